package dlq

import (
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// BR-55, run 3: an exhausted message of an interest stream, another consumer that
// has acknowledged it, and a restart of the broker before the router runs.
func TestExhaustedMessageOfAnInterestStreamSurvivesARestart(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 2})
		other := w.newConsumer(jetstream.ConsumerConfig{Durable: "other"})
		f := w.event("c", "events.a", "k1", []byte("x"))
		w.exhaust(c)
		w.ackNext(other)
		if err := w.srv.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		w.runRouter(w.letters, RouterConfig{})
		w.wantRouted("router-EVENTS")
		letters := w.list(Filter{})
		if len(letters) != 1 || letters[0].StreamSeq != f.Seq || letters[0].Consumer != "c" {
			t.Fatalf("letters = %+v, want the one of consumer c", letters)
		}
		if l := letters[0]; string(l.Payload) != "x" {
			t.Errorf("letter = %+v, want the payload", l)
		}
		w.wantMsgs("EVENTS", 0)
	}, interestStream)
}

// Each consumer has a letter of its own, and the message leaves with the last one.
func TestTwoConsumersExhaustOneMessageOfAnInterestStream(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		a := w.newConsumer(jetstream.ConsumerConfig{Durable: "a", MaxDeliver: 1})
		b := w.newConsumer(jetstream.ConsumerConfig{Durable: "b", MaxDeliver: 2})
		w.event("a", "events.a", "k1", []byte("x"))
		w.runRouter(w.letters, RouterConfig{MaxBackoff: 5 * time.Second})
		w.exhaust(a)
		time.Sleep(time.Minute)
		w.wantMsgs("EVENTS", 1)
		w.exhaust(b)
		w.wantRouted("router-EVENTS")
		w.wantMsgs("DLQ", 2)
		w.wantSeqs(Filter{Consumer: "a"}, 1)
		w.wantSeqs(Filter{Consumer: "b"}, 1)
		w.wantMsgs("EVENTS", 0)
	}, interestStream)
}

// Two services share an account, and with it the stream of advisories: each router
// takes its own, also while the other is down.
func TestServicesInOneAccountRouteTheirOwnAdvisories(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		_, err := w.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.>"}})
		if err != nil {
			t.Fatal(err)
		}
		theirs := w.newLetters(w.js, Config{Stream: "THEIRS", Prefix: "theirs"})
		if _, err := theirs.Setup(t.Context(), "ORDERS"); err != nil {
			t.Fatal(err)
		}
		w.event("c", "events.a", "k1", nil)
		if _, err := w.js.Publish(t.Context(), "orders.a", nil); err != nil {
			t.Fatal(err)
		}
		w.exhaust(w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 1}))
		c, err := w.js.CreateConsumer(t.Context(), "ORDERS", jetstream.ConsumerConfig{Durable: "c", AckPolicy: jetstream.AckExplicitPolicy, MaxDeliver: 1})
		if err != nil {
			t.Fatal(err)
		}
		w.exhaust(c)
		w.runRouter(w.letters, RouterConfig{})
		w.wantRouted("router-EVENTS")
		w.wantMsgs("DLQ", 1)
		w.wantMsgs("THEIRS", 0)
		w.runRouter(theirs, RouterConfig{EventStream: "ORDERS"})
		w.wantRouted("router-ORDERS")
		w.wantMsgs("DLQ", 1)
		w.wantMsgs("THEIRS", 1)
	})
}

// BR-56 b: the limit is lowered below the deliveries a message has had.
func TestMessageBeyondALoweredLimitIsParked(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.runRouter(w.letters, RouterConfig{})
		cfg := jetstream.ConsumerConfig{Durable: "c", AckPolicy: jetstream.AckExplicitPolicy, MaxDeliver: -1}
		c := w.newConsumer(cfg)
		f := w.event("c", "events.a", "k1", []byte("x"))
		for range 4 {
			w.exhaustOnce(c)
		}
		cfg.MaxDeliver = 2
		if _, err := w.js.UpdateConsumer(t.Context(), "EVENTS", cfg); err != nil {
			t.Fatal(err)
		}
		if m := w.next(c); m != nil {
			t.Fatal("delivered beyond the limit")
		}
		w.wantRouted("router-EVENTS")
		if l := w.wantState(ownID(f), StateOpen); l.Deliveries != 4 {
			t.Errorf("deliveries = %d, want 4", l.Deliveries)
		}
	})
}

// Anybody can name a letter in a reason: one that is not there hides nothing, nor
// does one of another message or consumer.
func TestForgedNameOfALetterHidesNoFailure(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c"})
		other := w.park(w.event("other", "events.a", "k1", nil))
		w.event("c", "events.a", "k2", nil)
		w.event("c", "events.a", "k3", nil)
		mine := w.event("c", "events.a", "k4", nil)
		if err := w.letters.Intend(t.Context(), mine); err != nil {
			t.Fatal(err)
		}
		w.event("c", "events.a", "k5", nil)
		names := []string{"9-9", other.ID, strings.TrimPrefix(other.ID, "dlq.EVENTS.other."), strings.TrimPrefix(ownID(mine), "dlq.EVENTS.c."), "x"}
		w.runRouter(w.letters, RouterConfig{})
		for _, name := range names { // of messages 1 to 5
			if err := w.next(c).TermWithReason("no [letter " + name + "]"); err != nil {
				t.Fatal(err)
			}
		}
		w.wantRouted("router-EVENTS")
		letters := w.list(Filter{Consumer: "c"})
		if len(letters) != len(names) {
			t.Errorf("letters = %d, want one for each of %d", len(letters), len(names))
		}
		for _, l := range letters {
			if l.State != StateOpen || !strings.HasPrefix(l.Error, "no") {
				t.Errorf("letter = %+v, want it open with its reason", l)
			}
		}
	})
}

func TestForgedAndStaleAdvisoriesHarmNobody(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.event("c", "events.a", "k1", []byte("old"))
		w.exhaust(w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 1}))
		// The advisory is about a stream that is deleted and made anew.
		if err := w.js.DeleteStream(t.Context(), "EVENTS"); err != nil {
			t.Fatal(err)
		}
		w.events = w.createEvents(func(c *jetstream.StreamConfig) { c.Retention = jetstream.WorkQueuePolicy })
		time.Sleep(10 * time.Second)
		w.event("c", "events.a", "k1", []byte("healthy"))
		w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 1})

		const subject = maxDeliveriesSubject + ".EVENTS.c"
		longAgo := time.Now().Add(-time.Hour).UTC().Format(time.RFC3339Nano)
		before := time.Now().Add(-clockSkew - time.Second).UTC().Format(time.RFC3339Nano)
		now := time.Now().UTC().Format(time.RFC3339Nano)
		advisory := func(typ, at, stream, extra string) string {
			return fmt.Sprintf(`{"type":%q,"timestamp":%q,"stream":%q,"consumer":"c","stream_seq":1,"deliveries":1%s}`, typ, at, stream, extra)
		}
		w.advise(subject, advisory(typeMaxDeliveries, before, "EVENTS", ""))
		w.advise(subject, strings.Replace(advisory(typeMaxDeliveries, longAgo, "EVENTS", ""), `"stream_seq":1`, `"stream_seq":9`, 1))
		w.advise(subject, advisory(typeMaxDeliveries, now, "OTHER", ""))
		w.advise(subject, advisory(typeMaxDeliveries, now, "EVENTS", `,"domain":"leaf"`))
		w.advise(subject, advisory(typeTerminated, now, "EVENTS", ""))
		w.advise(subject, advisory("io.nats.jetstream.advisory.v1.nak", now, "EVENTS", ""))
		w.advise(subject, strings.Replace(advisory(typeMaxDeliveries, now, "EVENTS", ""), `"stream_seq":1`, `"stream_seq":0`, 1))
		w.advise(subject, "no JSON")
		w.advise(subject, "")
		w.runRouter(w.letters, RouterConfig{})
		w.wantRouted("router-EVENTS")
		w.wantMsgs("DLQ", 0)
		w.wantMsgs("EVENTS", 1)

		// A perfect forgery makes a letter, but takes nothing from the consumer.
		w.advise(subject, advisory(typeMaxDeliveries, now, "EVENTS", ""))
		time.Sleep(5 * time.Minute)
		w.wantMsgs("DLQ", 1)
		w.wantMsgs("EVENTS", 1)
	})
}

// A message of a raw client whose header block is no header block is parked
// with its payload.
func TestMessageWithUndecodableHeadersIsParked(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.garbage("events.a", "GARBAGE\r\n", "x")
		w.wantMsgs("EVENTS", 1)
		w.runRouter(w.letters, RouterConfig{})
		w.exhaust(w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 1}))
		w.wantRouted("router-EVENTS")
		l := w.list(Filter{})
		if len(l) != 1 || string(l[0].Payload) != "x" || l[0].Error != `headers cannot be decoded: "GARBAGE\r\n"` {
			t.Errorf("letters = %+v, want one with the payload", l)
		}
	})
}

// In a cluster the server that sends the advisory need not be the one that stored
// the message, nor have its clock.
func TestAdvisoryOfAServerWhoseClockIsBehindIsRouted(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.event("c", "events.a", "k1", []byte("x"))
		behind := time.Now().Add(-clockSkew + time.Second).UTC().Format(time.RFC3339Nano)
		w.advise(terminatedSubject+".EVENTS.c",
			fmt.Sprintf(`{"type":%q,"timestamp":%q,"stream":"EVENTS","consumer":"c","stream_seq":1,"deliveries":1}`, typeTerminated, behind))
		w.runRouter(w.letters, RouterConfig{})
		w.wantRouted("router-EVENTS")
		if l := w.list(Filter{}); len(l) != 1 || string(l[0].Payload) != "x" {
			t.Errorf("letters = %+v, want the message's", l)
		}
	})
}

// garbage publishes as a raw client can, with a header block that is none.
func (w *world) garbage(subject, block, payload string) {
	w.t.Helper()
	conn, err := w.srv.InProcessConn()
	if err != nil {
		w.t.Fatal(err)
	}
	defer conn.Close()
	go func() { _, _ = io.Copy(io.Discard, conn) }() // ends with the connection
	_, err = fmt.Fprintf(conn, "CONNECT {\"headers\":true,\"verbose\":false}\r\nHPUB %s %d %d\r\n%s%s\r\n",
		subject, len(block), len(block)+len(payload), block, payload)
	if err != nil {
		w.t.Fatal(err)
	}
	time.Sleep(time.Second)
}
