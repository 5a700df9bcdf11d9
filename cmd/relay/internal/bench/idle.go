package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/seed-5e04d8fb/jetbox/relay"
)

const (
	// idleFor is long enough for a renewal of the lease, which comes at a third of
	// its 10 s, and some polls.
	idleFor = 4 * time.Second

	// settleFor lets what was begun before come to rest, and a relay become idle.
	settleFor = 6 * time.Second
)

// idle measures the whole process: with a relay, and before that without, so that
// the broker's part can be told.
func (r *rig) idle(ctx context.Context) error {
	if err := r.freshStream(ctx); err != nil {
		return err
	}
	alone, err := r.cpuShare(ctx)
	if errors.Is(err, errors.ErrUnsupported) {
		fmt.Fprintln(r.results.progress, "idle: this system does not say how much CPU a process had")
		return nil
	}
	if err != nil {
		return err
	}
	for _, db := range r.databases() {
		share, err := r.idleOn(ctx, db)
		if err != nil {
			return fmt.Errorf("%s: %w", db.name, err)
		}
		r.results.compare("broker and relay, "+db.name, percentOfCore, share, "broker alone", alone)
	}
	return nil
}

func (r *rig) idleOn(ctx context.Context, db database) (share float64, err error) {
	b, err := db.open(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, b.discard()) }()
	t, err := r.startRelay(ctx, b, relay.Config{})
	if err != nil {
		return 0, err
	}
	share, err = r.cpuShare(ctx)
	return share, errors.Join(err, t.stop())
}

// cpuShare returns how many per cent of a core this process uses. A run of few rows is
// a trial, and takes less time for it.
func (r *rig) cpuShare(ctx context.Context) (share float64, err error) {
	trial := time.Duration(r.cfg.Rows) * time.Millisecond
	runtime.GC()
	if !sleepUntil(ctx, time.Now().Add(min(settleFor, trial))) {
		return 0, context.Cause(ctx)
	}
	before, err := cpuTime()
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if !sleepUntil(ctx, began.Add(min(idleFor, trial))) {
		return 0, context.Cause(ctx)
	}
	after, err := cpuTime()
	return 100 * (after - before).Seconds() / time.Since(began).Seconds(), err
}
