package outboxtest

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

func claimScenarios() []scenario {
	return []scenario{
		{"a claim hands out the lowest ids, up to its limit, until they are recorded", migrated(claimLowestFirst)},
		{"only claimed rows are processing, and a takeover keeps the range", migrated(processingShown)},
		{"an empty outbox claims nothing", migrated(claimNothing)},
		{"a row that was claimed before tells when, and where the streams stood", migrated(earlierTold)},
		{"the claim of rows that were not sent is taken back", migrated(claimTakenBack)},
		{"rows in hand are left out of a claim", migrated(inHandLeftOut)},
		{"scattered rows in hand are left out of a claim", migrated(scatteredLeftOut)},
		{"claims beside records of settled rows hand out each row once, in order", migrated(claimBesideRecord)},
		{"a row is fresh in its first claim alone", migrated(freshOnce)},
		{"rows of a dead relay's claim that many sleep at once stay in doubt, and others fresh", migrated(bulkSleepKeepsDoubt)},
		{"while the lease is held, wait returns after a commit by another connection", migrated(waitReturns)},
		{"a scheduled row comes when due and holds nobody", migrated(scheduledHoldsNobody)},
		{"a scheduled row that can go any time goes at once", migrated(scheduledInThePast)},
	}
}

func claimLowestFirst(t *testing.T, b *bench) {
	ids := b.add(append(keyed("k", 3), append(keyed("", 2), keyed("l", 2)...)...)...)
	l := b.lease("a")
	b.claimIDs(l, 1, ids[0])
	b.claimIDs(l, 3, ids[:3]...)
	b.claimIDs(l, 100, ids...)
	// Not the first one: what is left is still in order.
	b.record(l, published(ids[1], ids[4])...)
	b.claimIDs(l, 3, ids[0], ids[2], ids[3])
	b.record(l, published(ids[0], ids[2], ids[3], ids[5], ids[6])...)
	b.claimIDs(l, 100)
}

func processingShown(t *testing.T, b *bench) {
	ids := b.add(keyed("", 6)...)
	b.wantStates(jetbox.Pending, ids...)
	l := b.lease("a")
	b.claimIDs(l, 4, ids[:4]...)
	b.wantStates(jetbox.Processing, ids[:4]...)
	b.wantStates(jetbox.Pending, ids[4:]...)
	b.claimIDs(l, 1, ids[0]) // fewer: the others are no less claimed
	b.wantStates(jetbox.Processing, ids[:4]...)
	if n := b.number("SELECT count(*) FROM {t} WHERE status = 'PENDING'"); n != 6 {
		t.Errorf("%d rows are PENDING in the table, want all 6", n)
	}

	b.record(l, published(ids[0], ids[3])...)
	b.wantStates(jetbox.Published, ids[0], ids[3])
	b.wantStates(jetbox.Processing, ids[1], ids[2])
	st, err := b.Stats(t.Context())
	b.check(err)
	if st.Pending != 4 || st.Claimed != 2 {
		t.Errorf("stats = %+v, want 4 pending, 2 of them claimed", st)
	}

	// Row 0 and 3 have shrunk the range from both ends: 1 and 2 are of unknown
	// outcome, and stay so when another relay takes over.
	b.check(b.Release(t.Context(), l))
	b.wantStates(jetbox.Processing, ids[1], ids[2])
	other := b.another()
	l = other.lease("b")
	b.wantStates(jetbox.Processing, ids[1], ids[2])
	b.wantStates(jetbox.Pending, ids[4:]...)

	// Claiming more does not forget them, recording more does not either.
	other.claimIDs(l, 3, ids[1], ids[2], ids[4])
	other.record(l, published(ids[4])...)
	b.wantStates(jetbox.Processing, ids[1], ids[2])
	other.record(l, published(ids[2])...)
	b.wantStates(jetbox.Processing, ids[1])
	b.wantStates(jetbox.Pending, ids[5])
	other.record(l, published(ids[1])...)
	b.wantStates(jetbox.Published, ids[:5]...)
	b.wantStates(jetbox.Pending, ids[5])
	late := b.add(keyed("", 1)...)
	b.wantStates(jetbox.Pending, late...)
}

func claimNothing(t *testing.T, b *bench) {
	l := b.lease("a")
	b.claimIDs(l, 10)
	b.record(l)
	b.record(l, published(1, 2, 3)...) // rows that are gone, or never were
	b.claimIDs(l, 10)
}

func waitReturns(t *testing.T, b *bench) {
	other := b.another()
	l := b.lease("a")
	// It is a hint: it may return for nothing, and for what was before.
	quiet := func() {
		b.drain(l, 10)
		b.eventually("wait for nothing", func() (bool, string) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
			defer cancel()
			err := b.Wait(ctx)
			if err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("Wait = %v, want nil or the context's error", err)
			}
			return err != nil, "it returns nil again and again"
		})
	}
	for _, writer := range []*bench{other, b} {
		quiet()
		returned := make(chan error, 1)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		go func() { returned <- b.Wait(ctx) }()
		writer.add(keyed("", 1)...)
		if err := <-returned; err != nil {
			t.Errorf("Wait after a commit = %v, want nil", err)
		}
	}
}

// A row is fresh in its first claim alone. Whoever claims it again, and for whatever
// reason it waited meanwhile, has to reckon with its being sent.
func freshOnce(t *testing.T, b *bench) {
	fresh := func(rows []jetbox.Row) (out []bool) {
		for _, r := range rows {
			out = append(out, r.Fresh)
		}
		return out
	}
	want := func(what string, rows []jetbox.Row, want ...bool) {
		t.Helper()
		if got := fresh(rows); !slices.Equal(got, want) {
			t.Errorf("%s: rows %v are fresh: %v, want %v", what, positions(rows), got, want)
		}
	}
	l := b.lease("a")
	ids := b.add(keyed("k", 3)...)
	want("first claim", b.claimIDs(l, 2, ids[:2]...), true, true)
	want("second claim", b.claimIDs(l, 3, ids...), false, false, true)
	b.record(l, published(ids[0])...)
	want("after a record", b.claimIDs(l, 3, ids[1:]...), false, false)
	b.record(l, retry(ids[1], 0))
	pass()
	want("after a retry", b.claimIDs(l, 3, ids[1:]...), false, false)

	// The head waits, so the other goes to sleep, and comes back.
	b.record(l, retry(ids[1], long))
	b.claimIDs(l, 3)
	b.record(l, published(ids[1])...)
	want("after it was behind", b.claimIDs(l, 3, ids[2]), false)

	b.check(b.Release(t.Context(), l))
	other := b.another()
	more := b.add(keyed("", 1)...)
	want("after a takeover", other.claimIDs(other.lease("b"), 3, ids[2], more[0]), false, true)
}

// A relay died with ten rows of a key claimed. The next one claims few of them, and what
// it leaves asleep behind the first is in no claim any more.
func bulkSleepKeepsDoubt(t *testing.T, b *bench) {
	ids := b.add(keyed("k", 10)...)
	l := b.lease("a")
	b.claimIDs(l, 10, ids...)
	b.check(b.Release(t.Context(), l))
	other := b.another()
	l = other.lease("b")
	other.claimIDs(l, 3, ids[:3]...)
	other.record(l, retry(ids[0], long))
	ids = append(ids, b.add(keyed("k", 2)...)...)
	other.claimIDs(l, 3)
	free := b.add(keyed("", 1)...)
	other.claimIDs(l, 3, free...)
	other.record(l, published(free...)...) // nothing is left of the dead relay's claim
	other.record(l, published(ids[0])...)
	for i, row := range other.claimIDs(l, 20, ids[1:]...) {
		if never := i+1 >= 10; row.Fresh != never || row.InDoubt == never {
			t.Errorf("row %d is fresh: %v, in doubt: %v, want fresh: %v", row.Pos, row.Fresh, row.InDoubt, never)
		}
	}
}

// Whoever claims a row again is told how long ago it was first claimed, and where
// the streams stood then.
func earlierTold(t *testing.T, b *bench) {
	at := func(seq uint64) []jetbox.Position {
		return []jetbox.Position{{Stream: "EVENTS", Created: time.Unix(1_700_000_000, 5).UTC(), Seq: seq}, {Stream: "OTHER é", Seq: 1<<63 + 1}}
	}
	claim := func(s Store, l jetbox.Lease, seq uint64, want ...int64) []jetbox.Row {
		t.Helper()
		rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 100, Before: at(seq)})
		b.check(err)
		if got := positions(rows); !slices.Equal(got, want) {
			t.Fatalf("claimed %v, want %v", got, want)
		}
		return rows
	}
	want := func(what string, r jetbox.Row, before []jetbox.Position, age time.Duration) {
		t.Helper()
		if e := r.Earlier; e == nil || !reflect.DeepEqual(e.Before, before) || e.Age < age || e.Age > age+time.Minute {
			t.Errorf("%s: row %d has the earlier claim %+v, want one of %v at the least, with %+v", what, r.Pos, e, age, before)
		}
	}
	l := b.lease("a")
	ids := b.add(keyed("", 2)...)
	for _, r := range claim(b, l, 10, ids...) {
		if r.Earlier != nil {
			t.Errorf("row %d was never claimed and has the earlier claim %+v", r.Pos, r.Earlier)
		}
	}
	const pause = 50 * time.Millisecond
	time.Sleep(pause)
	ids = append(ids, b.add(keyed("", 1)...)...)
	rows := claim(b, l, 20, ids...)
	want("second claim", rows[0], at(10), pause)
	want("second claim", rows[1], at(10), pause)
	if rows[2].Earlier != nil {
		t.Errorf("the new row has the earlier claim %+v", rows[2].Earlier)
	}
	b.record(l, published(ids[0])...)
	b.check(b.Release(t.Context(), l))
	other := b.another()
	rows = claim(other, other.lease("b"), 30, ids[1:]...)
	want("after a takeover", rows[0], at(10), pause)
	want("after a takeover", rows[1], at(20), 0)
}

// A relay claims the next rows while those of before are on the wire.
func inHandLeftOut(t *testing.T, b *bench) {
	l := b.lease("a")
	ids := b.add(keyed("", 6)...)
	b.claimIDs(l, 3, ids[:3]...)
	claim := func(inHand []int64, want ...int64) {
		t.Helper()
		rows, err := b.Claim(t.Context(), l, jetbox.Ask{Limit: 3, InHand: inHand})
		b.check(err)
		if got := positions(rows); !slices.Equal(got, want) {
			t.Errorf("claim with %v in hand = %v, want %v", inHand, got, want)
		}
	}
	claim(ids[:3], ids[3:]...)
	b.wantStates(jetbox.Processing, ids...)
	claim(ids)
	claim([]int64{ids[1], ids[5]}, ids[0], ids[2], ids[3])
	b.record(l, published(ids[:3]...)...)
	claim(ids[3:])
	claim(nil, ids[3:]...)
}

func scatteredLeftOut(t *testing.T, b *bench) {
	l := b.lease("a")
	ids := b.add(keyed("", 60)...)
	b.claimIDs(l, 60, ids...)
	var hand, rest []int64
	for i, id := range ids {
		if i%3 == 0 {
			rest = append(rest, id)
		} else {
			hand = append(hand, id)
		}
	}
	slices.Reverse(hand)
	rows, err := b.Claim(t.Context(), l, jetbox.Ask{Limit: 60, InHand: hand})
	b.check(err)
	if got := positions(rows); !slices.Equal(got, rest) {
		t.Errorf("claim = %v, want %v", got, rest)
	}
}

// While one batch is on its way, the one before it is recorded and the one after it
// claimed, at once. Rows behind a key that has waited come in between.
func claimBesideRecord(t *testing.T, b *bench) {
	const size, keys = 20, 3
	l := b.lease("a")
	waits := b.add(keyed("waits", 1)...)
	b.claimIDs(l, 1, waits...)
	b.record(l, jetbox.Outcome{Pos: waits[0], State: jetbox.Pending, Attempted: true, Reason: "later", Delay: time.Millisecond})
	ids := b.add(keyed("waits", 2*size)...)
	for i := range keys {
		ids = append(ids, b.add(keyed(string(rune('a'+i)), 5*size)...)...)
	}
	ids = append(waits, ids...)

	last := make(map[string]int64)
	seen := make(map[int64]bool)
	claim := func(inHand ...int64) []int64 {
		rows, err := b.Claim(t.Context(), l, jetbox.Ask{Limit: size, InHand: inHand})
		if err != nil {
			t.Errorf("claim: %v", err)
		}
		for _, r := range rows {
			key := r.Event.OrderingKey()
			if seen[r.Pos] || r.Pos < last[key] || !r.Fresh && r.Pos != waits[0] {
				t.Errorf("row %d of key %q comes after %d, fresh: %v, seen before: %v", r.Pos, key, last[key], r.Fresh, seen[r.Pos])
			}
			seen[r.Pos], last[key] = true, r.Pos
		}
		return positions(rows)
	}
	var done []int64
	deadline := time.Now().Add(time.Minute)
	for wire := claim(); len(seen) < len(ids) || len(wire) > 0; {
		recorded := make(chan error, 1)
		go func() { recorded <- b.Record(t.Context(), l, published(done...)) }()
		next := claim(slices.Concat(wire, done)...)
		b.check(<-recorded)
		done, wire = wire, next
		if time.Now().After(deadline) || t.Failed() {
			t.Fatalf("%d of %d rows came", len(seen), len(ids))
		}
	}
	b.record(l, published(done...)...)
	b.wantStates(jetbox.Published, ids...)
	if n := b.number("SELECT count(*) FROM {t}_claim"); n != 0 {
		t.Errorf("%d claims are left, want none", n)
	}
}

// A relay that stops has claimed rows that it does not send any more.
func claimTakenBack(t *testing.T, b *bench) {
	l := b.lease("a")
	ids := b.add(append(keyed("", 1998), keyed("k", 2)...)...)
	b.claimIDs(l, 2000, ids...)
	outcomes := published(ids[:1500]...)
	for _, id := range ids[1501:] {
		outcomes = append(outcomes, jetbox.Outcome{Pos: id, State: jetbox.Pending, Unsent: true})
	}
	b.record(l, outcomes...)
	b.wantStates(jetbox.Published, ids[0], ids[1499])
	b.wantStates(jetbox.Processing, ids[1500])
	b.wantStates(jetbox.Pending, ids[1501], ids[1999])
	for i, r := range b.claimIDs(l, 2000, ids[1500:]...) {
		if want := i > 0; r.Fresh != want || r.Attempts != 0 {
			t.Fatalf("row %d is fresh: %v, %d attempts, want fresh: %v, none", r.Pos, r.Fresh, r.Attempts, want)
		}
	}
	if e := b.show(ids[1999]); e.LastError != "" {
		t.Errorf("a row that was not sent has the error %q", e.LastError)
	}
	// Nothing but that.
	b.record(l, jetbox.Outcome{Pos: ids[1999], State: jetbox.Pending, Unsent: true})
	b.wantStates(jetbox.Pending, ids[1999])
	b.wantStates(jetbox.Processing, ids[1998])
}

func scheduledHoldsNobody(t *testing.T, b *bench) {
	due := time.Now().Add(300 * time.Millisecond)
	events := append(keyed("k", 3), keyed("", 1)...)
	later(events[0], due)
	later(events[3], due)
	ids := b.add(events...)
	l := b.lease("a")
	b.claimIDs(l, 10, ids[1], ids[2])
	b.record(l, published(ids[1], ids[2])...)
	if time.Now().Before(due) {
		b.wantStates(jetbox.Pending, ids[0], ids[3])
	}
	rows := b.claimWhenDue(l, 10)
	if now := time.Now(); now.Before(due) {
		t.Errorf("rows %v came at %v, %v too early", positions(rows), now, due.Sub(now))
	}
	b.record(l, published(positions(rows)...)...)
	b.eventually("publish the scheduled rows", func() (bool, string) {
		b.drain(l, 10)
		return b.number("SELECT count(*) FROM {t} WHERE status = 'PENDING'") == 0, b.dump()
	})
	for _, id := range []int64{ids[0], ids[3]} {
		if at := b.show(id).PublishedAt; at.Before(due.Truncate(time.Millisecond)) {
			t.Errorf("row %d was published at %v, scheduled for %v", id, at, due)
		}
	}
}

func scheduledInThePast(t *testing.T, b *bench) {
	events := keyed("k", 4)
	for i, ev := range events {
		later(ev, time.Now().Add(-time.Duration(i+1)*time.Hour)) // the last one since longest
	}
	ids := b.add(events...)
	l := b.lease("a")
	b.claimIDs(l, 2, ids[:2]...)
	if got := positions(b.drain(l, 3)); !slices.Equal(got, ids) {
		t.Errorf("drained %v, want %v", got, ids)
	}
}
