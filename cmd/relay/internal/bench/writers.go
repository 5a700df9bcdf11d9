package bench

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

const (
	appRate  = 200 // transactions a second
	aloneFor = 2 * time.Second

	// longer is how much more than the usual backlog is drained here, so that
	// there are enough transactions for a p99.
	longer = 4

	// leastTx are measured also when the backlog is small.
	leastTx = 20
)

func (r *rig) drainBesideWriters(ctx context.Context) (err error) {
	b, err := r.openSQLite(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.discard()) }()
	// Without a relay. The events that this leaves are part of the backlog.
	alone := &application{box: b}
	aloneTx := min(int(appRate*aloneFor/time.Second), max(r.cfg.Rows/10, leastTx))
	if err := alone.run(ctx, aloneTx); err != nil {
		return err
	}
	s := r.sample(longer*r.cfg.Rows, manyKeys)
	if err := b.fill(ctx, s); err != nil {
		return err
	}
	app := &application{box: b}
	rate, raw, err := r.besides(ctx, s, func(ctx context.Context) (float64, error) {
		return r.drainBeside(ctx, b, app, s.len()+aloneTx)
	})
	if err != nil {
		return err
	}
	r.results.compare("relay", rowsPerSecond, rate, besideRaw, raw)
	r.results.figure("transactions", txPerSecond, app.rate())
	r.results.compareTimes("transaction", app.times, "without relay", alone.times)
	r.results.compareTimes("with its queue", app.queued, "without relay", alone.queued)
	return nil
}

// drainBeside drains while the application works.
func (r *rig) drainBeside(ctx context.Context, b *box, app *application, rows int) (rate float64, err error) {
	t := start(ctx, func(ctx context.Context) error { return app.run(ctx, 0) })
	rate, err = r.drain(ctx, b, rows, relay.Config{})
	if err == nil {
		err = t.await(ctx, app.done.Load, func(context.Context) (bool, error) { return app.done.Load() >= leastTx, nil })
	}
	if err := errors.Join(err, t.stop()); err != nil {
		return 0, fmt.Errorf("beside an application: %w", err)
	}
	return rate, nil
}

// application writes appRate transactions a second, one after the other.
type application struct {
	box  *box
	done atomic.Int64

	// When run has returned. queued is what callers would see who come at a steady
	// rate: a transaction that is late because those before took too long counts from
	// when it was due. Lateness of the timer does not count.
	times, queued []time.Duration
	took          time.Duration
}

// run makes n transactions, or goes on until ctx is done when n is 0.
func (a *application) run(ctx context.Context, n int) error {
	began := time.Now()
	free := began
	defer func() { a.took = free.Sub(began) }()
	for i := 0; n == 0 || i < n; i++ {
		due := began.Add(time.Duration(i) * time.Second / appRate)
		if !sleepUntil(ctx, due) {
			return stopIsFine(ctx, n)
		}
		from := time.Now()
		called := from
		if free.After(due) {
			called = due
		}
		if err := a.box.order(ctx, i, &jetbox.Event{Subject: Subject, AggregateType: "order", Payload: make([]byte, payloadBytes)}); err != nil {
			if ctx.Err() != nil {
				return stopIsFine(ctx, n)
			}
			return fmt.Errorf("transaction of the application: %w", err)
		}
		free = time.Now()
		a.times = append(a.times, free.Sub(from))
		a.queued = append(a.queued, free.Sub(called))
		a.done.Add(1)
	}
	return nil
}

// stopIsFine returns nil for what goes on until it is stopped.
func stopIsFine(ctx context.Context, n int) error {
	if n == 0 {
		return nil
	}
	return context.Cause(ctx)
}

func (a *application) rate() float64 { return perSecond(len(a.times), a.took) }
