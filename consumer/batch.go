package consumer

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"
)

// BatchHandler handles several deliveries, all or none: in one transaction. nil
// acknowledges them all. After an error none of them may have had an effect.
// They are in stream order as far as they share an ordering key, which they may.
//
// A [*DeliveryError] in the error names the one that failed: it gets the verdict
// that its error means, and the others are handed in again without it. After
// any other error each is handed in alone, to find out which it was. The last
// delivery of a message, where a dead letter is due, and a message that comes
// back after a crash are always alone.
//
// ctx ends after HandleTimeout, which is for the batch and what follows from its
// errors. A batch takes what is there and does not wait to be full.
type BatchHandler func(ctx context.Context, ds []*Delivery) error

// DeliveryError says which delivery of a batch failed. It has failed with a nil
// Err too.
type DeliveryError struct {
	Delivery *Delivery
	Err      error
}

// Error names the delivery.
func (e *DeliveryError) Error() string {
	if e.Delivery == nil {
		return fmt.Sprint(e.Err)
	}
	return fmt.Sprintf("%s: %v", e.Delivery.where(), e.Err)
}

// Unwrap returns Err.
func (e *DeliveryError) Unwrap() error { return e.Err }

// handleBatch hands messages to the handler until each has its verdict.
func (r *run) handleBatch(taken []*message) {
	ms := taken[:0]
	for _, m := range taken {
		if r.ready(m) {
			ms = append(ms, m)
		}
	}
	ctx, cancel := context.WithTimeoutCause(r.drainCtx, r.cfg.HandleTimeout, ErrHandleTimeout)
	defer cancel()
	for len(ms) > 0 {
		if ctx.Err() != nil {
			// Too late to find out more. None of these is known to be bad.
			r.judgeAll(ms, because(ctx, ctx.Err()), 0)
			return
		}
		took, err := r.try(ctx, ms)
		if i, named := culprit(ms, err); named {
			ms = r.judgeOne(ms, i, err, took)
			continue
		}
		if err == nil || len(ms) == 1 {
			r.judgeAll(ms, err, took)
			return
		}
		for len(ms) > 0 && ctx.Err() == nil {
			took, err := r.try(ctx, ms[:1])
			ms = r.judgeOne(ms, 0, err, took)
		}
	}
}

func (r *run) judgeAll(ms []*message, err error, took time.Duration) {
	for _, m := range ms {
		r.judge(m, err, took, took/time.Duration(len(ms)))
	}
}

// judgeOne judges the message at i and returns the others that are to be
// handled. If it is to come again, the later ones of its key wait for it.
func (r *run) judgeOne(ms []*message, i int, err error, took time.Duration) (others []*message) {
	m := ms[i]
	later := ms[i+1:]
	again := r.judge(m, blamed(err), took, took)
	if again && m.lane != nil {
		for _, l := range later {
			if l.lane == m.lane {
				r.hand.putBack(l)
			}
		}
		later = slices.DeleteFunc(later, func(l *message) bool { return l.lane == m.lane })
	}
	return slices.Concat(ms[:i], later)
}

// culprit returns which message the error names.
func culprit(ms []*message, err error) (i int, named bool) {
	var e *DeliveryError
	if !errors.As(err, &e) {
		return 0, false
	}
	i = slices.IndexFunc(ms, func(m *message) bool { return m.d == e.Delivery })
	return i, i >= 0
}

// blamed returns the error as it is for the message it names: in its own words.
func blamed(err error) error {
	if e, ok := err.(*DeliveryError); ok && e.Err != nil { //nolint:errorlint // what wraps it has more to say
		return e.Err
	}
	return err
}

// try calls the handler on a goroutine of its own, so that runtime.Goexit ends
// that one and not what is to be done about the error.
func (r *run) try(ctx context.Context, ms []*message) (took time.Duration, err error) {
	ds := make([]*Delivery, len(ms))
	for i, m := range ms {
		ds[i] = m.d
	}
	start := time.Now()
	done := make(chan struct{})
	err = ErrGoexit
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				err = &PanicError{Value: p, Stack: debug.Stack()}
			}
		}()
		err = r.batch(ctx, ds)
	}()
	<-done
	return time.Since(start), because(ctx, err)
}
