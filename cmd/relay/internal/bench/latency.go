package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// steadyFor is how long the events come, at most: with few rows fewer events do.
const steadyFor = 3 * time.Second

func (r *rig) latency(ctx context.Context) error {
	for _, db := range r.databases() {
		if err := r.latencyOf(ctx, db); err != nil {
			return fmt.Errorf("%s: %w", db.name, err)
		}
	}
	return nil
}

func (r *rig) latencyOf(ctx context.Context, db database) (err error) {
	b, err := db.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.discard()) }()
	if err := r.freshStream(ctx); err != nil {
		return err
	}
	relaying, err := r.startRelay(ctx, b, relay.Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, relaying.stop()) }()
	// The first tenth is for everybody to get up to speed.
	n := min(r.cfg.Rows, int(steadyFor.Seconds()*float64(r.cfg.Rate)))
	warm := n / 10
	trip := newTrip(r.sample(n, manyKeys))
	end, err := trip.watch(ctx, r.js, r.cfg.Stream.Name)
	if err != nil {
		return err
	}
	defer end()
	rate, err := trip.write(ctx, b, r.cfg.Rate)
	if err != nil {
		return err
	}
	err = relaying.await(ctx, trip.arrived.Load, func(context.Context) (bool, error) { return trip.arrived.Load() >= int64(n), nil })
	if err != nil {
		return fmt.Errorf("%d of %d events arrived: %w", trip.arrived.Load(), n, err)
	}
	r.results.figure(db.name+"/committed", eventsPerSecond, rate)
	r.results.times(db.name, trip.times(warm))
	return nil
}

// trip notes by one monotonic clock when each event was committed and when a
// consumer had it.
type trip struct {
	sample    sample
	number    map[string]int // by event ID
	began     time.Time
	committed []atomic.Int64 // ns since began
	seen      []atomic.Int64
	arrived   atomic.Int64
}

func newTrip(s sample) *trip {
	t := &trip{
		sample: s, number: make(map[string]int, s.len()), began: time.Now(),
		committed: make([]atomic.Int64, s.len()), seen: make([]atomic.Int64, s.len()),
	}
	for i, id := range s.ids {
		t.number[id] = i
	}
	return t
}

// watch receives with an ordered consumer. Not with a plain subscription, which
// would see a message that the stream has not stored; and not by the stream's own
// time, which is the wall clock's.
func (t *trip) watch(ctx context.Context, js jetstream.JetStream, stream string) (end func(), err error) {
	c, err := js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return nil, fmt.Errorf("create an ordered consumer: %w", err)
	}
	consuming, err := c.Consume(func(m jetstream.Msg) {
		i, ok := t.number[m.Headers().Get(jetbox.HeaderCEID)]
		if ok && t.seen[i].CompareAndSwap(0, int64(time.Since(t.began))) {
			t.arrived.Add(1)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("consume: %w", err)
	}
	return func() { consuming.Stop(); <-consuming.Closed() }, nil
}

// write commits all events at a rate, with as many writers as the database needs
// for it, and returns the rate it had.
func (t *trip) write(ctx context.Context, b *box, perSec int) (rate float64, err error) {
	began := time.Now()
	errs := make([]error, b.writers)
	var wg sync.WaitGroup
	for w := range b.writers {
		wg.Go(func() {
			for i := w; i < t.sample.len() && errs[w] == nil; i += b.writers {
				if !sleepUntil(ctx, began.Add(time.Duration(i)*time.Second/time.Duration(perSec))) {
					errs[w] = context.Cause(ctx)
					return
				}
				errs[w] = b.order(ctx, i, new(t.sample.event(i)))
				t.committed[i].Store(int64(time.Since(t.began)))
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return 0, fmt.Errorf("write events: %w", err)
	}
	return perSecond(t.sample.len(), time.Since(began)), nil
}

// times returns how long the events took, without the first ones.
func (t *trip) times(without int) []time.Duration {
	var out []time.Duration
	for i := without; i < t.sample.len(); i++ {
		// A relay can be quicker than the commit's return to its caller.
		out = append(out, time.Duration(max(t.seen[i].Load()-t.committed[i].Load(), 0)))
	}
	return out
}
