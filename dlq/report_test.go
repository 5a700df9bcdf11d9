package dlq

import (
	"errors"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

func TestLetterHasTheOriginalAndWhyItFailed(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.order.1", "k1", []byte("{}\x00\xff"), "X-App", "a", "X-App", "b", "ce-id", "e1", "traceparent", "00-1")
		time.Sleep(time.Minute)
		l := w.park(f)
		want := Letter{
			ID: ownID(f), State: StateOpen,
			Stream: "EVENTS", Consumer: "billing", StreamSeq: 1, Stored: f.Stored,
			Subject: "events.order.1",
			Header: map[string][]string{
				"Idempotency-Key": {"k1"}, "X-App": {"a", "b"}, "ce-id": {"e1"}, "traceparent": {"00-1"},
			},
			Payload: []byte("{}\x00\xff"), Deliveries: 3, Reason: "max_deliveries", Error: "boom",
			Time: time.Now().UTC(), Seq: 1, Updated: l.Updated,
		}
		if !reflect.DeepEqual(l, want) {
			t.Errorf("letter = %+v\nwant %+v", l, want)
		}
		if want := "dlq.EVENTS.billing.1-946684800"; !strings.HasPrefix(l.ID, want) {
			t.Errorf("ID = %q, want it to begin with %q: stream, consumer, sequence and time stored", l.ID, want)
		}
	})
}

// One letter for three reporters: the consumer, and two routers of which one is
// an hour late.
func TestAllReportersOfAFailureShareOneLetter(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.a", "k1", []byte("x"))
		if err := w.letters.Intend(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		advised := f
		advised.Err = ""
		var wg sync.WaitGroup
		for _, f := range []jetbox.Failure{f, advised, advised} {
			wg.Go(func() {
				if err := w.letters.Park(t.Context(), f); err != nil {
					t.Errorf("Park: %v", err)
				}
			})
		}
		wg.Wait()
		time.Sleep(time.Hour)
		l := w.park(advised)
		if l.State != StateOpen || l.Deliveries != 3 || l.Error != "boom" {
			t.Errorf("letter = %+v, want it open after 3 deliveries with the consumer's error", l)
		}
		w.wantMsgs("DLQ", 1)
	})
}

// A router that is first knows no error, or finds the message gone; what the
// consumer knows is added to its letter.
func TestLaterReporterAddsWhatTheFirstDidNotKnow(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.a", "k1", []byte("x"))
		gone := f
		gone.Subject, gone.Header, gone.Payload, gone.Err = "", nil, nil, ""
		if l := w.park(gone); !l.PayloadMissing {
			t.Fatalf("letter = %+v, want one without payload", l)
		}
		advised := f
		advised.Err = ""
		first := w.park(advised)
		if first.PayloadMissing || string(first.Payload) != "x" || first.Subject != "events.a" || first.Error != "" {
			t.Errorf("letter = %+v, want the payload added", first)
		}
		time.Sleep(time.Minute)
		l := w.park(f)
		if l.Error != "boom" || string(l.Payload) != "x" || !l.Time.Equal(first.Time) {
			t.Errorf("letter = %+v, want the error added and nothing else changed", l)
		}
		if again := w.park(gone); again.Seq != l.Seq {
			t.Errorf("a report that knows less was written, sequence %d, want %d", again.Seq, l.Seq)
		}
		w.wantMsgs("DLQ", 1)
	})
}

// BR-32: two consumers that fail the same message have a letter each.
func TestTwoConsumersFailingOneMessageHaveTwoLetters(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.a", "k1", []byte("x"))
		g := f
		g.Consumer = "shipping"
		w.park(f)
		w.park(g)
		w.wantMsgs("DLQ", 2)
		w.wantSeqs(Filter{Consumer: "shipping"}, 1)
	})
}

func TestRecreatedStreamMakesAnotherLetterOfTheSameSequence(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first := w.event("billing", "events.a", "k1", []byte("x"))
		w.park(first)
		if err := w.js.DeleteStream(t.Context(), "EVENTS"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		w.events = w.createEvents()
		second := w.event("billing", "events.a", "k2", []byte("y"))
		if second.Seq != first.Seq {
			t.Fatalf("sequence = %d after the stream was created anew, want %d", second.Seq, first.Seq)
		}
		if l := w.park(second); string(l.Payload) != "y" {
			t.Errorf("payload = %q, want %q", l.Payload, "y")
		}
		w.wantMsgs("DLQ", 2)
	})
}

func TestWithdrawnIntentLeavesNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.a", "k1", []byte("x"))
		for range 2 { // repeats are harmless
			if err := w.letters.Intend(t.Context(), f); err != nil {
				t.Fatal(err)
			}
		}
		for range 2 {
			if err := w.letters.Withdraw(t.Context(), f); err != nil {
				t.Fatal(err)
			}
		}
		w.wantMsgs("DLQ", 0)
		// The same message may fail all the same, say when the ack was lost.
		w.park(f)
		if err := w.letters.Withdraw(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		w.wantState(ownID(f), StateOpen)
	})
}

// A withdrawal and a report at the same time: the report stays or comes again,
// and is never deleted by the withdrawal.
func TestWithdrawNeverDeletesAnOpenLetter(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for range 50 {
			f := w.event("billing", "events.a", "", []byte("x"))
			if err := w.letters.Intend(t.Context(), f); err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			wg.Go(func() {
				if err := w.letters.Withdraw(t.Context(), f); err != nil {
					t.Errorf("Withdraw: %v", err)
				}
			})
			if err := w.letters.Park(t.Context(), f); err != nil {
				t.Fatal(err)
			}
			wg.Wait()
			w.wantState(ownID(f), StateOpen)
		}
	})
}

// A handler may work for as long as its consumer's ack wait, whatever the
// default is: an operator must not replay what it has in hand.
func TestIntentIsNoLetterBeforeTheAckWaitOfItsConsumer(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for _, c := range []jetstream.ConsumerConfig{
			{Durable: "slow", AckWait: 5 * time.Minute},
			{Durable: "quick", AckWait: 5 * time.Second},
			{Durable: "spread", MaxDeliver: 3, BackOff: []time.Duration{time.Second, 2 * time.Minute}},
		} {
			c.AckPolicy = jetstream.AckExplicitPolicy
			if _, err := w.events.CreateConsumer(t.Context(), c); err != nil {
				t.Fatal(err)
			}
		}
		var slow jetbox.Failure
		for _, consumer := range []string{"slow", "quick", "spread", "gone"} { // letters 1 to 4
			f := w.event(consumer, "events.a", consumer, []byte("x"))
			if err := w.letters.Intend(t.Context(), f); err != nil {
				t.Fatal(err)
			}
			if consumer == "slow" {
				slow = f
			}
		}
		w.wantSeqs(Filter{})
		time.Sleep(6 * time.Second)
		w.wantSeqs(Filter{}, 2)
		time.Sleep(30 * time.Second)
		w.wantSeqs(Filter{}, 2, 4)
		time.Sleep(2 * time.Minute)
		w.wantSeqs(Filter{}, 2, 3, 4)
		if _, err := w.letters.Replay(t.Context(), ownID(slow)); !errors.Is(err, jetbox.ErrLetterGone) || !strings.Contains(err.Error(), "5m0s") {
			t.Errorf("Replay of an intent in hand: err = %v, want %v and the ack wait", err, jetbox.ErrLetterGone)
		}
		if _, err := w.letters.Discard(t.Context(), ownID(slow)); !errors.Is(err, jetbox.ErrLetterGone) {
			t.Errorf("Discard of an intent in hand: err = %v, want %v", err, jetbox.ErrLetterGone)
		}
		time.Sleep(3 * time.Minute)
		w.wantSeqs(Filter{}, 1, 2, 3, 4)
		w.wantSeqs(Filter{ID: ownID(slow)}, 1)
	})
}

func TestIntentCountsAsLetterAfterTheAckWait(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.a", "k1", []byte("x"))
		if err := w.letters.Intend(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		w.wantSeqs(Filter{})
		w.wantSeqs(Filter{States: []State{StateIntent}}, 1)
		if _, err := w.letters.Replay(t.Context(), ownID(f)); !errors.Is(err, jetbox.ErrLetterGone) {
			t.Errorf("Replay of a fresh intent: err = %v, want %v", err, jetbox.ErrLetterGone)
		}
		time.Sleep(30 * time.Second)
		w.wantSeqs(Filter{}, 1)
		if l, err := w.letters.Replay(t.Context(), ownID(f)); err != nil || l.State != StateReplayed {
			t.Errorf("Replay of an old intent = %q, %v, want it replayed", l.State, err)
		}
	})
}

// BR-32, and what broke verbatim copies: each of these is refused by a stream,
// or purges it.
func TestServerHeadersOfTheOriginalDoNotTravel(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		kept := w.park(w.event("billing", "events.a", "k0", nil))
		f := w.event("billing", "events.b", "k1", []byte("x"))
		h := nats.Header{
			"Nats-Msg-Id": {"k1"}, "Idempotency-Key": {"k1"}, "X-App": {"a"},
			"Nats-Rollup": {"all"}, "nats-rollup": {"all"}, "NATS-ROLLUP": {"sub"}, "Nats-TTL": {"1s"},
			"Nats-Expected-Stream": {"OTHER"}, "Nats-Expected-Last-Sequence": {"99"},
			"Nats-Expected-Last-Msg-Id": {"nope"}, "Nats-Expected-Last-Subject-Sequence": {"99"},
			"Nats-Batch-Id": {"b"}, "Nats-Batch-Sequence": {"1"}, "Nats-Schedule": {"@every 1s"},
			"Nats-Scheduler": {"s"}, "Nats-Incr": {"1"}, "Nats-Stream-Source": {"S 1"},
			"Dlq-State": {"discarded"}, "dlq-error": {"forged"},
			"No good": {"x"}, "X-Lines": {"a\r\nNats-Rollup: all"}, "X-None": {},
		}
		f.Header = h
		l := w.park(f)
		want := map[string][]string{"Idempotency-Key": {"k1"}, "X-App": {"a"}, "X-Lines": {"a  Nats-Rollup: all"}}
		if !reflect.DeepEqual(l.Header, want) {
			t.Errorf("headers of the letter = %v, want %v", l.Header, want)
		}
		if !l.HeadersTrimmed || l.State != StateOpen {
			t.Errorf("letter = %+v, want it open and marked for the header no client can send", l)
		}
		w.wantState(kept.ID, StateOpen)
		time.Sleep(time.Minute)
		w.wantMsgs("DLQ", 2)
	})
}

func TestMessageIDBecomesTheIdempotencyKeyOfForeignMessages(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.a", "", []byte("x"), jetbox.HeaderMsgID, "theirs")
		if got := nats.Header(w.park(f).Header).Get(jetbox.HeaderIdempotencyKey); got != "theirs" {
			t.Errorf("Idempotency-Key = %q, want the message ID: a replay must be the same event", got)
		}
	})
}

func TestErrorTextIsOneBoundedLine(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.a", "k1", []byte("x"))
		f.Err = "  line 1\r\nNats-Rollup: all\x00\xff " + strings.Repeat("\u00e9", 5000)
		l := w.park(f)
		if !strings.HasPrefix(l.Error, "line 1  Nats-Rollup: all \uFFFD \u00e9") || len(l.Error) > maxError {
			t.Errorf("Error = %q, %d bytes; want one clean line of at most %d", l.Error, len(l.Error), maxError)
		}
	})
}

// BR-58, run 1 and 2: an error while the stream is missing or full, then stored.
func TestParkFailsUntilTheDeadLetterStreamTakesIt(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.a", "k1", []byte("x"))
		if err := w.js.DeleteStream(t.Context(), "DLQ"); err != nil {
			t.Fatal(err)
		}
		if err := w.letters.Park(t.Context(), f); !errors.Is(err, jetstream.ErrNoStreamResponse) {
			t.Errorf("Park without a stream: err = %v, want %v", err, jetstream.ErrNoStreamResponse)
		}
		cfg := w.letters.lettersConfig()
		cfg.MaxMsgs = 1
		if _, err := w.js.CreateStream(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		first := w.park(f)
		g := w.event("billing", "events.a", "k2", []byte("y"))
		if err := w.letters.Park(t.Context(), g); err == nil || !strings.Contains(err.Error(), "maximum messages exceeded") {
			t.Errorf("Park in a full stream: err = %v, want maximum messages exceeded", err)
		}
		// A full stream still lets a letter change its state: pinned, because
		// the letters' stream relies on it (one server; nats-server 2.15).
		if l, err := w.letters.Discard(t.Context(), first.ID); err != nil || l.State != StateDiscarded {
			t.Errorf("Discard in a full stream = %q, %v, want discarded", l.State, err)
		}
		cfg.MaxMsgs = -1
		if _, err := w.js.UpdateStream(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		w.park(g)
	})
}

// The PubAck of a letter is lost, or the answer to every question for a while: the
// letter is there once, and its reporter learns that it is.
func TestLostAnswersToALetterAreSettledByReadingBack(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		box := &deafBox{srv: w.srv}
		nc, err := nats.Connect("", nats.InProcessServer(box), nats.MaxReconnects(-1))
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		var opened int
		s := w.newLetters(js, Config{RoutedFunc: func(string) { opened++ }})
		f := w.event("billing", "events.a", "k1", []byte("x"))
		for n, report := range []func() error{
			func() error { return s.Intend(t.Context(), f) },
			func() error { return s.Park(t.Context(), f) },
		} {
			box.deafFor(time.Second)
			if err := report(); err != nil {
				t.Errorf("report %d with a lost answer: %v", n, err)
			}
			w.wantMsgs("DLQ", 1)
			if l := w.show(ownID(f)); l.Seq != uint64(n+1) {
				t.Errorf("report %d: the letter was written %d times, want %d", n, l.Seq, n+1)
			}
		}
		if opened != 1 {
			t.Errorf("letters counted as opened = %d, want 1", opened)
		}
		// Somebody else's letter is in the way of an attempt without an answer.
		g := w.event("billing", "events.a", "k2", []byte("y"))
		other := g
		other.Err = "another error"
		box.deafFor(time.Minute)
		done := make(chan error)
		go func() { done <- s.Park(t.Context(), g) }()
		time.Sleep(time.Second)
		if err := w.letters.Park(t.Context(), other); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err == nil {
			t.Error("Park without an answer: no error, want one: nobody knows what became of the letter")
		}
		time.Sleep(time.Minute)
		if err := s.Park(t.Context(), g); err != nil {
			t.Errorf("Park after the silence: %v", err)
		}
		w.wantMsgs("DLQ", 2)
		if l := w.wantState(ownID(g), StateOpen); l.Error != "boom" {
			t.Errorf("Error = %q, want that of whoever was first", l.Error)
		}
	})
}

// What is no letter may not hide one; what a later version wrote stays.
func TestForeignMessageOnALettersSubject(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.a", "k1", []byte("x"))
		if _, err := w.js.Publish(t.Context(), ownID(f), []byte("spam")); err != nil {
			t.Fatal(err)
		}
		w.wantSeqs(Filter{})
		if l := w.park(f); string(l.Payload) != "x" || l.State != StateOpen {
			t.Errorf("letter = %+v, want the failure instead of what was there", l)
		}
		g := w.event("billing", "events.a", "k2", []byte("x"))
		m := nats.NewMsg(ownID(g))
		m.Header.Set(jetbox.HeaderDLQState, "archived")
		if _, err := w.js.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		if err := w.letters.Park(t.Context(), g); err != nil {
			t.Fatal(err)
		}
		w.wantState(ownID(g), "archived")
	})
}

func TestFailureWithoutIdentityIsRefused(t *testing.T) {
	t.Parallel()
	s := &Letters{cfg: Config{}.withDefaults()}
	good := jetbox.Failure{Stream: "S", Consumer: "c", Seq: 1, Stored: time.Unix(1, 0)}
	for name, spoil := range map[string]func(*jetbox.Failure){
		"no stream":          func(f *jetbox.Failure) { f.Stream = "" },
		"wildcard stream":    func(f *jetbox.Failure) { f.Stream = "*" },
		"dotted consumer":    func(f *jetbox.Failure) { f.Consumer = "a.b" },
		"blank in consumer":  func(f *jetbox.Failure) { f.Consumer = "a b" },
		"no sequence":        func(f *jetbox.Failure) { f.Seq = 0 },
		"no time of storage": func(f *jetbox.Failure) { f.Stored = time.Time{} },
	} {
		f := good
		spoil(&f)
		if err := s.Park(t.Context(), f); err == nil {
			t.Errorf("%s: Park(%+v) = nil, want an error", name, f)
		}
	}
}
