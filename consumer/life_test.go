package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
)

type consumerConfig = jetstream.ConsumerConfig

// createConsumer makes the durable before the product does.
func (b *bus) createConsumer(adjust func(*consumerConfig)) {
	b.Helper()
	cfg := consumerConfig{Durable: durable, AckPolicy: jetstream.AckExplicitPolicy, MaxDeliver: 5}
	adjust(&cfg)
	if _, err := b.js.CreateConsumer(b.Context(), streamName, cfg); err != nil {
		b.Fatal(err)
	}
}

// BR-44: the broker goes away in the middle of handlers, many times. The
// process lives, consumption resumes, and nothing is lost.
func TestConsumptionResumesAfterBrokerRestarts(t *testing.T) {
	inBubble(t, func(b *bus) {
		var handled record
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			time.Sleep(10 * time.Second)
			handled.add(d)
			return nil
		}, consumer.Config{Workers: 2})
		want := map[string]bool{}
		for round := range 5 {
			for i := range 4 {
				key := fmt.Sprintf("r%d-%d", round, i)
				want[key] = true
				b.publish(key)
			}
			time.Sleep(5 * time.Second)
			if err := b.srv.Close(); err != nil {
				b.Fatal(err)
			}
			time.Sleep(20 * time.Second)
			if err := b.srv.Restart(b.Context()); err != nil {
				b.Fatal(err)
			}
			time.Sleep(2 * time.Second) // until our own connection is back
			key := fmt.Sprintf("r%d-after", round)
			want[key] = true
			b.publish(key)
			time.Sleep(30 * time.Second)
			if len(handled.of(key)) == 0 {
				b.Errorf("round %d: nothing new handled within 30s of the restart", round)
			}
		}
		b.pass(2 * time.Minute)
		for _, k := range handled.keys() {
			delete(want, k)
		}
		if len(want) > 0 {
			b.Errorf("never handled: %v", want)
		}
		b.wantSettled()
	})
}

// A request for messages that gets lost on its way is noticed by the missing
// heartbeats; one that died with a connection at once.
func TestLostPullIsRenewed(t *testing.T) {
	inBubble(t, func(b *bus) {
		box := &holdBox{Server: b.srv}
		var seen record
		b.startOn(box.connect(b), seen.ok, consumer.Config{})
		b.pass(time.Second)

		box.mu.Lock()
		box.drop = "CONSUMER.MSG.NEXT"
		box.mu.Unlock()
		b.publish("a") // ends the open request; the next one gets lost
		b.pass(time.Second)
		b.publish("b")
		b.pass(20 * time.Second)
		if len(seen.of("b")) != 1 {
			b.Errorf("handled %v within 20s of a lost request, want b too", seen.keys())
		}

		if err := b.srv.Close(); err != nil {
			b.Fatal(err)
		}
		b.pass(time.Second)
		if err := b.srv.Restart(b.Context()); err != nil {
			b.Fatal(err)
		}
		b.pass(3 * time.Second) // the client's reconnect wait is 2s
		b.publish("c")
		b.pass(time.Second)
		if len(seen.of("c")) != 1 {
			b.Errorf("handled %v within a second of the reconnect, want c too", seen.keys())
		}
	})
}

func TestClosedConnectionEndsRunWithAnError(t *testing.T) {
	inBubble(t, func(b *bus) {
		nc, js := b.connect()
		c, err := consumer.New(js, (&record{}).ok, b.config(consumer.Config{}))
		if err != nil {
			b.Fatal(err)
		}
		time.AfterFunc(time.Minute, nc.Close)
		if err := c.Run(b.Context()); !errors.Is(err, nats.ErrConnectionClosed) {
			b.Errorf("Run: %v, want ErrConnectionClosed", err)
		}
	})
}

// BR-45: the consumer is deleted while idle and while busy. It is created again
// and starts at the first message; nothing is missed.
func TestDeletedConsumerIsCreatedAgain(t *testing.T) {
	for _, busy := range []bool{false, true} {
		t.Run(fmt.Sprintf("busy %v", busy), func(t *testing.T) {
			inBubble(t, func(b *bus) {
				b.publish("a", "b")
				var seen record
				b.start(func(_ context.Context, d *consumer.Delivery) error {
					if busy {
						time.Sleep(10 * time.Second)
					}
					seen.add(d)
					return nil
				}, consumer.Config{MaxDeliver: 7})
				b.pass(5 * time.Second)
				if err := b.js.DeleteConsumer(b.Context(), streamName, durable); err != nil {
					b.Fatal(err)
				}
				b.pass(time.Second)
				b.publish("c")
				b.pass(time.Minute)
				if len(seen.of("c")) != 1 {
					b.Errorf("handled %v, want c once", seen.keys())
				}
				if i := b.info(); i.Config.MaxDeliver != 7 {
					b.Errorf("MaxDeliver of the new consumer = %d, want 7", i.Config.MaxDeliver)
				}
				if len(b.log.containing("WARN consumer was deleted")) != 1 {
					b.Errorf("log does not say once that the consumer was deleted")
				}
				b.wantSettled()
			})
		})
	}
}

// BR-45: a stream that is gone for good ends Run with an error that says so; one
// that is created again is consumed from its start.
func TestDeletedStreamEndsRunUnlessItComesBack(t *testing.T) {
	for _, back := range []bool{false, true} {
		t.Run(fmt.Sprintf("back %v", back), func(t *testing.T) {
			inBubble(t, func(b *bus) {
				b.publish("a")
				var seen record
				c, err := consumer.New(b.js, seen.ok, b.config(consumer.Config{}))
				if err != nil {
					b.Fatal(err)
				}
				ctx, cancel := context.WithCancel(b.Context())
				done := make(chan error, 1)
				go func() { done <- c.Run(ctx) }()
				b.pass(time.Second)
				if err := b.js.DeleteStream(b.Context(), streamName); err != nil {
					b.Fatal(err)
				}
				begin := time.Now()
				if !back {
					err := <-done
					if took := time.Since(begin); !errors.Is(err, jetstream.ErrStreamNotFound) || took > 45*time.Second {
						b.Errorf("Run: %v after %v, want ErrStreamNotFound within 45s", err, took)
					}
					cancel()
					return
				}
				b.pass(10 * time.Second)
				if _, err := b.js.CreateStream(b.Context(), jetstream.StreamConfig{Name: streamName, Subjects: []string{"events.>"}}); err != nil {
					b.Fatal(err)
				}
				b.publish("b")
				b.pass(20 * time.Second)
				if len(seen.of("b")) != 1 {
					b.Errorf("handled %v, want b", seen.keys())
				}
				cancel()
				if err := <-done; err != nil {
					b.Errorf("Run: %v", err)
				}
			})
		})
	}
}

// BR-43: an existing consumer is used as it is, the differences are logged, and
// its own MaxDeliver decides which delivery is the last.
func TestExistingConsumerKeepsItsSettings(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.createConsumer(func(c *consumerConfig) { c.MaxDeliver, c.AckWait = 3, 45*time.Second })
		b.publish("k")
		dlq := &letters{}
		var seen record
		b.start(func(_ context.Context, d *consumer.Delivery) error { seen.add(d); return errHandler },
			consumer.Config{MaxDeliver: 5, AckWait: 10 * time.Second, DeadLetters: dlq})
		b.pass(time.Hour)
		if i := b.info(); i.Config.MaxDeliver != 3 || i.Config.AckWait != 45*time.Second {
			b.Errorf("MaxDeliver, AckWait = %d, %v, want them untouched", i.Config.MaxDeliver, i.Config.AckWait)
		}
		if len(seen.all()) != 3 || len(dlq.named("park")) != 1 {
			b.Errorf("deliveries = %d, letters = %d, want 3 and 1", len(seen.all()), len(dlq.named("park")))
		}
		lines := b.log.containing("differs")
		if len(lines) != 1 || !strings.Contains(lines[0], "MaxDeliver is 3, configured 5; AckWait is 45s, configured 10s") {
			b.Errorf("log = %q, want one line with both differences", lines)
		}
	})
}

func TestUnusableConsumerIsRefused(t *testing.T) {
	tests := []struct {
		name   string
		adjust func(*consumerConfig)
		want   string
	}{
		{"no acks", func(c *consumerConfig) { c.AckPolicy = jetstream.AckNonePolicy; c.MaxDeliver = 0 }, "ack policy"},
		{"priority groups", func(c *consumerConfig) {
			c.PriorityPolicy, c.PriorityGroups = jetstream.PriorityPolicyOverflow, []string{"g"}
		}, "priority groups"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(b *bus) {
				b.createConsumer(tt.adjust)
				c, err := consumer.New(b.js, (&record{}).ok, b.config(consumer.Config{}))
				if err != nil {
					b.Fatal(err)
				}
				err = c.Run(b.Context())
				if !errors.Is(err, consumer.ErrUnusable) || !strings.Contains(err.Error(), tt.want) {
					b.Errorf("Run: %v, want ErrUnusable about %s", err, tt.want)
				}
			})
		})
	}
}

func TestSecondRunIsRefusedWhileTheFirstRuns(t *testing.T) {
	inBubble(t, func(b *bus) {
		c, err := consumer.New(b.js, (&record{}).ok, b.config(consumer.Config{}))
		if err != nil {
			b.Fatal(err)
		}
		ctx, cancel := context.WithCancel(b.Context())
		done := make(chan error, 1)
		go func() { done <- c.Run(ctx) }()
		synctest.Wait()
		if err := c.Run(ctx); !errors.Is(err, consumer.ErrRunning) {
			b.Errorf("second Run: %v, want ErrRunning", err)
		}
		cancel()
		if err := <-done; err != nil {
			b.Errorf("first Run: %v", err)
		}
	})
}

// A crash loop must not take healthy messages along: one message ends the
// process each time, nine others are in hand with it, three deliveries are
// allowed, a supervisor starts the process again. Only the one is lost to the
// dead letters.
func TestCrashLoopDeadLettersOnlyTheMessageThatCrashes(t *testing.T) {
	inBubble(t, func(b *bus) {
		crashLoop(b, b.publishN(50), "k004", 100*time.Millisecond, consumer.Config{MaxDeliver: 3})
	})
}

// crashLoop has a handler that takes a while end its process on one of the
// messages, and checks that exactly that one is lost to the dead letters.
func crashLoop(b *bus, keys []string, poison string, takes time.Duration, cfg consumer.Config) {
	b.Helper()
	messages := len(keys)
	var handled record
	dlq := &letters{}
	cfg.Workers, cfg.DeadLetters, cfg.DrainTimeout = 10, dlq, time.Second
	crashes := 0
	for process := 0; ; process++ {
		nc, js := b.connect(nats.NoReconnect())
		var crashed atomic.Bool
		c, err := consumer.New(js, func(_ context.Context, d *consumer.Delivery) error {
			if d.Key == poison && !crashed.Swap(true) {
				crashes++
				nc.Close() // the end of the process, for the broker
			}
			time.Sleep(takes)
			if crashed.Load() {
				return errHandler // nobody hears this
			}
			handled.add(d)
			return nil
		}, b.config(cfg))
		if err != nil {
			b.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(b.Context(), 10*time.Minute)
		err = c.Run(ctx)
		cancel()
		nc.Close()
		if !crashed.Load() {
			if err != nil {
				b.Errorf("Run: %v", err)
			}
			break
		}
		if process > 10 {
			b.Fatal("the process crashes for ever")
		}
	}
	if crashes != cfg.MaxDeliver {
		b.Errorf("crashes = %d, want one for each delivery", crashes)
	}
	if n := len(handled.all()); n < messages-1 {
		b.Errorf("handled = %d, want at least %d", n, messages-1)
	}
	unique := map[string]bool{}
	for _, k := range handled.keys() {
		unique[k] = true
	}
	if len(unique) != messages-1 || unique[poison] {
		b.Errorf("different messages handled = %d, want all but the one", len(unique))
	}
	var left []string
	for _, s := range dlq.named("intend") {
		left = append(left, s.f.Header[jetbox.HeaderIdempotencyKey][0])
	}
	withdrawn := len(dlq.named("withdraw"))
	if len(left)-withdrawn != 1 || !strings.Contains(strings.Join(left, " "), poison) {
		b.Errorf("intents = %v, %d withdrawn, want only %s's to be left", left, withdrawn, poison)
	}
}
