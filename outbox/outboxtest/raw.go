package outboxtest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

func rawScenarios() []scenario {
	return []scenario{
		{"a row of plain SQL with only subject and payload is an event", migrated(plainRow)},
		{"an explicit NULL never makes a row invisible", migrated(nullsVisible)},
		{"rows that are no events come out with a fault and block nobody", migrated(faultsComeOut)},
	}
}

func plainRow(t *testing.T, b *bench) {
	before := time.Now().Add(-time.Second)
	b.exec("INSERT INTO {t} (subject, payload) VALUES ('events.plain', 'text é'), ('events.plain', '')")
	rows := b.claim(b.lease("a"), 10)
	if len(rows) != 2 {
		t.Fatalf("claimed %d rows, want 2", len(rows))
	}
	for i, row := range rows {
		ev := row.Event
		if row.Fault != nil || ev.Subject != "events.plain" || ev.Type != "events.plain" || ev.ContentType != jetbox.DefaultContentType ||
			ev.ID == "" || ev.Key != ev.ID || ev.Time.Before(before) || ev.Time.After(time.Now().Add(time.Second)) ||
			ev.OrderingKey() != "" || ev.AggregateSeq != nil || len(ev.Headers) != 0 {
			t.Errorf("row %d = %+v, want the defaults", i, row)
		}
	}
	if got := string(rows[0].Event.Payload); got != "text é" {
		t.Errorf("payload = %q, want %q", got, "text é")
	}
	if n := len(rows[1].Event.Payload); n != 0 {
		t.Errorf("empty payload has %d bytes", n)
	}
	if rows[0].Event.ID == rows[1].Event.ID {
		t.Errorf("both rows have the event ID %s", rows[0].Event.ID)
	}
}

// Object mappers send NULL for every field that is not set. The database may
// refuse the row, which the writer sees; it may not hide it.
func nullsVisible(t *testing.T, b *bench) {
	columns := []string{
		"event_id", "idempotency_key", "event_type", "aggregate_type", "aggregate_id", "aggregate_seq", "schema_version",
		"content_type", "headers", "status", "attempts", "last_error", "available_at", "created_at", "published_at",
		"stream", "stream_seq",
	}
	inserts := []string{"INSERT INTO {t} (subject, payload, " + strings.Join(columns, ", ") + ") VALUES ('s', 'all'" +
		strings.Repeat(", NULL", len(columns)) + ")"}
	for _, c := range columns {
		inserts = append(inserts, "INSERT INTO {t} (subject, payload, "+c+") VALUES ('s', "+quote(c)+", NULL)")
	}
	taken := 0
	for _, q := range inserts {
		if _, err := b.DB().ExecContext(t.Context(), b.sql(q)); err == nil {
			taken++
		}
	}
	rows := b.claim(b.lease("a"), 100)
	if len(rows) != taken {
		t.Fatalf("%d rows were taken, %d come out of a claim\n%s", taken, len(rows), b.dump())
	}
	for _, row := range rows {
		if row.Fault != nil || row.Event.ID == "" || row.Event.ContentType == "" || row.Event.Time.IsZero() {
			t.Errorf("row %q = %+v, want an event with defaults", row.Event.Payload, row)
		}
	}
}

// What Append refuses, plain SQL can bring. It is parked by the relay, so it has
// to come out of a claim, with the reason, among its healthy neighbors.
func faultsComeOut(t *testing.T, b *bench) {
	type bad struct{ column, value string }
	var bads []bad
	for _, h := range []string{
		`[]`, `"x"`, `1`, `null`, `true`, `{"a":1}`, `{"a":null}`, `{"a":true}`, `{"a":{"b":"c"}}`, `{"a":[1]}`, `{"a":["1",null]}`,
		`{"a":[["1"]]}`, `{"a":[]}`, `{"":"1"}`, `{"a b":"1"}`, `{"Nats-Msg-Id":"x"}`, `{"CE-Id":"x"}`, `{"a":"1\r\nb: 2"}`,
		`{"a":" 1"}`, `{"é":"1"}`, `{"idempotency-Key":"1"}`,
		// A database that checks JSON refuses these itself.
		`{`, `{}}`, `{} {}`, `{"a":"1"} x`, `{"a":"1"}]`, `not json`, `{'a':'1'}`, `{"a":"1",}`, `{"a":"\ud800"}`, `{"a":"\\ufffd\udc00"}`,
		`{"\ud800":"1"}`,
	} {
		bads = append(bads, bad{"headers", h})
	}
	for _, s := range badSubjects() {
		if strings.IndexByte(s, 0) < 0 && strings.IndexByte(s, 0xff) < 0 {
			bads = append(bads, bad{"subject", s})
		}
	}
	for _, c := range []string{"event_id", "idempotency_key"} {
		for _, v := range []string{"", " " + c, c + " ", c + "\nb", c + "\tb", c + strings.Repeat("i", 512)} {
			bads = append(bads, bad{c, v})
		}
	}

	want := make(map[string]bool) // payload to whether it has a fault
	for i, v := range bads {
		names, values := "subject, "+v.column, "'s', "+quote(v.value)
		name := fmt.Sprintf("bad %d", i)
		switch v.column {
		case "subject":
			names, values = "subject", quote(v.value)
		case "event_id": // with a key, or the empty one of both would be the same
			names, values = names+", idempotency_key", values+", "+quote(name)
		}
		q := "INSERT INTO {t} (payload, aggregate_id, " + names + ") VALUES (" + quote(name) + ", 'key', " + values + ")"
		if _, err := b.DB().ExecContext(t.Context(), b.sql(q)); err != nil {
			t.Logf("%s %.40q is refused by the database: %v", v.column, v.value, err)
			continue
		}
		want[name] = true
		good := fmt.Sprintf("good %d", i)
		b.exec("INSERT INTO {t} (subject, payload, aggregate_id) VALUES ('s', " + quote(good) + ", 'key')")
		want[good] = false
	}
	l := b.lease("a")
	for {
		rows := b.claim(l, 10)
		if len(rows) == 0 {
			break
		}
		var outcomes []jetbox.Outcome
		for _, row := range rows {
			name := string(row.Event.Payload)
			fault, known := want[name]
			if !known || fault != (row.Fault != nil) {
				t.Errorf("row %q (%.60q, headers %v): fault = %v, want one: %v (known: %v)",
					name, row.Event.Subject, row.Event.Headers, row.Fault, fault, known)
			}
			delete(want, name)
			if row.Fault != nil {
				outcomes = append(outcomes, jetbox.Outcome{Pos: row.Pos, State: jetbox.DeadLetter, Reason: row.Fault.Error()})
			} else {
				outcomes = append(outcomes, published(row.Pos)...)
			}
		}
		b.record(l, outcomes...)
	}
	var left []string
	for name := range want {
		left = append(left, name)
	}
	if slices.Sort(left); len(left) > 0 {
		t.Errorf("rows that never came out of a claim: %q", left)
	}
	st, err := b.Stats(t.Context())
	b.check(err)
	if st.Pending != 0 || st.DeadLetter == 0 {
		t.Errorf("stats = %+v, want nothing pending and the rest parked", st)
	}
}
