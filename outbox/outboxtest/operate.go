package outboxtest

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

func operateScenarios() []scenario {
	return []scenario{
		{"list pages through any number of rows, lowest id first", migrated(listPages)},
		{"list chooses by state, id, subject and reason", migrated(listFilters)},
		{"show of a row that is not there says so", migrated(showNothing)},
		{"stats tell what is pending, claimed, dead and how old", migrated(statsTell)},
		{"a due row that no relay has woken has an age", migrated(statsOfStoppedRelay)},
	}
}

func listPages(t *testing.T, b *bench) {
	ids := b.add(keyed("", 1234)...)
	for _, limit := range []int{0, 1, 199, 200, 201, 400, 1000, 5000} {
		want := ids
		if limit > 0 {
			want = ids[:min(limit, len(ids))]
		}
		if got := b.all(outbox.Filter{Limit: limit}); !slices.Equal(got, want) {
			t.Errorf("List with limit %d = %d rows, want the first %d", limit, len(got), len(want))
		}
	}
	n := 0
	for e, err := range b.List(t.Context(), outbox.Filter{}) {
		b.check(err)
		if n++; n == 3 {
			if e.ID != ids[2] {
				t.Errorf("third row = %d, want %d", e.ID, ids[2])
			}
			break
		}
	}
	// The caller may write while it lists: nothing is locked, no row comes twice.
	var seen []int64
	l := b.lease("a")
	for e, err := range b.List(t.Context(), outbox.Filter{State: jetbox.Pending}) {
		b.check(err)
		seen = append(seen, e.ID)
		if len(seen) == 100 {
			b.claim(l, 150)
			b.record(l, published(ids[:150]...)...)
		}
	}
	if !slices.IsSorted(seen) || len(slices.Compact(slices.Clone(seen))) != len(seen) || len(seen) < len(ids)-150 {
		t.Errorf("listing while recording gave %d rows out of order or twice", len(seen))
	}
}

func listFilters(t *testing.T, b *bench) {
	events := keyed("", 6)
	events[1].Subject, events[2].Subject = "other", "other"
	ids := b.add(events...)
	l := b.lease("a")
	b.claimIDs(l, 5, ids[:5]...)
	b.record(l, append(published(ids[0]), dead(ids[1], false), retry(ids[2], long))...)
	tests := []struct {
		name string
		f    outbox.Filter
		want []int64
	}{
		{"all", outbox.Filter{}, ids},
		{"published", outbox.Filter{State: jetbox.Published}, ids[:1]},
		{"dead", outbox.Filter{State: jetbox.DeadLetter}, ids[1:2]},
		{"claimed", outbox.Filter{State: jetbox.Processing}, ids[3:5]},
		{"pending", outbox.Filter{State: jetbox.Pending}, []int64{ids[2], ids[5]}},
		{"ids", only(ids[5], ids[0], ids[0], 1_000_000), []int64{ids[0], ids[5]}},
		{"subject", outbox.Filter{Subject: "other"}, ids[1:3]},
		{"subject is exact", outbox.Filter{Subject: "othe"}, nil},
		{"reason", outbox.Filter{Reason: "ois"}, ids[1:2]},
		{"reason of a row that waits", outbox.Filter{Reason: "refused", State: jetbox.Pending}, ids[2:3]},
		{"state and subject", outbox.Filter{State: jetbox.DeadLetter, Subject: "events.test"}, nil},
		{"state of nothing", outbox.Filter{State: "x"}, nil},
	}
	for _, tt := range tests {
		if got := b.all(tt.f); !slices.Equal(got, tt.want) {
			t.Errorf("List of %s = %v, want %v", tt.name, got, tt.want)
		}
	}
	for e, err := range b.List(t.Context(), outbox.Filter{}) {
		b.check(err)
		if string(e.State) != b.states()[e.ID] {
			t.Errorf("row %d is %s in List, %s in the view", e.ID, e.State, b.states()[e.ID])
		}
	}
}

func showNothing(t *testing.T, b *bench) {
	for _, id := range []int64{0, -1, 1, 1 << 62} {
		if _, err := b.Show(t.Context(), id); !errors.Is(err, outbox.ErrNotFound) {
			t.Errorf("Show(%d) = %v, want ErrNotFound", id, err)
		}
	}
}

func (b *bench) stats() outbox.Stats {
	b.t.Helper()
	st, err := b.Stats(b.t.Context())
	b.check(err)
	return st
}

func statsTell(t *testing.T, b *bench) {
	if st := b.stats(); st.Pending != 0 || st.Claimed != 0 || st.DeadLetter != 0 || !st.OldestPending.IsZero() || st.TableBytes <= 0 {
		t.Errorf("stats of an empty outbox = %+v", st)
	}
	recorded := time.Now().Add(-time.Hour).Truncate(time.Millisecond)
	events := append(keyed("k", 4), keyed("", 6)...)
	for i, ev := range events {
		ev.Time = recorded.Add(time.Duration(i) * time.Minute)
	}
	later(events[9], time.Now().Add(long))
	ids := b.add(events...)
	if st := b.stats(); st.Pending != 10 || st.Claimed != 0 || !st.OldestPending.Equal(recorded) {
		t.Errorf("stats before a claim = %+v, want 10 pending since %v", st, recorded)
	}
	l := b.lease("a")
	b.claimIDs(l, 100, ids[:9]...)
	if st := b.stats(); st.Pending != 10 || st.Claimed != 9 || len(holders(st)) != 1 || holders(st)[0].Owner != "a" {
		t.Errorf("stats after a claim = %+v, want 10 pending, 9 of them claimed by a", st)
	}
	b.record(l, append(published(ids[4]), retry(ids[0], long), dead(ids[5], false), dead(ids[6], false))...)
	b.claimIDs(l, 100, ids[7], ids[8]) // the rest of k goes to sleep
	st := b.stats()
	if st.Pending != 7 || st.DeadLetter != 2 || st.Claimed != 2 || !st.OldestPending.Equal(recorded) {
		t.Errorf("stats with a row waiting = %+v, want 7 pending since %v, 2 dead, 2 claimed", st, recorded)
	}
	b.record(l, published(ids[0])...)
	b.drain(l, 100)
	if st := b.stats(); st.Pending != 1 || st.Claimed != 0 || !st.OldestPending.IsZero() {
		t.Errorf("stats with one row scheduled = %+v, want 1 pending and nothing due", st)
	}
	b.check(b.Release(t.Context(), l))
	if st := b.stats(); len(st.Leases) != 0 {
		t.Errorf("leases after a release = %+v, want none", st.Leases)
	}
	b.leaseFor("b", time.Millisecond)
	pass()
	if st := b.stats(); len(st.Leases) != 0 {
		t.Errorf("leases after their end = %+v, want none", st.Leases)
	}
}

// Read from the database, the numbers are true also while no relay works.
func statsOfStoppedRelay(t *testing.T, b *bench) {
	recorded := time.Now().Add(-time.Hour).Truncate(time.Millisecond)
	ev := later(keyed("", 1)[0], time.Now().Add(150*time.Millisecond))
	ev.Time = recorded
	b.add(ev)
	l := b.lease("a")
	b.claim(l, 10) // it is put to sleep
	if st := b.stats(); time.Now().Before(ev.NotBefore) && (st.Pending != 1 || !st.OldestPending.IsZero()) {
		t.Errorf("stats before the row is due = %+v, want one pending, none of age", st)
	}
	time.Sleep(time.Until(ev.NotBefore.Add(3 * time.Millisecond)))
	if st := b.stats(); !st.OldestPending.Equal(recorded) {
		t.Errorf("stats of a due row = %+v, want it pending since %v", st, recorded)
	}
}
