package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
)

// A handler may take many ack waits: the server hears that somebody works on
// the message, and delivers it once.
func TestHandlerMayTakeLongerThanTheAckWait(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publish("k")
		var seen record
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			seen.add(d)
			time.Sleep(4 * time.Minute)
			return nil
		}, consumer.Config{AckWait: 30 * time.Second})
		b.pass(5 * time.Minute)
		if n := len(seen.all()); n != 1 {
			b.Errorf("deliveries = %d, want 1", n)
		}
		signals := b.answersLike(1, "+WPI")
		if len(signals) != 23 && len(signals) != 24 {
			b.Errorf("in-progress signals = %d, want one every 10s for 4m", len(signals))
		}
		b.wantSettled()
	})
}

// BR-43: the ack wait that counts is the live consumer's.
func TestInProgressFollowsTheLiveAckWait(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publish("k")
		b.createConsumer(func(c *consumerConfig) { c.AckWait = 3 * time.Second })
		var seen record
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			seen.add(d)
			time.Sleep(time.Minute)
			return nil
		}, consumer.Config{AckWait: 30 * time.Second})
		b.pass(2 * time.Minute)
		if n := len(seen.all()); n != 1 {
			b.Errorf("deliveries = %d, want 1", n)
		}
	})
}

// After HandleTimeout the context ends, with the reason, and the attempt is an
// error like any other.
func TestHandleTimeoutCancelsTheHandler(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publish("k")
		dlq := &letters{}
		var causes []error
		b.start(func(ctx context.Context, d *consumer.Delivery) error {
			start := time.Now()
			<-ctx.Done()
			causes = append(causes, context.Cause(ctx))
			if took := time.Since(start); took != time.Minute {
				b.Errorf("canceled after %v, want 1m", took)
			}
			return ctx.Err()
		}, consumer.Config{HandleTimeout: time.Minute, MaxDeliver: 2, DeadLetters: dlq})
		b.pass(time.Hour)
		if len(causes) != 2 || !errors.Is(causes[0], consumer.ErrHandleTimeout) {
			b.Errorf("causes = %v, want two, ErrHandleTimeout", causes)
		}
		parked := dlq.named("park")
		if want := "handler took too long: context deadline exceeded"; len(parked) != 1 || parked[0].f.Err != want {
			b.Errorf("letters = %+v, want one with %q", parked, want)
		}
	})
}

// What a handler finished is acknowledged, also when it was late.
func TestLateSuccessIsAcknowledged(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publish("k")
		var seen record
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			seen.add(d)
			time.Sleep(time.Minute + time.Second)
			return nil
		}, consumer.Config{HandleTimeout: time.Minute})
		b.pass(time.Hour)
		if n := len(seen.all()); n != 1 {
			b.Errorf("deliveries = %d, want 1", n)
		}
		b.wantSettled()
	})
}

// A handler that ignores its context does not hold the message for ever: the
// server delivers it again, to another worker here, and the overdue one's error
// does not disturb that delivery.
func TestOverdueHandlerLosesItsMessageButNotTheNextDelivery(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publish("k")
		var seen record
		release := make(chan struct{})
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			seen.add(d)
			if d.NumDelivered == 1 {
				<-release
				return errHandler
			}
			time.Sleep(time.Minute) // still at work when the overdue one fails
			return nil
		}, consumer.Config{Workers: 2, HandleTimeout: time.Minute, AckWait: 30 * time.Second})
		b.pass(2 * time.Minute)
		if n := len(seen.all()); n != 2 {
			b.Errorf("deliveries = %d after HandleTimeout and AckWait, want 2", n)
		}
		close(release)
		b.pass(time.Hour)
		if n := len(seen.all()); n != 2 {
			b.Errorf("deliveries = %d, want 2: the overdue error must not ask for another", n)
		}
		if naks := b.answersLike(1, "-NAK"); len(naks) != 0 {
			b.Errorf("naks = %v, want none", naks)
		}
		if len(b.log.containing("ERROR handler ignores its canceled context")) != 1 {
			b.Errorf("log has no error about the overdue handler: %q", b.log.containing("handler"))
		}
		b.wantSettled()
	})
}

// A handler that never returns keeps its worker, and holds up the others no
// longer than until it is overdue: whether it has a message that came back, or
// the first one after a start.
func TestHandlerThatNeverReturnsKeepsOnlyItsWorker(t *testing.T) {
	for _, starting := range []bool{false, true} {
		t.Run(fmt.Sprintf("starting %v", starting), func(t *testing.T) {
			inBubble(t, func(b *bus) {
				if starting { // one message is out, and will not come back for long
					b.createConsumer(func(c *consumerConfig) { c.AckWait = 10 * time.Minute })
					b.publish("out")
					c, err := b.js.Consumer(b.Context(), streamName, durable)
					if err != nil {
						b.Fatal(err)
					}
					if _, err := c.Next(); err != nil {
						b.Fatal(err)
					}
				}
				release := make(chan struct{})
				defer close(release)
				var done record
				b.publish("poison")
				b.start(func(_ context.Context, d *consumer.Delivery) error {
					if d.Key == "poison" {
						<-release
					}
					done.add(d)
					return nil
				}, consumer.Config{Workers: 3, HandleTimeout: time.Minute, MaxDeliver: 2})
				b.pass(100 * time.Second) // if it comes back, it has by now
				b.publish("k1", "k2", "k3", "k4", "k5")
				b.pass(5 * time.Minute)
				if n := len(done.all()); n != 5 {
					b.Errorf("handled %d, want the 5 others", n)
				}
			})
		})
	}
}

// Messages wait aside for their letters in progress, not on a worker: BR-58. A
// poison message is neither acknowledged nor terminated before its letter is
// stored, and the others go on.
func TestDeadLetterOutageKeepsPoisonAndHoldsUpNobody(t *testing.T) {
	inBubble(t, func(b *bus) {
		const outage = 20 * time.Minute
		up := time.Now().Add(outage)
		dlq := &letters{failFunc: func(string, jetbox.Failure) error {
			if time.Now().Before(up) {
				return errors.New("no stream takes letters")
			}
			return nil
		}}
		b.publish("permanent", "exhausted")
		b.publishN(100)
		var effects record
		var handled atomic.Int64
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			switch d.Key {
			case "permanent":
				return jetbox.Permanent(errHandler)
			case "exhausted":
				handled.Add(1)
				return errHandler
			}
			effects.add(d)
			return nil
		}, consumer.Config{MaxDeliver: 2, DeadLetters: dlq})
		b.pass(outage - time.Second)

		if n := len(effects.all()); n != 100 {
			b.Errorf("effects during the outage = %d, want 100", n)
		}
		if a := append(b.answersLike(1, "+TERM"), b.answersLike(1, "+ACK")...); len(a) != 0 {
			b.Errorf("answers to the permanent one without a letter: %v", a)
		}
		if n := handled.Load(); n != 1 {
			b.Errorf("exhausted one was handled %d times, want 1: its intent is not stored", n)
		}
		if i := b.info(); i.NumAckPending != 2 {
			b.Errorf("unsettled = %d, want both", i.NumAckPending)
		}
		if n := dlq.attempts(); n > 100 {
			b.Errorf("tries = %d, want few: backoff", n)
		}

		b.pass(2 * time.Minute)
		if n := len(dlq.named("park")); n != 2 || handled.Load() != 2 {
			b.Errorf("letters = %d, handled = %d after the outage, want 2 and 2", n, handled.Load())
		}
		b.wantSettled()
	})
}

// With too many messages aside nothing more is pulled, and that is said.
func TestTooManyHeldMessagesPauseTheConsumer(t *testing.T) {
	inBubble(t, func(b *bus) {
		var up atomic.Bool
		dlq := &letters{failFunc: func(string, jetbox.Failure) error {
			if !up.Load() {
				return errors.New("no stream takes letters")
			}
			return nil
		}}
		b.publishN(20)
		b.start(func(context.Context, *consumer.Delivery) error { return jetbox.Permanent(errHandler) },
			consumer.Config{DeadLetters: dlq, MaxHeld: 5})
		b.pass(10 * time.Minute)
		if i := b.info(); i.NumAckPending != 5 || i.NumPending != 15 {
			b.Errorf("in hand = %d, on the stream = %d, want 5 and 15", i.NumAckPending, i.NumPending)
		}
		if len(b.log.containing("ERROR paused")) != 1 {
			b.Errorf("log has %d errors about the pause, want 1", len(b.log.containing("paused")))
		}
		up.Store(true)
		b.pass(10 * time.Minute)
		if len(b.log.containing("INFO goes on")) != 1 {
			b.Errorf("log has %d lines about the end of the pause, want 1", len(b.log.containing("goes on")))
		}
		if n := len(dlq.named("park")); n != 20 {
			b.Errorf("letters after the outage = %d, want 20", n)
		}
		b.wantSettled()
	})
}

// The limit holds although a retry, of a message without a key, went to another
// instance and will never come.
func TestRetryTakenByAnotherInstanceDoesNotLiftTheLimit(t *testing.T) {
	inBubble(t, func(b *bus) {
		dlq := &letters{failFunc: func(string, jetbox.Failure) error { return errors.New("no stream takes letters") }}
		b.publish("retry", "slow")
		b.publishN(40)
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			switch d.Key {
			case "retry":
				return errHandler
			case "slow":
				time.Sleep(5 * time.Second) // no worker is free when the retry is due
				return nil
			}
			return jetbox.Permanent(errHandler)
		}, consumer.Config{Unordered: true, DeadLetters: dlq, MaxHeld: 5, AckWait: 10 * time.Second})
		b.pass(time.Second)
		c, err := b.js.Consumer(b.Context(), streamName, durable)
		if err != nil {
			b.Fatal(err)
		}
		other, err := c.Next(jetstream.FetchMaxWait(3 * time.Second))
		if err != nil {
			b.Fatalf("take the retry: %v", err)
		}
		for range 20 { // somebody works on it
			if err := other.InProgress(); err != nil {
				b.Fatal(err)
			}
			b.pass(5 * time.Second)
		}
		if i := b.info(); i.NumAckPending > 20 {
			b.Errorf("unsettled = %d, want 5, the retry, and one a second for an ack wait", i.NumAckPending)
		}
	})
}

// The effect happened, so an intent that cannot be withdrawn must not keep the
// message; it is said, and left for a person.
func TestIntentThatCannotBeWithdrawnDoesNotKeepTheMessage(t *testing.T) {
	inBubble(t, func(b *bus) {
		dlq := &letters{failFunc: func(step string, _ jetbox.Failure) error {
			if step == "withdraw" {
				return errors.New("no stream takes letters")
			}
			return nil
		}}
		b.publish("k")
		var seen record
		b.start(seen.ok, consumer.Config{MaxDeliver: 1, DeadLetters: dlq})
		b.pass(10 * time.Minute)
		if n := len(b.answersLike(1, "+ACK")); n != 1 || len(seen.all()) != 1 {
			b.Errorf("acks = %d, deliveries = %d, want 1 and 1", n, len(seen.all()))
		}
		if len(b.log.containing("could not be withdrawn")) != 1 {
			b.Error("log does not say that the intent was left behind")
		}
	})
}
