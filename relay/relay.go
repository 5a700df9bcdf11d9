package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/delay"
)

// Relay publishes the rows of one source. Run may be called once; Wake and
// Health are safe for concurrent use.
type Relay struct {
	src     Source
	cfg     Config
	owner   string
	streams *streams
	denials *denials
	engine  engine
	retry   delay.Policy
	late    *highest // used by the loop alone
	asleep  asleep   // used by the loop alone
	wake    chan struct{}
	at      positions
	watch   watch
	share   share
	health  health
	started sync.Once
}

// New returns a Relay that takes rows from src and publishes them through js. It
// starts nothing, and keeps neither: the caller closes both after Run returns.
//
// Connect with nats.MaxReconnects(-1), so that an outage of any length ends by
// itself, and nats.ReconnectBufSize(-1), so that a publish during one fails at
// once instead of being stored later, out of order. Run puts an error handler in
// front of the connection's own, because a publish that the server denies shows
// nowhere else.
func New(src Source, js jetstream.JetStream, cfg Config) (*Relay, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if src == nil || js == nil {
		return nil, errors.New("relay: New needs a source and a JetStream context, one is nil")
	}
	streams := newStreams(js, cfg.Stream)
	denied := new(denials)
	eng, err := newEngine(js, cfg, streams, denied)
	if err != nil {
		return nil, err
	}
	return &Relay{
		src:     src,
		cfg:     cfg,
		owner:   uuid.NewString(),
		streams: streams,
		denials: denied,
		engine:  eng,
		retry:   delay.Policy{Initial: cfg.Backoff, Max: cfg.MaxBackoff},
		late:    newHighest(),
		asleep:  make(asleep),
		wake:    make(chan struct{}, 1),
	}, nil
}

// Wake says that rows may have been committed, for writers in the same process:
// call it after the commit. It never blocks, and calling it for nothing is
// harmless.
func (r *Relay) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Run relays until ctx is canceled, waits for the PubAcks of what was sent,
// records them and returns nil, within DrainTimeout. What was not acknowledged by
// then is sent again by the next relay. Any other result is a setting that
// cannot work; outages of broker and database are waited for.
func (r *Relay) Run(ctx context.Context) error {
	err := errors.New("relay: Run was called before")
	r.started.Do(func() { err = r.run(ctx) })
	return err
}

func (r *Relay) run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer r.engine.close()
	defer wg.Wait()
	r.denials.watch(r.streams.js.Conn())
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	wg.Go(func() { r.watchBroker(ctx, cancel) })
	wg.Go(func() { r.watchSource(ctx) })

	for ctx.Err() == nil {
		asked := time.Now()
		lease, err := r.src.Acquire(ctx, r.candidate())
		switch {
		case err != nil:
			r.fault(ctx, partDatabase, fmt.Errorf("acquire lease: %w", err))
		case lease.Held:
			r.fault(ctx, partDatabase, nil)
			if gaveBack := r.lead(ctx, lease, asked); !gaveBack {
				continue
			}
			// Whom it stands by for the next Acquire says. Others come first.
			r.health.setRole(RoleStandby, "other relays")
		default:
			r.fault(ctx, partDatabase, nil)
			r.standBy(ctx, lease)
		}
		pause(ctx, min(r.cfg.PollInterval, r.cfg.Lease/3))
	}
	r.leave(ctx)
	r.health.setRole(RoleStopped, "")
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) && !errors.Is(cause, context.DeadlineExceeded) {
		return cause
	}
	return nil
}

// candidate is what this relay asks for the lease as.
func (r *Relay) candidate() jetbox.Candidate {
	return jetbox.Candidate{Owner: r.owner, Length: r.cfg.Lease, Unable: r.health.unable(r.cfg.Lease)}
}

func (r *Relay) standBy(ctx context.Context, l jetbox.Lease) {
	if r.health.setRole(RoleStandby, l.Holder) {
		r.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "standing by", slog.String("holder", l.Holder))
	}
}

// leave takes leave of a shared source that this relay stands by for: others would
// keep a part for it until its lease runs out.
func (r *Relay) leave(ctx context.Context) {
	if _, shared := r.src.(Yielder); !shared || r.health.state().Role != RoleStandby {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.DrainTimeout)
	defer cancel()
	r.release(ctx, jetbox.Lease{Owner: r.owner})
}

func (r *Relay) release(ctx context.Context, l jetbox.Lease) {
	if err := r.src.Release(ctx, l); err != nil {
		r.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "lease not released, it runs out by itself", slog.Any("err", err))
	}
}

// lead works for as long as the lease, asked for at a time, is ours and ctx is
// not done. It reports whether the lease ended because all of it was given back to
// other relays.
func (r *Relay) lead(ctx context.Context, lease jetbox.Lease, asked time.Time) (gaveBack bool) {
	r.share.begin(lease)
	defer r.share.begin(jetbox.Lease{})
	r.health.setRole(RoleActive, "")
	r.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "lease acquired",
		slog.Int64("epoch", lease.Epoch), slog.Int("shards", lease.Shards))

	// What has begun outlives the stop, for DrainTimeout.
	hard, cancelHard := context.WithCancel(context.WithoutCancel(ctx))
	defer cancelHard()
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(r.cfg.DrainTimeout, cancelHard) })
	defer stop()

	leadCtx, lost := context.WithCancelCause(ctx)
	defer lost(nil)
	s := &session{Relay: r, ctx: leadCtx, hard: hard, size: r.cfg.Batch, unverified: make(map[int64]bool), absent: make(map[int64]bool)}
	s.extend(asked)
	r.watch.suspect() // what happened while others worked, or nobody

	var wg sync.WaitGroup
	wg.Go(func() { s.keepLease(lost) })
	wg.Go(s.prune)
	err := s.loop()
	lost(err)
	wg.Wait()

	cause := context.Cause(leadCtx)
	switch {
	case errors.Is(err, errGivenBack), errors.Is(cause, errGivenBack):
		return true
	case errors.Is(err, jetbox.ErrLeaseLost), errors.Is(cause, jetbox.ErrLeaseLost):
		r.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "lease lost to another relay", slog.Int64("epoch", lease.Epoch))
		return false
	}
	r.release(hard, lease)
	return false
}

// watchSource passes the source's hints on to whoever waits for rows.
func (r *Relay) watchSource(ctx context.Context) {
	for ctx.Err() == nil {
		if err := r.src.Wait(ctx); err != nil {
			// Acquire and Claim meet the same error and report it.
			pause(ctx, r.cfg.PollInterval)
			continue
		}
		r.Wake()
	}
}

// pause waits, or less when ctx is done.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
