package outboxtest

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

func recallScenarios() []scenario {
	return []scenario{
		{"the last message on each stream is remembered with its record", migrated(anchorKept)},
		{"messages of a stream that was created anew are not taken for the old one's", migrated(anchorOfOneStream)},
		{"each relay's last message is remembered", migrated(anchorOfEachRelay)},
		{"a recall chooses what was recorded after a message, and nothing else", migrated(recallChooses)},
		{"recalled rows are claimed again as if never sent, before later ones of their keys", migrated(recallGoesFirst)},
		{"nothing is claimed while a recall is under way, by nobody", migrated(recallHolds)},
		{"a step of a recall that another relay has moved on changes nothing", migrated(recallMoved)},
		{"rows of an older stream are recalled when asked", migrated(recallOlder)},
		{"a recall of many rows is done in steps and recalls each once", migrated(recallMany)},
		{"a relay that has lost its lease changes no anchor and recalls nothing", migrated(recallFenced)},
	}
}

// born is when the stream of a scenario was created: to the nanosecond.
var born = time.Date(2026, 1, 2, 3, 4, 5, 678901234, time.UTC)

// stored is the outcome of rows on a stream, at their ids as sequences.
func stored(created time.Time, ids ...int64) []jetbox.Outcome {
	out := published(ids...)
	for i := range out {
		out[i].StreamSeq = uint64(ids[i])
		out[i].Created, out[i].MsgID = created, fmt.Sprint("key ", ids[i])
	}
	return out
}

// anchors returns the highest anchor of each stream.
func (b *bench) anchors() map[string]jetbox.Anchor {
	b.t.Helper()
	all, err := b.Anchors(b.t.Context())
	b.check(err)
	highest := make(map[string]jetbox.Anchor)
	for _, a := range all {
		if h, ok := highest[a.Stream]; !ok || a.Seq >= h.Seq {
			highest[a.Stream] = a
		}
	}
	return highest
}

func (b *bench) wantAnchor(stream string, created time.Time, seq uint64) jetbox.Anchor {
	b.t.Helper()
	a, ok := b.anchors()[stream]
	if !ok || a.Seq != seq || !a.Created.Equal(created) || a.MsgID != fmt.Sprint("key ", seq) || a.Pos != int64(seq) {
		b.t.Fatalf("anchor of %s = %+v, want message %d of the one created at %v", stream, a, seq, created)
	}
	return a
}

func anchorKept(t *testing.T, b *bench) {
	ids := b.add(keyed("", 6)...)
	l := b.lease("a")
	b.claimIDs(l, 10, ids...)
	b.record(l, published(ids[0])...) // not one to be remembered
	if all := b.anchors(); len(all) != 0 {
		t.Fatalf("anchors = %+v, want none", all)
	}
	before := time.Now().Add(-time.Second)
	b.record(l, stored(born, ids[2], ids[3], ids[1])...)
	a := b.wantAnchor("EVENTS", born, uint64(ids[3]))
	if a.At.Before(before) || a.At.After(time.Now().Add(time.Second)) || a.Shared || a.Older || a.Recall != nil {
		t.Errorf("anchor = %+v, want it recorded now, by one relay, with nothing to do", a)
	}
	other := stored(born.Add(1), ids[4])
	other[0].Stream = "OTHER"
	other[0].Remove = jetbox.Delete
	b.record(l, append(other, dead(ids[5], false))...)
	b.wantAnchor("EVENTS", born, uint64(ids[3]))
	b.wantAnchor("OTHER", born.Add(1), uint64(ids[4]))

	// A duplicate has a lower sequence: it is no newer.
	more := b.add(keyed("", 1)...)
	b.claimIDs(l, 10, more...)
	low := stored(born, more...)
	low[0].StreamSeq = 1
	b.record(l, low...)
	b.wantAnchor("EVENTS", born, uint64(ids[3]))

	// It outlives its relay.
	b.check(b.Release(t.Context(), l))
	other2 := b.another()
	other2.wantAnchor("EVENTS", born, uint64(ids[3]))
}

func anchorOfOneStream(t *testing.T, b *bench) {
	ids := b.add(keyed("", 3)...)
	l := b.lease("a")
	b.claimIDs(l, 10, ids...)
	b.record(l, stored(born, ids[1])...)
	b.record(l, stored(born.Add(1), ids[2])...) // by a relay that has not told so
	a := b.wantAnchor("EVENTS", born, uint64(ids[1]))

	a.Created, a.Seq, a.MsgID, a.Older = born.Add(1), 0, "", true
	b.check(b.SetAnchor(t.Context(), l, born.Add(2), a)) // not known as that one
	b.wantAnchor("EVENTS", born, uint64(ids[1]))
	b.check(b.SetAnchor(t.Context(), l, born, a))
	if got := b.anchors()["EVENTS"]; !got.Created.Equal(born.Add(1)) || got.Seq != 0 || got.MsgID != "" || !got.Older {
		t.Fatalf("anchor = %+v, want one of the new stream that knows no message", got)
	}
	b.record(l, stored(born.Add(1), ids[0])...)
	if got := b.wantAnchor("EVENTS", born.Add(1), uint64(ids[0])); !got.Older {
		t.Errorf("anchor = %+v, want older rows still known", got)
	}
}

func anchorOfEachRelay(t *testing.T, b *bench) {
	first, second := b.leaseFor("a", 200*time.Millisecond), b.another()
	ids := b.add(keyed("", 2)...)
	b.claim(first, 10)
	b.record(first, stored(born, ids[1])...)
	l := second.takeOver("b", long)
	second.record(l, stored(born, ids[0])...)
	second.wantAnchor("EVENTS", born, uint64(ids[1]))

	// What was verified is kept as one.
	all := second.anchors()
	second.check(second.SetAnchor(t.Context(), l, born, all["EVENTS"]))
	second.wantAnchor("EVENTS", born, uint64(ids[1]))
	rest, err := second.Anchors(t.Context())
	second.check(err)
	if len(rest) != 1 || rest[0].Shared {
		t.Errorf("anchors = %+v, want the one that was set", rest)
	}
}

// recallable reads the ids of all rows that a recall chooses.
func (b *bench) recallable(r jetbox.Recall) (ids []int64) {
	b.t.Helper()
	for after := int64(math.MinInt64); after != math.MaxInt64; {
		rows, upTo, err := b.Recallable(b.t.Context(), "EVENTS", r, after)
		b.check(err)
		if upTo <= after {
			b.t.Fatalf("Recallable after %d came to %d", after, upTo)
		}
		for _, row := range rows {
			if row.Pos <= after || row.Pos > upTo {
				b.t.Errorf("row %d is not between %d and %d", row.Pos, after, upTo)
			}
			ids = append(ids, row.Pos)
		}
		after = upTo
	}
	return ids
}

func recallChooses(t *testing.T, b *bench) {
	ids := b.add(keyed("", 9)...)
	l := b.lease("a")
	b.claimIDs(l, 20, ids...)
	b.record(l, stored(born, ids[0], ids[1])...)
	unknown := stored(born, ids[2])
	unknown[0].StreamSeq = 0
	b.record(l, unknown...)
	between := apart()
	late := stored(born, ids[3], ids[4], ids[5])
	late[1].StreamSeq, late[2].Stream = 0, "OTHER"
	b.record(l, append(late, dead(ids[6], false), retry(ids[7], long))...)
	gone := stored(born, ids[8])
	gone[0].Remove = jetbox.Delete
	b.record(l, gone...)

	for _, tt := range []struct {
		r    jetbox.Recall
		want []int64
	}{
		{jetbox.Recall{}, []int64{ids[0], ids[1], ids[2], ids[3], ids[4]}},
		{jetbox.Recall{After: uint64(ids[1]), AfterTime: between}, []int64{ids[3], ids[4]}},
		{jetbox.Recall{After: uint64(ids[0])}, []int64{ids[1], ids[2], ids[3], ids[4]}},
		{jetbox.Recall{After: uint64(ids[8]), AfterTime: time.Now().Add(long)}, nil},
		{jetbox.Recall{Older: true}, nil},
	} {
		if got := b.recallable(tt.r); !slices.Equal(got, tt.want) {
			t.Errorf("recall %+v chooses rows %v, want %v", tt.r, got, tt.want)
		}
	}
	rows, _, err := b.Recallable(t.Context(), "EVENTS", jetbox.Recall{After: uint64(ids[0]), AfterTime: time.Now().Add(long)}, ids[0])
	b.check(err)
	if e := b.show(ids[1]); len(rows) != 2 || rows[0].ID != e.Event.ID || rows[0].MsgID != e.Event.Key || rows[0].Seq != uint64(ids[1]) ||
		!rows[0].At.Equal(e.PublishedAt) {
		t.Errorf("recallable = %+v, want row %+v first", rows, e)
	}
}

// startRecall remembers a message as the last that is there, and begins to recall
// what came after.
func (b *bench) startRecall(l jetbox.Lease, after int64) jetbox.Recall {
	b.t.Helper()
	a := b.anchors()["EVENTS"]
	r := &jetbox.Recall{Number: 1<<62 + 1, After: uint64(after), AfterTime: a.At, Done: math.MinInt64}
	a.Seq, a.MsgID, a.Pos, a.Recall = uint64(after), fmt.Sprint("key ", after), after, r
	b.check(b.SetAnchor(b.t.Context(), l, a.Created, a))
	return b.recall()
}

// recallStep carries out a step, and checks whether that is done.
func (b *bench) recallStep(l jetbox.Lease, want bool, r jetbox.Recall, step jetbox.Recalled) {
	b.t.Helper()
	done, err := b.Recall(b.t.Context(), l, "EVENTS", r, step)
	b.check(err)
	if done != want {
		b.t.Errorf("step %+v of recall %+v is done: %v, want %v", step, r, done, want)
	}
}

// recall is the one that is under way.
func (b *bench) recall() jetbox.Recall {
	b.t.Helper()
	a := b.anchors()["EVENTS"]
	if a.Recall == nil {
		b.t.Fatalf("anchor = %+v, want a recall under way", a)
	}
	return *a.Recall
}

func recallGoesFirst(t *testing.T, b *bench) {
	ids := b.add(append(keyed("k", 4), keyed("", 1)...)...)
	l := b.lease("a")
	b.claimIDs(l, 10, ids...)
	b.record(l, retry(ids[0], 0))
	b.claimWhenDue(l, 1)
	b.record(l, stored(born, ids[:4]...)...)
	b.record(l, stored(born, ids[4])...)
	later := b.add(keyed("k", 2)...)
	r := b.startRecall(l, ids[1])
	if got := b.recallable(r); !slices.Equal(got, ids[2:]) {
		t.Fatalf("recallable = %v, want %v", got, ids[2:])
	}
	moved := jetbox.PublishedRow{Pos: ids[3], Seq: 77}
	b.recallStep(l, true, r, jetbox.Recalled{
		Lost: []int64{ids[2], ids[4]}, Moved: []jetbox.PublishedRow{moved}, Done: math.MaxInt64, End: true,
	})
	b.wantStates(jetbox.Published, ids[0], ids[1], ids[3])
	b.wantStates(jetbox.Pending, ids[2], ids[4])
	if e := b.show(ids[3]); e.StreamSeq != 77 {
		t.Errorf("moved row = %+v, want its sequence corrected", e)
	}
	if e := b.show(ids[2]); e.Stream != "" || e.StreamSeq != 0 || !e.PublishedAt.IsZero() || e.Attempts != 0 || e.LastError != "" {
		t.Errorf("recalled row = %+v, want nothing left of its publication", e)
	}
	a := b.wantAnchor("EVENTS", born, uint64(ids[1]))
	if a.Recall != nil {
		t.Errorf("anchor = %+v, want no recall any more", a)
	}
	rows := b.claimIDs(l, 10, ids[2], ids[4], later[0], later[1])
	for _, row := range rows {
		if !row.Fresh || row.Earlier != nil {
			t.Errorf("row %d = %+v, want it as if never sent", row.Pos, row)
		}
	}
	b.record(l, stored(born, ids[2], ids[4], later[0], later[1])...)
	b.wantAnchor("EVENTS", born, uint64(later[1]))
}

func recallHolds(t *testing.T, b *bench) {
	ids := b.add(keyed("", 3)...)
	l := b.lease("a")
	b.claimIDs(l, 2, ids[:2]...)
	b.record(l, stored(born, ids[0])...)
	b.startRecall(l, 0)
	b.claimIDs(l, 10)
	b.check(b.Release(t.Context(), l))
	other := b.another()
	l = other.lease("b")
	other.claimIDs(l, 10)
	r := other.recall() // with whoever takes over

	// Neither is what is known changed under it.
	a := other.anchors()["EVENTS"]
	a.Recall, a.Seq = nil, 99
	other.check(other.SetAnchor(t.Context(), l, born, a))
	other.recallStep(l, true, other.recall(), jetbox.Recalled{Lost: ids[:1], Done: ids[0]})
	other.claimIDs(l, 10)
	r.Done, r.Rows = ids[0], 1
	if got := other.recall(); got != r {
		t.Errorf("recall = %+v, want %+v", got, r)
	}
	other.recallStep(l, true, r, jetbox.Recalled{Done: math.MaxInt64, End: true})
	other.claimIDs(l, 10, ids...)
}

func recallMoved(t *testing.T, b *bench) {
	ids := b.add(keyed("", 2)...)
	l := b.lease("a")
	b.claimIDs(l, 2, ids...)
	b.record(l, stored(born, ids...)...)
	old := b.startRecall(l, 0)
	b.recallStep(l, true, old, jetbox.Recalled{Done: ids[0]})
	dump := b.dump()
	for _, step := range []jetbox.Recalled{
		{Lost: ids, Done: ids[1]},
		{Moved: []jetbox.PublishedRow{{Pos: ids[0], Seq: 9}}, Done: ids[1], End: true},
	} {
		b.recallStep(l, false, old, step)
	}
	if after := b.dump(); after != dump {
		t.Errorf("a late step changed the outbox from\n%s\nto\n%s", dump, after)
	}
	r := b.recall()
	b.recallStep(l, true, r, jetbox.Recalled{Done: ids[1], End: true})
	b.recallStep(l, false, r, jetbox.Recalled{Lost: ids, Done: ids[1], End: true})
	if after := b.dump(); after != dump {
		t.Errorf("a step of an ended recall changed the outbox from\n%s\nto\n%s", dump, after)
	}
}

func recallOlder(t *testing.T, b *bench) {
	ids := b.add(keyed("", 4)...)
	l := b.lease("a")
	b.claimIDs(l, 10, ids...)
	b.record(l, stored(born, ids[0], ids[1])...)
	apart()
	b.record(l, stored(born.Add(1), ids[2])...) // to the new stream, before anybody has noticed
	a := b.anchors()["EVENTS"]
	a.Created, a.Seq, a.MsgID, a.Older = born.Add(1), 0, "", true
	b.check(b.SetAnchor(t.Context(), l, born, a))
	b.record(l, stored(born.Add(1), ids[3])...)
	if got := b.recallable(jetbox.Recall{Older: true}); !slices.Equal(got, ids[:2]) {
		t.Errorf("rows of the older stream = %v, want %v", got, ids[:2])
	}
	if got := b.recallable(jetbox.Recall{}); !slices.Equal(got, ids[2:]) {
		t.Errorf("rows of this stream = %v, want %v", got, ids[2:])
	}
	a = b.anchors()["EVENTS"]
	a.Recall = &jetbox.Recall{Number: 1, Older: true, Done: math.MinInt64}
	b.check(b.SetAnchor(t.Context(), l, a.Created, a))
	b.recallStep(l, true, b.recall(), jetbox.Recalled{Lost: ids[:2], Done: math.MaxInt64, End: true})
	if a := b.anchors()["EVENTS"]; a.Older || a.Recall != nil {
		t.Errorf("anchor = %+v, want nothing of the older stream left to do", a)
	}
	b.claimIDs(l, 10, ids[:2]...)
}

func recallMany(t *testing.T, b *bench) {
	const rows = 5500 // more than one page, and than one transaction
	b.exec(`INSERT INTO {t} (subject, payload, status, stream, stream_seq) WITH RECURSIVE n (i) AS (
		SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5500) SELECT 'events.many', '', 'PUBLISHED', 'EVENTS', i FROM n`)
	l := b.lease("a")
	last := b.add(keyed("", 1)...)
	b.claim(l, 1)
	b.record(l, stored(born, last...)...)
	all := b.recallable(jetbox.Recall{After: 10})
	if len(all) != rows-10+1 {
		t.Fatalf("%d rows are recallable, want %d", len(all), rows-10+1)
	}
	r := b.startRecall(l, 10)
	b.recallStep(l, true, r, jetbox.Recalled{Lost: all, Done: all[len(all)-1]})
	if got := b.recall(); got.Rows != len(all) || got.Done != all[len(all)-1] {
		t.Errorf("recall = %+v, want %d rows up to %d", got, len(all), all[len(all)-1])
	}
	if n := b.number("SELECT count(*) FROM {t} WHERE status = 'PENDING'"); int(n) != len(all) {
		t.Errorf("%d rows are pending, want %d", n, len(all))
	}
	if got := b.recallable(r); len(got) != 0 {
		t.Errorf("%d rows are recallable still", len(got))
	}
}

func recallFenced(t *testing.T, b *bench) {
	ids := b.add(keyed("", 1)...)
	old := b.leaseFor("a", 100*time.Millisecond)
	b.claim(old, 1)
	b.record(old, stored(born, ids...)...)
	other := b.another()
	l := other.takeOver("b", long)
	r := other.startRecall(l, 0)
	dump := b.dump()
	b.wantLost("SetAnchor", b.SetAnchor(t.Context(), old, born, jetbox.Anchor{Stream: "EVENTS", Created: born}))
	done, err := b.Recall(t.Context(), old, "EVENTS", r, jetbox.Recalled{Lost: ids, Done: ids[0]})
	if b.wantLost("Recall", err); done {
		t.Error("a step by a relay that was taken over is done")
	}
	if after := b.dump(); after != dump || other.recall() != r {
		t.Errorf("an old lease changed the outbox from\n%s\nto\n%s, recall %+v", dump, after, other.recall())
	}
}

func (b *bench) wantLost(what string, err error) {
	b.t.Helper()
	if !errors.Is(err, jetbox.ErrLeaseLost) {
		b.t.Errorf("%s by a relay that was taken over = %v, want ErrLeaseLost", what, err)
	}
}
