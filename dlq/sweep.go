package dlq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// The time between the two looks of a sweep. An acknowledged message leaves its
// stream a moment after the ack floor has passed it; what is still there after this
// was not acknowledged. A replicated stream whose leader changes in that moment
// forgets to remove it, and makes up for that within two and a half minutes
// (nats-server 2.15, stream.checkInterestState).
const (
	sweepSettle           = 5 * time.Second
	sweepSettleReplicated = 3 * time.Minute
)

// sweepFailures is after how many messages that could not be parked a sweep gives
// up until the next one: the cause is not theirs.
const sweepFailures = 10

// sweepLoop sweeps at once, then every SweepEvery, until ctx is done.
func (r *Router) sweepLoop(ctx context.Context, log *slog.Logger) {
	var said string
	for ctx.Err() == nil {
		err := r.sweep(ctx)
		switch {
		case err == nil:
			said = ""
		case ctx.Err() == nil && err.Error() != said:
			said = err.Error()
			log.LogAttrs(ctx, slog.LevelWarn, "sweep for exhausted messages incomplete, will retry", slog.Any("err", err))
		}
		_ = sleep(ctx, r.cfg.SweepEvery)
	}
}

// sweep parks the exhausted messages that no advisory told of. Work-queue and
// interest streams remove what is acknowledged, so what they still store
// although its consumer is past it was given up. A limits stream keeps
// everything: there is nothing to be seen there.
//
// It looks at the consumers twice, and goes by what both looks say.
func (r *Router) sweep(ctx context.Context) error {
	st, err := r.events.js.Stream(ctx, r.cfg.EventStream)
	if err != nil {
		return fmt.Errorf("look up event stream %s: %w", r.cfg.EventStream, err)
	}
	info := st.CachedInfo()
	if info.Config.Retention == jetstream.LimitsPolicy || info.State.Msgs == 0 {
		return nil
	}
	first, err := listConsumers(ctx, st)
	if err != nil || !anyPast(first, info.State.FirstSeq) {
		return err
	}
	settle := sweepSettle
	if info.Config.Replicas > 1 {
		settle = sweepSettleReplicated
	}
	if err := sleep(ctx, settle); err != nil {
		return err
	}
	second, err := listConsumers(ctx, st)
	if err != nil {
		return err
	}
	w := &sweeping{
		router: r, stream: st, retention: info.Config.Retention,
		consumers: bothLooks(first, second), unclear: make(map[uint64]string),
	}
	return w.run(ctx)
}

func listConsumers(ctx context.Context, st jetstream.Stream) ([]*jetstream.ConsumerInfo, error) {
	var all []*jetstream.ConsumerInfo
	list := st.ListConsumers(ctx)
	for c := range list.Info() { // to its end, or nats.go 1.55 leaks a goroutine
		all = append(all, c)
	}
	if err := list.Err(); err != nil {
		return nil, fmt.Errorf("list consumers of stream %s: %w", st.CachedInfo().Config.Name, err)
	}
	slices.SortFunc(all, func(a, b *jetstream.ConsumerInfo) int { return cmp.Compare(a.Name, b.Name) })
	return all, nil
}

func anyPast(consumers []*jetstream.ConsumerInfo, seq uint64) (found bool) {
	return slices.ContainsFunc(consumers, func(c *jetstream.ConsumerInfo) bool { return past(c, seq) })
}

// sweptConsumer is a consumer and the sequence up to which it delivers nothing
// any more.
type sweptConsumer struct {
	info *jetstream.ConsumerInfo
	done uint64
}

// bothLooks returns the consumers of the second look. One that is new, or was
// made anew or reset between the looks, is past nothing.
func bothLooks(first, second []*jetstream.ConsumerInfo) []sweptConsumer {
	earlier := make(map[string]*jetstream.ConsumerInfo, len(first))
	for _, c := range first {
		earlier[c.Name] = c
	}
	out := make([]sweptConsumer, len(second))
	for i, c := range second {
		out[i].info = c
		if e := earlier[c.Name]; e != nil && e.Created.Equal(c.Created) && slices.Equal(filtersOf(e.Config), filtersOf(c.Config)) {
			out[i].done = min(doneUpTo(e), doneUpTo(c))
		}
	}
	return out
}

// sweeping is one sweep of an interest or work-queue stream.
type sweeping struct {
	router    *Router
	stream    jetstream.Stream
	retention jetstream.RetentionPolicy
	consumers []sweptConsumer

	unclear  map[uint64]string // by sequence, why a message is left where it is
	failed   error             // the first
	failures int
}

// run walks what is left below each consumer's bound. One message that cannot be
// parked does not keep the others from it; a broker that does not answer does.
func (w *sweeping) run(ctx context.Context) error {
	for i, c := range w.consumers {
		bound := w.bound(i)
		for _, filter := range filtersOf(c.info.Config) {
			err := w.router.events.walk(ctx, w.router.cfg.EventStream, filter, 1, bound, func(m *record) (more bool) {
				return w.count(m.seq, w.settle(ctx, m)) && ctx.Err() == nil
			})
			if err != nil || w.failures >= sweepFailures {
				return fmt.Errorf("sweep stream %s: %w", w.router.cfg.EventStream, errors.Join(err, w.failed))
			}
		}
	}
	if w.failed != nil {
		return fmt.Errorf("sweep stream %s: %w", w.router.cfg.EventStream, w.failed)
	}
	if len(w.unclear) > 0 {
		first := slices.Min(slices.Collect(maps.Keys(w.unclear)))
		return fmt.Errorf("sweep stream %s: %d messages are left over, the first is %d: %s",
			w.router.cfg.EventStream, len(w.unclear), first, w.unclear[first])
	}
	return nil
}

// count remembers what became of a message, and reports whether it is worth while
// to go on.
func (w *sweeping) count(seq uint64, err error) (more bool) {
	var unclear *unclearError
	var later *postponed
	switch {
	case err == nil, errors.As(err, &later):
		return true
	case errors.As(err, &unclear):
		w.unclear[seq] = unclear.Error()
		return true
	}
	w.failed = cmp.Or(w.failed, err)
	if w.failures++; !refused(err) {
		w.failures = sweepFailures // nobody answers
	}
	return w.failures < sweepFailures
}

// bound is the sequence up to which all consumers that share a subject with
// consumer i are done. Below it nothing but exhausted messages is left to read,
// however large the backlog of the others.
func (w *sweeping) bound(i int) uint64 {
	bound := w.consumers[i].done
	for _, c := range w.consumers {
		if filtersOverlap(w.consumers[i].info.Config, c.info.Config) {
			bound = min(bound, c.done)
		}
	}
	return bound
}

// unclearError says that a message was given up by one of several consumers, and
// nothing says by which.
type unclearError struct{ names []string }

func (e *unclearError) Error() string {
	return fmt.Sprintf("consumers %s are all past it and one of them gave it up, but the stream does not say which",
		strings.Join(e.names, ", "))
}

// settle parks one message that is left over, and removes it.
func (w *sweeping) settle(ctx context.Context, m *record) error {
	suspects := w.suspects(m)
	switch {
	case len(suspects) == 0:
		return nil
	case len(suspects) > 1:
		var err error
		if suspects, err = w.known(ctx, suspects, m); err != nil {
			return err
		}
	}
	culprit := suspects[0]
	f := jetbox.Failure{
		Stream:     w.router.cfg.EventStream,
		Consumer:   culprit.Name,
		Seq:        m.seq,
		Deliveries: uint64(max(culprit.Config.MaxDeliver, 0)),
		Reason:     jetbox.ReasonMaxDeliveries,
	}
	return w.router.parkMessage(ctx, w.stream, f, m)
}

// suspects are the consumers that may have given the message up. On a work queue
// that is the one consumer it was for. On an interest stream, where the message
// may be there for one that was deleted, it is those that have a limit of
// deliveries and were there, or began at the start.
func (w *sweeping) suspects(m *record) []*jetstream.ConsumerInfo {
	var out []*jetstream.ConsumerInfo
	for _, c := range w.consumers {
		cfg := c.info.Config
		if cfg.AckPolicy == jetstream.AckNonePolicy || !wants(cfg, m.subject) {
			continue
		}
		saw := cfg.DeliverPolicy == jetstream.DeliverAllPolicy || c.info.Created.Before(m.time)
		if w.retention == jetstream.WorkQueuePolicy || cfg.MaxDeliver > 0 && saw {
			out = append(out, c.info)
		}
	}
	return out
}

// known returns those of several suspects that have a letter of the message.
func (w *sweeping) known(ctx context.Context, suspects []*jetstream.ConsumerInfo, m *record) ([]*jetstream.ConsumerInfo, error) {
	s := w.router.letters
	var known []*jetstream.ConsumerInfo
	var names []string
	for _, c := range suspects {
		names = append(names, c.Name)
		id := identity{stream: w.router.cfg.EventStream, consumer: c.Name, seq: m.seq, stored: m.time}
		l, err := s.last(ctx, id.subject(s.cfg.Prefix))
		if err != nil {
			return nil, err
		}
		if l != nil && l.State != "" {
			known = append(known, c)
		}
	}
	if len(known) == 0 {
		return nil, &unclearError{names}
	}
	return known, nil
}

// doneUpTo is the sequence up to which a consumer will not deliver any more. An
// exhausted message is no longer pending, and the ack floor passes it with the
// next ack.
func doneUpTo(c *jetstream.ConsumerInfo) uint64 {
	if c.NumAckPending == 0 {
		return max(c.AckFloor.Stream, c.Delivered.Stream)
	}
	return c.AckFloor.Stream
}

// filtersOf returns the subjects a consumer wants, all of them spelt out.
func filtersOf(c jetstream.ConsumerConfig) []string {
	switch {
	case len(c.FilterSubjects) > 0:
		return c.FilterSubjects
	case c.FilterSubject != "":
		return []string{c.FilterSubject}
	default:
		return []string{">"}
	}
}

func filtersOverlap(a, b jetstream.ConsumerConfig) (both bool) {
	for _, x := range filtersOf(a) {
		for _, y := range filtersOf(b) {
			if overlap(x, y) {
				return true
			}
		}
	}
	return false
}
