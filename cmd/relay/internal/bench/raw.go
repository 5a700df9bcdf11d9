package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

const besideRaw = "raw publish"

// publishRaw is the yardstick: the messages of a sample, headers and all, by
// asynchronous publish to an empty stream, until every PubAck is there.
func (r *rig) publishRaw(ctx context.Context, s sample) (rate float64, err error) {
	if err := r.freshStream(ctx); err != nil {
		return 0, err
	}
	began := time.Now()
	for i := range s.len() {
		if _, err := r.js.PublishMsgAsync(s.message(i), jetstream.WithStallWait(patience)); err != nil {
			return 0, fmt.Errorf("publish: %w", err)
		}
	}
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	select {
	case <-r.js.PublishAsyncComplete():
	case <-timeout.C:
		return 0, fmt.Errorf("publish: %w", errStuck)
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	took := time.Since(began)
	return perSecond(s.len(), took), r.expectStored(ctx, s.len())
}

// besides measures f between two runs of raw publish, and returns their mean.
func (r *rig) besides(ctx context.Context, s sample, f func(ctx context.Context) (float64, error)) (rate, raw float64, err error) {
	before, err := r.publishRaw(ctx, s)
	if err != nil {
		return 0, 0, err
	}
	if rate, err = f(ctx); err != nil {
		return 0, 0, err
	}
	after, err := r.publishRaw(ctx, s)
	return rate, mean(before, after), err
}
