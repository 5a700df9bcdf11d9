package outboxtest

import (
	"slices"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

func retryScenarios() []scenario {
	return []scenario{
		{"a row that waits for its retry holds its own key and nobody else's", migrated(retryHoldsItsKey)},
		{"ordering keys are type and id, exactly", migrated(keysAreExact)},
		{"a retry tells its attempts, reason and time", migrated(retryTells)},
		{"a delay that was not the row's fault counts no attempt but holds its key", migrated(delayCountsNothing)},
		{"rows of one key that fail again and again stay in order", migrated(failuresStayInOrder)},
		{"a row in doubt stays so until another outcome, parked and retried too", migrated(doubtIsKept)},
		{"a row appended behind a waiting one waits too", migrated(appendedBehind)},
	}
}

// Catalog BR-05: a retry is not overtaken.
func retryHoldsItsKey(t *testing.T, b *bench) {
	k := b.add(keyed("k", 3)...)
	m := b.add(keyed("m", 2)...)
	free := b.add(keyed("", 2)...)
	l := b.lease("a")
	b.claimIDs(l, 10, slices.Concat(k, m, free)...)
	const delay = 150 * time.Millisecond
	asked := time.Now()
	b.record(l, retry(k[0], delay))
	rows := b.claim(l, 10)
	if time.Since(asked) < delay && !slices.Equal(positions(rows), slices.Concat(m, free)) {
		t.Errorf("claimed %v while row %d waits, want %v", positions(rows), k[0], slices.Concat(m, free))
	}
	b.record(l, published(slices.Concat(m, free)...)...)

	rows = b.claimWhenDue(l, 10)
	if waited := time.Since(asked); waited < delay-time.Millisecond {
		t.Errorf("row %d came back after %v, want %v", k[0], waited, delay)
	}
	if rows[0].Pos != k[0] || rows[0].Attempts != 1 {
		t.Errorf("claimed %+v after the wait, want row %d with one attempt first", rows[0], k[0])
	}
	if got := positions(b.drain(l, 10)); !slices.Equal(got, k) {
		t.Errorf("drained %v, want %v in order", got, k)
	}
}

func keysAreExact(t *testing.T, b *bench) {
	event := func(typ, id string) *jetbox.Event {
		return &jetbox.Event{Subject: "s", AggregateType: typ, AggregateID: id}
	}
	holds := [][2]string{{"a", "b/c"}, {"", "x"}, {"case", "ID"}}
	goes := [][2]string{{"a/b", "c"}, {"a", "b%2Fc"}, {"", "a/b/c"}, {"y", "x"}, {"x", ""}, {"", ""}, {"case", "id"}, {"Case", "ID"}, {"case", "ID "}}
	var first, held, free []*jetbox.Event
	for _, k := range holds {
		first = append(first, event(k[0], k[1]))
		held = append(held, event(k[0], k[1]))
	}
	for _, k := range goes {
		free = append(free, event(k[0], k[1]))
	}
	waiting := b.add(first...)
	l := b.lease("a")
	b.claimIDs(l, 100, waiting...)
	for _, id := range waiting {
		b.record(l, retry(id, long))
	}
	b.add(held...)
	ids := b.add(free...)
	b.claimIDs(l, 100, ids...)

	// Plain SQL may write no type as NULL or as nothing: the same key.
	b.exec("INSERT INTO {t} (subject, payload, aggregate_type, aggregate_id) VALUES ('s', '', '', 'x')")
	b.claimIDs(l, 100, ids...)
}

func retryTells(t *testing.T, b *bench) {
	ids := b.add(keyed("k", 1)...)
	l := b.lease("a")
	for attempt := range 3 {
		rows := b.claimWhenDue(l, 10)
		if rows[0].Attempts != attempt {
			t.Errorf("claimed with %d attempts, want %d", rows[0].Attempts, attempt)
		}
		before := time.Now()
		b.record(l, jetbox.Outcome{Pos: ids[0], State: jetbox.Pending, Reason: "reason é", Attempted: true, Delay: 20 * time.Millisecond})
		after := time.Now()
		e := b.show(ids[0])
		if e.State != jetbox.Pending || e.Attempts != attempt+1 || e.LastError != "reason é" || !e.PublishedAt.IsZero() {
			t.Errorf("row after attempt %d = %+v", attempt+1, e)
		}
		const ms = time.Millisecond
		if at := e.Event.NotBefore; at.Before(before.Add(20*ms-ms)) || at.After(after.Add(20*ms+ms)) {
			t.Errorf("available at %v, want 20ms after a time from %v to %v", at, before, after)
		}
	}
	b.claimWhenDue(l, 10)
	b.record(l, published(ids...)...)
	if e := b.show(ids[0]); e.Attempts != 3 || e.LastError != "" || e.State != jetbox.Published {
		t.Errorf("published after three failures = %+v, want the attempts kept and no error", e)
	}
}

func delayCountsNothing(t *testing.T, b *bench) {
	ids := b.add(keyed("k", 2)...)
	l := b.lease("a")
	b.claimIDs(l, 10, ids...)
	b.record(l, jetbox.Outcome{Pos: ids[0], State: jetbox.Pending, Reason: "denied", Delay: 50 * time.Millisecond})
	if e := b.show(ids[0]); e.Attempts != 0 || e.LastError != "denied" {
		t.Errorf("delayed row = %+v, want no attempt counted, the reason kept", e)
	}
	rows := b.claimWhenDue(l, 10)
	if rows[0].Pos != ids[0] || rows[0].Attempts != 0 {
		t.Errorf("claimed %+v, want row %d with no attempts before row %d", rows[0], ids[0], ids[1])
	}
	if got := positions(b.drain(l, 10)); !slices.Equal(got, ids) {
		t.Errorf("drained %v, want %v", got, ids)
	}
}

func doubtIsKept(t *testing.T, b *bench) {
	ids := b.add(keyed("k", 1)...)
	l := b.lease("a")
	want := func(what string, inDoubt bool) {
		t.Helper()
		if row := b.claimWhenDue(l, 10)[0]; row.Pos != ids[0] || row.Fresh || row.InDoubt != inDoubt || inDoubt && row.Earlier != nil {
			t.Errorf("%s: claimed %+v, want row %d, in doubt: %v", what, row, ids[0], inDoubt)
		}
	}
	inDoubt := func(o jetbox.Outcome) jetbox.Outcome { o.InDoubt = true; return o }

	b.claimIDs(l, 10, ids...)
	b.record(l, inDoubt(retry(ids[0], 0)))
	want("after a retry in doubt", true)
	want("in a claim of its own", true)
	if got, want := b.show(ids[0]).LastError, outbox.OutcomeUnknown+": refused"; got != want {
		t.Errorf("last error %q, want %q", got, want)
	}
	b.record(l, inDoubt(dead(ids[0], false)))
	_, err := b.Retry(t.Context(), outbox.Filter{})
	b.check(err)
	want("a dead letter in doubt that is retried", true)
	b.record(l, retry(ids[0], 0))
	want("after a refusal", false)
	b.record(l, dead(ids[0], false))
	_, err = b.Retry(t.Context(), outbox.Filter{})
	b.check(err)
	if row := b.claimWhenDue(l, 10)[0]; !row.Fresh || row.InDoubt {
		t.Errorf("claimed %+v after a dead letter that was refused was retried, want it fresh", row)
	}
}

func failuresStayInOrder(t *testing.T, b *bench) {
	ids := b.add(keyed("k", 6)...)
	l := b.lease("a")
	var order []int64
	failures := map[int64]int{ids[0]: 2, ids[1]: 1, ids[3]: 3, ids[5]: 1}
	b.eventually("publish all rows", func() (bool, string) {
		rows := b.claim(l, 4)
		for _, row := range rows {
			if failures[row.Pos] > 0 {
				failures[row.Pos]--
				b.record(l, retry(row.Pos, 10*time.Millisecond))
				break // as a relay does: the rest of the key waits
			}
			order = append(order, row.Pos)
			b.record(l, published(row.Pos)...)
		}
		return len(order) == len(ids), b.dump()
	})
	if !slices.Equal(order, ids) {
		t.Errorf("published in the order %v, want %v", order, ids)
	}
}

func appendedBehind(t *testing.T, b *bench) {
	first := b.add(keyed("k", 1)...)
	l := b.lease("a")
	b.claimIDs(l, 10, first...)
	b.record(l, retry(first[0], 60*time.Millisecond))
	second := b.add(keyed("k", 1)...)
	early := positions(b.claim(l, 10))
	if len(early) > 0 && early[0] != first[0] {
		t.Errorf("claimed %v, want nothing before row %d", early, first[0])
	}
	third := b.add(keyed("k", 1)...)
	b.claimWhenDue(l, 10)
	if got, want := positions(b.drain(l, 1)), slices.Concat(first, second, third); !slices.Equal(got, want) {
		t.Errorf("drained %v, want %v", got, want)
	}
}
