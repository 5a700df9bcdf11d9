package outboxtest

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

func deadScenarios() []scenario {
	return []scenario{
		{"a dead row keeps its payload, is copied, and its key goes on", migrated(deadSkips)},
		{"a dead row can freeze its key until it is discarded", migrated(deadFreezes)},
		{"a retried row starts again under its key, before those behind it", migrated(deadRetried)},
		{"a dead row and its copy are written together or not at all", migrated(deadCopiedTogether)},
		{"only dead rows can be retried or discarded", migrated(onlyDeadChange)},
		{"dead rows are chosen by subject, reason and number", migrated(deadChosen)},
	}
}

func only(ids ...int64) outbox.Filter { return outbox.Filter{IDs: ids} }

// wantCopies checks which rows have a copy among the dead letters.
func (b *bench) wantCopies(want ...int64) {
	b.t.Helper()
	rows, err := b.DB().QueryContext(b.t.Context(), b.sql("SELECT id FROM {t}_dead_letter ORDER BY id"))
	b.check(err)
	defer rows.Close()
	var got []int64
	for rows.Next() {
		var id int64
		b.check(rows.Scan(&id))
		got = append(got, id)
	}
	b.check(rows.Err())
	if !slices.Equal(got, want) {
		b.t.Errorf("dead letters %v, want %v", got, want)
	}
}

func deadSkips(t *testing.T, b *bench) {
	events := keyed("k", 3)
	events[0].Payload, events[0].Key = []byte("\x00poison\xff"), "the key"
	ids := b.add(events...)
	l := b.lease("a")
	b.claimIDs(l, 10, ids...)
	b.record(l, retry(ids[0], 0))
	b.claimWhenDue(l, 1)
	b.record(l, dead(ids[0], false))
	e := b.show(ids[0])
	if e.State != jetbox.DeadLetter || e.Attempts != 2 || e.LastError != "poison" || string(e.Event.Payload) != "\x00poison\xff" || e.Event.Key != "the key" {
		t.Errorf("dead row = %+v, want payload, key, reason and 2 attempts", e)
	}
	var (
		payload []byte
		n       int64
	)
	b.check(b.DB().QueryRowContext(t.Context(), b.sql(`SELECT payload, CASE WHEN status = 'DEAD_LETTER' AND attempts = 2
		AND last_error = 'poison' AND idempotency_key = 'the key' AND aggregate_id = 'k' AND dead_at IS NOT NULL
		THEN 1 ELSE 0 END FROM {t}_dead_letter`)).Scan(&payload, &n))
	if string(payload) != "\x00poison\xff" || n != 1 {
		t.Errorf("copy of the dead row differs\n%s", b.dump())
	}
	if got := positions(b.drain(l, 10)); !slices.Equal(got, ids[1:]) {
		t.Errorf("drained %v, want %v: the key goes on", got, ids[1:])
	}
	b.wantStates(jetbox.DeadLetter, ids[0])
}

func deadFreezes(t *testing.T, b *bench) {
	k := b.add(keyed("k", 3)...)
	m := b.add(keyed("m", 1)...)
	l := b.lease("a")
	b.claimIDs(l, 10, slices.Concat(k, m)...)
	b.record(l, dead(k[0], true))
	b.claimIDs(l, 10, m...)
	k = append(k, b.add(keyed("k", 1)...)...)
	b.record(l, published(m...)...)
	b.claimIDs(l, 10)
	b.wantStates(jetbox.Pending, k[1:]...)
	b.wantCopies(k[0])

	// It stays frozen for the next relay too.
	b.check(b.Release(t.Context(), l))
	other := b.another()
	l = other.lease("b")
	other.claimIDs(l, 10)
	st, err := b.Stats(t.Context())
	b.check(err)
	if st.OldestPending.IsZero() {
		t.Errorf("stats = %+v, want the rows behind the frozen one to have an age", st)
	}

	if n, err := b.Discard(t.Context(), only(k[0])); err != nil || n != 1 {
		t.Fatalf("Discard = %d, %v, want 1", n, err)
	}
	b.wantCopies()
	if _, err := b.Show(t.Context(), k[0]); !errors.Is(err, outbox.ErrNotFound) {
		t.Errorf("Show of a discarded row = %v, want ErrNotFound", err)
	}
	if got := positions(other.drain(l, 10)); !slices.Equal(got, k[1:]) {
		t.Errorf("drained %v after the discard, want %v", got, k[1:])
	}
}

func deadRetried(t *testing.T, b *bench) {
	for _, freeze := range []bool{true, false} {
		ids := b.add(keyed("k", 3)...)
		l := b.lease("a")
		before := b.claimIDs(l, 10, ids...)[0].Event
		b.record(l, dead(ids[0], freeze))
		if n, err := b.Retry(t.Context(), only(ids[0])); err != nil || n != 1 {
			t.Fatalf("Retry = %d, %v, want 1", n, err)
		}
		b.wantCopies()
		// Settled rows have left the claimed range: it is pending until it is
		// claimed again.
		b.wantStates(jetbox.Pending, ids[0])
		e := b.show(ids[0])
		if e.Attempts != 0 || e.LastError != "" || e.Event.Key != before.Key {
			t.Errorf("retried row = %+v, want it pending without attempts under key %s", e, before.Key)
		}
		rows := b.claim(l, 10)
		if len(rows) == 0 || rows[0].Pos != ids[0] || rows[0].Attempts != 0 || rows[0].Event.Key != before.Key || rows[0].Event.ID != before.ID {
			t.Errorf("claimed %+v, want row %d first, as before", rows, ids[0])
		}
		if got := positions(b.drain(l, 10)); !slices.Equal(got, ids) {
			t.Errorf("freeze %v: drained %v, want %v", freeze, got, ids)
		}
	}
}

// A table that refuses the copy refuses the death: a dead row without a letter
// would be one that nobody sees.
func deadCopiedTogether(t *testing.T, b *bench) {
	ids := b.add(keyed("", 2)...)
	l := b.lease("a")
	b.claimIDs(l, 10, ids...)
	b.exec("ALTER TABLE {t}_dead_letter RENAME TO {t}_hidden")
	before := b.number("SELECT count(*) FROM {t} WHERE status = 'PENDING'")
	if err := b.Record(t.Context(), l, append(published(ids[0]), dead(ids[1], false))); err == nil {
		t.Error("Record without a table of dead letters succeeded")
	}
	if n := b.number("SELECT count(*) FROM {t} WHERE status = 'PENDING'"); n != before {
		t.Errorf("%d rows pending after a failed record, want %d: half of it is there", n, before)
	}
	b.exec("ALTER TABLE {t}_hidden RENAME TO {t}_dead_letter")
	b.record(l, append(published(ids[0]), dead(ids[1], false))...)
	b.wantCopies(ids[1])
}

func onlyDeadChange(t *testing.T, b *bench) {
	ids := b.add(keyed("", 5)...)
	l := b.lease("a")
	b.claimIDs(l, 4, ids[:4]...)
	b.record(l, append(published(ids[0]), dead(ids[1], false), retry(ids[2], long))...)
	dump := b.dump()
	changes := map[string]func(f outbox.Filter) (int, error){
		"Retry":   func(f outbox.Filter) (int, error) { return b.Retry(t.Context(), f) },
		"Discard": func(f outbox.Filter) (int, error) { return b.Discard(t.Context(), f) },
	}
	for name, change := range changes {
		tests := []struct {
			name string
			f    outbox.Filter
			want error
		}{
			{"a published row", only(ids[0]), outbox.ErrIllegalState},
			{"a dead row beside a waiting one", only(ids[1], ids[2]), outbox.ErrIllegalState},
			{"a claimed row", only(ids[3]), outbox.ErrIllegalState},
			{"a pending row", only(ids[4]), outbox.ErrIllegalState},
			{"a row that is not there", only(ids[1], 1_000_000), outbox.ErrNotFound},
			{"published rows by state", outbox.Filter{State: jetbox.Published}, outbox.ErrIllegalState},
			{"pending rows by state", outbox.Filter{State: jetbox.Pending}, outbox.ErrIllegalState},
			{"a subject nobody has", outbox.Filter{Subject: "none"}, nil},
		}
		for _, tt := range tests {
			if n, err := change(tt.f); n != 0 || !errors.Is(err, tt.want) {
				t.Errorf("%s of %s = %d, %v, want 0, %v", name, tt.name, n, err, tt.want)
			}
		}
	}
	if after := b.dump(); after != dump {
		t.Errorf("refused changes changed the outbox from\n%s\nto\n%s", dump, after)
	}
}

func deadChosen(t *testing.T, b *bench) {
	events := keyed("", 8)
	for i, ev := range events {
		ev.Subject = []string{"one", "two"}[i%2]
	}
	ids := b.add(events...)
	l := b.lease("a")
	b.claimIDs(l, 10, ids...)
	for i, id := range ids[:6] {
		o := dead(id, false)
		o.Reason = []string{"payload of 9 bytes", "no 100% match_", "x"}[i/2]
		b.record(l, o)
	}
	steps := []struct {
		name string
		do   func() (int, error)
		want int
		left []int64
	}{
		{"a reason's part, taken literally", func() (int, error) { return b.Discard(t.Context(), outbox.Filter{Reason: "%"}) }, 2, []int64{ids[0], ids[1], ids[4], ids[5]}},
		{"subject and reason", func() (int, error) {
			return b.Retry(t.Context(), outbox.Filter{Subject: "two", Reason: "bytes"})
		}, 1, []int64{ids[0], ids[4], ids[5]}},
		{"a number", func() (int, error) {
			return b.Discard(t.Context(), outbox.Filter{State: jetbox.DeadLetter, Limit: 1})
		}, 1, ids[4:6]},
		{"an ID that the subject excludes", func() (int, error) {
			return b.Discard(t.Context(), outbox.Filter{IDs: []int64{ids[4]}, Subject: "two"})
		}, 0, ids[4:6]},
		{"all", func() (int, error) { return b.Retry(t.Context(), outbox.Filter{}) }, 2, nil},
		{"none left", func() (int, error) { return b.Retry(t.Context(), outbox.Filter{}) }, 0, nil},
	}
	for _, s := range steps {
		n, err := s.do()
		if left := b.all(outbox.Filter{State: jetbox.DeadLetter}); err != nil || n != s.want || !slices.Equal(left, s.left) {
			t.Errorf("%s: changed %d, %v, left %v, want %d, %v", s.name, n, err, left, s.want, s.left)
		}
		b.wantCopies(s.left...)
	}
	if n := len(b.drain(l, 10)); n != 5 {
		t.Errorf("drained %d rows, want the 3 retried and the 2 that were never dead", n)
	}
	if !b.show(ids[7]).PublishedAt.Before(time.Now().Add(time.Second)) {
		t.Error("published in the future")
	}
}
