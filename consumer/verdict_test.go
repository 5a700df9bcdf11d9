package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
)

// nil acknowledges, once, and with one worker in stream order.
func TestHandledMessagesAreAcknowledgedInStreamOrder(t *testing.T) {
	inBubble(t, func(b *bus) {
		keys := b.publishN(50)
		var seen record
		b.start(seen.ok, consumer.Config{})
		b.pass(time.Second)
		if got := seen.keys(); !slices.Equal(got, keys) {
			b.Errorf("handled %v, want %v", got, keys)
		}
		b.wantSettled()
		if acks := b.answersLike(7, ""); len(acks) != 1 || acks[0].text != "+ACK" {
			b.Errorf("answers to 7 = %v, want one +ACK", acks)
		}
	})
}

// BR-50: a dependency that is down for ten seconds costs no good message its
// life. Errors, panics and timeouts wait alike, as long as the nak says.
func TestRetriesFollowTheBackoff(t *testing.T) {
	ways := map[string]func(ctx context.Context) error{
		"error":   func(context.Context) error { return errHandler },
		"panic":   func(context.Context) error { panic(errHandler) },
		"timeout": func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
	}
	for name, fail := range ways {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(b *bus) {
				const messages, timeout = 100, 10 * time.Millisecond
				b.publishN(messages)
				var seen record
				down := time.Now().Add(10 * time.Second)
				dlq := &letters{}
				b.start(func(ctx context.Context, d *consumer.Delivery) error {
					seen.add(d)
					if time.Now().Before(down) {
						return fail(ctx)
					}
					return nil
				}, consumer.Config{DeadLetters: dlq, HandleTimeout: timeout, Workers: messages})
				b.pass(time.Minute)

				b.wantSettled()
				if got := dlq.names(); slices.Contains(got, "park") {
					b.Errorf("dead letters: %v, want none", got)
				}
				tries := seen.of("k042")
				if len(tries) != 5 {
					b.Fatalf("deliveries = %d, want 5", len(tries))
				}
				naks := b.answersLike(43, "-NAK")
				if len(naks) != 4 {
					b.Fatalf("naks = %v, want 4", naks)
				}
				for i, want := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second} {
					var ns int64
					if _, err := fmt.Sscanf(naks[i].text, `-NAK {"delay":%d}`, &ns); err != nil {
						b.Fatalf("nak %d = %q: %v", i+1, naks[i].text, err)
					}
					asked := time.Duration(ns)
					if asked < want*9/10 || asked > want*11/10 {
						b.Errorf("delay %d = %v, want %v within a tenth", i+1, asked, want)
					}
					gap := tries[i+1].at.Sub(naks[i].at)
					if gap < asked || gap > asked+slack {
						b.Errorf("delivery %d came after %v, want the %v the nak asked for", i+2, gap, asked)
					}
				}
			})
		})
	}
}

// The delay grows with the delivery, up to MaxBackoff, and no further.
func TestDelaysStopGrowingAtMaxBackoff(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publish("k")
		var seen record
		b.start(func(_ context.Context, d *consumer.Delivery) error { seen.add(d); return errHandler },
			consumer.Config{MaxDeliver: 8, Backoff: time.Second, MaxBackoff: 3 * time.Second, DeadLetters: &letters{}})
		b.pass(time.Minute)
		tries := seen.of("k")
		if len(tries) != 8 {
			b.Fatalf("deliveries = %d, want 8", len(tries))
		}
		for i := 1; i < len(tries); i++ {
			if gap := tries[i].at.Sub(tries[i-1].at); gap > 3*time.Second+slack {
				b.Errorf("gap %d = %v, want at most 3s", i, gap)
			}
		}
	})
}

// Invariants of a failed last delivery: the intent is stored before the handler
// runs, the letter with the handler's error before the term, and no delivery
// comes after it.
func TestLastFailedDeliveryIsParkedBeforeItIsTerminated(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publish("good", "bad", "fine")
		var seen record
		dlq := &letters{}
		var termsAtPark int
		dlq.failFunc = func(step string, f jetbox.Failure) error {
			if step == "park" {
				termsAtPark = len(b.answersLike(f.Seq, "+TERM"))
			}
			return nil
		}
		var verdicts []consumer.Verdict
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			if d.Last && len(dlq.named("intend")) != 1 {
				b.Errorf("last delivery is handled without an intent")
			}
			seen.add(d)
			if d.Key == "bad" {
				return fmt.Errorf("attempt %d: %w", d.NumDelivered, errHandler)
			}
			return nil
		}, consumer.Config{MaxDeliver: 3, DeadLetters: dlq, HandledFunc: func(_ *consumer.Delivery, v consumer.Verdict, _ time.Duration) {
			verdicts = append(verdicts, v)
		}})
		b.pass(time.Hour)

		if got := dlq.names(); !slices.Equal(got, []string{"intend", "park"}) {
			b.Fatalf("letters: %v, want intend, park", got)
		}
		f := dlq.named("park")[0].f
		if f.Stream != streamName || f.Consumer != durable || f.Seq != 2 || f.Deliveries != 3 || f.Subject != "events.bad" ||
			f.Reason != jetbox.ReasonMaxDeliveries || f.Err != "attempt 3: dependency down" ||
			string(f.Payload) != `{"key":"bad"}` || f.Header[jetbox.HeaderIdempotencyKey][0] != "bad" || f.Stored.IsZero() {
			b.Errorf("letter = %+v", f)
		}
		if in := dlq.named("intend")[0].f; in.Err != "" || in.Reason != jetbox.ReasonMaxDeliveries || !in.Stored.Equal(f.Stored) {
			b.Errorf("intent = %+v, want the letter without its error", in)
		}
		terms := b.answersLike(2, "+TERM")
		why := fmt.Sprintf("+TERM max_deliveries: attempt 3: dependency down [letter 2-%d]", f.Stored.UnixNano())
		if termsAtPark != 0 || len(terms) != 1 || terms[0].text != why {
			b.Errorf("terms before the letter = %d, after = %v, want 0 and one with the reason", termsAtPark, terms)
		}
		if n := len(seen.of("bad")); n != 3 {
			b.Errorf("deliveries = %d, want 3", n)
		}
		want := []consumer.Verdict{consumer.Ack, consumer.Nak, consumer.Ack, consumer.Nak, consumer.Term}
		if !slices.Equal(verdicts, want) {
			b.Errorf("verdicts = %v, want %v", verdicts, want)
		}
		b.wantSettled()
	})
}

// Success on the last delivery withdraws the intent, then acknowledges.
func TestLastDeliveryThatSucceedsWithdrawsItsIntent(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publish("k")
		dlq := &letters{}
		dlq.failFunc = func(step string, f jetbox.Failure) error {
			if acks := b.answersLike(f.Seq, "+ACK"); len(acks) > 0 {
				b.Errorf("%s after the ack", step)
			}
			return nil
		}
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			if !d.Last {
				return errHandler
			}
			return nil
		}, consumer.Config{MaxDeliver: 2, DeadLetters: dlq})
		b.pass(time.Minute)
		if got := dlq.names(); !slices.Equal(got, []string{"intend", "withdraw"}) {
			b.Errorf("letters: %v, want intend, withdraw", got)
		}
		b.wantSettled()
	})
}

func TestPermanentErrorIsParkedAtOnce(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publish("k")
		dlq := &letters{}
		b.start(func(context.Context, *consumer.Delivery) error {
			return fmt.Errorf("handle: %w", jetbox.Permanent(errors.New("no such customer\nsecond line")))
		}, consumer.Config{DeadLetters: dlq})
		b.pass(time.Minute)
		parked := dlq.named("park")
		if len(parked) != 1 || parked[0].f.Reason != jetbox.ReasonTerminated || parked[0].f.Deliveries != 1 {
			b.Fatalf("letters: %+v, want one, terminated, after 1 delivery", parked)
		}
		if want := "handle: no such customer\nsecond line"; parked[0].f.Err != want {
			b.Errorf("error in the letter = %q, want %q", parked[0].f.Err, want)
		}
		want := fmt.Sprintf("+TERM terminated: handle: no such customer [letter 1-%d]", parked[0].f.Stored.UnixNano())
		if terms := b.answersLike(1, "+TERM"); len(terms) != 1 || terms[0].text != want {
			b.Errorf("terms = %v, want %q: the first line and the letter", terms, want)
		}
		b.wantSettled()
	})
}

// Without DeadLetters a router must hear of both ends from the server.
func TestWithoutDeadLettersTheServerReportsTheEnd(t *testing.T) {
	inBubble(t, func(b *bus) {
		var mu sync.Mutex
		advisories := map[string]int{} // guarded by mu
		if _, err := b.nc.Subscribe("$JS.EVENT.ADVISORY.CONSUMER.*."+streamName+"."+durable, func(m *nats.Msg) {
			mu.Lock()
			defer mu.Unlock()
			advisories[strings.Split(m.Subject, ".")[4]]++
		}); err != nil {
			b.Fatal(err)
		}
		b.publish("fails", "permanent")
		var seen record
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			seen.add(d)
			if d.Key == "permanent" {
				return jetbox.Permanent(errHandler)
			}
			return errHandler
		}, consumer.Config{MaxDeliver: 2})
		b.pass(time.Minute)
		mu.Lock()
		defer mu.Unlock()
		if advisories["MAX_DELIVERIES"] != 1 || advisories["MSG_TERMINATED"] != 1 {
			b.Errorf("advisories = %v, want one of each kind", advisories)
		}
		if n := len(seen.of("fails")); n != 2 {
			b.Errorf("deliveries = %d, want 2", n)
		}
	})
}

// BR-46: whatever way a handler fails to return nil, its message is never
// acknowledged, is tried again with the backoff, and ends as a dead letter with
// the reason, while the others are handled.
func TestHandlerThatDoesNotReturnIsNeverAcknowledged(t *testing.T) {
	var nilMap map[string]int
	ways := []struct {
		name string
		do   func()
		want string
	}{
		{"nil map write", func() { nilMap["x"]++ }, "assignment to entry in nil map"},
		{"panic of nil", func() { panic(nil) }, "panic called with nil argument"},
		{"panic of a text", func() { panic("boom") }, "handler panicked: boom"},
		{"goexit", runtime.Goexit, "runtime.Goexit"},
	}
	for _, tt := range ways {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(b *bus) {
				b.publishN(20)
				var effects record
				tries := 0
				dlq := &letters{}
				b.start(func(_ context.Context, d *consumer.Delivery) error {
					if d.Key == "k004" {
						tries++
						tt.do()
					}
					effects.add(d)
					return nil
				}, consumer.Config{MaxDeliver: 3, DeadLetters: dlq})
				b.pass(time.Minute)

				if n := len(effects.all()); n != 19 || tries != 3 {
					b.Errorf("effects = %d, tries = %d, want 19 and 3", n, tries)
				}
				if acks := b.answersLike(5, "+ACK"); len(acks) != 0 {
					b.Errorf("acks = %v, want none", acks)
				}
				parked := dlq.named("park")
				if len(parked) != 1 || !strings.Contains(parked[0].f.Err, tt.want) {
					b.Fatalf("letters = %+v, want one with %q", parked, tt.want)
				}
				if strings.Contains(tt.name, "panic") && !strings.Contains(parked[0].f.Err, "verdict_test.go") {
					b.Errorf("error = %q, want the stack in it", parked[0].f.Err)
				}
				b.wantSettled()
			})
		})
	}
}

// BR-52: the originals leave a work queue once their letters are stored.
func TestPoisonLeavesAWorkQueueOnceParked(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publishN(10)
		dlq := &letters{}
		b.start(func(context.Context, *consumer.Delivery) error { return errHandler },
			consumer.Config{MaxDeliver: 2, Backoff: 10 * time.Millisecond, DeadLetters: dlq})
		b.pass(time.Minute)
		s, err := b.js.Stream(b.Context(), streamName)
		if err != nil {
			b.Fatal(err)
		}
		if n := s.CachedInfo().State.Msgs; n != 0 || len(dlq.named("park")) != 10 {
			b.Errorf("left in the queue = %d with %d letters, want 0 and 10", n, len(dlq.named("park")))
		}
		// A second group without a filter of its own cannot work: said at once.
		cfg := b.config(consumer.Config{})
		cfg.Durable = "second"
		second, err := consumer.New(b.js, (&record{}).ok, cfg)
		if err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		err = second.Run(b.Context())
		if err == nil || !strings.Contains(err.Error(), "workqueue") || time.Since(start) > time.Second {
			b.Errorf("second consumer: %v after %v, want a refusal about the work queue at once", err, time.Since(start))
		}
	}, func(c *jetstream.StreamConfig) {
		c.Retention = jetstream.WorkQueuePolicy
		c.Discard = jetstream.DiscardNew
		c.MaxMsgs = 100
	})
}
