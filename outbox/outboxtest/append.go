package outboxtest

import (
	"bytes"
	"database/sql"
	"errors"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

func appendScenarios() []scenario {
	return []scenario{
		{"every field of an event comes out of a claim as it was appended", migrated(fieldsRoundTrip)},
		{"payloads come out byte for byte", migrated(payloadsRoundTrip)},
		{"headers come out as they were, or are refused", migrated(headersRoundTrip)},
		{"empty fields are filled in place and equal payloads are two events", migrated(defaultsFilled)},
		{"what is rolled back leaves nothing", migrated(rollbackLeavesNothing)},
		{"one bad event refuses all before the database sees any", migrated(badEventRefusesAll)},
		{"subjects the broker would obey or refuse are refused", migrated(subjectsRefused)},
		{"ids and keys that would change on the wire are refused", migrated(idsRefused)},
		{"a repeated event id or key is a duplicate", migrated(duplicatesRefused)},
	}
}

func fieldsRoundTrip(t *testing.T, b *bench) {
	full := jetbox.Event{
		ID:            "id é 1",
		Key:           "key/ü?%",
		Subject:       "orders.ünïcode.created",
		Type:          "order.created",
		AggregateType: "order%/",
		AggregateID:   "o 1/é",
		AggregateSeq:  new(int64(math.MaxInt64)),
		SchemaVersion: "v2 'quoted'",
		ContentType:   "text/plain; charset=utf-8",
		Headers:       map[string][]string{"X-One": {"1"}, "x-many": {"a", "", "a"}, "X-MANY": {"ä \" \\ <>&\u2028"}},
		Payload:       []byte("payload"),
		Time:          time.Date(1969, 7, 20, 20, 17, 40, 123_987_654, time.FixedZone("x", 5*3600+45*60)),
		NotBefore:     time.Date(2020, 2, 29, 23, 59, 59, 1, time.FixedZone("y", -3*3600)),
	}
	bare := jetbox.Event{Subject: "s", AggregateID: "only the id", AggregateSeq: new(int64(0))}
	other := jetbox.Event{Subject: "s", AggregateType: "a type alone", AggregateSeq: new(int64(math.MinInt64))}
	events := []*jetbox.Event{new(full), new(bare), new(other)}
	b.add(events...)

	rows := b.claim(b.lease("a"), 10)
	if len(rows) != len(events) {
		t.Fatalf("claimed %d rows, want %d", len(rows), len(events))
	}
	for i, row := range rows {
		want := *events[i] // Append filled ID, Type, ContentType and Time
		if want.Key == "" {
			want.Key = want.ID
		}
		if !want.NotBefore.IsZero() {
			// Never before the instant asked for: rounded up.
			want.NotBefore = time.Date(2020, 3, 1, 2, 59, 59, 1_000_000, time.UTC)
		}
		want.Payload = slices.Clip(append([]byte{}, want.Payload...))
		got := row.Event
		got.Payload = append([]byte{}, got.Payload...) // nil and empty are the same
		if !reflect.DeepEqual(got, want) {
			t.Errorf("event %d came out as\n%+v, want\n%+v", i, got, want)
		}
		if row.Fault != nil || row.Attempts != 0 {
			t.Errorf("event %d: fault = %v, attempts = %d, want none", i, row.Fault, row.Attempts)
		}
		entry := b.show(row.Pos)
		entry.Event.Payload = append([]byte{}, entry.Event.Payload...)
		if !reflect.DeepEqual(entry.Event, want) {
			t.Errorf("Show of event %d:\n%+v, want\n%+v", i, entry.Event, want)
		}
	}
	if want := time.Date(1969, 7, 20, 14, 32, 40, 123_000_000, time.UTC); !rows[0].Event.Time.Equal(want) {
		t.Errorf("Time = %v, want %v", rows[0].Event.Time, want)
	}
}

// Catalog BR-63 and BR-67: bytes are bytes, whatever they look like.
func payloadsRoundTrip(t *testing.T, b *bench) {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	payloads := [][]byte{
		nil,
		{},
		[]byte("null"), []byte("{}"), []byte(" "), []byte("!nil!"), []byte("\x00"),
		[]byte("9007199254740993"), []byte("18446744073709551615"), []byte("-0"), []byte("1.0"), []byte("1e400"),
		[]byte("0.10"), []byte(strings.Repeat("9", 100)), []byte(`{"a":1,"a":2}`), []byte(`{"z":1,"y":2,"a":3}`),
		[]byte("{ \"a\" :\t1\r\n}"), []byte(`"<>&"`), []byte("\"\u2028\""), []byte(`"\u00e9\ud83d\ude00\ud800"`),
		[]byte(`\x41`), []byte("'; DROP TABLE outbox; --"), []byte("not json"),
		{0xff, 0xfe, 0x00, 0x80},
		every, bytes.Repeat([]byte("0123456789abcdef"), 1<<16),
	}
	var events []*jetbox.Event
	for _, p := range payloads {
		events = append(events, &jetbox.Event{Subject: "s", Payload: bytes.Clone(p)})
	}
	b.add(events...)
	rows := b.claim(b.lease("a"), 2*len(payloads))
	if len(rows) != len(payloads) {
		t.Fatalf("claimed %d rows, want %d", len(rows), len(payloads))
	}
	keys := make(map[string]bool)
	for i, row := range rows {
		if !bytes.Equal(row.Event.Payload, payloads[i]) {
			t.Errorf("payload %.40q came out as %.40q", payloads[i], row.Event.Payload)
		}
		if row.Fault != nil {
			t.Errorf("payload %.40q: fault %v", payloads[i], row.Fault)
		}
		keys[row.Event.Key] = true
	}
	if len(keys) != len(payloads) {
		t.Errorf("%d keys for %d events: equal bodies became one", len(keys), len(payloads))
	}
}

// Catalog BR-31: exact round trip or a clear refusal, nothing between.
func headersRoundTrip(t *testing.T, b *bench) {
	thousand := make(map[string][]string)
	for i := range 1000 {
		thousand["X-"+strconv.Itoa(i)] = []string{strconv.Itoa(i)}
	}
	good := []map[string][]string{
		nil,
		{},
		{"a": {""}},
		{"x-a": {"1"}, "X-A": {"2"}},
		{"a": {"", "", ""}},
		{"a": {"1", "2", "1"}},
		{"a": {"\u00a0é\uFFFD"}},
		{"a": {`"\u0041" ' \ {}`}},
		{"Content-Type": {"application/json"}},
		{"traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}},
		{"a": {strings.Repeat("v", 60_000)}},
		thousand,
	}
	var events []*jetbox.Event
	for _, h := range good {
		events = append(events, &jetbox.Event{Subject: "s", Headers: maps.Clone(h)})
	}
	b.add(events...)
	for i, row := range b.claim(b.lease("a"), 100) {
		if row.Fault != nil || len(row.Event.Headers) != len(good[i]) ||
			(len(good[i]) > 0 && !reflect.DeepEqual(row.Event.Headers, good[i])) {
			t.Errorf("headers %.200v came out as %.200v, fault %v", good[i], row.Event.Headers, row.Fault)
		}
	}

	before := b.number("SELECT count(*) FROM {t}")
	for _, h := range []map[string][]string{
		{"a": {"1\r"}},
		{"a": {"1\n2"}},
		{"a": {"1\r\nNats-Msg-Id: evil"}},
		{"a": {"1\x002"}},
		{"a": {" 1"}},
		{"a": {"1 "}},
		{"a": {"\t"}},
		{"a": {"\xff"}},
		{"a": {}},
		{"a": nil},
		{"": {"1"}},
		{"a b": {"1"}},
		{"a:b": {"1"}},
		{"a/b": {"1"}},
		{"é": {"1"}},
		{"a\n": {"1"}},
		{"Nats-Msg-Id": {"x"}},
		{"nats-rollup": {"all"}},
		{"CE-id": {"x"}},
		{"Dlq-State": {"open"}},
		{"jetbox-Letter": {"x"}},
		{"idempotency-key": {"x"}},
		{"content-type": {"Application/CloudEvents+json"}},
		{"a": {strings.Repeat("v", 65536)}},
	} {
		b.refused(&jetbox.Event{Subject: "s", Headers: h})
	}
	if after := b.number("SELECT count(*) FROM {t}"); after != before {
		t.Errorf("%d rows after refusals, want %d", after, before)
	}
}

// refused checks that an event is not stored.
func (b *bench) refused(ev *jetbox.Event) {
	b.t.Helper()
	b.inTx(func(tx *sql.Tx) {
		if err := b.Append(b.t.Context(), tx, ev); !errors.Is(err, jetbox.ErrInvalidEvent) {
			b.t.Errorf("Append of %.300v = %v, want ErrInvalidEvent", *ev, err)
		}
	})
}

func defaultsFilled(t *testing.T, b *bench) {
	one, two := &jetbox.Event{Subject: "s", Payload: []byte("{}")}, &jetbox.Event{Subject: "s", Payload: []byte("{}")}
	before := time.Now().Truncate(time.Millisecond)
	b.add(one, two)
	for _, ev := range []*jetbox.Event{one, two} {
		if ev.ID == "" || ev.Type != "s" || ev.ContentType != jetbox.DefaultContentType ||
			ev.Time.Before(before) || ev.Time.After(time.Now()) || ev.Key != "" {
			t.Errorf("event after Append = %+v, want ID, Type, ContentType and Time filled, Key not", ev)
		}
	}
	if one.ID == two.ID {
		t.Errorf("two events have the ID %s", one.ID)
	}
	b.add() // none is fine
	rows := b.claim(b.lease("a"), 10)
	if len(rows) != 2 || rows[0].Event.Key != one.ID || rows[1].Event.Key != two.ID {
		t.Errorf("claimed %+v, want the two IDs as keys", rows)
	}
}

// Catalog BR-07: only what was committed is there.
func rollbackLeavesNothing(t *testing.T, b *bench) {
	event := func(name string) *jetbox.Event { return &jetbox.Event{ID: name, Subject: "s"} }
	exec := func(tx *sql.Tx, query string) {
		t.Helper()
		_, err := tx.ExecContext(t.Context(), query)
		b.check(err)
	}
	b.inTx(func(tx *sql.Tx) {
		b.check(b.Append(t.Context(), tx, event("a")))
		exec(tx, "SAVEPOINT sp")
		b.check(b.Append(t.Context(), tx, event("b"), event("b2")))
		exec(tx, "ROLLBACK TO SAVEPOINT sp")
		b.check(b.Append(t.Context(), tx, event("c")))
	})
	tx, err := b.DB().BeginTx(t.Context(), nil)
	b.check(err)
	b.check(b.Append(t.Context(), tx, event("d")))
	b.check(tx.Rollback())

	// Not committed yet: nobody else may see it.
	tx, err = b.DB().BeginTx(t.Context(), nil)
	b.check(err)
	b.check(b.Append(t.Context(), tx, event("e")))
	if n := b.number("SELECT count(*) FROM {t} WHERE event_id = 'e'"); n != 0 {
		t.Error("another connection sees an uncommitted event")
	}
	b.check(tx.Rollback())

	// A rolled-back ID may be used again.
	b.add(event("d"))
	var got []string
	for _, row := range b.claim(b.lease("a"), 10) {
		got = append(got, row.Event.ID)
	}
	if want := []string{"a", "c", "d"}; !slices.Equal(got, want) {
		t.Errorf("claimed %v, want %v", got, want)
	}
}

func badEventRefusesAll(t *testing.T, b *bench) {
	// In a transaction that has ended, any statement would be ErrTxDone.
	tx, err := b.DB().BeginTx(t.Context(), nil)
	b.check(err)
	b.check(tx.Rollback())
	tests := []struct {
		name string
		bad  *jetbox.Event
		want []string // parts of the text
	}{
		{"subject", &jetbox.Event{Subject: "a b"}, []string{"2 of 3", "subject", `"a b"`, "white space"}},
		{"header", &jetbox.Event{Subject: "s", Headers: map[string][]string{"Nats-X": {"1"}}}, []string{"2 of 3", "header", "Nats-X", "reserved"}},
		{"key", &jetbox.Event{Subject: "s", Key: " k"}, []string{"2 of 3", "key", `" k"`, "blanks"}},
		{"nil", nil, []string{"2 of 3", "nil"}},
	}
	for _, tt := range tests {
		first, last := &jetbox.Event{Subject: "s"}, &jetbox.Event{Subject: "s"}
		err := b.Append(t.Context(), tx, first, tt.bad, last)
		if !errors.Is(err, jetbox.ErrInvalidEvent) {
			t.Errorf("%s: Append = %v, want ErrInvalidEvent", tt.name, err)
			continue
		}
		for _, part := range tt.want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: Append = %q, want it to say %q", tt.name, err, part)
			}
		}
		if first.ID != "" || last.ID != "" {
			t.Errorf("%s: events were filled although nothing was appended", tt.name)
		}
	}
	if n := b.number("SELECT count(*) FROM {t}"); n != 0 {
		t.Errorf("%d rows, want none", n)
	}
}

// BadSubjects are those of catalog BR-29, and more of their kind.
func badSubjects() []string {
	return []string{
		"", "a b", "a\tb", "a\r\nPUB x 0", "a..b", ".a", "a.", ".", "*", ">", "a.*", "a.>", "a*b", "a\x00b", "a\x7fb",
		"a\u00a0b", "a\u0085b", "\xff", strings.Repeat("s", 1025), strings.Repeat("s", 65536), "$JS.API.STREAM.PURGE.X", "$SYS",
	}
}

func subjectsRefused(t *testing.T, b *bench) {
	for _, s := range badSubjects() {
		b.refused(&jetbox.Event{Subject: s})
	}
	good := []string{"eu.west", "a", "é.日本", "a$b", strings.Repeat("s", 1024), "a-b_c.D/1"}
	for _, s := range good {
		b.add(&jetbox.Event{Subject: s})
	}
	for i, row := range b.claim(b.lease("a"), 100) {
		if row.Event.Subject != good[i] || row.Fault != nil {
			t.Errorf("subject %q came out as %q, fault %v", good[i], row.Event.Subject, row.Fault)
		}
	}
}

func idsRefused(t *testing.T, b *bench) {
	for _, s := range []string{
		" ", " a", "a ", "a\n", "a\r\nb", "a\tb", "a\x00b", "\xff", "a\u00a0b", "a\u200bb", strings.Repeat("i", 513),
	} {
		b.refused(&jetbox.Event{Subject: "s", ID: s})
		b.refused(&jetbox.Event{Subject: "s", Key: s})
	}
	long := strings.Repeat("é", 256)
	b.add(&jetbox.Event{Subject: "s", ID: long, Key: "a b"})
	row := b.claim(b.lease("a"), 1)[0]
	if row.Event.ID != long || row.Event.Key != "a b" || row.Fault != nil {
		t.Errorf("claimed %+v, want the ID and key as appended", row)
	}
}

func duplicatesRefused(t *testing.T, b *bench) {
	b.add(&jetbox.Event{ID: "id1", Subject: "s"}, &jetbox.Event{ID: "id2", Key: "key2", Subject: "s"})
	tests := []struct {
		name string
		ev   jetbox.Event
	}{
		{"the event ID of a row", jetbox.Event{ID: "id1", Subject: "s"}},
		{"the event ID of a row with a key", jetbox.Event{ID: "id2", Key: "other", Subject: "s"}},
		{"the key of a row", jetbox.Event{ID: "id3", Key: "key2", Subject: "s"}},
		{"a key that is another row's event ID", jetbox.Event{ID: "id4", Key: "id1", Subject: "s"}},
		{"an event ID that is another row's key", jetbox.Event{ID: "key2", Subject: "s"}},
	}
	for _, tt := range tests {
		for _, state := range []string{"alone", "beside another"} {
			tx, err := b.DB().BeginTx(t.Context(), nil)
			b.check(err)
			events := []*jetbox.Event{new(tt.ev)}
			if state == "beside another" {
				events = []*jetbox.Event{{Subject: "s"}, new(tt.ev)}
			}
			if err := b.Append(t.Context(), tx, events...); !errors.Is(err, outbox.ErrDuplicateKey) {
				t.Errorf("%s, %s: Append = %v, want ErrDuplicateKey", tt.name, state, err)
			}
			b.check(tx.Rollback())
		}
	}
	// Twice in one call, and while the first is published, dead or claimed.
	tx, err := b.DB().BeginTx(t.Context(), nil)
	b.check(err)
	if err := b.Append(t.Context(), tx, &jetbox.Event{ID: "x", Subject: "s"}, &jetbox.Event{ID: "x", Subject: "s"}); !errors.Is(err, outbox.ErrDuplicateKey) {
		t.Errorf("Append of one ID twice = %v, want ErrDuplicateKey", err)
	}
	b.check(tx.Rollback())

	// Once the row is gone its key is free.
	l := b.lease("a")
	rows := b.claim(l, 10)
	out := published(positions(rows)...)
	for i := range out {
		out[i].Remove = jetbox.Delete
	}
	b.record(l, out...)
	b.add(&jetbox.Event{ID: "id1", Subject: "s"}, &jetbox.Event{ID: "id2", Key: "key2", Subject: "s"})
}
