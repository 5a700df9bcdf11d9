package bench

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/seed-5e04d8fb/jetbox/relay"
)

// manyKeys is the usual case: more keys than messages on their way at once would
// need.
const manyKeys = 1000

// backlogs are the drains measured: how many ordering keys the rows have.
var backlogs = []struct {
	name string
	keys int
}{
	{"no keys", noKey},
	{fmt.Sprintf("%d keys", manyKeys), manyKeys},
	{"one key", oneKey},
}

func (r *rig) drainSQLite(ctx context.Context) error {
	for _, bl := range backlogs {
		if err := r.drainBacklog(ctx, bl.name, r.openSQLite, bl.keys, relay.Config{}); err != nil {
			return fmt.Errorf("%s: %w", bl.name, err)
		}
	}
	return nil
}

func (r *rig) drainPostgres(ctx context.Context) error {
	for _, keep := range []struct {
		name      string
		retention time.Duration
	}{
		{"24h retention", 0}, // the default
		{"retention 0", relay.DeleteAtOnce},
	} {
		for _, bl := range backlogs {
			name := bl.name + ", " + keep.name
			if err := r.drainBacklog(ctx, name, r.openPostgres, bl.keys, relay.Config{Retention: keep.retention}); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return nil
}

func (r *rig) drainBacklog(ctx context.Context, name string, open func(context.Context) (*box, error), keys int, cfg relay.Config) (err error) {
	b, err := open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.discard()) }()
	s := r.sample(r.cfg.Rows, keys)
	if err := b.fill(ctx, s); err != nil {
		return err
	}
	rate, raw, err := r.besides(ctx, s, func(ctx context.Context) (float64, error) {
		rate, err := r.drain(ctx, b, s.len(), cfg)
		if err != nil {
			return 0, err
		}
		return rate, r.expectStored(ctx, s.len())
	})
	if err != nil {
		return err
	}
	r.results.compare(name, rowsPerSecond, rate, besideRaw, raw)
	return nil
}

// drain runs a relay until a backlog is published and recorded. The time includes
// the relay's own start.
func (r *rig) drain(ctx context.Context, b *box, rows int, cfg relay.Config) (rate float64, err error) {
	if err := r.freshStream(ctx); err != nil {
		return 0, err
	}
	var published atomic.Int64
	cfg.Hooks.PublishedFunc = func(_, _ time.Duration, _ bool) { published.Add(1) }
	began := time.Now()
	t, err := r.startRelay(ctx, b, cfg)
	if err != nil {
		return 0, err
	}
	err = t.await(ctx, published.Load, func(ctx context.Context) (bool, error) {
		if published.Load() < int64(rows) {
			return false, nil // nor is the database asked before that
		}
		st, err := b.Stats(ctx)
		return st.OldestPending.IsZero() || st.OldestPending.After(began), err
	})
	took := time.Since(began)
	if err := errors.Join(err, t.stop()); err != nil {
		return 0, fmt.Errorf("drain %d rows: %w", rows, err)
	}
	return perSecond(rows, took), nil
}
