package dlq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
)

var _ consumer.DeadLetters = (*Letters)(nil)

// runConsumer starts package consumer on EVENTS and returns how to stop it.
func (w *world) runConsumer(durable string, h consumer.Handler) (stop func()) {
	w.t.Helper()
	c, err := consumer.New(w.js, h, consumer.Config{
		Stream: "EVENTS", Durable: durable, MaxDeliver: 3, Workers: 4, DeadLetters: w.letters,
		Logger: w.letters.cfg.Logger,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	return func() {
		w.t.Helper()
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("consumer: %v", err)
		}
	}
}

// A poison message ends as one letter with its last error, whether the handler
// gives up at once or runs out of deliveries; replayed to a mended handler it
// is handled once, by that consumer only.
func TestConsumerParksAndReplayReachesItAlone(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		var mu sync.Mutex
		mended := false
		handled := map[string]int{}
		handler := func(name string) consumer.Handler {
			return func(_ context.Context, d *consumer.Delivery) error {
				mu.Lock()
				defer mu.Unlock()
				poison := d.Subject != "events.good" && name == "billing"
				switch {
				case poison && !mended && d.Subject == "events.permanent":
					return jetbox.Permanent(errors.New("never"))
				case poison && !mended:
					return errors.New("not yet")
				}
				handled[name+" "+d.Key]++
				return nil
			}
		}
		defer w.runConsumer("billing", handler("billing"))()
		defer w.runConsumer("shipping", handler("shipping"))()
		w.runRouter(w.letters, RouterConfig{})
		for _, s := range []string{"good", "permanent", "temporary"} {
			w.event("billing", "events."+s, s, []byte(s))
		}
		time.Sleep(5 * time.Minute)
		got := map[string]string{}
		for _, l := range w.list(Filter{}) {
			got[string(l.Payload)] = fmt.Sprintf("%s %s %s %d", l.Consumer, l.Reason, l.Error, l.Deliveries)
		}
		want := map[string]string{
			"permanent": "billing terminated never 1",
			"temporary": "billing max_deliveries not yet 3",
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("letters = %v, want %v", got, want)
		}
		w.wantMsgs("DLQ", 2) // no intent left behind

		mu.Lock()
		mended = true
		mu.Unlock()
		for _, l := range w.list(Filter{}) {
			w.replay(l.ID)
		}
		time.Sleep(5 * time.Minute)
		mu.Lock()
		defer mu.Unlock()
		for _, k := range []string{"good", "permanent", "temporary"} {
			if handled["billing "+k] != 1 || handled["shipping "+k] != 1 {
				t.Errorf("%s was handled %d times by billing, %d by shipping, want once each", k, handled["billing "+k], handled["shipping "+k])
			}
		}
		w.wantSeqs(Filter{})
	})
}

// The term of a replay removes it from a work queue before the router hears of it.
// Its letter is the one it came from, whether the consumer names that or the router
// has to find it.
func TestReplayTerminatedOnAWorkQueueReopensItsLetterOnly(t *testing.T) {
	for _, foreign := range []bool{false, true} {
		inBubble(t, func(t *testing.T, w *world) {
			w.runRouter(w.letters, RouterConfig{})
			f := w.event("billing", "events.a", "k1", []byte("x"))
			w.park(f) // a foreign consumer's is gone with its term
			var c jetstream.Consumer
			if foreign {
				c = w.newConsumer(jetstream.ConsumerConfig{Durable: "billing"})
			} else {
				defer w.runConsumer("billing", func(context.Context, *consumer.Delivery) error {
					return jetbox.Permanent(errors.New("never"))
				})()
			}
			term := func() {
				if foreign {
					if m := w.next(c); m == nil || m.TermWithReason("never") != nil {
						t.Fatal("nothing to terminate")
					}
				}
				time.Sleep(time.Minute)
			}
			if _, err := w.js.Publish(t.Context(), "events.b", nil); err != nil {
				t.Fatal(err)
			}
			term()
			term()
			for n := 1; n <= 3; n++ {
				w.replay(ownID(f))
				term()
				l := w.wantState(ownID(f), StateOpen)
				if l.Replays != n || string(l.Payload) != "x" || l.Error != "never" {
					t.Errorf("foreign %v: letter = %+v, want it open after %d replays, with payload and error", foreign, l, n)
				}
			}
			w.wantMsgs("DLQ", 2)
			w.wantMsgs("EVENTS", 0)
		}, workQueue)
	}
}

// A header block that is none reaches the consumer's handler as no headers at all,
// with the payload, and its letter the same way.
func TestConsumerParksWhatHasUndecodableHeaders(t *testing.T) {
	for _, adjust := range []func(*jetstream.StreamConfig){func(*jetstream.StreamConfig) {}, workQueue} {
		inBubble(t, func(t *testing.T, w *world) {
			w.garbage("events.a", "GARBAGE\r\n", "x")
			w.event("billing", "events.a", "k2", []byte("y"))
			w.runRouter(w.letters, RouterConfig{})
			defer w.runConsumer("billing", func(_ context.Context, d *consumer.Delivery) error {
				if string(d.Payload) == "x" {
					return errors.New("who is this for?")
				}
				return nil
			})()
			time.Sleep(5 * time.Minute)
			letters := w.list(Filter{})
			if len(letters) != 1 || string(letters[0].Payload) != "x" || letters[0].Error != "who is this for?" || letters[0].Deliveries != 3 {
				t.Fatalf("letters = %+v, want one with the payload", letters)
			}
			w.replay(letters[0].ID)
			w.wantMsgs("DLQ", 1)
		}, adjust)
	}
}

// Two consumers fail at random, routers come and go, the broker restarts. In
// the end there is a letter for each message a consumer did not handle, each
// once; and after replaying them all to mended handlers everything is handled
// and no letter is open. A letter too many, which only a router can write and
// which has no handler's error, is allowed: a server that is restarted may forget
// the ack of a last delivery, and then reports its message as exhausted.
func TestLettersAreExactlyWhatWasNotHandled(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		rnd := rand.New(rand.NewPCG(seed, 1))
		const events = 300
		var mu sync.Mutex
		mended := false
		handled := map[string]bool{}
		handler := func(name string) consumer.Handler {
			return func(_ context.Context, d *consumer.Delivery) error {
				mu.Lock()
				defer mu.Unlock()
				switch n := rnd.IntN(20); {
				case mended || n < 10:
					handled[name+" "+d.Key] = true
					return nil
				case n == 10:
					panic("random")
				case n == 11:
					return jetbox.Permanent(errors.New("random"))
				default:
					return errors.New("random")
				}
			}
		}
		names := []string{"billing", "shipping"}
		var stops []func()
		start := func() {
			for _, name := range names {
				stops = append(stops, w.runConsumer(name, handler(name)))
			}
		}
		stop := func() {
			for _, stop := range stops {
				stop()
			}
			stops = nil
		}
		start()
		defer func() { stop() }()
		for i := range events {
			w.event("", "events.a", fmt.Sprintf("k%d", i), []byte("x"))
			switch i % 100 {
			case 30:
				stopRouter := w.runRouter(w.newLetters(w.js, Config{}), RouterConfig{})
				time.Sleep(time.Second)
				stopRouter()
			case 60:
				// Not under open pulls: a server that has something to redeliver
				// and loses its clients spins until it is down, and the fake
				// clock, which its shutdown waits for, stands (nats-server 2.15).
				stop()
				if err := w.srv.Restart(t.Context()); err != nil {
					t.Fatal(err)
				}
				time.Sleep(5 * time.Second)
				start()
			}
		}
		w.runRouter(w.letters, RouterConfig{})
		settle := func() {
			time.Sleep(10 * time.Minute)
			w.wantRouted("router-EVENTS")
			for _, name := range names {
				c, err := w.js.Consumer(t.Context(), "EVENTS", name)
				if err != nil {
					t.Fatal(err)
				}
				if i := c.CachedInfo(); i.NumPending > 0 || i.NumAckPending > 0 {
					t.Fatalf("consumer %s has work left: %+v", name, i)
				}
			}
		}
		settle()
		letters, routed := map[string]int{}, map[string]bool{}
		for _, l := range w.list(Filter{}) {
			key := l.Consumer + " " + l.Header[jetbox.HeaderIdempotencyKey][0]
			letters[key]++
			routed[key] = l.Error == ""
		}
		mu.Lock()
		for i := range events {
			for _, name := range names {
				key := fmt.Sprintf("%s k%d", name, i)
				want := 1
				if handled[key] {
					want = 0
				}
				if handled[key] && routed[key] {
					want = 1
				}
				if letters[key] != want {
					t.Errorf("seed %d: %s: handled = %v, letters = %d", seed, key, handled[key], letters[key])
				}
			}
		}
		mended = true
		mu.Unlock()
		t.Logf("%d letters of %d deliveries", len(letters), 2*events)
		for l, err := range w.letters.List(t.Context(), Filter{}) {
			if err != nil {
				t.Fatal(err)
			}
			w.replay(l.ID)
		}
		settle()
		mu.Lock()
		defer mu.Unlock()
		if len(handled) != 2*events {
			t.Errorf("handled after the replay = %d, want %d", len(handled), 2*events)
		}
		if n := len(w.list(Filter{Interrupted: true})); n != 0 {
			t.Errorf("letters waiting after the replay = %d, want 0", n)
		}
	}, func(c *jetstream.StreamConfig) { c.MaxMsgs = -1 })
}
