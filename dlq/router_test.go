package dlq

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// BR-54: exhausted with nobody there, the broker restarted, the router started
// hours later; a day is the same, and takes a fake clock three seconds.
func TestMessagesExhaustedWhileTheRouterIsDownAreParked(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for i := range 10 {
			w.event("c", fmt.Sprintf("events.%d", i), fmt.Sprintf("k%d", i), []byte{byte(i)}, "X-App", "a")
		}
		w.exhaust(w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 3}))
		if err := w.srv.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Hour)
		var routed atomic.Int64
		s := w.newLetters(w.js, Config{RoutedFunc: func(reason string) {
			if reason == jetbox.ReasonMaxDeliveries {
				routed.Add(1)
			}
		}})
		w.runRouter(s, RouterConfig{})
		time.Sleep(30 * time.Second)
		letters := w.list(Filter{})
		if len(letters) != 10 || routed.Load() != 10 {
			t.Fatalf("after 30s: %d letters, %d counted, want 10", len(letters), routed.Load())
		}
		for i, l := range letters {
			if l.StreamSeq != uint64(i+1) || l.Consumer != "c" || l.Deliveries != 3 || l.Subject != fmt.Sprintf("events.%d", i) ||
				string(l.Payload) != string([]byte{byte(i)}) || nats.Header(l.Header).Get("X-App") != "a" || l.Reason != jetbox.ReasonMaxDeliveries {
				t.Errorf("letter %d = %+v", i, l)
			}
		}
	})
}

// BR-54: the router dies between the letter and its own ack.
func TestRouterKilledAfterTheLetterMakesNoSecondOne(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for i := range 10 {
			w.event("c", "events.a", fmt.Sprintf("k%d", i), nil)
		}
		w.exhaust(w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 2}))
		dying := w.newLetters(w.js, Config{})
		var parked atomic.Int64
		dying.testOnlyCrash = func(string) error { parked.Add(1); return errKilled }
		stop := w.runRouter(dying, RouterConfig{})
		time.Sleep(20 * time.Second)
		stop()
		if parked.Load() == 0 {
			t.Fatal("the router that dies has parked nothing")
		}
		w.runRouter(w.letters, RouterConfig{})
		w.wantRouted("router-EVENTS")
		if n := len(w.list(Filter{})); n != 10 {
			t.Errorf("letters = %d, want 10", n)
		}
		w.wantMsgs("DLQ", 10)
	})
}

func TestSeveralRoutersShareTheWork(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 1})
		var stops []func()
		for range 3 {
			stops = append(stops, w.runRouter(w.newLetters(w.connect(), Config{}), RouterConfig{}))
		}
		for round := range 10 {
			for i := range 10 {
				w.event("c", "events.a", fmt.Sprintf("k%d-%d", round, i), nil)
			}
			w.exhaust(c)
			// Routers come and go.
			stops[round%3]()
			stops[round%3] = w.runRouter(w.newLetters(w.connect(), Config{}), RouterConfig{})
		}
		w.wantRouted("router-EVENTS")
		if n := len(w.list(Filter{})); n != 100 {
			t.Errorf("letters = %d, want 100", n)
		}
		w.wantMsgs("DLQ", 100)
	})
}

// A stop hands back what was fetched, so that the next router need not wait.
func TestStoppedRouterHandsBackWhatItHasNotBegun(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for i := range 10 {
			w.event("c", "events.a", fmt.Sprintf("k%d", i), nil)
		}
		w.exhaust(w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 1}))
		slow := w.newLetters(w.js, Config{})
		slow.testOnlyCrash = func(string) error { time.Sleep(time.Second); return errKilled }
		stop := w.runRouter(slow, RouterConfig{})
		time.Sleep(500 * time.Millisecond)
		stop()
		w.runRouter(w.letters, RouterConfig{})
		time.Sleep(time.Second)
		if n := len(w.list(Filter{})); n != 10 {
			t.Errorf("letters a second after the next router started = %d, want 10", n)
		}
	})
}

func TestTerminatedByAForeignConsumerIsParkedWithItsReason(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.runRouter(w.letters, RouterConfig{})
		w.event("c", "events.a", "k1", []byte("x"))
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c"})
		if err := w.next(c).TermWithReason("bad address"); err != nil {
			t.Fatal(err)
		}
		w.wantRouted("router-EVENTS")
		l := w.list(Filter{})
		if len(l) != 1 || l[0].Reason != jetbox.ReasonTerminated || l[0].Error != "bad address" || string(l[0].Payload) != "x" || l[0].Deliveries != 1 {
			t.Errorf("letters = %+v, want one with the reason of the term", l)
		}
	})
}

// The consumer parks, then terms; the advisory of that term adds nothing, on a
// work queue neither, where the message is gone by then.
func TestTermOfAParkedMessageIsNoSecondLetter(t *testing.T) {
	for _, retention := range []jetstream.RetentionPolicy{jetstream.LimitsPolicy, jetstream.WorkQueuePolicy, jetstream.InterestPolicy} {
		t.Run(retention.String(), func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c"})
				time.Sleep(time.Minute) // stored at another time than the stream's creation
				f := w.event("c", "events.a", "k1", []byte("x"))
				m := w.next(c)
				f.Reason, f.Err = jetbox.ReasonTerminated, "from the handler"
				l := w.park(f)
				if err := m.TermWithReason("terminated"); err != nil {
					t.Fatal(err)
				}
				w.runRouter(w.letters, RouterConfig{})
				w.wantRouted("router-EVENTS")
				w.wantMsgs("DLQ", 1)
				if got := w.wantState(l.ID, StateOpen); got.Seq != l.Seq {
					t.Errorf("the letter was written again, sequence %d, want %d", got.Seq, l.Seq)
				}
			}, func(c *jetstream.StreamConfig) { c.Retention = retention })
		})
	}
}

func TestHandlerThatKillsItsProcessLeavesALetter(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.runRouter(w.letters, RouterConfig{})
		f := w.event("c", "events.a", "k1", []byte("x"))
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 2, AckWait: 10 * time.Second})
		w.exhaustOnce(c)
		w.next(c) // last delivery: never settled
		f.Err, f.Deliveries = "", 2
		if err := w.letters.Intend(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		w.wantSeqs(Filter{})
		time.Sleep(30 * time.Second)
		w.wantState(ownID(f), StateIntent) // no pull, no advisory
		w.wantSeqs(Filter{}, 1)
		w.next(c) // somebody pulls: the server says it
		w.wantRouted("router-EVENTS")
		if l := w.wantState(ownID(f), StateOpen); l.Deliveries != 2 || string(l.Payload) != "x" {
			t.Errorf("letter = %+v, want the intent opened", l)
		}
		w.wantMsgs("DLQ", 1)
	})
}

func (w *world) exhaustOnce(c jetstream.Consumer) {
	w.t.Helper()
	if err := w.next(c).Nak(); err != nil {
		w.t.Fatal(err)
	}
}

// BR-55: expired, or evicted, before the router looks.
func TestOriginalGoneLeavesALetterThatSaysSo(t *testing.T) {
	for name, adjust := range map[string]func(*jetstream.StreamConfig){
		"expired": func(c *jetstream.StreamConfig) { c.MaxAge = 5 * time.Second; c.Duplicates = time.Second },
		"evicted": func(c *jetstream.StreamConfig) { c.MaxMsgs = 5 },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				for i := range 5 {
					w.event("c", "events.a", fmt.Sprintf("k%d", i), []byte("x"))
				}
				w.exhaust(w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 2}))
				for i := range 5 {
					w.event("c", "events.a", fmt.Sprintf("new%d", i), []byte("y"))
				}
				time.Sleep(10 * time.Second)
				w.runRouter(w.letters, RouterConfig{})
				w.wantRouted("router-EVENTS")
				letters := w.list(Filter{})
				if len(letters) != 5 {
					t.Fatalf("letters = %d, want 5", len(letters))
				}
				for i, l := range letters {
					if l.StreamSeq != uint64(i+1) || !l.PayloadMissing || l.Deliveries != 2 ||
						l.Error != fmt.Sprintf("payload unavailable: message %d is gone from stream EVENTS", i+1) {
						t.Errorf("letter = %+v, want one that says the payload is gone", l)
					}
				}
				if _, err := w.letters.Replay(t.Context(), letters[0].ID); err == nil || !strings.Contains(err.Error(), "payload unavailable") {
					t.Errorf("Replay: err = %v, want payload unavailable", err)
				}
				w.wantState(letters[0].ID, StateOpen)
			}, adjust)
		})
	}
}

// An advisory about a message that was deleted while pending is no failure.
func TestRemovedMessagesAreNoDeadLetters(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.runRouter(w.letters, RouterConfig{})
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c"})
		for i := range 3 {
			w.event("c", "events.a", fmt.Sprintf("k%d", i), nil)
			w.next(c)
		}
		if err := w.events.DeleteMsg(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Minute)
		w.wantRouted("router-EVENTS")
		st, err := w.js.Stream(t.Context(), "JETBOX_ADVISORIES")
		if err != nil {
			t.Fatal(err)
		}
		if n := st.CachedInfo().State.Msgs; n < 2 {
			t.Errorf("advisories captured = %d, want one per message deleted or expired: the test proves nothing", n)
		}
		w.wantMsgs("DLQ", 0)
	}, func(c *jetstream.StreamConfig) { c.MaxAge = time.Minute; c.Duplicates = time.Minute })
}

// BR-52: the originals leave, but only what nobody wants any more.
func TestOriginalsLeaveAWorkQueueAfterTheirLetterIsStored(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 2, AckWait: time.Hour})
		for i := range 10 {
			w.event("c", "events.a", fmt.Sprintf("k%d", i), []byte("x"))
		}
		w.exhaust(c)
		w.wantMsgs("EVENTS", 10)
		w.runRouter(w.letters, RouterConfig{})
		w.wantRouted("router-EVENTS")
		w.wantMsgs("EVENTS", 0)
		if n := len(w.list(Filter{})); n != 10 {
			t.Errorf("letters = %d, want 10", n)
		}
		for i := range 100 {
			w.event("c", "events.b", fmt.Sprintf("good%d", i), nil)
		}
		for m := w.next(c); m != nil; m = w.next(c) {
			if err := m.Ack(); err != nil {
				t.Fatal(err)
			}
		}
		w.wantMsgs("EVENTS", 0)
		// A letter that cannot hold its payload has it beside it.
		payload := bytes.Repeat([]byte("x"), 1<<20-450)
		w.event("c", "events.a", "big", payload)
		w.exhaust(c)
		w.wantRouted("router-EVENTS")
		w.wantMsgs("EVENTS", 0)
		big := w.replay(w.list(Filter{})[10].ID)
		if m := w.next(c); m == nil || !bytes.Equal(m.Data(), payload) {
			t.Errorf("replay of %s: not the message with its %d bytes", big.ID, len(payload))
		}
	}, func(c *jetstream.StreamConfig) {
		c.Retention = jetstream.WorkQueuePolicy
		c.MaxMsgs = 100
		c.Discard = jetstream.DiscardNew
	})
}

func TestExhaustedMessageOfAnInterestStreamStaysForItsOtherConsumers(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 1})
		other := w.newConsumer(jetstream.ConsumerConfig{Durable: "other", AckWait: time.Hour})
		w.newConsumer(jetstream.ConsumerConfig{Durable: "elsewhere", FilterSubject: "events.b"})
		w.event("c", "events.a", "k1", []byte("x"))
		w.exhaust(c)
		w.runRouter(w.letters, RouterConfig{MaxBackoff: 10 * time.Second})
		time.Sleep(time.Minute)
		w.wantSeqs(Filter{}, 1)
		w.wantMsgs("EVENTS", 1)
		m := w.next(other)
		if m == nil {
			t.Fatal("the other consumer gets nothing")
		}
		time.Sleep(time.Minute)
		w.wantMsgs("EVENTS", 1)
		if err := m.Ack(); err != nil {
			t.Fatal(err)
		}
		w.wantRouted("router-EVENTS")
		w.wantMsgs("EVENTS", 0)
		w.wantMsgs("DLQ", 1)
	}, func(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy })
}

// BR-58: the advisory stays, is tried with growing delays, and is parked when
// the dead-letter stream is back.
func TestAdvisoriesWaitForTheDeadLetterStream(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		if err := w.js.DeleteStream(t.Context(), "DLQ"); err != nil {
			t.Fatal(err)
		}
		for i := range 5 {
			w.event("c", "events.a", fmt.Sprintf("k%d", i), []byte("x"))
		}
		w.exhaust(w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 1}))
		w.runRouter(w.letters, RouterConfig{})
		time.Sleep(10 * time.Minute)
		c, err := w.js.Consumer(t.Context(), "JETBOX_ADVISORIES", "router-EVENTS")
		if err != nil {
			t.Fatal(err)
		}
		if n := c.CachedInfo().Delivered.Consumer; n > 150 || n < 5 {
			t.Errorf("5 advisories were delivered %d times in 10 minutes, want a few each: no hot loop", n)
		}
		if n := c.CachedInfo().NumAckPending; n != 5 {
			t.Errorf("advisories pending = %d, want 5", n)
		}
		if _, err := w.letters.Setup(t.Context(), "EVENTS"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(90 * time.Second)
		if n := len(w.list(Filter{})); n != 5 {
			t.Errorf("letters after the stream is back = %d, want 5", n)
		}
		// And while it is full.
		full := w.letters.lettersConfig()
		full.MaxMsgs = 5
		if _, err := w.js.UpdateStream(t.Context(), full); err != nil {
			t.Fatal(err)
		}
		w.event("c", "events.b", "k5", []byte("x"))
		worker, err := w.js.Consumer(t.Context(), "EVENTS", "c")
		if err != nil {
			t.Fatal(err)
		}
		w.exhaust(worker)
		time.Sleep(10 * time.Minute)
		w.wantMsgs("DLQ", 5)
		full.MaxMsgs = -1
		if _, err := w.js.UpdateStream(t.Context(), full); err != nil {
			t.Fatal(err)
		}
		time.Sleep(90 * time.Second)
		w.wantMsgs("DLQ", 6)
	})
}

// The router outlives its streams, its consumer and the broker.
func TestRouterOutlivesWhatItDependsOn(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		if err := w.js.DeleteStream(t.Context(), "JETBOX_ADVISORIES"); err != nil {
			t.Fatal(err)
		}
		w.runRouter(w.letters, RouterConfig{MaxBackoff: 5 * time.Second})
		time.Sleep(time.Minute)
		if _, err := w.letters.Setup(t.Context(), "EVENTS"); err != nil {
			t.Fatal(err)
		}
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 1})
		fail := func(id string) {
			w.event("c", "events.a", id, nil)
			w.exhaust(c)
			time.Sleep(2 * time.Minute)
		}
		fail("k1")
		w.wantSeqs(Filter{}, 1)
		if err := w.js.DeleteConsumer(t.Context(), "JETBOX_ADVISORIES", "router-EVENTS"); err != nil {
			t.Fatal(err)
		}
		fail("k2")
		w.wantSeqs(Filter{}, 1, 2)
		if err := w.srv.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		fail("k3")
		w.wantSeqs(Filter{}, 1, 2, 3)
	})
}

// A router told only its first failure: when its consumer had been deleted, and
// then the whole stream of advisories, the log said nothing of the second.
func TestRouterThatLosesItsStreamSaysSo(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		var log bytes.Buffer
		letters := w.newLetters(w.js, Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		stop := w.runRouter(letters, RouterConfig{})
		time.Sleep(10 * time.Second)
		if err := w.js.DeleteConsumer(t.Context(), "JETBOX_ADVISORIES", "router-EVENTS"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		if err := w.js.DeleteStream(t.Context(), "JETBOX_ADVISORIES"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(30 * time.Second)
		stop()
		if !strings.Contains(log.String(), "stream not found") {
			t.Errorf("30 s after the stream was deleted the log has\n%s", log.String())
		}
	})
}

func TestReplayOfARoutedLetterThatExhaustsAgainReopensIt(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.runRouter(w.letters, RouterConfig{})
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 2})
		f := w.event("c", "events.a", "k1", []byte("x"))
		w.exhaust(c)
		w.wantRouted("router-EVENTS")
		id := ownID(f)
		for n := 1; n <= 3; n++ {
			w.replay(id)
			w.exhaust(c)
			w.wantRouted("router-EVENTS")
			l := w.wantState(id, StateOpen)
			if l.Replays != n || l.Deliveries != uint64(2+2*n) || l.StreamSeq != 1 {
				t.Errorf("letter = %+v, want %d replays and %d deliveries of message 1", l, n, 2+2*n)
			}
		}
		w.wantMsgs("DLQ", 1)
	})
}

func TestRouterIsRestartedManyTimes(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 1})
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := range 200 {
				if _, err := w.js.Publish(t.Context(), "events.a", nil, jetstream.WithMsgID(fmt.Sprint(i))); err != nil {
					t.Error(err)
				}
			}
			w.exhaust(c)
		})
		for i := range 20 {
			s := w.newLetters(w.js, Config{})
			n := 0
			s.testOnlyCrash = func(string) error {
				if n++; n%(i+2) == 0 {
					return errors.New("killed by the test")
				}
				return nil
			}
			stop := w.runRouter(s, RouterConfig{})
			time.Sleep(time.Second)
			stop()
		}
		wg.Wait()
		w.runRouter(w.letters, RouterConfig{})
		w.wantRouted("router-EVENTS")
		if n := len(w.list(Filter{})); n != 200 {
			t.Errorf("letters = %d, want 200", n)
		}
		w.wantMsgs("DLQ", 200)
	})
}
