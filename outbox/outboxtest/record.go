package outboxtest

import (
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

func recordScenarios() []scenario {
	return []scenario{
		{"only the rows named are recorded, not what lies between them", migrated(recordByID)},
		{"each row gets its own sequence, however ids and sequences run", migrated(recordRuns)},
		{"a record keeps what the broker said", migrated(recordKeeps)},
		{"recording again, or a row that has ended, changes nothing", migrated(recordAgain)},
		{"an outcome that is none leaves the whole batch unrecorded", migrated(recordNonsense)},
		{"a published row leaves the table with its record where it should", migrated(recordRemoves)},
	}
}

// A range update would mark a row that committed late into the range and was
// never published: silent loss.
func recordByID(t *testing.T, b *bench) {
	ids := b.add(keyed("", 5)...)
	l := b.lease("a")
	b.claimIDs(l, 5, ids...)
	b.record(l, published(ids[0], ids[2], ids[4])...)
	b.wantStates(jetbox.Published, ids[0], ids[2], ids[4])
	b.wantStates(jetbox.Processing, ids[1], ids[3])
	for _, id := range []int64{ids[1], ids[3]} {
		if e := b.show(id); !e.PublishedAt.IsZero() || e.Stream != "" || e.StreamSeq != 0 {
			t.Errorf("row %d was not named, but is %+v", id, e)
		}
	}
	b.claimIDs(l, 5, ids[1], ids[3])
	b.record(l, dead(ids[3], false))
	b.claimIDs(l, 5, ids[1])
}

// A store may mark runs of rows at once. A run is one only when ids, sequences
// and stream all go on.
func recordRuns(t *testing.T, b *bench) {
	ids := b.add(keyed("", 12)...)
	l := b.lease("a")
	b.claimIDs(l, 12, ids...)
	want := map[int64]jetbox.Outcome{}
	var outcomes []jetbox.Outcome
	for _, o := range []struct {
		row    int
		stream string
		seq    uint64
	}{
		{0, "A", 10}, {2, "A", 11}, {4, "A", 12}, // sequences run, ids do not
		{5, "A", 14}, {6, "B", 15}, {7, "B", 16}, // one run of two
		{8, "B", 16}, {9, "B", 0}, {10, "B", 0}, // a duplicate's, and unknown ones
	} {
		out := jetbox.Outcome{Pos: ids[o.row], State: jetbox.Published, Stream: o.stream, StreamSeq: o.seq}
		outcomes = append(outcomes, out)
		want[out.Pos] = out
	}
	b.record(l, outcomes...)
	for _, id := range ids {
		e, o := b.show(id), want[id]
		state := jetbox.Processing
		if o.Pos == id {
			state = jetbox.Published
		}
		if e.State != state || e.Stream != o.Stream || e.StreamSeq != o.StreamSeq {
			t.Errorf("row %d is %s at %d of stream %q, want %s at %d of %q", id, e.State, e.StreamSeq, e.Stream, state, o.StreamSeq, o.Stream)
		}
	}
}

func recordKeeps(t *testing.T, b *bench) {
	ids := b.add(keyed("", 3)...)
	l := b.lease("a")
	b.claimIDs(l, 5, ids...)
	before := time.Now().Truncate(time.Millisecond)
	b.record(l,
		jetbox.Outcome{Pos: ids[0], State: jetbox.Published, Stream: "EVENTS", StreamSeq: 1<<63 - 1},
		jetbox.Outcome{Pos: ids[1], State: jetbox.Published, Stream: "EVENTS"},
		jetbox.Outcome{Pos: ids[2], State: jetbox.DeadLetter, Reason: "payload of 2097152 bytes; 'the' limit is 1048576 é"})
	after := time.Now()
	e := b.show(ids[0])
	if e.State != jetbox.Published || e.Stream != "EVENTS" || e.StreamSeq != 1<<63-1 || e.Attempts != 0 || e.LastError != "" ||
		e.PublishedAt.Before(before) || e.PublishedAt.After(after) {
		t.Errorf("published row = %+v, want stream, sequence and time", e)
	}
	if e := b.show(ids[1]); e.Stream != "EVENTS" || e.StreamSeq != 0 || e.PublishedAt.IsZero() {
		t.Errorf("row published at an unknown sequence = %+v, want none", e)
	}
	if n := b.number("SELECT count(*) FROM {t} WHERE stream_seq IS NULL"); n != 2 {
		t.Errorf("%d rows have no sequence in the table, want 2: an unknown one is NULL", n)
	}
	e = b.show(ids[2])
	if e.State != jetbox.DeadLetter || e.LastError != "payload of 2097152 bytes; 'the' limit is 1048576 é" || e.Attempts != 0 || !e.PublishedAt.IsZero() {
		t.Errorf("dead row = %+v, want its reason, no attempts", e)
	}
}

func recordAgain(t *testing.T, b *bench) {
	ids := b.add(keyed("", 4)...)
	l := b.lease("a")
	b.claimIDs(l, 5, ids...)
	first := append(published(ids[0]), dead(ids[1], false), retry(ids[2], long))
	b.record(l, first...)
	dump := b.dump()
	again := published(ids[0], ids[1])
	again[0].StreamSeq, again[0].Stream = 7, "OTHER"
	b.record(l, again...)
	b.record(l, retry(ids[0], 0), retry(ids[1], 0))
	b.record(l, dead(ids[0], true), dead(ids[1], true))
	gone := published(ids[1])
	gone[0].Remove = jetbox.Delete
	b.record(l, gone...)
	if after := b.dump(); after != dump {
		t.Errorf("recording again changed the outbox from\n%s\nto\n%s", dump, after)
	}
	// Neither does the same batch as a whole, but for the row still pending.
	b.record(l, first[:2]...)
	if after := b.dump(); after != dump {
		t.Errorf("repeating the record changed the outbox from\n%s\nto\n%s", dump, after)
	}
	b.claimIDs(l, 5, ids[3])

	// A row that waits for its retry may still turn out to be stored.
	b.record(l, published(ids[2])...)
	b.wantStates(jetbox.Published, ids[2])
}

func recordNonsense(t *testing.T, b *bench) {
	ids := b.add(keyed("", 2)...)
	l := b.lease("a")
	b.claimIDs(l, 5, ids...)
	dump := b.dump()
	for _, state := range []jetbox.State{"", jetbox.Processing, "nonsense"} {
		if err := b.Record(t.Context(), l, append(published(ids[0]), jetbox.Outcome{Pos: ids[1], State: state})); err == nil {
			t.Errorf("Record of state %q succeeded", state)
		}
	}
	if after := b.dump(); after != dump {
		t.Errorf("a refused record changed the outbox from\n%s\nto\n%s", dump, after)
	}
	b.claimIDs(l, 5, ids...)
}

func recordRemoves(t *testing.T, b *bench) {
	ids := b.add(keyed("k", 4)...)
	l := b.lease("a")
	b.claimIDs(l, 5, ids...)
	before := b.show(ids[1])
	out := append(published(ids[:3]...), dead(ids[3], false))
	out[0].Remove, out[1].Remove, out[2].Remove = jetbox.Delete, jetbox.Archive, jetbox.Keep
	out[3].Remove = jetbox.Delete // of a row that is not published: kept
	b.record(l, out...)
	b.wantStates(jetbox.Published, ids[2])
	b.wantStates(jetbox.DeadLetter, ids[3])
	if n := b.number("SELECT count(*) FROM {t}"); n != 2 {
		t.Errorf("%d rows are left, want the kept and the dead one\n%s", n, b.dump())
	}
	if n := b.number("SELECT count(*) FROM {t}_archive"); n != 1 {
		t.Errorf("%d rows are archived, want the one that should be\n%s", n, b.dump())
	}
	b.wantArchived(before)
	b.record(l, out...) // harmless
	if n := b.number("SELECT count(*) FROM {t}_archive"); n != 1 {
		t.Errorf("%d rows are archived after a repeat, want 1", n)
	}
}
