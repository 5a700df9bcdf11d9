package dlq

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

const (
	// scanBatch bounds the memory of a scan: so many messages of the broker's
	// maximum size. Without payloads more fit.
	scanBatch        = 32
	scanBatchHeaders = 512

	// scanRestarts is how often a scan is resumed after its consumer was lost.
	scanRestarts = 5
)

// scan reads the messages on filter that the stream stores now, from sequence
// from on, in order, until fn returns false. Gaps are noticed and read again, as an ordered consumer does; unlike
// with one, the end is known although messages may be removed meanwhile.
//
// The end is the stream's last sequence when st was looked up.
func scan(ctx context.Context, st jetstream.Stream, filter string, from uint64, headersOnly bool, fn func(*record) (more bool)) error {
	info := st.CachedInfo()
	r := reader{stream: st, filter: filter, headersOnly: headersOnly, next: max(from, 1), last: info.State.LastSeq}
	for attempt := 1; r.next <= r.last; attempt++ {
		done, err := r.read(ctx, fn)
		if done || ctx.Err() != nil {
			return ctx.Err()
		}
		if attempt == scanRestarts {
			return fmt.Errorf("read stream %s: %w", info.Config.Name, err)
		}
		if err := sleep(ctx, askPause<<attempt); err != nil {
			return err
		}
	}
	return nil
}

// reader is one scan, which may need several consumers.
type reader struct {
	stream      jetstream.Stream
	filter      string
	headersOnly bool
	next, last  uint64 // stream sequences
}

// read goes on at r.next with a consumer of its own. It returns done when
// nothing is left or wanted, and otherwise why it has to be resumed.
func (r *reader) read(ctx context.Context, fn func(*record) (more bool)) (done bool, err error) {
	c, err := r.stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
		FilterSubject:     r.filter,
		DeliverPolicy:     jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:       r.next,
		AckPolicy:         jetstream.AckNonePolicy,
		HeadersOnly:       r.headersOnly,
		MemoryStorage:     true,
		Replicas:          1,
		InactiveThreshold: time.Minute,
	})
	if err != nil {
		return false, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
		defer cancel()
		_ = r.stream.DeleteConsumer(ctx, c.CachedInfo().Name) // the threshold removes what this misses
	}()
	batch := scanBatch
	if r.headersOnly {
		batch = scanBatchHeaders
	}
	for delivered := uint64(0); ; {
		msgs, err := c.FetchNoWait(batch)
		if err != nil {
			return false, err
		}
		n, done, err := r.take(ctx, msgs, delivered, fn)
		for range msgs.Messages() { // the rest of it, or its goroutine outlives us
		}
		switch {
		case done || err != nil:
			return done, err
		case msgs.Error() != nil:
			return false, msgs.Error()
		case n > delivered:
			delivered = n
			continue
		}
		// An empty batch can also mean that the answer was lost.
		info, err := c.Info(ctx)
		switch {
		case err != nil:
			return false, err
		case info.Delivered.Consumer != delivered:
			return false, errLost
		case info.NumPending == 0:
			return true, nil
		}
	}
}

var errLost = errors.New("a message was lost on the way")

// take hands the messages of one batch to fn, and returns how many the consumer
// has delivered by then.
func (r *reader) take(ctx context.Context, msgs jetstream.MessageBatch, delivered uint64, fn func(*record) (more bool)) (n uint64, done bool, err error) {
	for m := range msgs.Messages() {
		meta, err := m.Metadata()
		if err != nil {
			return delivered, false, err
		}
		if delivered++; meta.Sequence.Consumer != delivered {
			return delivered, false, errLost
		}
		seq := meta.Sequence.Stream
		if seq > r.last {
			return delivered, true, nil
		}
		r.next = seq + 1
		more := fn(&record{subject: m.Subject(), seq: seq, time: meta.Timestamp, header: m.Headers(), data: m.Data()})
		if !more || seq == r.last || ctx.Err() != nil {
			return delivered, true, nil //nolint:nilerr // the caller asks ctx itself
		}
	}
	return delivered, false, nil
}
