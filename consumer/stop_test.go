package consumer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// BR-48: a stop in the middle costs nothing. What no handler saw is not counted
// as tried, what was handled does not come back, and the next instance starts
// at once, not after an ack wait.
func TestShutdownHandsOverAtOnce(t *testing.T) {
	inBubble(t, func(b *bus) {
		const messages, workers = 1000, 4
		b.publishN(messages)
		var first, second record
		work := func(r *record) consumer.Handler {
			return func(_ context.Context, d *consumer.Delivery) error {
				time.Sleep(100 * time.Millisecond)
				r.add(d)
				return nil
			}
		}
		stop := b.start(work(&first), consumer.Config{Workers: workers})
		b.pass(5*time.Second + 50*time.Millisecond)
		begin := time.Now()
		if err := stop(); err != nil {
			b.Fatalf("Run: %v", err)
		}
		if took := time.Since(begin); took > time.Second {
			b.Errorf("shutdown took %v, want the time of one handler", took)
		}
		if i := b.info(); i.NumAckPending != 0 {
			b.Errorf("unsettled after the stop = %d, want 0", i.NumAckPending)
		}
		begin = time.Now()
		b.start(work(&second), consumer.Config{Workers: workers})
		b.pass(time.Minute)

		if len(second.all()) == 0 {
			b.Fatal("second instance got nothing")
		}
		if wait := second.all()[0].at.Sub(begin); wait > 2*time.Second {
			b.Errorf("second instance handled its first message after %v, want at most 2s", wait)
		}
		again := 0
		times := map[string]int{}
		for _, s := range append(first.all(), second.all()...) {
			times[s.key]++
			if s.delivered > 1 {
				again++
			}
		}
		if len(times) != messages || len(first.all())+len(second.all()) != messages || again > workers {
			b.Errorf("handled %d different messages in %d calls, %d redelivered, want %d, %d and at most %d",
				len(times), len(first.all())+len(second.all()), again, messages, messages, workers)
		}
		b.wantSettled()
	})
}

// Handlers that take longer than DrainTimeout are told to stop, and why.
func TestDrainTimeoutCancelsHandlers(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publish("k")
		var cause error
		stop := b.start(func(ctx context.Context, _ *consumer.Delivery) error {
			<-ctx.Done()
			cause = context.Cause(ctx)
			return ctx.Err()
		}, consumer.Config{DrainTimeout: 7 * time.Second})
		b.pass(time.Second)
		begin := time.Now()
		if err := stop(); err != nil {
			b.Errorf("Run: %v", err)
		}
		if took := time.Since(begin); took != 7*time.Second || !errors.Is(cause, consumer.ErrStopping) {
			b.Errorf("stopped after %v with cause %v, want 7s and ErrStopping", took, cause)
		}
		if naks := b.answersLike(1, "-NAK"); len(naks) != 1 {
			b.Errorf("naks = %v, want one", naks)
		}
	})
}

// What comes of a last delivery after DrainTimeout still reaches its letter.
func TestLettersAreSettledAfterTheDrainTimeout(t *testing.T) {
	for _, succeeds := range []bool{true, false} {
		t.Run(fmt.Sprintf("succeeds %v", succeeds), func(t *testing.T) {
			inBubble(t, func(b *bus) {
				b.publish("k")
				dlq := &letters{}
				stop := b.start(func(ctx context.Context, _ *consumer.Delivery) error {
					<-ctx.Done()
					if succeeds {
						return nil // it had just finished
					}
					return ctx.Err()
				}, consumer.Config{MaxDeliver: 1, DeadLetters: dlq})
				b.pass(time.Second)
				if err := stop(); err != nil {
					b.Error(err)
				}
				want := []string{"intend", "park"}
				if succeeds {
					want[1] = "withdraw"
				}
				if got := dlq.names(); !slices.Equal(got, want) {
					b.Errorf("letters: %v, want %v", got, want)
				}
				b.wantSettled()
			})
		})
	}
}

// An idle consumer stops at once, and its open request takes no message along.
func TestIdleConsumerStopsAtOnce(t *testing.T) {
	inBubble(t, func(b *bus) {
		var seen record
		stop := b.start(seen.ok, consumer.Config{Workers: 10})
		b.pass(time.Minute)
		begin := time.Now()
		if err := stop(); err != nil || time.Since(begin) > 10*time.Millisecond {
			b.Errorf("stop of an idle consumer: %v after %v, want nil at once", err, time.Since(begin))
		}
		b.publish("k")
		b.pass(time.Minute)
		if i := b.info(); i.NumAckPending != 0 || i.NumPending != 1 {
			b.Errorf("unsettled = %d, undelivered = %d, want 0 and 1", i.NumAckPending, i.NumPending)
		}
		b.start(seen.ok, consumer.Config{})
		b.pass(time.Second)
		if s := seen.all(); len(s) != 1 || s[0].delivered != 1 {
			b.Errorf("deliveries = %+v, want one first delivery", s)
		}
	})
}

// holdBox hands out a connection whose incoming data it can hold up, and of which
// it can lose a write.
type holdBox struct {
	*embedded.Server

	mu   sync.Mutex
	held chan struct{} // guarded by mu; nil when data flows
	drop string        // guarded by mu; the next write with this text is lost
}

type heldConn struct {
	net.Conn

	box *holdBox
}

func (h *holdBox) InProcessConn() (net.Conn, error) {
	c, err := h.Server.InProcessConn()
	return &heldConn{c, h}, err
}

func (c *heldConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.box.mu.Lock()
	held := c.box.held
	c.box.mu.Unlock()
	if held != nil {
		<-held
	}
	return n, err
}

func (c *heldConn) Write(p []byte) (int, error) {
	c.box.mu.Lock()
	lost := c.box.drop != "" && bytes.Contains(p, []byte(c.box.drop))
	if lost {
		c.box.drop = ""
	}
	c.box.mu.Unlock()
	if lost {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// connect returns a connection through the box.
func (h *holdBox) connect(b *bus) jetstream.JetStream {
	b.Helper()
	nc, err := nats.Connect("", nats.InProcessServer(h), nats.MaxReconnects(-1))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		b.Fatal(err)
	}
	return js
}

// hold keeps what arrives from now on until release is called.
func (h *holdBox) hold() (release func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held = make(chan struct{})
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		close(h.held)
		h.held = nil
	}
}

// A message that is on its way when Run stops goes back at once: the next
// instance does not wait for it, and no ack wait runs out.
func TestMessageOnItsWayAtTheStopIsHandedBack(t *testing.T) {
	inBubble(t, func(b *bus) {
		box := &holdBox{Server: b.srv}
		js := box.connect(b)
		var first, second record
		stop := b.startOn(js, first.ok, consumer.Config{})
		b.pass(time.Second)
		release := box.hold()
		b.publish("k")
		b.pass(time.Millisecond)
		time.AfterFunc(time.Second, release)
		if err := stop(); err != nil {
			b.Errorf("Run: %v", err)
		}
		b.start(second.ok, consumer.Config{})
		b.pass(time.Second)
		if len(first.all()) != 0 || len(second.all()) != 1 {
			b.Errorf("handled by the first = %d, by the second at once = %d, want 0 and 1", len(first.all()), len(second.all()))
		}
		if naks := b.answersLike(1, "-NAK"); len(naks) != 1 || naks[0].text != "-NAK" {
			b.Errorf("naks = %v, want one without a delay", naks)
		}
		b.wantSettled()
	})
}

// A message on its last delivery is not handed back, which would end it: it is
// handled before Run returns.
func TestLastDeliveryOnItsWayAtTheStopIsHandled(t *testing.T) {
	inBubble(t, func(b *bus) {
		box := &holdBox{Server: b.srv}
		js := box.connect(b)
		var seen record
		dlq := &letters{}
		stop := b.startOn(js, seen.ok, consumer.Config{MaxDeliver: 1, DeadLetters: dlq})
		b.pass(time.Second)
		release := box.hold()
		b.publish("k")
		b.pass(time.Millisecond)
		time.AfterFunc(time.Second, release)
		if err := stop(); err != nil {
			b.Errorf("Run: %v", err)
		}
		if len(seen.all()) != 1 {
			b.Errorf("handled %d times, want once", len(seen.all()))
		}
		if got := dlq.names(); !slices.Equal(got, []string{"intend", "withdraw"}) {
			b.Errorf("letters: %v, want intend, withdraw", got)
		}
		b.wantSettled()
	})
}

// Run returns only when the broker has confirmed what it was told, so that the
// program may exit and take the connection along.
func TestRunReturnsOnlyWhenTheBrokerHasTheAcks(t *testing.T) {
	inBubble(t, func(b *bus) {
		box := &holdBox{Server: b.srv}
		b.publish("k")
		stop := b.startOn(box.connect(b), func(context.Context, *consumer.Delivery) error {
			time.Sleep(3 * time.Second)
			return nil
		}, consumer.Config{})
		b.pass(time.Second)
		begin := time.Now()
		time.AfterFunc(time.Second, func() {
			release := box.hold() // no confirmation comes through
			time.AfterFunc(3*time.Second, release)
		})
		if err := stop(); err != nil {
			b.Errorf("Run: %v", err)
		}
		if took := time.Since(begin); took != 4*time.Second {
			b.Errorf("Run returned after %v, want 4s: the handler's 2s, and until the broker confirmed", took)
		}
		if n := len(b.answersLike(1, "+ACK")); n != 1 {
			b.Errorf("acks = %d, want 1", n)
		}
	})
}
