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

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/dedup"
)

// batches is what a batch handler saw, and what of it took effect.
type batches struct {
	mu    sync.Mutex
	calls [][]string // guarded by mu; keys
	done  record
}

// handle records a call, which succeeds unless fail returns an error for it.
func (r *batches) handle(fail func(ds []*consumer.Delivery) error) consumer.BatchHandler {
	return func(_ context.Context, ds []*consumer.Delivery) error {
		var keys []string
		for _, d := range ds {
			keys = append(keys, d.Key)
		}
		r.mu.Lock()
		r.calls = append(r.calls, keys)
		r.mu.Unlock()
		time.Sleep(time.Millisecond)
		if err := fail(ds); err != nil {
			return err
		}
		for _, d := range ds {
			r.done.add(d)
		}
		return nil
	}
}

func (r *batches) all() [][]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.calls)
}

func (r *batches) longest() (n int) {
	for _, c := range r.all() {
		n = max(n, len(c))
	}
	return n
}

func find(ds []*consumer.Delivery, key string) *consumer.Delivery {
	for _, d := range ds {
		if d.Key == key {
			return d
		}
	}
	return nil
}

func (b *bus) startBatch(h consumer.BatchHandler, cfg consumer.Config) (stop func() error) {
	b.Helper()
	c, err := consumer.NewBatch(b.js, h, b.config(cfg))
	if err != nil {
		b.Fatal(err)
	}
	return b.run(c)
}

// A batch holds what is there, up to Batch, messages of one key in order and in
// one batch; each is acknowledged.
func TestBatchesHoldWhatIsThere(t *testing.T) {
	inBubble(t, func(b *bus) {
		keys := b.publishOf(strings.Repeat("aab", 100))
		var got batches
		b.startBatch(got.handle(func([]*consumer.Delivery) error { return nil }), consumer.Config{Workers: 3, Batch: 40})
		b.pass(time.Minute)
		if n := len(got.all()); n > 40 || got.longest() != 40 {
			b.Errorf("calls = %d, longest = %d, want few, and 40", n, got.longest())
		}
		for _, a := range []string{"a", "b"} {
			if !slices.Equal(of(a, got.done.keys()), of(a, keys)) {
				b.Errorf("handled %v, want the order of the stream", of(a, got.done.keys()))
			}
		}
		if n := len(b.answersLike(77, "")); n != 1 {
			b.Errorf("answers to 77 = %d, want an ack", n)
		}
		b.wantSettled()
	})
}

// One bad message of a batch is found, whether the handler names it or not, and
// however it fails. It alone gets its verdict; the later ones of its key wait
// for it, the others take effect once.
func TestOneBadMessageOfABatchFailsAlone(t *testing.T) {
	bad := func(ds []*consumer.Delivery) bool { d := find(ds, "a2"); return d != nil && d.NumDelivered < 3 }
	ways := map[string]func(ds []*consumer.Delivery) error{
		"unnamed": func([]*consumer.Delivery) error { return errHandler },
		"named": func(ds []*consumer.Delivery) error {
			return fmt.Errorf("insert: %w", &consumer.DeliveryError{Delivery: find(ds, "a2"), Err: errHandler})
		},
		"named, but nobody": func([]*consumer.Delivery) error { return &consumer.DeliveryError{Err: errHandler} },
		"named without a cause": func(ds []*consumer.Delivery) error {
			return &consumer.DeliveryError{Delivery: find(ds, "a2")}
		},
		"panic":  func([]*consumer.Delivery) error { panic("bad") },
		"goexit": func([]*consumer.Delivery) error { runtime.Goexit(); return nil },
	}
	for name, fail := range ways {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(b *bus) {
				b.publishOf("z")
				var got batches
				b.startBatch(got.handle(func(ds []*consumer.Delivery) error {
					if find(ds, "z1") != nil {
						time.Sleep(time.Second) // a batch gathers meanwhile
					}
					if bad(ds) {
						return fail(ds)
					}
					return nil
				}), consumer.Config{})
				b.pass(100 * time.Millisecond)
				start := time.Now()
				b.publishOf("abababcd")
				b.pass(1500 * time.Millisecond)
				first := got.done.keys()
				if want := []string{"a1", "b1", "b2", "b3", "c1", "d1"}; !containsAll(first, want) || slices.Contains(first, "a3") {
					b.Errorf("took effect at once: %v, want %v, and a3 not before a2", first, want)
				}
				b.pass(time.Minute)
				if n := got.longest(); n < 8 {
					b.Errorf("longest batch = %d, want those that gathered", n)
				}
				if keys := got.done.keys(); len(keys) != 9 || !slices.Equal(of("a", keys), []string{"a1", "a2", "a3"}) {
					b.Errorf("took effect: %v, want each once, and a1 to a3 in order", keys)
				}
				if s := got.done.of("a2"); len(s) != 1 || s[0].delivered != 3 || s[0].at.Sub(start) < 3*time.Second {
					b.Errorf("a2 took effect %+v, want on the third delivery, after both delays", s)
				}
				if s := got.done.of("a3"); len(s) != 1 || s[0].delivered != 1 {
					b.Errorf("a3 took effect %+v, want on its first delivery", s)
				}
				b.wantSettled()
			})
		})
	}
}

func containsAll(have, want []string) (all bool) {
	return !slices.ContainsFunc(want, func(s string) bool { return !slices.Contains(have, s) })
}

// A batch that names one after all of it was left to be delivered again does not
// bring the others back: their later deliveries are handled, once.
func TestOverdueBatchThatNamesOneBringsNothingBack(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publishOf("zy")
		var got batches
		late := true
		b.startBatch(got.handle(func(ds []*consumer.Delivery) error {
			if find(ds, "z1") != nil || find(ds, "y1") != nil {
				time.Sleep(time.Second) // both workers; a batch gathers meanwhile
			}
			if d := find(ds, "a2"); d != nil && late {
				late = false
				time.Sleep(80 * time.Second) // overdue, and not delivered again yet
				return &consumer.DeliveryError{Delivery: d, Err: errHandler}
			}
			return nil
		}), consumer.Config{Workers: 2, HandleTimeout: time.Minute})
		b.pass(100 * time.Millisecond)
		b.publishOf("aaaaab")
		b.pass(10 * time.Minute)
		if keys := got.done.keys(); len(keys) != 8 || !slices.Equal(of("a", keys), []string{"a1", "a2", "a3", "a4", "a5"}) {
			b.Errorf("took effect: %v, calls %v, want each once, in order", keys, got.all())
		}
		b.wantSettled()
	})
}

// A permanent error is the verdict of the message it is for: one letter, with
// its text as it was.
func TestPermanentErrorInABatchParksOne(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publishN(60)
		dlq := &letters{}
		var got batches
		b.startBatch(got.handle(func(ds []*consumer.Delivery) error {
			if d := find(ds, "k042"); d != nil {
				return &consumer.DeliveryError{Delivery: d, Err: jetbox.Permanent(errHandler)}
			}
			return nil
		}), consumer.Config{DeadLetters: dlq})
		b.pass(time.Minute)
		parked := dlq.named("park")
		if len(parked) != 1 || parked[0].f.Seq != 43 || parked[0].f.Err != errHandler.Error() {
			b.Errorf("letters = %+v, want one, of 43, with %q", parked, errHandler)
		}
		if n := len(got.done.all()); n != 59 {
			b.Errorf("took effect: %d, want the other 59", n)
		}
		b.wantSettled()
	})
}

// A batch that takes too long says nothing about those that are not named, be its
// error permanent or not: no good message becomes a letter.
func TestLateBatchParksOnlyTheBadOne(t *testing.T) {
	for _, named := range []bool{true, false} {
		t.Run(fmt.Sprintf("named %v", named), func(t *testing.T) {
			inBubble(t, func(b *bus) {
				b.publishN(20)
				dlq := &letters{}
				var got batches
				b.startBatch(got.handle(func(ds []*consumer.Delivery) error {
					d := find(ds, "k010")
					if d == nil {
						return nil
					}
					time.Sleep(2 * time.Second)
					if named {
						return &consumer.DeliveryError{Delivery: d, Err: jetbox.Permanent(errHandler)}
					}
					return jetbox.Permanent(errHandler)
				}), consumer.Config{DeadLetters: dlq, HandleTimeout: time.Second, MaxDeliver: 3})
				b.pass(10 * time.Minute)
				if parked := dlq.named("park"); len(parked) != 1 || parked[0].f.Seq != 11 {
					b.Errorf("letters = %+v, want one, of 11", parked)
				}
				if n := len(got.done.all()); n != 19 {
					b.Errorf("took effect: %d, want the other 19", n)
				}
				b.wantSettled()
			})
		})
	}
}

// An outage fails them all, quickly or by the time it takes; each waits for its
// backoff, none is lost, and no key loses its order.
func TestBatchesSurviveAnOutage(t *testing.T) {
	for _, takes := range []time.Duration{0, 30 * time.Millisecond} {
		t.Run(takes.String(), func(t *testing.T) {
			inBubble(t, func(b *bus) {
				keys := b.publishOf(strings.Repeat("aab", 30))
				up := time.Now().Add(10 * time.Second)
				dlq := &letters{}
				var got batches
				b.startBatch(got.handle(func([]*consumer.Delivery) error {
					if time.Now().Before(up) {
						time.Sleep(takes)
						return errHandler
					}
					return nil
				}), consumer.Config{Workers: 2, DeadLetters: dlq, HandleTimeout: 20 * time.Millisecond, MaxDeliver: 7})
				b.pass(3 * time.Minute)
				for _, a := range []string{"a", "b"} {
					if got := of(a, got.done.keys()); !slices.Equal(got, of(a, keys)) {
						b.Errorf("took effect: %v, want each once and in order", got)
					}
				}
				if n := len(dlq.named("park")); n != 0 {
					b.Errorf("letters = %d, want none", n)
				}
				b.wantSettled()
			})
		})
	}
}

// The last delivery of a message, and one that comes back after a crash, are
// alone in their batch, with their intent stored.
func TestLastDeliveriesAreAloneInTheirBatch(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publishN(20)
		dlq := &letters{}
		var got batches
		b.startBatch(got.handle(func(ds []*consumer.Delivery) error {
			if ds[0].Last && len(ds) != 1 {
				b.Errorf("%d in a batch with a last delivery, want it alone", len(ds))
			}
			if ds[0].NumDelivered < 3 {
				return errHandler
			}
			return nil
		}), consumer.Config{MaxDeliver: 3, DeadLetters: dlq})
		b.pass(time.Minute)
		if n := len(got.done.all()); n != 20 || len(dlq.named("intend")) != 20 || len(dlq.named("withdraw")) != 20 {
			b.Errorf("took effect: %d, intents: %d, withdrawn: %d, want 20 of each", n, len(dlq.named("intend")), len(dlq.named("withdraw")))
		}
		b.wantSettled()
	})
}

// With a ledger, a batch is one commit, repeats are no effects but counted, and
// a bad one takes nobody along.
func TestBatchWithALedgerIsOneCommit(t *testing.T) {
	inBubble(t, func(b *bus) {
		ledger, err := dedup.NewMemory(time.Hour)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := ledger.Do(b.Context(), streamName+"/"+durable, "k001", func(context.Context, struct{}) error { return nil }); err != nil {
			b.Fatal(err)
		}
		b.publish("z")
		b.publishN(30)
		b.publishRaw(&nats.Msg{Subject: "events.x", Header: nats.Header{jetbox.HeaderIdempotencyKey: {"k002"}}}) // a second copy
		var got batches
		inner := got.handle(func(ds []*consumer.Delivery) error {
			if find(ds, "z") != nil {
				time.Sleep(time.Second)
			}
			if d := find(ds, "k020"); d != nil {
				return &consumer.DeliveryError{Delivery: d, Err: jetbox.Permanent(errHandler)}
			}
			return nil
		})
		var mu sync.Mutex
		duplicates := 0
		b.startBatch(consumer.OnceAll(ledger, func(ctx context.Context, _ struct{}, ds []*consumer.Delivery) error {
			return inner(ctx, ds)
		}), consumer.Config{DuplicateFunc: func(*consumer.Delivery) {
			mu.Lock()
			defer mu.Unlock()
			duplicates++
		}})
		b.pass(time.Minute)
		if n := len(got.done.all()); n != 29 || duplicates != 2 {
			b.Errorf("effects = %d, duplicates = %d, want 29 (of z and 28 others) and 2", n, duplicates)
		}
		if n := len(got.all()); n > 4 {
			b.Errorf("transactions = %d, want one for a batch", n)
		}
		b.wantSettled()
	})
}

// An error of the ledger itself names the messages; the handler's keeps its words.
func TestErrorsOfABatchWithALedger(t *testing.T) {
	t.Parallel()
	ds := []*consumer.Delivery{{Stream: "S", Consumer: "c", StreamSeq: 7}}
	h := consumer.OnceAll(failingLedger{}, func(context.Context, struct{}, []*consumer.Delivery) error { return nil })
	if err := h(t.Context(), ds); !errors.Is(err, errHandler) || !strings.Contains(err.Error(), "S/c 7") {
		t.Errorf("error of the ledger = %v, want it with S/c 7", err)
	}
	own := errors.New("own")
	ledger, err := dedup.NewMemory(time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	h = consumer.OnceAll(ledger, func(context.Context, struct{}, []*consumer.Delivery) error { return own })
	if err := h(t.Context(), ds); err != own { //nolint:errorlint // as it is
		t.Errorf("error of the handler = %v, want it as it is", err)
	}
}

type failingLedger struct{}

func (failingLedger) DoAll(context.Context, string, []string, func(context.Context, struct{}, []int) error) ([]bool, error) {
	return nil, errHandler
}
