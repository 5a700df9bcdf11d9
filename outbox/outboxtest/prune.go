package outboxtest

import (
	"slices"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

func pruneScenarios() []scenario {
	return []scenario{
		{"a prune removes what was published long enough ago, and nothing else", migrated(pruneOnlyOld)},
		{"a prune to the archive keeps every column", migrated(pruneArchives)},
		{"a row published late does not keep older ones from being pruned", migrated(pruneBehindYoung)},
		{"a prune of many rows removes each once", migrated(pruneMany)},
	}
}

func pruneOnlyOld(t *testing.T, b *bench) {
	ids := b.add(keyed("", 6)...)
	l := b.lease("a")
	b.claimIDs(l, 5, ids[:5]...)
	b.record(l, append(published(ids[0], ids[1]), dead(ids[2], false), retry(ids[3], long))...)
	between := apart()
	b.record(l, published(ids[4])...)

	for _, tt := range []struct {
		before time.Time
		want   int
		left   []int64
	}{
		{between.Add(-long), 0, ids},
		{between, 2, ids[2:]},
		{between, 0, ids[2:]},
		{time.Now().Add(long), 1, []int64{ids[2], ids[3], ids[5]}},
	} {
		n, err := b.Prune(t.Context(), l, tt.before, false)
		b.check(err)
		if left := b.all(outbox.Filter{}); n != tt.want || !slices.Equal(left, tt.left) {
			t.Errorf("Prune(%v) = %d, left %v, want %d, %v", tt.before, n, left, tt.want, tt.left)
		}
	}
	if n := b.number("SELECT count(*) FROM {t}_dead_letter"); n != 1 {
		t.Errorf("%d dead letters after a prune, want 1", n)
	}
	if n := b.number("SELECT count(*) FROM {t}_archive"); n != 0 {
		t.Errorf("%d rows were archived, want none", n)
	}
}

func pruneArchives(t *testing.T, b *bench) {
	ev := &jetbox.Event{
		Key: "key", Subject: "s", Type: "t", AggregateType: "at", AggregateID: "ai", AggregateSeq: new(int64(7)), SchemaVersion: "2",
		ContentType: "text/plain", Headers: map[string][]string{"a": {"1", "2"}}, Payload: []byte("\x00\xffbytes"),
		NotBefore: time.Now().Add(-time.Hour).Truncate(time.Millisecond),
	}
	ids := b.add(ev, &jetbox.Event{Subject: "s"})
	l := b.lease("a")
	b.claimIDs(l, 5, ids...)
	b.record(l, retry(ids[0], 0))
	b.claimWhenDue(l, 5)
	b.record(l, published(ids...)...)
	before := []outbox.Entry{b.show(ids[0]), b.show(ids[1])}
	if n, err := b.Prune(t.Context(), l, time.Now().Add(long), true); err != nil || n != 2 {
		t.Fatalf("Prune to the archive = %d, %v, want 2", n, err)
	}
	if n := b.number("SELECT count(*) FROM {t}"); n != 0 {
		t.Errorf("%d rows are left, want none", n)
	}
	for _, e := range before {
		b.wantArchived(e)
	}
}

// wantArchived compares the row's copy in the archive with what it was.
func (b *bench) wantArchived(e outbox.Entry) {
	b.t.Helper()
	var (
		eventID, subject, status string
		payload                  []byte
		rest                     int64
	)
	// Column by column, where both databases say it in the same words.
	err := b.DB().QueryRowContext(b.t.Context(), b.sql(`SELECT event_id, subject, status, payload,
		CASE WHEN archived_at IS NOT NULL AND created_at IS NOT NULL AND published_at IS NOT NULL AND stream = 'EVENTS'
			AND stream_seq = 1000 + id AND headers IS NOT NULL AND content_type = `+quote(e.Event.ContentType)+`
			AND coalesce(aggregate_type, '') = `+quote(e.Event.AggregateType)+`
			AND coalesce(aggregate_id, '') = `+quote(e.Event.AggregateID)+`
			AND coalesce(schema_version, '') = `+quote(e.Event.SchemaVersion)+`
			AND coalesce(event_type, subject) = `+quote(e.Event.Type)+`
			AND coalesce(idempotency_key, event_id) = `+quote(e.Event.Key)+`
			THEN coalesce(aggregate_seq, -1) + attempts * 1000 ELSE -2 END
		FROM {t}_archive WHERE event_id = `+quote(e.Event.ID))).Scan(&eventID, &subject, &status, &payload, &rest)
	if err != nil {
		b.t.Errorf("read archived event %s: %v\n%s", e.Event.ID, err, b.dump())
		return
	}
	want := int64(-1 + e.Attempts*1000)
	if e.Event.AggregateSeq != nil {
		want = *e.Event.AggregateSeq + int64(e.Attempts*1000)
	}
	if subject != e.Event.Subject || status != string(jetbox.Published) || string(payload) != string(e.Event.Payload) || rest != want {
		b.t.Errorf("archived event %s differs from %+v\n%s", e.Event.ID, e, b.dump())
	}
}

// Rows that were scheduled, or waited for their retry, have low ids and were
// published last. Everything after them is old all the same.
func pruneBehindYoung(t *testing.T, b *bench) {
	for _, young := range []int{1, 1100} {
		ids := b.add(keyed("", young+3)...)
		l := b.lease("a")
		b.claimIDs(l, young+3, ids...)
		b.record(l, published(ids[young:]...)...)
		between := apart()
		b.record(l, published(ids[:young]...)...)
		n, err := b.Prune(t.Context(), l, between, false)
		b.check(err)
		if left := b.all(outbox.Filter{}); n != 3 || !slices.Equal(left, ids[:young]) {
			t.Errorf("Prune behind %d young rows = %d, left %d, want 3 and the young ones", young, n, len(left))
		}
		if n, err = b.Prune(t.Context(), l, time.Now().Add(long), false); err != nil || n != young {
			t.Errorf("Prune of the %d young rows later = %d, %v", young, n, err)
		}
	}
}

func pruneMany(t *testing.T, b *bench) {
	const rows = 1500
	ids := b.add(keyed("", rows)...)
	l := b.lease("a")
	b.claim(l, rows)
	var out []jetbox.Outcome
	for i, id := range ids {
		if i%10 == 0 {
			out = append(out, dead(id, false))
		} else {
			out = append(out, published(id)...)
		}
	}
	b.record(l, out...)
	if n, err := b.Prune(t.Context(), l, time.Now().Add(long), true); err != nil || n != rows-rows/10 {
		t.Errorf("Prune = %d, %v, want %d", n, err, rows-rows/10)
	}
	if n := b.number("SELECT count(*) FROM {t}"); n != rows/10 {
		t.Errorf("%d rows are left, want the %d dead ones", n, rows/10)
	}
	if n := b.number("SELECT count(*) FROM {t}_archive"); n != rows-rows/10 {
		t.Errorf("%d rows are archived, want %d", n, rows-rows/10)
	}
}

// all lists the ids a filter chooses.
func (b *bench) all(f outbox.Filter) []int64 {
	b.t.Helper()
	var ids []int64
	for e, err := range b.List(b.t.Context(), f) {
		b.check(err)
		ids = append(ids, e.ID)
	}
	return ids
}

// apart lets enough time pass, before and after the moment it returns, for clocks
// that are compared over a connection, on a busy machine.
func apart() time.Time {
	const wide = 150 * time.Millisecond
	time.Sleep(wide)
	now := time.Now()
	time.Sleep(wide)
	return now
}
