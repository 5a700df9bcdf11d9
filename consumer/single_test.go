package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/seed-5e04d8fb/jetbox/consumer"
)

// instance is one process of a single-active consumer.
type instance struct {
	done record
	nc   *nats.Conn
	stop func() error
}

func (b *bus) startInstance(takes time.Duration, fail func(d *consumer.Delivery) bool, cfg consumer.Config) *instance {
	b.Helper()
	i := &instance{}
	nc, js := b.connect(nats.NoReconnect())
	i.nc = nc
	cfg.SingleActive, cfg.DrainTimeout = true, time.Second
	c, err := consumer.New(js, func(ctx context.Context, d *consumer.Delivery) error {
		time.Sleep(takes)
		if ctx.Err() != nil || fail != nil && fail(d) {
			return errHandler
		}
		i.done.add(d)
		return nil
	}, b.config(cfg))
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	stopped := false
	i.stop = func() (err error) {
		if !stopped {
			stopped = true
			cancel()
			if err = <-done; errors.Is(err, nats.ErrConnectionClosed) {
				err = nil // it was killed
			}
		}
		return err
	}
	b.Cleanup(func() {
		if err := i.stop(); err != nil {
			b.Errorf("Run: %v", err)
		}
	})
	return i
}

// One instance is active, however long its handlers take, and the order of a key
// holds with many workers and two instances.
func TestOneInstanceIsActive(t *testing.T) {
	inBubble(t, func(b *bus) {
		keys := b.publishOf(strings.Repeat("abcdef", 4)) // more keys than workers: some wait on the server
		cfg := consumer.Config{Workers: 4, AckWait: 10 * time.Second}
		first := b.startInstance(90*time.Second, nil, cfg)
		b.pass(time.Second)
		second := b.startInstance(0, nil, cfg)
		b.pass(20 * time.Minute)
		if n := len(second.done.all()); n != 0 {
			b.Errorf("standby handled %d, want none", n)
		}
		for _, a := range []string{"a", "b", "c", "d", "e", "f"} {
			if got := of(a, first.done.keys()); !slices.Equal(got, of(a, keys)) {
				b.Errorf("handled %v, want %v", got, of(a, keys))
			}
		}
		b.wantSettled()
	})
}

// Whether the active instance stops or dies, the order of a key holds across the
// takeover: what was in hand or in backoff comes first.
func TestTakeoverKeepsTheOrderOfEachKey(t *testing.T) {
	for _, dies := range []bool{false, true} {
		t.Run(fmt.Sprintf("dies %v", dies), func(t *testing.T) {
			inBubble(t, func(b *bus) {
				keys := b.publishOf(strings.Repeat("a", 6) + "bcd" + strings.Repeat("b", 6))
				cfg := consumer.Config{Workers: 4, AckWait: 10 * time.Second, Backoff: 15 * time.Second, MaxBackoff: 30 * time.Second}
				// Half of each key is in hand when it ends: a3 waits for its
				// retry, b3 is with a worker.
				first := b.startInstance(200*time.Millisecond, func(d *consumer.Delivery) bool { return d.Key == "a3" }, cfg)
				b.pass(100 * time.Millisecond)
				standby := b.startInstance(0, nil, cfg)
				b.pass(600 * time.Millisecond)
				begin := time.Now()
				if dies {
					first.nc.Close()
				} else if err := first.stop(); err != nil {
					b.Error(err)
				}
				more := b.publishMore("a", 7, 9)
				b.pass(5 * time.Minute)
				all := append(first.done.keys(), standby.done.keys()...)
				for _, a := range []string{"a", "b"} {
					want := of(a, append(slices.Clone(keys), more...))
					if got := inOrder(of(a, all)); !slices.Equal(got, want) {
						b.Errorf("first effects: %v, want %v", got, want)
					}
				}
				if n := len(standby.done.all()); n < 9 {
					b.Errorf("standby handled %d, want the rest", n)
				}
				if wait := standby.done.all()[0].at.Sub(begin); !dies && wait > 20*time.Second || wait > 45*time.Second {
					b.Errorf("standby began after %v, want soon after what was in hand could come back", wait)
				}
				b.wantSettled()
			})
		})
	}
}

// One that takes over gathers what was out also when more arrives meanwhile than
// may wait in hand.
func TestTakeoverWithMoreThanMayWaitGoesOn(t *testing.T) {
	inBubble(t, func(b *bus) {
		keys := b.publishOf(strings.Repeat("a", 60))
		cfg := consumer.Config{AckWait: 30 * time.Second, MaxBehind: 10, Backoff: 30 * time.Second}
		first := b.startInstance(time.Millisecond, func(d *consumer.Delivery) bool { return d.Key == "a1" }, cfg)
		b.pass(10 * time.Second)
		if n := b.info().NumAckPending; n < 10 {
			b.Fatalf("unsettled = %d, want those that wait", n)
		}
		second := b.startInstance(0, nil, cfg)
		first.nc.Close()
		b.pass(10 * time.Minute)
		if got := second.done.keys(); !slices.Equal(got, keys) {
			b.Errorf("handled %d: %v, want all in their order", len(got), got)
		}
		b.wantSettled()
	})
}

// What waits while another instance's messages are gathered is of the same key
// as what came back before it, and as what comes after it: one is handled at a
// time, and a failure holds up the later ones until it comes again.
func TestGatheredMessagesStayOneKey(t *testing.T) {
	inBubble(t, func(b *bus) {
		keys := b.publishOf("aaaaaa")
		cfg := consumer.Config{Workers: 4, AckWait: 10 * time.Second, MaxDeliver: 3, Backoff: 20 * time.Second, MaxBackoff: 30 * time.Second}
		first := b.startInstance(time.Millisecond, func(d *consumer.Delivery) bool { return d.Key == "a1" }, cfg)
		b.pass(time.Second)
		const takes = 100 * time.Millisecond
		failed := map[string]bool{}
		second := b.startInstance(takes, func(d *consumer.Delivery) bool {
			again := failed[d.Key]
			failed[d.Key] = true
			return d.Key == "a7" && !again
		}, cfg)
		first.nc.Close()
		keys = append(keys, b.publishMore("a", 7, 40)...)
		b.pass(10 * time.Minute)
		all := second.done.all()
		if got := second.done.keys(); len(got) != 40 || !slices.Equal(got[6:], keys[6:]) { // the first are on their last two deliveries
			b.Errorf("handled %v, want %v", got, keys)
		}
		for i := 1; i < len(all); i++ {
			if all[i].at.Sub(all[i-1].at) < takes {
				b.Errorf("%s and %s were handled at the same time", all[i-1].key, all[i].key)
			}
		}
		b.wantSettled()
	})
}

// An instance that is not the active one any more, with nobody dead or paused,
// lets go of what no worker has: the other one goes on with it, in order. What
// its own worker has is done before that.
func TestInstanceThatLosesThePinLetsGo(t *testing.T) {
	inBubble(t, func(b *bus) {
		keys := b.publishOf(strings.Repeat("a", 40))
		const takes = 5 * time.Second
		slow := false
		var done record // of both
		cfg := consumer.Config{AckWait: 10 * time.Second, MaxBackoff: 10 * time.Second, Backoff: 10 * time.Second}
		handle := func(d *consumer.Delivery) bool {
			if d.Key == "a1" && d.NumDelivered == 1 {
				return true // the others gather behind it
			}
			if slow {
				time.Sleep(takes)
			}
			done.add(d)
			return false
		}
		first := b.startInstance(time.Millisecond, handle, cfg)
		b.pass(5 * time.Second)
		if n := b.info().NumAckPending; n < 20 {
			b.Fatalf("in hand = %d, want many", n)
		}
		slow = true
		second := b.startInstance(0, handle, cfg)
		b.pass(17 * time.Second) // a3 is with a worker
		s, err := b.js.Stream(b.Context(), streamName)
		if err != nil {
			b.Fatal(err)
		}
		if err := s.UnpinConsumer(b.Context(), durable, "jetbox"); err != nil {
			b.Fatal(err)
		}
		keys = append(keys, b.publishMore("a", 41, 50)...)
		b.pass(20 * time.Minute)
		if got := done.keys(); !slices.Equal(got, keys) {
			b.Errorf("handled %v, want %v", got, keys)
		}
		if f, s := len(first.done.all()), len(second.done.all()); f > 10 || s < 40 {
			b.Errorf("first handled %d, second %d, want the second to go on soon", f, s)
		}
		b.wantSettled()
	})
}

// A broker that starts again knows of no active instance. The one that was it
// keeps what it has in hand and goes on.
func TestActiveInstanceKeepsItsHandWhenTheBrokerRestarts(t *testing.T) {
	inBubble(t, func(b *bus) {
		keys := b.publishOf(strings.Repeat("a", 40))
		var done record
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			if d.Key == "a1" && d.NumDelivered < 3 {
				return errHandler
			}
			done.add(d)
			return nil
		}, consumer.Config{SingleActive: true, Backoff: 15 * time.Second})
		b.pass(5 * time.Second)
		if err := b.srv.Close(); err != nil {
			b.Fatal(err)
		}
		b.pass(3 * time.Second)
		if err := b.srv.Restart(b.Context()); err != nil {
			b.Fatal(err)
		}
		b.pass(10 * time.Minute)
		if got := done.keys(); !slices.Equal(got, keys) {
			b.Errorf("handled %v, want %v", got, keys)
		}
		for _, s := range done.all()[1:] {
			if s.delivered != 1 {
				b.Errorf("%s was delivered %d times, want once", s.key, s.delivered)
			}
		}
		if n := len(b.log.containing("not active any more")); n != 1 {
			b.Errorf("log says %d times that the place was lost, want once", n)
		}
		b.wantSettled()
	})
}

// publishMore goes on with an aggregate of publishOf.
func (b *bus) publishMore(aggregate string, from, to int) (keys []string) {
	b.Helper()
	for i := from; i <= to; i++ {
		key := fmt.Sprintf("%s%d", aggregate, i)
		keys = append(keys, key)
		h := nats.Header{"Idempotency-Key": {key}, "ce-partitionkey": {"t/" + aggregate}}
		b.publishRaw(&nats.Msg{Subject: "events." + aggregate, Header: h})
	}
	return keys
}

// inOrder drops repeats.
func inOrder(keys []string) (first []string) {
	for _, k := range keys {
		if !slices.Contains(first, k) {
			first = append(first, k)
		}
	}
	return first
}

// What waits for the order's sake is not burned by a crash loop: a message that
// ends the process every time is the only one that is lost.
func TestCrashLoopOfASingleActiveConsumerDeadLettersOne(t *testing.T) {
	for _, maxDeliver := range []int{3, 5} {
		t.Run(fmt.Sprint("max deliver ", maxDeliver), func(t *testing.T) {
			inBubble(t, func(b *bus) {
				crashLoop(b, b.publishOf(strings.Repeat("abcde", 10)), "b4", 0, consumer.Config{SingleActive: true, MaxDeliver: maxDeliver})
			})
		})
	}
}

// With nothing in hand, a standby takes over at once after a clean stop.
func TestCleanStopHandsOverToAStandbyAtOnce(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publishOf("a")
		first := b.startInstance(0, nil, consumer.Config{})
		b.pass(time.Second)
		second := b.startInstance(0, nil, consumer.Config{})
		b.pass(time.Second)
		if err := first.stop(); err != nil {
			b.Error(err)
		}
		b.publishOf("bc")
		b.pass(3 * time.Second)
		if got := second.done.keys(); len(got) != 2 {
			b.Errorf("standby handled %v within 3s, want b1 and c1", got)
		}
	})
}

// The promise of SingleActive is the consumer's: one that was not created so
// cannot keep it, and the other way round instances would wait in vain.
func TestSingleActiveMustMatchTheConsumer(t *testing.T) {
	for _, single := range []bool{false, true} {
		t.Run(fmt.Sprintf("single %v", single), func(t *testing.T) {
			inBubble(t, func(b *bus) {
				var seen record
				stop := b.start(seen.ok, consumer.Config{SingleActive: !single})
				b.pass(time.Second)
				if err := stop(); err != nil {
					b.Fatal(err)
				}
				c, err := consumer.New(b.js, seen.ok, b.config(consumer.Config{SingleActive: single}))
				if err != nil {
					b.Fatal(err)
				}
				if err := c.Run(b.Context()); !errors.Is(err, consumer.ErrUnusable) || !strings.Contains(err.Error(), "SingleActive") {
					b.Errorf("Run: %v, want ErrUnusable about SingleActive", err)
				}
			})
		})
	}
}
