package outboxtest

import (
	"database/sql"
	"errors"
	"regexp"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

func setUpScenarios() []scenario {
	return []scenario{
		{"eight processes migrate an empty database at once", eightMigrate},
		{"without tables every call says so", withoutTables},
		{"tables of a newer version are refused by both numbers", migrated(newerTables)},
	}
}

// Catalog BR-20: replicas that start together must all become ready.
func eightMigrate(t *testing.T, b *bench) {
	const processes = 8
	stores := make([]Store, processes)
	for i := range stores {
		stores[i] = b.open()
	}
	start, errs := make(chan struct{}), make(chan error, processes)
	for _, s := range stores {
		go func() {
			<-start
			errs <- errors.Join(s.Migrate(t.Context()), s.Check(t.Context()))
		}()
	}
	close(start)
	for range stores {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	b.check(b.Migrate(t.Context())) // repeating it is harmless

	// Each of them can be the relay.
	ids := b.add(keyed("", 1)...)
	for i, s := range stores {
		each := &bench{Store: s, t: t, db: b.db}
		l := each.lease("owner " + string(rune('a'+i)))
		each.claimIDs(l, 10, ids...)
		b.check(each.Release(t.Context(), l))
	}
}

func withoutTables(t *testing.T, b *bench) {
	ctx := t.Context()
	lease := jetbox.Lease{Owner: "a", Epoch: 1, Held: true}
	first := func() error {
		for _, err := range b.List(ctx, outbox.Filter{}) {
			return err
		}
		return nil
	}
	tests := []struct {
		name string
		call func() error
	}{
		{"Check", func() error { return b.Check(ctx) }},
		{"Append", func() error {
			tx, err := b.DB().BeginTx(ctx, nil)
			b.check(err)
			defer tx.Rollback()
			return b.Append(ctx, tx, keyed("", 1)...)
		}},
		{"Acquire", func() error { _, err := b.Acquire(ctx, jetbox.Candidate{Owner: "a", Length: time.Minute}); return err }},
		{"Release", func() error { return b.Release(ctx, lease) }},
		{"Claim", func() error { _, err := b.Claim(ctx, lease, jetbox.Ask{Limit: 1}); return err }},
		{"Record", func() error { return b.Record(ctx, lease, published(1)) }},
		{"Anchors", func() error { _, err := b.Anchors(ctx); return err }},
		{"SetAnchor", func() error { return b.SetAnchor(ctx, lease, time.Time{}, jetbox.Anchor{Stream: "S"}) }},
		{"Recallable", func() error { _, _, err := b.Recallable(ctx, "S", jetbox.Recall{}, 0); return err }},
		{"Recall", func() error { _, err := b.Recall(ctx, lease, "S", jetbox.Recall{}, jetbox.Recalled{}); return err }},
		{"Prune", func() error { _, err := b.Prune(ctx, lease, time.Now(), false); return err }},
		{"List", first},
		{"Show", func() error { _, err := b.Show(ctx, 1); return err }},
		{"Retry", func() error { _, err := b.Retry(ctx, outbox.Filter{}); return err }},
		{"Discard", func() error { _, err := b.Discard(ctx, outbox.Filter{IDs: []int64{1}}); return err }},
		{"Stats", func() error { _, err := b.Stats(ctx); return err }},
	}
	for _, tt := range tests {
		if err := tt.call(); !errors.Is(err, outbox.ErrNoTables) {
			t.Errorf("%s without tables = %v, want ErrNoTables", tt.name, err)
		}
	}
}

func newerTables(t *testing.T, b *bench) {
	b.db.Outgrow(t)
	s := b.open()
	for name, err := range map[string]error{"Check": s.Check(t.Context()), "Migrate": s.Migrate(t.Context())} {
		if !errors.Is(err, outbox.ErrSchemaTooNew) {
			t.Errorf("%s of newer tables = %v, want ErrSchemaTooNew", name, err)
			continue
		}
		if n := len(regexp.MustCompile(`\bversion \d+|\bknows \d+`).FindAllString(err.Error(), -1)); n < 2 {
			t.Errorf("%s of newer tables = %q, want both versions named", name, err)
		}
	}
	// A writer of an older version goes on: it is the table that counts.
	b.inTx(func(tx *sql.Tx) { b.check(b.Append(t.Context(), tx, keyed("", 1)...)) })
}
