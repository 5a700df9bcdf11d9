package dlq

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

func workQueue(c *jetstream.StreamConfig)      { c.Retention = jetstream.WorkQueuePolicy }
func interestStream(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy }

// unheard runs f while nobody captures advisories: they are lost.
func (w *world) unheard(f func()) {
	w.t.Helper()
	if err := w.js.DeleteStream(w.t.Context(), "JETBOX_ADVISORIES"); err != nil {
		w.t.Fatal(err)
	}
	f()
	if _, err := w.letters.Setup(w.t.Context(), "EVENTS"); err != nil {
		w.t.Fatal(err)
	}
}

// sweepNow sweeps once.
func (w *world) sweepNow() error {
	w.t.Helper()
	r, err := NewRouter(w.letters, RouterConfig{EventStream: "EVENTS"})
	if err != nil {
		w.t.Fatal(err)
	}
	return r.sweep(w.t.Context())
}

func (w *world) ackNext(c jetstream.Consumer) {
	w.t.Helper()
	m := w.next(c)
	if m == nil {
		w.t.Fatal("nothing to acknowledge")
	}
	if err := m.Ack(); err != nil {
		w.t.Fatal(err)
	}
	time.Sleep(10 * time.Millisecond)
}

// BR-56: no advisory ever comes, and the router finds the messages all the same,
// once, although there are two of it. What is pending or was never delivered is
// nobody's letter.
func TestSweepParksWhatNoAdvisoryToldOf(t *testing.T) {
	for _, adjust := range []func(*jetstream.StreamConfig){workQueue, interestStream} {
		inBubble(t, func(t *testing.T, w *world) {
			c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 2, AckWait: time.Hour})
			w.unheard(func() {
				for i := range 5 {
					w.event("c", "events.bad", fmt.Sprintf("k%d", i), []byte{byte(i)}, "X-App", "a")
				}
				w.exhaust(c)
			})
			w.event("c", "events.good", "acknowledged", nil)
			w.ackNext(c)
			w.event("c", "events.good", "pending", nil)
			w.next(c)
			w.event("c", "events.good", "waiting", nil)
			for range 2 {
				w.runRouter(w.newLetters(w.connect(), Config{}), RouterConfig{})
			}
			time.Sleep(30 * time.Second)
			letters := w.list(Filter{})
			if len(letters) != 5 {
				t.Fatalf("letters = %+v, want the 5 exhausted messages", letters)
			}
			for _, l := range letters {
				if l.Consumer != "c" || l.Reason != jetbox.ReasonMaxDeliveries || l.Deliveries != 2 || l.Subject != "events.bad" ||
					len(l.Payload) != 1 || uint64(l.Payload[0]) != l.StreamSeq-1 || l.Header["X-App"][0] != "a" || l.Error != "" {
					t.Errorf("letter = %+v, want all of the original", l)
				}
			}
			time.Sleep(10 * time.Minute)
			w.wantMsgs("DLQ", 5)
			w.wantMsgs("EVENTS", 2)
		}, adjust)
	}
}

// A limits stream keeps everything: an exhausted message looks like any other.
func TestSweepCannotSeeExhaustedMessagesOfALimitsStream(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 2})
		w.event("c", "events.good", "k1", nil)
		w.ackNext(c)
		w.unheard(func() {
			w.event("c", "events.bad", "k2", nil)
			w.exhaust(c)
		})
		w.runRouter(w.letters, RouterConfig{})
		time.Sleep(10 * time.Minute)
		w.wantMsgs("DLQ", 0)
		w.wantMsgs("EVENTS", 2)
	})
}

// A consumer at work is always a moment behind with its acks, or ahead of what the
// stream has removed: neither is a failure.
func TestSweepTakesNothingFromAConsumerAtWork(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 10, AckWait: 3 * time.Second})
		w.runRouter(w.letters, RouterConfig{SweepEvery: time.Second})
		for i := range 100 {
			w.event("c", "events.a", fmt.Sprintf("k%d", i), nil)
			m := w.next(c)
			if i%10 == 0 {
				time.Sleep(7 * time.Second) // its ack comes too late, and counts
			}
			if i%7 == 0 {
				if err := m.NakWithDelay(4 * time.Second); err != nil {
					t.Fatal(err)
				}
				continue
			}
			if err := m.Ack(); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(10 * time.Second)
		for m := w.next(c); m != nil; m = w.next(c) {
			if err := m.Ack(); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(30 * time.Second)
		w.wantMsgs("DLQ", 0)
		w.wantMsgs("EVENTS", 0)
	}, workQueue)
}

// What a slow consumer has still to do stays out of a sweep's way and in its own.
func TestSweepLeavesTheBacklogOfOtherConsumersAlone(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		a := w.newConsumer(jetstream.ConsumerConfig{Durable: "a", MaxDeliver: 1, FilterSubjects: []string{"events.a.>", "events.x"}})
		w.newConsumer(jetstream.ConsumerConfig{Durable: "stopped", MaxDeliver: 1, FilterSubject: "events.b.>"})
		w.unheard(func() {
			for i := range 20 {
				w.event("", "events.b.1", fmt.Sprintf("b%d", i), nil)
			}
			w.event("a", "events.a.1", "a1", nil)
			w.event("a", "events.x", "a2", nil)
			w.event("", "events.nobody", "n", nil)
			w.exhaust(a)
		})
		if err := w.sweepNow(); err != nil {
			t.Errorf("sweep: %v", err)
		}
		w.wantSeqs(Filter{}, 21, 22)
		w.wantMsgs("EVENTS", 21)
	}, workQueue)
}

// Of several consumers of an interest stream the one with a limit of deliveries is
// the one that gave up; of two, the one that has a letter. Otherwise nobody can
// tell, and the log says that.
func TestSweepOfAnInterestStreamNamesTheRightConsumer(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		var log bytes.Buffer
		w.letters = w.newLetters(w.js, Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		limited := w.newConsumer(jetstream.ConsumerConfig{Durable: "limited", MaxDeliver: 1})
		other := w.newConsumer(jetstream.ConsumerConfig{Durable: "other"})
		var f jetbox.Failure
		w.unheard(func() {
			f = w.event("limited", "events.a", "k1", []byte("x"))
			w.exhaust(limited)
			if err := w.sweepNow(); err != nil {
				t.Errorf("sweep: %v", err)
			}
			w.wantMsgs("DLQ", 0) // the other has not had it yet
			w.ackNext(other)
		})
		if err := w.sweepNow(); err != nil {
			t.Errorf("sweep: %v", err)
		}
		w.wantState(ownID(f), StateOpen)
		w.wantMsgs("EVENTS", 0)

		third := w.newConsumer(jetstream.ConsumerConfig{Durable: "third", MaxDeliver: 1, FilterSubject: "events.b"})
		var g, h jetbox.Failure
		w.unheard(func() {
			g = w.event("third", "events.b", "k2", []byte("y"))
			h = w.event("third", "events.b", "k3", []byte("z"))
			w.exhaust(third)
			for _, c := range []jetstream.Consumer{limited, limited, other, other} {
				w.ackNext(c)
			}
		})
		if err := w.letters.Park(t.Context(), h); err != nil {
			t.Fatal(err)
		}
		stop := w.runRouter(w.letters, RouterConfig{})
		time.Sleep(5 * time.Minute)
		stop()
		w.wantMsgs("EVENTS", 1)
		w.wantMsgs("DLQ", 2)
		w.wantState(ownID(h), StateOpen)
		want := fmt.Sprintf("1 messages are left over, the first is %d: consumers limited, third are all past it", g.Seq)
		if n := strings.Count(log.String(), want); n != 1 {
			t.Errorf("the log says %d times %q, want once:\n%s", n, want, log.String())
		}
	}, interestStream)
}

// BR-54, worse: the router is away for longer than advisories are kept. A sweep
// also finds what a restart of the broker left.
func TestRouterDownForLongerThanAdvisoriesLive(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		short := w.letters.advisoriesConfig()
		short.MaxAge, short.Duplicates = 10*time.Minute, time.Minute // a week takes a fake clock too long
		if _, err := w.js.UpdateStream(t.Context(), short); err != nil {
			t.Fatal(err)
		}
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 3})
		f := w.event("c", "events.a", "k1", []byte("x"))
		w.exhaust(c)
		w.wantMsgs("JETBOX_ADVISORIES", 1)
		time.Sleep(11 * time.Minute)
		w.wantMsgs("JETBOX_ADVISORIES", 0)
		if err := w.srv.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		w.runRouter(w.letters, RouterConfig{})
		time.Sleep(time.Minute)
		if l := w.wantState(ownID(f), StateOpen); string(l.Payload) != "x" {
			t.Errorf("letter = %+v, want the payload", l)
		}
		w.wantMsgs("EVENTS", 0)
	}, workQueue)
}

func TestSweptReplayReopensItsLetter(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 2})
		f := w.event("c", "events.a", "k1", []byte("x"))
		w.exhaust(c)
		w.runRouter(w.letters, RouterConfig{})
		w.wantRouted("router-EVENTS")
		w.unheard(func() {
			w.replay(ownID(f))
			w.exhaust(c)
		})
		time.Sleep(3 * time.Minute)
		if l := w.wantState(ownID(f), StateOpen); l.Replays != 1 || l.Deliveries != 4 {
			t.Errorf("letter = %+v, want the same letter after 1 replay and 4 deliveries", l)
		}
		w.wantMsgs("DLQ", 1)
		w.wantMsgs("EVENTS", 0)
	}, workQueue)
}

// The message stays where it is until its letter is stored.
func TestSweepWaitsForTheDeadLetterStream(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 1})
		w.unheard(func() {
			for i := range 30 {
				w.event("c", "events.a", fmt.Sprintf("k%d", i), nil)
			}
			w.exhaust(c)
			if err := w.js.DeleteStream(t.Context(), "DLQ"); err != nil {
				t.Fatal(err)
			}
			if err := w.sweepNow(); err == nil || !strings.Contains(err.Error(), "store letter dlq.EVENTS.c.1-") {
				t.Errorf("sweep without a dead-letter stream: err = %v, want it to name the letter", err)
			}
			w.wantMsgs("EVENTS", 30)
			full := w.letters.lettersConfig()
			full.MaxMsgs = 10
			if _, err := w.js.CreateStream(t.Context(), full); err != nil {
				t.Fatal(err)
			}
			if err := w.sweepNow(); err == nil || !strings.Contains(err.Error(), "maximum messages exceeded") {
				t.Errorf("sweep with a full dead-letter stream: err = %v, want it to say that", err)
			}
			w.wantMsgs("EVENTS", 20)
			full.MaxMsgs = -1
			if _, err := w.js.UpdateStream(t.Context(), full); err != nil {
				t.Fatal(err)
			}
		})
		if err := w.sweepNow(); err != nil {
			t.Errorf("sweep: %v", err)
		}
		w.wantMsgs("EVENTS", 0)
		w.wantMsgs("DLQ", 30)
	}, workQueue)
}

// An operator who makes a consumer anew between the two looks wants its messages
// delivered again.
func TestConsumerThatChangedBetweenTheLooksIsPastNothing(t *testing.T) {
	t.Parallel()
	info := func(floor, delivered uint64, pending int, created int64, filter string) *jetstream.ConsumerInfo {
		return &jetstream.ConsumerInfo{
			Name: "c", Created: time.Unix(created, 0), NumAckPending: pending, Config: jetstream.ConsumerConfig{FilterSubject: filter},
			AckFloor: jetstream.SequenceInfo{Stream: floor}, Delivered: jetstream.SequenceInfo{Stream: delivered},
		}
	}
	tests := []struct {
		name          string
		first, second *jetstream.ConsumerInfo
		want          uint64
	}{
		{"nothing happened", info(5, 9, 1, 1, "a"), info(5, 9, 1, 1, "a"), 5},
		{"nothing pending", info(5, 9, 0, 1, "a"), info(5, 9, 0, 1, "a"), 9},
		{"went on", info(5, 9, 1, 1, "a"), info(12, 15, 1, 1, "a"), 5},
		{"was reset", info(5, 9, 0, 1, "a"), info(2, 2, 0, 1, "a"), 2},
		{"made anew", info(5, 9, 0, 1, "a"), info(9, 9, 0, 2, "a"), 0},
		{"another filter", info(5, 9, 0, 1, "a"), info(5, 9, 0, 1, "b"), 0},
		{"new", nil, info(5, 9, 0, 1, "a"), 0},
	}
	for _, tt := range tests {
		var first []*jetstream.ConsumerInfo
		if tt.first != nil {
			first = append(first, tt.first)
		}
		if got := bothLooks(first, []*jetstream.ConsumerInfo{tt.second})[0].done; got != tt.want {
			t.Errorf("%s: past everything up to %d, want %d", tt.name, got, tt.want)
		}
	}
}
