package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
)

// publishOf stores events of aggregates, one for each letter of a text such as
// "aab": the events are then named a1, a2 and b1.
func (b *bus) publishOf(aggregates string) (keys []string) {
	b.Helper()
	count := map[rune]int64{}
	for _, a := range aggregates {
		count[a]++
		seq := count[a]
		key := fmt.Sprintf("%c%d", a, seq)
		keys = append(keys, key)
		ev := jetbox.Event{
			Key: key, Subject: "events." + string(a), AggregateType: "t", AggregateID: string(a), AggregateSeq: &seq,
		}.WithDefaults(time.Now())
		b.publishRaw(&nats.Msg{Subject: ev.Subject, Header: ev.Header("test")})
	}
	return keys
}

// of returns the keys that belong to an aggregate of publishOf.
func of(aggregate string, keys []string) []string {
	return slices.DeleteFunc(slices.Clone(keys), func(k string) bool { return !strings.HasPrefix(k, aggregate) })
}

// A message that is retried holds up the later ones of its key, with no sign but
// in-progress, and nobody else.
func TestRetryHoldsUpItsKeyOnly(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publishOf("aababca")
		var done, tried record
		start := time.Now()
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			tried.add(d)
			if d.Key == "a1" && d.NumDelivered < 4 {
				return errHandler
			}
			done.add(d)
			return nil
		}, consumer.Config{Workers: 4, AckWait: 3 * time.Second})
		b.pass(500 * time.Millisecond)
		if got := done.keys(); len(got) != 3 || !slices.Equal(of("b", got), []string{"b1", "b2"}) || !slices.Contains(got, "c1") {
			b.Errorf("handled beside the retry: %v, want b1, b2 and c1", got)
		}
		b.pass(time.Minute)
		if got := of("a", done.keys()); !slices.Equal(got, []string{"a1", "a2", "a3", "a4"}) {
			b.Errorf("handled %v, want the stream's order", got)
		}
		if s := done.of("a2"); len(s) != 1 || s[0].at.Sub(start) < 6*time.Second {
			b.Errorf("a2 handled %+v, want once, after the retries of a1", s)
		}
		if n := len(tried.of("a2")) + len(tried.of("a3")) + len(tried.of("a4")); n != 3 {
			b.Errorf("tries of the later ones = %d, want one of each", n)
		}
		answers := b.answersLike(2, "")
		if last := answers[len(answers)-1]; last.text != "+ACK" || len(b.answersLike(2, "+WPI")) != len(answers)-1 || len(answers) < 6 {
			b.Errorf("answers to a2 = %v, want in-progress all the time, and one ack", answers)
		}
		b.wantSettled()
	})
}

// Whatever workers and retries do, the effects of a key follow the stream.
func TestManyWorkersKeepTheOrderOfEachKey(t *testing.T) {
	for _, unordered := range []bool{false, true} {
		t.Run(fmt.Sprintf("unordered %v", unordered), func(t *testing.T) {
			inBubble(t, func(b *bus) {
				rnd := rand.New(rand.NewPCG(1, 2))
				var aggregates strings.Builder
				for range 400 {
					aggregates.WriteByte(byte('a' + rnd.IntN(8)))
				}
				keys := b.publishOf(aggregates.String())
				var mu sync.Mutex
				var done record
				b.start(func(_ context.Context, d *consumer.Delivery) error {
					mu.Lock()
					fail, takes := rnd.IntN(5) == 0, time.Duration(rnd.IntN(100))*time.Millisecond
					mu.Unlock()
					time.Sleep(takes)
					if fail {
						return errHandler
					}
					done.add(d)
					return nil
				}, consumer.Config{Workers: 8, MaxDeliver: 50, MaxBackoff: 2 * time.Second, Unordered: unordered})
				b.pass(10 * time.Minute)
				ordered := true
				for a := byte('a'); a < 'i'; a++ {
					ordered = ordered && slices.Equal(of(string(a), done.keys()), of(string(a), keys))
				}
				if ordered == unordered || len(done.all()) != len(keys) {
					b.Errorf("handled %d in the order of each key: %v, want %d and %v", len(done.all()), ordered, len(keys), !unordered)
				}
				b.wantSettled()
			})
		})
	}
}

// 2,000 messages behind one failing key take nothing from the others: neither
// the room of MaxAckPending nor, for themselves, deliveries. What the key fails
// with is parked, then it goes on in its order.
func TestManyMessagesBehindAFailingKeyHoldUpNobody(t *testing.T) {
	inBubble(t, func(b *bus) {
		const many = 2000
		var done record
		var tries atomic.Int64
		dlq := &letters{}
		keys := b.publishOf("a" + strings.Repeat("a", many) + strings.Repeat("b", 50))
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			if d.Key == "a1" {
				tries.Add(1)
				return errHandler
			}
			if d.NumDelivered > 1 {
				b.Errorf("%s is delivered %d times, want once", d.Key, d.NumDelivered)
			}
			done.add(d)
			return nil
		}, consumer.Config{Workers: 4, MaxDeliver: 4, Backoff: 20 * time.Second, DeadLetters: dlq})
		b.pass(time.Second)
		b.publishOf(strings.Repeat("c", 50))
		b.pass(time.Second)
		if got := done.keys(); len(got) != 100 || len(of("a", got)) != 0 {
			b.Errorf("handled beside %d messages that wait = %d, %d of the failing key, want 100 and 0", many, len(got), len(of("a", got)))
		}
		if i := b.info(); i.NumAckPending != many+1 {
			b.Errorf("unsettled = %d, want those that wait and what they wait for: %d", i.NumAckPending, many+1)
		}
		b.pass(5 * time.Minute)
		if got := of("a", done.keys()); !slices.Equal(got, of("a", keys)[1:]) {
			b.Errorf("handled %d of the key after its letter, want %d in the stream's order", len(got), many)
		}
		if n := len(dlq.named("park")); n != 1 || tries.Load() != 4 {
			b.Errorf("letters = %d after %d tries, want 1 after 4", n, tries.Load())
		}
		b.wantSettled()
	})
}

// With too many behind, the consumer takes nothing new, says so, and goes on
// when what they wait for is settled: its next delivery comes all the same.
func TestTooManyBehindAKeyPauseTheConsumer(t *testing.T) {
	tests := map[string]consumer.Config{
		"of one key":    {MaxBehindKey: 20},
		"of all keys":   {MaxBehind: 20},
		"MaxAckPending": {},
	}
	for name, cfg := range tests {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(b *bus) {
				if name == "MaxAckPending" {
					b.createConsumer(func(c *consumerConfig) { c.MaxAckPending = 40 })
				}
				var done record
				b.publishOf(strings.Repeat("a", 100) + "b")
				cfg.MaxBackoff, cfg.Backoff = 20*time.Second, 20*time.Second
				b.start(func(_ context.Context, d *consumer.Delivery) error {
					if d.Key == "a1" && d.NumDelivered < 3 {
						time.Sleep(30 * time.Millisecond) // not so fast that much is pulled ahead
						return errHandler
					}
					done.add(d)
					return nil
				}, cfg)
				b.pass(30 * time.Second)
				if i := b.info(); len(done.all()) != 0 || i.NumAckPending < 20 || i.NumAckPending > 25 {
					b.Errorf("handled %v, in hand = %d, want none, and 20 and a few", done.keys(), i.NumAckPending)
				}
				if n := len(b.log.containing("ERROR paused: too many messages wait behind")); n != 1 {
					b.Errorf("log has %d errors about the pause, want 1", n)
				}
				b.pass(30 * time.Second)
				if got := done.keys(); len(got) != 101 || got[0] != "a1" || got[99] != "a100" && got[100] != "a100" {
					b.Errorf("handled %d: %v, want 101 in their order", len(got), got)
				}
				b.wantSettled()
			})
		})
	}
}

// What all wait for when nothing more is taken in comes back also after its
// handler was overdue.
func TestOverdueHandlerBeforeTooManyMessagesDoesNotStallTheConsumer(t *testing.T) {
	inBubble(t, func(b *bus) {
		var done record
		b.publishOf(strings.Repeat("a", 60) + "b")
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			if d.Key == "a1" && d.NumDelivered == 1 {
				time.Sleep(5 * time.Minute)
				return errHandler
			}
			done.add(d)
			return nil
		}, consumer.Config{Workers: 2, HandleTimeout: time.Minute, MaxBehind: 20})
		b.pass(30 * time.Minute)
		if n := len(done.all()); n != 61 {
			b.Errorf("handled %d, want all 61", n)
		}
		b.wantSettled()
	})
}

// Two instances whose every message may wait for one that the other has go on
// all the same, and end.
func TestTwoInstancesDoNotWaitForEachOther(t *testing.T) {
	inBubble(t, func(b *bus) {
		const messages = 300
		rnd := rand.New(rand.NewPCG(3, 4))
		var aggregates strings.Builder
		for range messages {
			aggregates.WriteByte(byte('a' + rnd.IntN(4)))
		}
		b.publishOf(aggregates.String())
		var mu sync.Mutex
		var done record
		fails := map[string]bool{}
		for range 2 {
			_, js := b.connect()
			b.startOn(js, func(_ context.Context, d *consumer.Delivery) error {
				mu.Lock()
				again := fails[d.Key]
				fails[d.Key] = true
				mu.Unlock()
				if !again && d.StreamSeq%3 == 0 {
					return errHandler
				}
				done.add(d)
				return nil
			}, consumer.Config{Workers: 3, AckWait: 5 * time.Second, MaxDeliver: 20, MaxBehind: 4, MaxBehindKey: 2})
		}
		b.pass(30 * time.Minute)
		different := map[string]bool{}
		for _, k := range done.keys() {
			different[k] = true
		}
		if len(different) != messages {
			b.Errorf("handled %d different messages, want %d", len(different), messages)
		}
		b.wantSettled()
	})
}

// A retry that goes to another instance holds up its key here until the other
// has settled it, and if it does not, for an ack wait.
func TestRetryTakenByAnotherInstanceHoldsUpItsKeyForATime(t *testing.T) {
	for _, settles := range []bool{true, false} {
		t.Run(fmt.Sprintf("settles %v", settles), func(t *testing.T) {
			inBubble(t, func(b *bus) {
				b.publishOf("aab")
				var done record
				b.start(func(_ context.Context, d *consumer.Delivery) error {
					switch d.Key {
					case "a1":
						return errHandler
					case "b1":
						time.Sleep(5 * time.Second) // no worker is free when a1 is due
					}
					done.add(d)
					return nil
				}, consumer.Config{AckWait: 20 * time.Second})
				b.pass(100 * time.Millisecond)
				c, err := b.js.Consumer(b.Context(), streamName, durable)
				if err != nil {
					b.Fatal(err)
				}
				other, err := c.Next(jetstream.FetchMaxWait(3 * time.Second))
				if err != nil {
					b.Fatalf("take the retry: %v", err)
				}
				end := time.Now().Add(time.Minute)
				if settles {
					end = time.Now().Add(10 * time.Second)
				}
				due := time.Now()
				for time.Now().Before(end) {
					if err := other.InProgress(); err != nil {
						b.Fatal(err)
					}
					b.pass(5 * time.Second)
				}
				if err := other.Ack(); err != nil {
					b.Fatal(err)
				}
				b.pass(time.Minute)
				s := done.of("a2")
				if len(s) != 1 {
					b.Fatalf("a2 handled %d times, want once", len(s))
				}
				least, most := 20*time.Second, 23*time.Second
				if settles {
					least, most = 10*time.Second, 12*time.Second
				}
				if wait := s[0].at.Sub(due); wait < least || wait > most {
					b.Errorf("a2 waited for %v, want %v to %v", wait, least, most)
				}
				if n := len(b.log.containing("did not come back")); settles == (n == 1) {
					b.Errorf("log has %d warnings about the retry that did not come back", n)
				}
				b.wantSettled()
			})
		})
	}
}

// BR-49: a crash with ten messages of a key in hand. Whether the next process
// starts before or after their ack wait, their effects follow the stream.
func TestOrderOfAKeySurvivesACrash(t *testing.T) {
	for _, after := range []time.Duration{time.Second, time.Minute} {
		t.Run(after.String(), func(t *testing.T) {
			inBubble(t, func(b *bus) {
				nc, js := b.connect(nats.NoReconnect())
				c, err := consumer.New(js, func(ctx context.Context, _ *consumer.Delivery) error {
					<-ctx.Done()
					return ctx.Err()
				}, b.config(consumer.Config{Workers: 4, DrainTimeout: time.Second}))
				if err != nil {
					b.Fatal(err)
				}
				keys := b.publishOf("aaaaaaaaaa")
				time.AfterFunc(75*time.Second, nc.Close) // the end of the process, for the broker
				if err := c.Run(b.Context()); !errors.Is(err, nats.ErrConnectionClosed) {
					b.Fatalf("Run: %v", err)
				}
				if i := b.info(); i.NumAckPending < 4 {
					b.Fatalf("unsettled after the crash = %d, want several", i.NumAckPending)
				}
				b.pass(after)
				var done record
				b.start(done.ok, consumer.Config{Workers: 4})
				b.pass(2 * time.Minute)
				if got := done.keys(); !slices.Equal(got, keys) {
					b.Errorf("handled %v, want %v", got, keys)
				}
				b.wantSettled()
			})
		})
	}
}

// What waits behind a retry when Run stops does not come before it.
func TestShutdownHandsBackInOrder(t *testing.T) {
	inBubble(t, func(b *bus) {
		keys := b.publishOf("aaaaa")
		stop := b.start(func(context.Context, *consumer.Delivery) error { return errHandler },
			consumer.Config{Workers: 4, Backoff: 10 * time.Second})
		b.pass(2 * time.Second)
		if err := stop(); err != nil {
			b.Fatal(err)
		}
		var done record
		b.start(done.ok, consumer.Config{Workers: 4})
		b.pass(time.Minute)
		if got := done.keys(); !slices.Equal(got, keys) {
			b.Errorf("handled %v, want %v", got, keys)
		}
		b.wantSettled()
	})
}

// An overdue handler keeps its worker, but neither its message nor its key.
func TestOverdueHandlerDoesNotKeepItsKey(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publishOf("aa")
		release := make(chan struct{})
		defer close(release)
		var done record
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			if d.Key == "a1" && d.NumDelivered == 1 {
				<-release
			}
			done.add(d)
			return nil
		}, consumer.Config{Workers: 2, HandleTimeout: time.Minute})
		b.pass(3 * time.Minute)
		if got := done.keys(); !slices.Equal(got, []string{"a1", "a2"}) {
			b.Errorf("handled %v, want a1, delivered again, then a2", got)
		}
	})
}

// While no intent can be stored, the message that needs it holds up its key; its
// letter does not.
func TestKeyWaitsForAnIntentButNotForALetter(t *testing.T) {
	inBubble(t, func(b *bus) {
		up := map[string]time.Time{"intend": time.Now().Add(time.Minute), "park": time.Now().Add(10 * time.Minute)}
		dlq := &letters{failFunc: func(step string, _ jetbox.Failure) error {
			if time.Now().Before(up[step]) {
				return errHandler
			}
			return nil
		}}
		b.publishOf("aab")
		var done record
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			if d.Key == "a1" {
				return errHandler
			}
			done.add(d)
			return nil
		}, consumer.Config{MaxDeliver: 2, DeadLetters: dlq})
		b.pass(50 * time.Second)
		if got := done.keys(); !slices.Equal(got, []string{"b1"}) {
			b.Errorf("handled while the intent cannot be stored: %v, want b1", got)
		}
		b.pass(5 * time.Minute)
		if got := done.keys(); !slices.Equal(got, []string{"b1", "a2"}) {
			b.Errorf("handled while the letter cannot be stored: %v, want b1, a2", got)
		}
		b.pass(10 * time.Minute)
		if n := len(dlq.named("park")); n != 1 {
			b.Errorf("letters = %d, want 1", n)
		}
		b.wantSettled()
	})
}
