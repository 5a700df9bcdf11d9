package relay_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// A row refused for itself holds back its own key and nobody else, is tried again
// with growing delays, and what waited comes after it: BR-05.
func TestRefusedRowHoldsBackItsKeyOnly(t *testing.T) {
	inBubble(t, func(r *rig) {
		ctx := r.t.Context()
		st, err := r.admin.UpdateStream(ctx, jetstream.StreamConfig{
			Name: "EVENTS", Subjects: []string{"events.>"}, Discard: jetstream.DiscardNew,
			MaxMsgsPerSubject: 1, DiscardNewPerSubject: true,
		})
		r.must(err)
		_, err = r.admin.Publish(ctx, "events.s1", []byte("blocks"))
		r.must(err)
		r.append(event("events.s1", "K", "e1"), event("events.s2", "K", "e2"), event("events.s3", "K", "e3"))
		for i := range 50 {
			r.append(event(fmt.Sprint("events.other.", i), "L", "l"))
		}
		rel, stop := r.start(r.store, relay.Config{})
		time.Sleep(10 * time.Second)
		r.wantHealth(rel, true, "") // one row's trouble is not the relay's
		if got := r.payloads(); len(got) != 51 || slices.Contains(got, "e2") {
			r.t.Fatalf("while s1 is full: %q", got)
		}
		e := r.show(1)
		if e.State != jetbox.Pending || e.Attempts < 3 || e.Attempts > 5 ||
			!strings.Contains(e.LastError, "maximum messages per subject exceeded") {
			r.t.Fatalf("the refused row: %+v", e)
		}
		r.must(st.DeleteMsg(ctx, 1))
		r.append(event("events.s4", "K", "e4"))
		time.Sleep(20 * time.Second)
		stop()
		if got := r.payloads(); !slices.Equal(got[len(got)-4:], []string{"e1", "e2", "e3", "e4"}) {
			r.t.Fatalf("after the release: %q", got[len(got)-4:])
		}
	})
}

// More unpublishable rows than a batch holds, oldest of all, do not keep the
// others from flowing, and end where a person can see and retry them: BR-14.
func TestUnroutableRowsAreParkedAndOthersFlow(t *testing.T) {
	inBubble(t, func(r *rig) {
		for i := range 150 {
			r.append(event("nowhere.a", fmt.Sprint("bad", i), "bad"))
		}
		for i := range 1000 {
			r.append(event("events.a", fmt.Sprint("k", i%10), "good"))
		}
		_, stop := r.start(r.store, relay.Config{Batch: 100, MaxAttempts: 3})
		time.Sleep(10 * time.Second)
		if n := len(r.stored()); n != 1000 {
			r.t.Fatalf("%d good rows after 10 s, want 1000", n)
		}
		time.Sleep(10 * time.Second)
		if n := r.count("DEAD_LETTER"); n != 150 {
			r.t.Fatalf("%d rows parked, want 150", n)
		}
		r.wantState(1, jetbox.DeadLetter, "gave up after 3 attempts: no stream takes this subject: nowhere.a")
		if e := r.show(1); e.Attempts != 3 {
			r.t.Fatalf("attempts %d, want 3", e.Attempts)
		}

		// A person adds the stream and retries: same key, attempts from 0.
		_, err := r.admin.CreateStream(r.t.Context(), jetstream.StreamConfig{Name: "OTHER", Subjects: []string{"nowhere.>"}})
		r.must(err)
		n, err := r.store.Retry(r.t.Context(), outbox.Filter{})
		r.must(err)
		time.Sleep(time.Minute)
		stop()
		if e := r.show(1); n != 150 || e.State != jetbox.Published || e.Stream != "OTHER" || e.Attempts != 0 {
			r.t.Fatalf("retried %d: %+v", n, e)
		}
	})
}

// A row that holds its key and is deleted or marked by hand is never settled: what
// waits behind it comes all the same.
func TestKeyGoesOnWhenItsHolderIsTakenAwayByHand(t *testing.T) {
	for _, byHand := range []string{
		"DELETE FROM outbox WHERE id = 1",
		"UPDATE outbox SET status = 'PUBLISHED' WHERE id = 1",
	} {
		t.Run(byHand[:6], func(t *testing.T) {
			inBubble(t, func(r *rig) {
				r.append(event("nowhere.a", "k", "held"), event("events.a", "k", "1"), event("events.a", "k", "2"))
				_, stop := r.start(r.store, relay.Config{Backoff: time.Hour, MaxBackoff: time.Hour})
				defer stop()
				time.Sleep(10 * time.Second)
				r.wantPayloads()
				r.exec(byHand)
				time.Sleep(2 * time.Minute)
				r.wantPayloads("1", "2")
			})
		})
	}
}

func TestOnDeadSaysWhetherTheKeyGoesOn(t *testing.T) {
	for _, tt := range []struct {
		onDead relay.OnDead
		want   []string
	}{
		{relay.Skip, []string{"other", "second"}},
		{relay.Freeze, []string{"other"}},
	} {
		t.Run(string(tt.onDead), func(t *testing.T) {
			inBubble(t, func(r *rig) {
				r.exec(`INSERT INTO outbox (subject, aggregate_id, payload) VALUES ('events.*', 'k', 'first')`)
				r.append(event("events.a", "k", "second"), event("events.a", "", "other"))
				_, stop := r.start(r.store, relay.Config{OnDead: tt.onDead})
				defer stop()
				time.Sleep(5 * time.Second)
				got := r.payloads()
				slices.Sort(got)
				if !slices.Equal(got, tt.want) {
					r.t.Fatalf("stream has %q, want %q", got, tt.want)
				}
				if _, err := r.store.Discard(r.t.Context(), outbox.Filter{}); err != nil {
					r.t.Fatal(err)
				}
				time.Sleep(5 * time.Second)
				if got := r.payloads(); len(got) != 2 {
					r.t.Fatalf("after the discard the stream has %q", got)
				}
			})
		})
	}
}

// What raw SQL brings and the wire cannot carry is parked at the first attempt,
// with the reason; neighbors flow and the connection stays: BR-29, BR-31, BR-32.
func TestRowsTheWireCannotCarryAreParked(t *testing.T) {
	inBubble(t, func(r *rig) {
		bad := []struct{ column, value, reason string }{
			{"subject", "a b", "white space"},
			{"subject", "a\tb", "white space"},
			{"subject", "a\r\nPUB x 0", "white space"},
			{"subject", "", "empty"},
			{"subject", "a..b", "empty token"},
			{"subject", ".a", "empty token"},
			{"subject", "a.", "empty token"},
			{"subject", "events.*", "wildcard"},
			{"subject", "events.>", "wildcard"},
			{"subject", "events.\x00", "control character"},
			{"subject", "events." + strings.Repeat("x", 64<<10), "at most 1024"},
			{"subject", "events.\xff", "UTF-8"},
			{"subject", "$JS.API.STREAM.PURGE.EVENTS", "starts with $"},
			{"headers", `{"x":"a\r\nNats-Msg-Id: evil"}`, "CR, LF or NUL"},
			{"headers", `{"x":"\u0000"}`, "CR, LF or NUL"},
			{"headers", `{"x":" padded"}`, "blanks at its ends"},
			{"headers", `{"a b":"x"}`, "printable ASCII"},
			{"headers", `{"a:b":"x"}`, "printable ASCII"},
			{"headers", `{"é":"x"}`, "printable ASCII"},
			{"headers", `{"x":[]}`, "no value"},
			{"headers", `{"x":1}`, "neither a string nor"},
			{"headers", `[]`, "not a JSON object"},
			{"headers", `{`, "not a JSON object"},
			{"headers", `{"x":"` + strings.Repeat("y", 64<<10) + `"}`, "65535"},
			{"headers", `{"Nats-Rollup":"all"}`, "reserved prefix"},
			{"headers", `{"nats-rollup":"all"}`, "reserved prefix"},
			{"headers", `{"Nats-Msg-Id":"const"}`, "reserved prefix"},
			{"headers", `{"Nats-Expected-Last-Sequence":"1"}`, "reserved prefix"},
			{"headers", `{"Nats-Expected-Last-Msg-Id":"x"}`, "reserved prefix"},
			{"headers", `{"NATS-TTL":"1s"}`, "reserved prefix"},
			{"headers", `{"ce-id":"x"}`, "reserved prefix"},
			{"headers", `{"idempotency-KEY":"x"}`, "reserved"},
			{"headers", `{"Content-Type":"application/cloudevents+json"}`, "CloudEvents"},
			{"idempotency_key", " padded", "blanks at its ends"},
			{"idempotency_key", "a\nb", "unprintable"},
			{"idempotency_key", "", "idempotency key is empty"},
			{"idempotency_key", strings.Repeat("x", 513), "at most 512"},
		}
		for _, b := range bad {
			subject, args := "'events.bad', ?", []any{b.value}
			cols := "subject, " + b.column
			if b.column == "subject" {
				subject, cols = "?", "subject"
			}
			r.exec("INSERT INTO outbox ("+cols+", payload) VALUES ("+subject+", 'bad')", args...)
			r.append(event("events.good", "", "good"))
		}
		published := len(r.stored())
		_, err := r.admin.UpdateStream(r.t.Context(), jetstream.StreamConfig{
			Name: "EVENTS", Subjects: []string{"events.>"}, AllowRollup: true, AllowMsgTTL: true,
		})
		r.must(err)
		_, stop := r.start(r.store, relay.Config{})
		time.Sleep(5 * time.Second)
		stop()
		if got := r.payloads(); len(got) != published+len(bad) || slices.Contains(got, "bad") {
			r.t.Fatalf("stream has %d messages, want the %d good ones", len(got), len(bad))
		}
		for i, b := range bad {
			r.wantState(int64(2*i+1), jetbox.DeadLetter, b.reason)
		}
		if n := r.box.Dialed(); n != 1 {
			r.t.Fatalf("the connection was made %d times", n)
		}
	})
}

// Header values that the rules allow arrive as they are: BR-31.
func TestHeadersArriveExactly(t *testing.T) {
	inBubble(t, func(r *rig) {
		headers := map[string][]string{
			"x-a":         {"lower"},
			"X-A":         {"upper"},
			"X-Empty":     {""},
			"X-Many":      {"1", "2", "2"},
			"X-Inner":     {"a  b\tc"},
			"X-UTF8":      {"é漢😀"},
			"X-Long":      {strings.Repeat("v", 50_000)},
			"traceparent": {"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
		}
		many := make(map[string][]string)
		for i := range 1000 {
			many[fmt.Sprint("x-", i)] = []string{fmt.Sprint(i)}
		}
		a, b := event("events.a", "", "a"), event("events.b", "", "b")
		a.Headers, b.Headers = headers, many
		r.append(a, b)
		_, stop := r.start(r.store, relay.Config{})
		time.Sleep(2 * time.Second)
		stop()
		msgs := r.stored()
		for i, want := range []map[string][]string{headers, many} {
			for name, values := range want {
				if got := msgs[i].Header[name]; !slices.Equal(got, values) {
					r.t.Errorf("header %s: got %q, want %q", name, got, values)
				}
			}
			if got := len(msgs[i].Header); got != len(want)+8 {
				r.t.Errorf("message %d has %d headers, want the %d given and 8 of ours", i, got, len(want))
			}
		}
	})
}

// Payloads are never read, so they cannot be altered: BR-63, BR-67.
func TestPayloadsArriveByteForByte(t *testing.T) {
	inBubble(t, func(r *rig) {
		payloads := []string{
			"", " ", "null", "{}", "!nil!", "9007199254740993", "18446744073709551615", "-0", "1.0", "1e400", "0.10",
			strings.Repeat("9", 100), `{"a":1,"a":2}`, `{"z":1,"a":2}`, "[1, 2 ]\n", `"<>&"`, "\"\u2028\"", `"\u00e9\ud83d\ude00"`,
			"\x00\xff\xfe binary \r\n", strings.Repeat("x", 1<<19),
		}
		for _, p := range payloads {
			r.append(event("events.a", "k", p))
		}
		r.append(&jetbox.Event{Subject: "events.a", AggregateID: "k"})                                 // nil
		r.exec("INSERT INTO outbox (subject, aggregate_id, payload) VALUES ('events.a', 'k', 'text')") // TEXT
		r.exec("INSERT INTO outbox (subject, aggregate_id, payload) VALUES ('events.a', 'k', x'')")
		_, stop := r.start(r.store, relay.Config{})
		time.Sleep(5 * time.Second)
		stop()
		r.wantPayloads(append(payloads, "", "text", "")...)
		ids := make(map[string]bool)
		for _, m := range r.stored() {
			ids[m.Header.Get(jetbox.HeaderMsgID)] = true
		}
		if len(ids) != len(payloads)+3 {
			r.t.Fatalf("%d different message IDs for %d events", len(ids), len(payloads)+3)
		}
	})
}

// Headers and payload together count: at the limit stored, one byte over parked
// at the first attempt with both sizes, without a disconnect: BR-30.
func TestOversizeIsParkedAtOnce(t *testing.T) {
	for _, tt := range []struct {
		name   string
		limit  int
		stream int32
		reason string
	}{
		{"broker limit", 1 << 20, -1, "the broker takes 1048576 together"},
		{"stream limit", 32 << 10, 32 << 10, "stream EVENTS takes 32768 together"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				_, err := r.admin.UpdateStream(r.t.Context(), jetstream.StreamConfig{
					Name: "EVENTS", Subjects: []string{"events.>"}, MaxMsgSize: tt.stream,
				})
				r.must(err)
				probe := event("events.a", "", "")
				probe.ID = jetbox.NewID()
				headers := len("NATS/1.0\r\n\r\n")
				for name, values := range probe.WithDefaults(time.UnixMilli(1)).Header("jetbox") {
					headers += len(name) + len(values[0]) + len(": \r\n")
				}
				// ce-time drops trailing zeros of the milliseconds: fix it.
				at := time.UnixMilli(1_700_000_000_123)
				headers += len("2023-11-14T22:13:20.123Z") - len("1970-01-01T00:00:00.001Z")
				for _, over := range []int{-1, 0, 1, 9 << 20} {
					big := event("events.a", "", "")
					big.Time, big.Payload = at, bytes.Repeat([]byte("x"), tt.limit-headers+over)
					r.append(big, event("events.a", "", "small"))
				}
				_, stop := r.start(r.store, relay.Config{})
				time.Sleep(3 * time.Second)
				stop()
				r.wantState(1, jetbox.Published, "")
				r.wantState(3, jetbox.Published, "")
				r.wantState(5, jetbox.DeadLetter, tt.reason)
				r.wantState(5, jetbox.DeadLetter, fmt.Sprintf("%d bytes of headers and %d of payload", headers, tt.limit-headers+1))
				r.wantState(7, jetbox.DeadLetter, "together")
				if n, dialed := len(r.stored()), r.box.Dialed(); n != 6 || dialed != 1 {
					r.t.Fatalf("%d stored, want 6; %d connections, want 1", n, dialed)
				}
			})
		})
	}
}
