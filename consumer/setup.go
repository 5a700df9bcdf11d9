package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

const (
	setupTimeout = 5 * time.Second
	// missingGrace is how long a missing stream may stay missing: whoever
	// creates it may still be starting, or be replacing it.
	missingGrace = 30 * time.Second
	// maxRefusals is how often in a row the server must refuse a request as
	// wrong before it is believed.
	maxRefusals = 3
)

// live is what the server says about the consumer: its settings decide, not
// ours.
type live struct {
	maxDeliver int // 0 is unlimited
	ackWait    time.Duration
	maxBatch   int           // 0 is unlimited
	maxExpires time.Duration // 0 is unlimited

	maxAckPending int           // 0 is unlimited
	group         string        // of a single-active consumer
	pinned        string        // its active client; empty when there is none
	pinnedTTL     time.Duration // for how long its active client may ask for nothing

	delivered  uint64 // highest stream sequence delivered to anybody
	ackFloor   uint64 // everything up to it is settled
	ackPending int
}

// signalEvery leaves room for two lost in-progress signals in an ack wait.
func (l *live) signalEvery() time.Duration {
	return max(l.ackWait/3, time.Millisecond)
}

// lookUp finds the consumer, creates it if it is missing, and returns its live
// settings. It never changes an existing one: an operator may have tuned it.
func (r *run) lookUp(ctx context.Context) (*live, error) {
	ctx, cancel := context.WithTimeout(ctx, setupTimeout)
	defer cancel()
	cons, err := r.js.Consumer(ctx, r.cfg.Stream, r.cfg.Durable)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		cons, err = r.js.CreateConsumer(ctx, r.cfg.Stream, r.cfg.server())
		if err == nil && r.live.Load() != nil {
			// Not before: while the deletion is going on the server refuses.
			r.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "consumer was deleted, created it again from the stream's first message",
				r.attrs()...)
		}
		if errors.Is(err, jetstream.ErrConsumerExists) { // another instance was faster
			cons, err = r.js.Consumer(ctx, r.cfg.Stream, r.cfg.Durable)
		}
	}
	if errors.Is(err, jetstream.ErrNotPullConsumer) {
		return nil, fmt.Errorf("consumer %s/%s pushes, want a pull consumer: %w", r.cfg.Stream, r.cfg.Durable, ErrUnusable)
	}
	if err != nil {
		return nil, fmt.Errorf("look up consumer %s/%s: %w", r.cfg.Stream, r.cfg.Durable, err)
	}
	info := cons.CachedInfo()
	if err := r.check(info.Config); err != nil {
		return nil, err
	}
	l := &live{
		maxDeliver: max(info.Config.MaxDeliver, 0),
		ackWait:    info.Config.AckWait,
		maxBatch:   info.Config.MaxRequestBatch,
		maxExpires: info.Config.MaxRequestExpires,

		maxAckPending: max(info.Config.MaxAckPending, 0),
		pinnedTTL:     info.Config.PinnedTTL,

		delivered:  info.Delivered.Stream,
		ackFloor:   info.AckFloor.Stream,
		ackPending: info.NumAckPending,
	}
	if r.cfg.SingleActive {
		l.group = info.Config.PriorityGroups[0]
		for _, g := range info.PriorityGroups { // the one
			l.pinned = g.PinnedClientID
		}
	}
	for _, d := range info.Config.BackOff {
		l.ackWait = min(l.ackWait, d)
	}
	return l, nil
}

// check refuses a consumer that cannot do the job and logs, once, how one that
// can differs from the Config.
func (r *run) check(have jetstream.ConsumerConfig) error {
	name := r.cfg.Stream + "/" + r.cfg.Durable
	if have.AckPolicy != jetstream.AckExplicitPolicy {
		return fmt.Errorf("consumer %s has ack policy %v, want explicit: %w", name, have.AckPolicy, ErrUnusable)
	}
	pinned := have.PriorityPolicy == jetstream.PriorityPolicyPinned && len(have.PriorityGroups) == 1
	switch {
	case r.cfg.SingleActive && !pinned:
		return fmt.Errorf("consumer %s is shared by its instances, want a pinned one for SingleActive: %w", name, ErrUnusable)
	case !r.cfg.SingleActive && pinned:
		return fmt.Errorf("consumer %s serves one active instance only, want SingleActive in the configuration: %w", name, ErrUnusable)
	case len(have.PriorityGroups) > 0 && !pinned:
		return fmt.Errorf("consumer %s has priority groups %q, which are not supported: %w", name, have.PriorityGroups, ErrUnusable)
	}
	diff := strings.Join(differences(r.cfg.server(), have), "; ")
	if diff != "" && diff != r.reported {
		r.cfg.Logger.LogAttrs(r.ctx, slog.LevelWarn, "consumer differs from the configuration, its own settings decide",
			r.attrs(slog.String("differences", diff))...)
	}
	r.reported = diff
	return nil
}

func differences(want, have jetstream.ConsumerConfig) []string {
	var diff []string
	add := func(field string, have, want any) {
		diff = append(diff, fmt.Sprintf("%s is %v, configured %v", field, have, want))
	}
	if have.MaxDeliver != want.MaxDeliver {
		add("MaxDeliver", have.MaxDeliver, want.MaxDeliver)
	}
	if have.AckWait != want.AckWait {
		add("AckWait", have.AckWait, want.AckWait)
	}
	if h, w := filters(have), filters(want); !slices.Equal(h, w) {
		add("FilterSubjects", h, w)
	}
	if have.MaxAckPending > 0 && have.MaxAckPending < want.MaxAckPending {
		add("MaxAckPending", have.MaxAckPending, fmt.Sprintf("%d: fewer messages can wait behind others of their key", want.MaxAckPending))
	}
	if len(have.BackOff) > 0 {
		// With it NakWithDelay(d) waits for d plus the difference of two steps.
		add("BackOff", have.BackOff, "none: delays between attempts will not be as configured")
	}
	if have.InactiveThreshold != 0 {
		add("InactiveThreshold", have.InactiveThreshold, "0: the server deletes the consumer when nobody pulls for that long")
	}
	if have.DeliverPolicy != want.DeliverPolicy {
		add("DeliverPolicy", have.DeliverPolicy, want.DeliverPolicy)
	}
	return diff
}

func filters(c jetstream.ConsumerConfig) []string {
	fs := slices.Clone(c.FilterSubjects)
	if c.FilterSubject != "" {
		fs = append(fs, c.FilterSubject)
	}
	slices.Sort(fs)
	return fs
}

// hopeless reports whether no waiting can help. A missing stream gets some
// time; everything that looks like an outage gets as long as it takes.
func (r *run) hopeless(err error) (give bool) {
	if errors.Is(err, ErrUnusable) {
		return true
	}
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		if r.missingSince.IsZero() {
			r.missingSince = time.Now()
		}
		return time.Since(r.missingSince) >= missingGrace
	}
	r.missingSince = time.Time{}
	var api *jetstream.APIError
	if errors.As(err, &api) && api.Code >= 400 && api.Code < 500 && api.Code != 404 && api.Code != 408 && api.Code != 429 {
		// Not at the first time: while a consumer is being deleted, the server
		// (2.15) may refuse to create it because it does not exist (10149).
		r.refusals++
		return r.refusals >= maxRefusals
	}
	r.refusals = 0
	return false
}
