package jetbox_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// What the wire cannot carry exactly is refused, naming field and rule: BR-29,
// BR-31, BR-32.
func TestEventsTheWireCannotCarryAreRefused(t *testing.T) {
	t.Parallel()
	subject := func(s string) jetbox.Event { return jetbox.Event{Subject: s} }
	header := func(name string, values ...string) jetbox.Event {
		return jetbox.Event{Subject: "a", Headers: map[string][]string{name: values}}
	}
	for _, tt := range []struct {
		name string
		ev   jetbox.Event
		want string // in the error; "" means fine
	}{
		{"plain", subject("events.order.placed"), ""},
		{"non-ASCII subject", subject("events.größe.漢"), ""},
		{"longest subject", subject(strings.Repeat("x", 1024)), ""},
		{"dollar inside", subject("a.$b"), ""},
		{"empty", subject(""), "subject is empty"},
		{"blank", subject("a b"), "white space"},
		{"tab", subject("a\tb"), "white space"},
		{"CRLF", subject("a\r\nPUB x 0"), "white space"},
		{"no-break space", subject("a\u00a0b"), "white space"},
		{"line separator", subject("a\u2028b"), "white space"},
		{"empty token", subject("a..b"), "empty token"},
		{"leading dot", subject(".a"), "empty token"},
		{"trailing dot", subject("a."), "empty token"},
		{"only a dot", subject("."), "empty token"},
		{"star", subject("*"), "wildcard"},
		{"star in a token", subject("a.b*"), "wildcard"},
		{"gt", subject("a.>"), "wildcard"},
		{"NUL", subject("a\x00"), "control character"},
		{"DEL", subject("a\x7f"), "control character"},
		{"too long", subject(strings.Repeat("x", 1025)), "1025 bytes, at most 1024"},
		{"64 KB", subject(strings.Repeat("x", 64<<10)), "at most 1024"},
		{"not UTF-8", subject("a\xff"), "UTF-8"},
		{"API", subject("$JS.API.STREAM.PURGE.X"), "starts with $"},

		{"ID", jetbox.Event{Subject: "a", ID: "order 1/é"}, ""},
		{"longest ID", jetbox.Event{Subject: "a", ID: strings.Repeat("x", 512)}, ""},
		{"long ID", jetbox.Event{Subject: "a", ID: strings.Repeat("x", 513)}, "event ID"},
		{"padded ID", jetbox.Event{Subject: "a", ID: " x"}, "blanks at its ends"},
		{"blank key", jetbox.Event{Subject: "a", Key: " "}, "idempotency key"},
		{"key with LF", jetbox.Event{Subject: "a", Key: "a\nb"}, "unprintable"},
		{"key with zero width space", jetbox.Event{Subject: "a", Key: "a\u200bb"}, "unprintable"},
		{"key not UTF-8", jetbox.Event{Subject: "a", Key: "\xff"}, "UTF-8"},

		{"header", header("X-A", "v"), ""},
		{"header twice", header("X-A", "v", "v"), ""},
		{"empty value", header("X-A", ""), ""},
		{"inner blanks", header("X-A", "a \t b"), ""},
		{"CR", header("X-A", "a\rb"), "CR, LF or NUL"},
		{"LF", header("X-A", "a\nb"), "CR, LF or NUL"},
		{"CRLF and a header", header("X-A", "a\r\nNats-Msg-Id: evil"), "CR, LF or NUL"},
		{"NUL in value", header("X-A", "a\x00"), "CR, LF or NUL"},
		{"leading blank", header("X-A", " a"), "blanks at its ends"},
		{"trailing tab", header("X-A", "a\t"), "blanks at its ends"},
		{"value not UTF-8", header("X-A", "\xff"), "UTF-8"},
		{"no values", header("X-A"), "no value"},
		{"empty name", header("", "v"), "printable ASCII"},
		{"blank in name", header("a b", "v"), "printable ASCII"},
		{"colon in name", header("a:b", "v"), "printable ASCII"},
		{"slash in name", header("a/b", "v"), "printable ASCII"},
		{"UTF-8 in name", header("é", "v"), "printable ASCII"},
		{"64 KB value", header("X-A", strings.Repeat("v", 64<<10)), "at most 65535"},
		{"rollup", header("Nats-Rollup", "all"), "reserved prefix nats-"},
		{"rollup, lower case", header("nats-rollup", "all"), "reserved prefix"},
		{"message ID", header("Nats-Msg-Id", "x"), "reserved prefix"},
		{"expectation", header("NATS-Expected-Last-Msg-Id", "x"), "reserved prefix"},
		{"TTL", header("nAtS-TTL", "1s"), "reserved prefix"},
		{"attribute", header("CE-Id", "x"), "reserved prefix ce-"},
		{"letter", header("Dlq-State", "open"), "reserved prefix dlq-"},
		{"ours", header("jetbox-replay-for", "x"), "reserved prefix jetbox-"},
		{"key", header("idempotency-key", "x"), "reserved"},
		{"structured mode", header("content-type", "Application/CloudEvents+json"), "CloudEvents"},
		{"other content type", header("Content-Type", "text/plain"), ""},

		{"type not UTF-8", jetbox.Event{Subject: "a", Type: "\xff"}, "event type"},
		{"aggregate ID not UTF-8", jetbox.Event{Subject: "a", AggregateID: "\xff"}, "aggregate ID"},
		{"aggregate ID of any text", jetbox.Event{Subject: "a", AggregateID: "a\r\n%/ \x00"}, ""},
		{"huge aggregate ID", jetbox.Event{Subject: "a", AggregateID: strings.Repeat("x", 64<<10)}, "at most 65535"},
		{"year 10000", jetbox.Event{Subject: "a", Time: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}, "year"},
		{"due in year 10000", jetbox.Event{Subject: "a", NotBefore: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}, "year"},
	} {
		err := tt.ev.Validate()
		switch {
		case tt.want == "" && err != nil:
			t.Errorf("%s: %v, want no error", tt.name, err)
		case tt.want != "" && (!errors.Is(err, jetbox.ErrInvalidEvent) || !strings.Contains(err.Error(), tt.want)):
			t.Errorf("%s: error %v, want ErrInvalidEvent that names %q", tt.name, err, tt.want)
		case err != nil && len(err.Error()) > 300:
			t.Errorf("%s: the error has %d bytes", tt.name, len(err.Error()))
		}
	}
}

func TestDefaultsAreFilledAndKeptApart(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 29, 1, 2, 3, 456_789_000, time.FixedZone("", 3600))
	ev := jetbox.Event{Subject: "events.a"}.WithDefaults(now)
	if ev.ID == "" || ev.Key != ev.ID || ev.Type != "events.a" || ev.ContentType != "application/json" ||
		ev.Time.Format(time.RFC3339Nano) != "2026-11-29T00:02:03.456Z" {
		t.Errorf("defaults: %+v", ev)
	}
	given := jetbox.Event{ID: "i", Key: "k", Subject: "s", Type: "t", ContentType: "c", Time: now}.WithDefaults(time.Now())
	if given.ID != "i" || given.Key != "k" || given.Type != "t" || given.ContentType != "c" {
		t.Errorf("given values were replaced: %+v", given)
	}
	// Two equal payloads are two events.
	other := jetbox.Event{Subject: "events.a"}.WithDefaults(now)
	if other.Key == ev.Key {
		t.Errorf("two events have the key %s", ev.Key)
	}
}

// Two different pairs never make one ordering key.
func TestOrderingKeysDoNotCollide(t *testing.T) {
	t.Parallel()
	seen := make(map[string]string)
	for _, p := range []struct{ typ, id, want string }{
		{"order", "1", "order/1"},
		{"", "1", "1"},
		{"order", "o 1/é", "order/o 1%2Fé"},
		{"", "order/1", "order%2F1"},
		{"order", "%2F", "order/%252F"},
		{"order/", "1", "order%2F/1"},
		{"order", "/1", "order/%2F1"},
		{"order%2F", "1", "order%252F/1"},
	} {
		got := jetbox.Event{AggregateType: p.typ, AggregateID: p.id}.OrderingKey()
		if got != p.want {
			t.Errorf("key of %q, %q is %q, want %q", p.typ, p.id, got, p.want)
		}
		pair := fmt.Sprintf("%q %q", p.typ, p.id)
		if seen[got] != "" {
			t.Errorf("%s and %s make the same key %q", pair, seen[got], got)
		}
		seen[got] = pair
	}
	if got := (jetbox.Event{AggregateType: "order"}).OrderingKey(); got != "" {
		t.Errorf("without an ID the key is %q, want none", got)
	}
}

func TestPermanentMarksAnErrorAndItsWrappers(t *testing.T) {
	t.Parallel()
	cause := errors.New("no such country")
	err := fmt.Errorf("ship: %w", jetbox.Permanent(cause))
	if !jetbox.IsPermanent(err) || !errors.Is(err, cause) {
		t.Errorf("IsPermanent(%v) = %v, Is = %v", err, jetbox.IsPermanent(err), errors.Is(err, cause))
	}
	if jetbox.IsPermanent(cause) || jetbox.IsPermanent(nil) || jetbox.Permanent(nil) != nil {
		t.Error("what was not marked is permanent")
	}
}

// The size that a broker checks is never more than the one that Validate does,
// which is exact only near the limit.
func TestHeaderSizeIsNeverTakenForLess(t *testing.T) {
	t.Parallel()
	seq := int64(math.MinInt64)
	long := func(n int) string { return strings.Repeat("/", n) }
	for _, n := range []int{0, 1, 100, 511, 5_000, 6_000, 12_000, 20_000} {
		for _, ev := range []jetbox.Event{
			{Subject: "s", AggregateType: long(n), AggregateID: long(n)},
			{Subject: "s", AggregateID: strings.Repeat("é", n), AggregateSeq: &seq, SchemaVersion: "1"},
			{Subject: "s", Type: strings.Repeat("%", n), ContentType: strings.Repeat(" ", n), SchemaVersion: strings.Repeat("\"", n)},
			{Subject: "s", Headers: map[string][]string{"a": {strings.Repeat("x", n)}, "b": {"", strings.Repeat("x", n)}}},
		} {
			ev = ev.WithDefaults(time.Now())
			size := len("NATS/1.0\r\n\r\n")
			for name, values := range ev.Header("jetbox") {
				for _, v := range values {
					size += len(name) + len(": \r\n") + len(v)
				}
			}
			if err := ev.Validate(); (size > jetbox.MaxHeader) && err == nil {
				t.Errorf("%d bytes of %.20q... are valid, the broker stores at most %d", size, ev.AggregateID+ev.Type, jetbox.MaxHeader)
			} else if size < jetbox.MaxHeader-2000 && err != nil {
				t.Errorf("%d bytes of %.20q... are refused: %v", size, ev.AggregateID+ev.Type, err)
			}
		}
	}
}
