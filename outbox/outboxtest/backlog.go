package outboxtest

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

func backlogScenarios() []scenario {
	return []scenario{
		{"rows of one key that become due at once come lowest id first", migrated(dueAtOnce(20, 2, 7))},
		{"a thousand rows that become due at once come lowest id first of their key", migrated(dueAtOnce(1200, 4, 100))},
		{"a row due and the row after it are not swapped", migrated(dueBesideReady)},
		{"two thousand rows behind a retry come back in order", migrated(behindRetry)},
		{"two thousand rows behind a frozen key come back in order after a discard", migrated(behindFrozen)},
		{"two thousand rows behind a frozen key come back in order after a retry", migrated(behindFrozenRetried)},
		{"a claim of one row is not kept by rows that may not go", migrated(claimOneBehindMany)},
	}
}

// dueAtOnce schedules rows so that the lowest ids become due last, lets them all
// become due, and claims.
func dueAtOnce(rows, keys, batch int) func(t *testing.T, b *bench) {
	return func(t *testing.T, b *bench) {
		// Time enough to see them while none is due, also with a race detector.
		wait := 300*time.Millisecond + time.Duration(rows)*time.Millisecond/2
		last := time.Now().Add(wait)
		var events []*jetbox.Event
		for i := range rows {
			ev := keyed(fmt.Sprintf("key %d", i%keys), 1)[0]
			events = append(events, later(ev, last.Add(-time.Duration(i)*100*time.Microsecond)))
		}
		b.add(events...)
		l := b.lease("a")
		if got := b.claim(l, batch); len(got) > 0 && time.Now().Before(last.Add(-time.Duration(rows)*100*time.Microsecond)) {
			t.Fatalf("claimed %v before their time", positions(got))
		}
		time.Sleep(time.Until(last.Add(2 * time.Millisecond)))
		b.wantDrained(l, batch, rows)
	}
}

// wantDrained drains and checks that so many rows come, those of one key in the
// order of their ids.
func (b *bench) wantDrained(l jetbox.Lease, batch, rows int) {
	b.t.Helper()
	all := b.drain(l, batch)
	if len(all) != rows {
		b.t.Errorf("drained %d rows, want %d", len(all), rows)
	}
	highest := make(map[string]int64)
	for _, r := range all {
		key := r.Event.OrderingKey()
		if key != "" && r.Pos <= highest[key] {
			b.t.Fatalf("row %d of %s came after row %d", r.Pos, key, highest[key])
		}
		highest[key] = r.Pos
	}
}

func dueBesideReady(t *testing.T, b *bench) {
	due := time.Now().Add(150 * time.Millisecond)
	events := keyed("k", 3)
	later(events[0], due)
	ids := b.add(events...)
	l := b.lease("a")
	rows := b.claim(l, 10)
	if time.Now().Before(due) && !slices.Equal(positions(rows), ids[1:]) {
		t.Fatalf("claimed %v, want %v", positions(rows), ids[1:])
	}
	time.Sleep(time.Until(due.Add(2 * time.Millisecond)))
	b.claimIDs(l, 10, ids...) // nothing was recorded: now the first is due, and goes first
	b.claimIDs(l, 1, ids[0])
}

const behind = 2000

// crowd appends one row of key "k", claims it, then puts two thousand behind it,
// with a row of another key after every hundred.
func crowd(b *bench, l jetbox.Lease, outcome func(id int64) jetbox.Outcome) (head int64, others int) {
	b.t.Helper()
	head = b.add(keyed("k", 1)...)[0]
	b.claimIDs(l, 10, head)
	b.record(l, outcome(head))
	var events []*jetbox.Event
	for i, ev := range keyed("k", behind) {
		events = append(events, ev)
		if i%100 == 99 {
			events = append(events, keyed(fmt.Sprintf("other %d", i%3), 1)...)
			others++
		}
	}
	b.add(events...)
	return head, others
}

// wantOthers drains what does not belong to the key.
func (b *bench) wantOthers(l jetbox.Lease, others int) {
	b.t.Helper()
	all := b.drain(l, 50)
	for _, r := range all {
		if r.Event.AggregateID == "k" {
			b.t.Fatalf("row %d of the waiting key came", r.Pos)
		}
	}
	if len(all) != others {
		b.t.Errorf("%d rows of other keys came, want %d", len(all), others)
	}
}

func behindRetry(t *testing.T, b *bench) {
	l := b.lease("a")
	head, others := crowd(b, l, func(id int64) jetbox.Outcome { return retry(id, long) })
	b.wantOthers(l, others)
	b.wantOthers(l, 0)
	// The head turns out to be stored after all. Its key goes on, and a row that
	// is appended meanwhile comes last.
	b.record(l, published(head)...)
	b.claim(l, 10)
	b.add(keyed("k", 1)...)
	b.wantDrained(l, 300, behind+1)
}

func behindFrozen(t *testing.T, b *bench) {
	l := b.lease("a")
	head, others := crowd(b, l, func(id int64) jetbox.Outcome { return dead(id, true) })
	b.wantOthers(l, others)
	b.add(keyed("k", 1)...)
	b.wantOthers(l, 0)
	if n, err := b.Discard(t.Context(), only(head)); err != nil || n != 1 {
		t.Fatalf("Discard = %d, %v, want 1", n, err)
	}
	// The first to come fails: the rest waits again.
	rows := b.claim(l, 10)
	if len(rows) == 0 {
		t.Fatal("nothing came after the discard")
	}
	b.record(l, retry(rows[0].Pos, long))
	b.claimIDs(l, 10)
	b.record(l, published(rows[0].Pos)...)
	b.wantDrained(l, 300, behind)
}

func behindFrozenRetried(t *testing.T, b *bench) {
	l := b.lease("a")
	head, others := crowd(b, l, func(id int64) jetbox.Outcome { return dead(id, true) })
	b.wantOthers(l, others)
	if n, err := b.Retry(t.Context(), only(head)); err != nil || n != 1 {
		t.Fatalf("Retry = %d, %v, want 1", n, err)
	}
	if rows := b.claim(l, 10); len(rows) == 0 || rows[0].Pos != head {
		t.Fatalf("claimed %v, want row %d first", positions(rows), head)
	}
	b.wantDrained(l, 300, behind+1)
}

// Rows that may not go are put aside once, many at a time, however few are
// claimed: their number is not the time of a claim.
func claimOneBehindMany(t *testing.T, b *bench) {
	const many = 5000
	var events []*jetbox.Event
	for range many {
		events = append(events, later(&jetbox.Event{Subject: "s"}, time.Now().Add(long)))
	}
	b.add(events...)
	ids := b.add(keyed("", 2)...)
	l := b.lease("a")
	b.claimIDs(l, 1, ids[0])
	b.record(l, published(ids[0])...)
	b.claimIDs(l, 1, ids[1])
}
