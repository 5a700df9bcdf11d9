package consumer_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
)

// What is in hand follows the handler: with a slow one no more than the workers
// have, with a quick one what they can start on soon, and never everything.
func TestPullsAheadOnlyForQuickHandlers(t *testing.T) {
	tests := []struct {
		takes       time.Duration
		least, most int
	}{
		{time.Second, 4, 4},
		{10 * time.Millisecond, 8, 24},
		{time.Millisecond, 20, 204},
	}
	for _, tt := range tests {
		t.Run(tt.takes.String(), func(t *testing.T) {
			inBubble(t, func(b *bus) {
				const messages = 700
				b.publishN(messages)
				var handled atomic.Int64
				stop := b.start(func(context.Context, *consumer.Delivery) error {
					time.Sleep(tt.takes)
					handled.Add(1)
					return nil
				}, consumer.Config{Workers: 4})
				b.pass(100 * tt.takes)
				most := 0
				for range 40 {
					b.pass(tt.takes + tt.takes/7)
					most = max(most, b.info().NumAckPending)
				}
				if most < tt.least || most > tt.most {
					b.Errorf("in hand = %d at most, want %d to %d", most, tt.least, tt.most)
				}
				// No worker ever waited: that is what it is for.
				if n := handled.Load(); n < 4*130 {
					b.Errorf("handled %d in the time of %d, want the workers to be busy", n, 4*145)
				}
				if err := stop(); err != nil {
					b.Error(err)
				}
			})
		})
	}
}

// Everything in hand is kept alive, what waits for a worker too: a queue of
// quick messages behind one that takes very long is delivered once.
func TestQueuedMessagesAreKeptAlive(t *testing.T) {
	inBubble(t, func(b *bus) {
		const messages = 600
		b.publishN(messages)
		var seen record
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			seen.add(d)
			if d.StreamSeq == 400 {
				time.Sleep(4 * time.Minute)
			}
			time.Sleep(100 * time.Microsecond)
			return nil
		}, consumer.Config{AckWait: 5 * time.Second})
		b.pass(time.Minute)
		if i := b.info(); i.NumAckPending < 50 || i.NumRedelivered > 0 {
			b.Errorf("in hand = %d, redelivered = %d, want a queue and none", i.NumAckPending, i.NumRedelivered)
		}
		b.pass(10 * time.Minute)
		if n := len(seen.all()); n != messages {
			b.Errorf("deliveries = %d, want %d", n, messages)
		}
		b.wantSettled()
	})
}

// Three instances with messages of a second each are restarted one after the
// other, twice: each stop costs a redelivery per worker at most.
func TestRollingRestartRedeliversLittle(t *testing.T) {
	inBubble(t, func(b *bus) {
		const messages, workers, stops = 2000, 8, 6
		b.publishN(messages)
		var done record
		start := func() (stop func() error) {
			_, js := b.connect()
			return b.startOn(js, func(_ context.Context, d *consumer.Delivery) error {
				time.Sleep(time.Second)
				done.add(d)
				return nil
			}, consumer.Config{Workers: workers})
		}
		var running []func() error
		for range 3 {
			running = append(running, start())
		}
		for i := range stops {
			b.pass(9*time.Second + 700*time.Millisecond)
			if err := running[i%3](); err != nil {
				b.Error(err)
			}
			running[i%3] = start()
		}
		b.pass(5 * time.Minute)
		again := 0
		for _, s := range done.all() {
			if s.delivered > 1 {
				again++
			}
		}
		if n := len(done.all()); n != messages || again > workers*stops {
			b.Errorf("handled %d, %d of them redelivered, want %d and at most %d", n, again, messages, workers*stops)
		}
		if last := done.all()[messages-1].at; time.Since(last) < 2*time.Minute {
			b.Errorf("done %v before the end, want soon after the restarts", time.Since(last))
		}
		b.wantSettled()
	})
}

// A message that ends the process costs the one instance that is left no more
// than that, when it comes to it next: nothing else is in hand then.
func TestIdleInstanceTakesWhatAnotherLeftOneAtATime(t *testing.T) {
	inBubble(t, func(b *bus) {
		nc, js := b.connect()
		c, err := consumer.New(js, func(ctx context.Context, _ *consumer.Delivery) error {
			<-ctx.Done()
			return ctx.Err()
		}, b.config(consumer.Config{Workers: 10, DrainTimeout: time.Second, AckWait: 5 * time.Second, HandleTimeout: time.Hour}))
		if err != nil {
			b.Fatal(err)
		}
		died := make(chan error, 1)
		go func() { died <- c.Run(b.Context()) }()
		b.publishN(10)
		b.pass(time.Second)
		var mu sync.Mutex
		now, most := 0, 0
		b.start(func(context.Context, *consumer.Delivery) error {
			mu.Lock()
			now++
			most = max(most, now)
			mu.Unlock()
			time.Sleep(100 * time.Millisecond)
			mu.Lock()
			now--
			mu.Unlock()
			return nil
		}, consumer.Config{Workers: 10})
		b.pass(10*time.Minute + time.Second) // the slow start is over
		b.publish("u", "v", "w", "x", "y")
		b.pass(time.Second)
		nc.Close()
		if err := <-died; err == nil {
			b.Error("Run of the dead one = nil, want an error")
		}
		mu.Lock()
		most = 0
		mu.Unlock()
		b.pass(5 * time.Minute)
		mu.Lock()
		defer mu.Unlock()
		if most != 1 {
			b.Errorf("at the same time in hand = %d, want 1", most)
		}
		b.wantSettled()
	})
}

// The handler of a message may be quick, and many may be pulled ahead: a crash
// loop is survived by all but the one all the same.
func TestCrashLoopOfQuickHandlersDeadLettersOne(t *testing.T) {
	for _, at := range []string{"k030", "k049"} {
		t.Run(fmt.Sprint("crash on ", at), func(t *testing.T) {
			inBubble(t, func(b *bus) { crashLoop(b, b.publishN(50), at, 0, consumer.Config{MaxDeliver: 3}) })
		})
	}
}

// BR-44: an outage longer than the ack wait, with much in hand. The server
// delivers all of it again, and none of it is handled twice: what is at work, in
// the queue, behind another of its key or waits for its letter.
func TestOutageWithAFullHandRepeatsNothing(t *testing.T) {
	inBubble(t, func(b *bus) {
		up := time.Now().Add(5 * time.Minute)
		dlq := &letters{failFunc: func(string, jetbox.Failure) error {
			if time.Now().Before(up) {
				return errHandler
			}
			return nil
		}}
		keys := b.publishN(200)
		keys = append(keys, b.publishOf(strings.Repeat("ab", 50))...)
		b.publish("last")
		var done record
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			switch d.Key {
			case "a1":
				time.Sleep(3 * time.Minute)
			case "last":
				return jetbox.Permanent(errHandler)
			case "k150":
				time.Sleep(2 * time.Minute)
			}
			time.Sleep(100 * time.Microsecond)
			done.add(d)
			return nil
		}, consumer.Config{Workers: 2, AckWait: 10 * time.Second, DeadLetters: dlq})
		b.pass(20 * time.Second)
		if i := b.info(); i.NumAckPending < 100 {
			b.Fatalf("in hand = %d, want many", i.NumAckPending)
		}
		if err := b.srv.Close(); err != nil {
			b.Fatal(err)
		}
		b.pass(50 * time.Second)
		if err := b.srv.Restart(b.Context()); err != nil {
			b.Fatal(err)
		}
		b.pass(20 * time.Minute)
		if i := b.info(); i.NumAckPending != 0 {
			b.Errorf("unsettled = %d, want none", i.NumAckPending)
		}
		got := done.keys()
		if len(got) != len(keys) || len(inOrder(got)) != len(keys) {
			b.Errorf("handled %d, %d different, want %d", len(got), len(inOrder(got)), len(keys))
		}
		if n := len(dlq.named("park")); n != 1 {
			b.Errorf("letters = %d, want 1", n)
		}
	})
}
