package jetbox_test

import (
	"flag"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

var update = flag.Bool("update", false, "rewrite golden files")

func fullEvent() jetbox.Event {
	return jetbox.Event{
		ID:            "01a227db-4eb4-7227-b9d4-382d1cf06b5c",
		Key:           "order-1-placed",
		Subject:       "events.order.placed",
		Type:          "order placed \"now\"",
		AggregateType: "order",
		AggregateID:   "o 1/é",
		AggregateSeq:  new(int64(7)),
		SchemaVersion: "2",
		ContentType:   "application/json; charset=utf-8",
		Headers: map[string][]string{
			"traceparent": {"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
			"tracestate":  {"vendor=1"},
			"X-Tags":      {"a", "b"},
		},
		Payload: []byte(`{"order":1}`),
		Time:    time.Date(2026, 11, 29, 14, 52, 41, 500_000_000, time.UTC),
	}
}

// One set of headers per kind of event: a renamed header shows up as a diff.
func TestHeadersOnTheWireAreGolden(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	for _, ev := range []jetbox.Event{
		fullEvent(),
		{ID: "id", Subject: "events.a", Time: time.UnixMilli(0)},
		{ID: "id", Subject: "events.a", AggregateID: "only-id", AggregateSeq: new(int64(0)), Time: time.UnixMilli(1)},
	} {
		h := ev.WithDefaults(time.Time{}).Header("jetbox")
		b.WriteString(ev.Subject + "\n")
		for _, name := range slices.Sorted(maps.Keys(h)) {
			for _, v := range h[name] {
				b.WriteString("  " + name + ": " + v + "\n")
			}
		}
	}
	const golden = "testdata/headers.golden"
	if *update {
		if err := os.WriteFile(golden, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if b.String() != string(want) {
		t.Errorf("headers changed, which breaks consumers; got\n%s\nwant\n%s", b.String(), want)
	}
}

func TestEventSurvivesTheWire(t *testing.T) {
	t.Parallel()
	for _, ev := range []jetbox.Event{
		fullEvent(),
		jetbox.Event{Subject: "events.a"}.WithDefaults(time.Now()),
		jetbox.Event{Subject: "a", AggregateType: "t%2F/", AggregateID: "%/ \x00\r\n\u2028"}.WithDefaults(time.Now()),
	} {
		got, err := jetbox.FromMessage(ev.Subject, ev.Header("jetbox"), ev.Payload)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, ev) {
			t.Errorf("got\n%+v, want\n%+v", got, ev)
		}
	}
}

// A message of another program is no error; what cannot be decoded is named, and
// the rest is there.
func TestForeignMessagesAreReadAsTheyAre(t *testing.T) {
	t.Parallel()
	ev, err := jetbox.FromMessage("a.b", nil, []byte("raw"))
	if err != nil || ev.Subject != "a.b" || string(ev.Payload) != "raw" || ev.ID != "" || ev.Key != "" {
		t.Errorf("without headers: %+v, %v", ev, err)
	}
	ev, err = jetbox.FromMessage("a", map[string][]string{
		"Nats-Msg-Id": {"theirs"}, "ce-id": {"100%"}, "ce-time": {"yesterday"}, "ce-sequence": {"many"}, "X": {"kept"},
	}, nil)
	if err == nil || ev.Key != "theirs" || ev.ID != "100%" || ev.Headers["X"][0] != "kept" || len(ev.Headers) != 1 {
		t.Errorf("malformed: %+v, %v", ev, err)
	}
	for _, name := range []string{"ce-id", "ce-time", "ce-sequence"} {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("error %q does not name %s", err, name)
		}
	}
}

// Every event that Validate lets through comes back from the wire as it was.
func FuzzEventSurvivesTheWire(f *testing.F) {
	f.Add("events.a", "id", "key", "type", "order", "o 1/é", "v", "application/json", "X-A", "value", []byte("{}"))
	f.Add("a", "", "", "", "%", "/%2F", "", "", "x", "", []byte(nil))
	f.Fuzz(func(t *testing.T, subject, id, key, typ, aggType, aggID, schema, content, name, value string, payload []byte) {
		ev := jetbox.Event{
			ID: id, Key: key, Subject: subject, Type: typ, AggregateType: aggType, AggregateID: aggID,
			SchemaVersion: schema, ContentType: content, Headers: map[string][]string{name: {value}},
			Payload: payload,
		}.WithDefaults(time.UnixMilli(1_700_000_000_000))
		if ev.Validate() != nil {
			return
		}
		got, err := jetbox.FromMessage(ev.Subject, ev.Header("jetbox"), ev.Payload)
		if err != nil {
			t.Fatal(err)
		}
		if ev.AggregateID == "" {
			ev.AggregateType = "" // no ordering key, so the type does not travel
		}
		if !reflect.DeepEqual(got, ev) {
			t.Fatalf("got\n%+v, want\n%+v", got, ev)
		}
	})
}

func BenchmarkHeader(b *testing.B) {
	ev := fullEvent()
	b.ReportAllocs()
	for b.Loop() {
		ev.Header("jetbox")
	}
}
