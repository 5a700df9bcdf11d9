package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// appendPairs is the most transactions of either kind.
const appendPairs = 1000

func (r *rig) appendCost(ctx context.Context) error {
	for _, db := range r.databases() {
		if err := r.appendTo(ctx, db); err != nil {
			return fmt.Errorf("%s: %w", db.name, err)
		}
	}
	return nil
}

// appendTo makes transactions of both kinds in turn: whatever slows the machine
// down slows both.
func (r *rig) appendTo(ctx context.Context, db database) (err error) {
	b, err := db.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.discard()) }()
	n := min(r.cfg.Rows, appendPairs)
	s := r.sample(n, manyKeys)
	var with, without []time.Duration
	measure := func(times *[]time.Duration, i int, ev *jetbox.Event) error {
		began := time.Now()
		err := b.order(ctx, i, ev)
		*times = append(*times, time.Since(began))
		return err
	}
	for i := range n {
		if err := errors.Join(measure(&without, i, nil), measure(&with, i, new(s.event(i)))); err != nil {
			return fmt.Errorf("transaction of the application: %w", err)
		}
	}
	r.results.compareTimes(db.name, with, "without event", without)
	return nil
}
