package postgres

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// touched runs a statement of the relay's as it is run there, and returns how many
// pages that took. Nothing of it stays.
func touched(t *testing.T, s *Store, query string, args ...any) (pages int) {
	t.Helper()
	ctx := t.Context()
	tx, err := s.pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if _, err := tx.Exec(ctx, relaySettings, "60000", "60000", "on"); err != nil {
		t.Fatal(err)
	}
	var plan []byte
	if err := tx.QueryRow(ctx, "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "+query, args...).Scan(&plan); err != nil {
		t.Fatal(err)
	}
	var plans []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	if err := json.Unmarshal(plan, &plans); err != nil {
		t.Fatal(err)
	}
	return plans[0].Plan.Hit + plans[0].Plan.Read
}

// What a claim and a record touch depends on how many rows they are about, not on
// how many were published, are pending, scheduled, or wait behind a key; whatever the
// statistics say.
func TestClaimsAndRecordsTouchNoMoreInALargeTable(t *testing.T) {
	t.Parallel()
	const some = 200
	measure := func(size int, analyzed bool) map[string]int {
		s, err := Open(t.Context(), Config{URL: pgtest.URL(t)})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if err := s.Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		exec := func(query string, args ...any) {
			t.Helper()
			if _, err := s.pool.Exec(t.Context(), query, args...); err != nil {
				t.Fatalf("%s: %v", query, err)
			}
		}
		exec(`ALTER TABLE outbox SET (autovacuum_enabled = off)`)
		exec(`ALTER TABLE outbox_queue SET (autovacuum_enabled = off)`)
		exec(`ALTER TABLE outbox_wait SET (autovacuum_enabled = off)`)
		exec(`INSERT INTO outbox (subject, payload, status, aggregate_id) SELECT 's', '', 'PUBLISHED', 'k' || n % 100 FROM generate_series(1, $1) n`, size)
		exec(`INSERT INTO outbox (subject, payload, aggregate_id) VALUES ('s', '', 'frozen')`)
		l, err := s.Acquire(t.Context(), jetbox.Candidate{Owner: "a", Length: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: some})
		if err != nil || len(rows) != 1 {
			t.Fatalf("claimed %d rows, %v, want the one to freeze", len(rows), err)
		}
		if err := s.Record(t.Context(), l, []jetbox.Outcome{{Pos: rows[0].Pos, State: jetbox.DeadLetter, Freeze: true}}); err != nil {
			t.Fatal(err)
		}
		exec(`INSERT INTO outbox (subject, payload, available_at) SELECT 's', '', now() + interval '1 day' FROM generate_series(1, $1)`, size)
		exec(`INSERT INTO outbox (subject, payload, aggregate_id) SELECT 's', '', 'frozen' FROM generate_series(1, $1)`, size)
		if rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: some}); err != nil || len(rows) > 0 {
			t.Fatalf("claimed %d rows, %v, want none that may go", len(rows), err)
		}
		exec(`INSERT INTO outbox (subject, payload, aggregate_id) SELECT 's', '', 'k' || n % 100 FROM generate_series(1, $1) n`, size)
		exec(`VACUUM outbox_queue`)
		if analyzed {
			exec(`VACUUM ANALYZE`)
		}
		got := map[string]int{"state": touched(t, s, s.sql(stateSQL), l.Owner, l.Epoch, nil)}
		got["read"] = touched(t, s, s.readSQL(true, some), l.Owner, nil, []int64{})
		got["read of some shards"] = touched(t, s, s.readSQL(false, some), l.Owner, nil, []int64{}, []int16{1, 3, 5, 7})
		if rows, err = s.Claim(t.Context(), l, jetbox.Ask{Limit: some}); err != nil || len(rows) != some {
			t.Fatalf("claimed %d rows, %v", len(rows), err)
		}
		var outcomes []jetbox.Outcome
		for _, r := range rows {
			outcomes = append(outcomes, jetbox.Outcome{Pos: r.Pos, State: jetbox.Published, StreamSeq: 1})
		}
		b := new(batch)
		s.queuePublished(b, l, group{stream: "S"}, outcomes)
		b.Queue(s.sql(shrinkSQL), l.Owner, l.Epoch, []int64{})
		b.Queue(s.sql(wakeSQL), l.Owner, l.Epoch, wakeBatch, time.Now())
		for i, name := range []string{"record", "shrink", "wake"} {
			q := b.QueuedQueries[i]
			got[name] = touched(t, s, q.SQL, q.Arguments...)
		}
		return got
	}
	for _, analyzed := range []bool{false, true} {
		small, large := measure(2_000, analyzed), measure(20_000, analyzed)
		for name, pages := range large {
			// An index of ten times the size may be a page higher.
			if limit := small[name] + small[name]/2 + 50; pages > limit {
				t.Errorf("analyzed: %v: %s touches %d pages among 20,000 rows of each kind, %d among 2,000", analyzed, name, pages, small[name])
			}
		}
	}
}
