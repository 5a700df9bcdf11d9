package consumer

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/seed-5e04d8fb/jetbox/internal/delay"
)

const (
	// flushTimeout bounds what Run waits for the broker when it stops.
	flushTimeout = 5 * time.Second
	// pollEvery is how often a slow start looks whether it is over.
	pollEvery = time.Second
)

// troubleDelay spaces look-ups and requests that keep failing.
var troubleDelay = delay.Policy{Initial: 100 * time.Millisecond, Max: 5 * time.Second}

// run is one call of Run. Its loop owns the queue, the puller and the pace; the
// workers and the messages held aside share the hand.
type run struct {
	*Consumer

	ctx      context.Context // ends when nothing more is to be started
	stop     context.CancelFunc
	drainCtx context.Context // outlives it by DrainTimeout at most
	cancel   context.CancelCauseFunc

	live    atomic.Pointer[live]
	hand    *hand
	ready   chan *message // from the loop to the workers; nobody waits in it
	back    chan *message // from aside to the loop
	workers sync.WaitGroup
	aside   sync.WaitGroup

	pull  *puller
	queue []*message // arrived, not handed to a worker
	pace  pace

	trouble      *time.Timer // fires when the consumer is to be looked up
	failures     int         // look-ups that failed in a row
	losses       int         // requests lost in a row
	polled       time.Time   // when unsettled messages were last asked for
	missingSince time.Time   // of the stream
	refusals     int         // by the server, in a row
	reported     string      // differences already logged
	full         bool        // logged that too many messages are held
}

func newRun(ctx context.Context, c *Consumer) *run {
	r := &run{
		Consumer: c,
		hand:     newHand(),
		ready:    make(chan *message),
		back:     make(chan *message),
	}
	r.ctx, r.stop = context.WithCancel(ctx)
	r.drainCtx, r.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	return r
}

// loop runs until ctx is done or nothing can help. All goroutines have ended
// when it returns.
func (r *run) loop() error {
	defer r.cancel(nil)
	defer r.stop()
	connected := r.nc.StatusChanged(nats.CONNECTED, nats.CLOSED)
	defer r.nc.RemoveStatusListener(connected)
	p, err := newPuller(r.js, r.cfg)
	if err != nil {
		return err
	}
	r.pull = p
	r.trouble = time.NewTimer(0) // look up first
	defer r.trouble.Stop()
	watch := time.NewTicker(pullHeartbeat)
	defer watch.Stop()

	keepCtx, stopKeeping := context.WithCancel(context.WithoutCancel(r.ctx))
	var keeper sync.WaitGroup
	defer keeper.Wait()
	defer stopKeeping()

	for {
		r.next()
		var ready chan<- *message
		var head *message
		if len(r.queue) > 0 {
			ready, head = r.ready, r.queue[0]
		}
		select {
		case <-r.ctx.Done():
			r.drain()
			return nil
		case ready <- head:
			r.queue = r.queue[1:]
		case m := <-r.pull.msgs:
			r.receive(m)
		case m := <-r.back:
			r.queue = slices.Insert(r.queue, 0, m)
		case <-r.hand.changed:
		case now := <-watch.C:
			if r.pull.silent(now) {
				r.lost("no heartbeat")
			}
		case s := <-connected:
			if s == nats.CLOSED {
				r.drain()
				return nats.ErrConnectionClosed
			}
			r.lost("reconnected")
		case <-r.trouble.C:
			first := r.live.Load() == nil
			if err := r.lookAgain(); err != nil && r.ctx.Err() == nil && !r.retry(err) {
				r.drain()
				return err
			}
			if first && r.live.Load() != nil {
				keeper.Go(func() { r.keepAlive(keepCtx) })
				for range r.cfg.Workers {
					r.workers.Go(r.work)
				}
			}
		}
	}
}

// next asks for as many messages as there are free workers, at the pace of the
// moment. Nothing is asked while the consumer is looked up or has never been.
func (r *run) next() {
	l := r.live.Load()
	if l == nil || r.pull.open() || r.failures > 0 {
		return
	}
	busy, suspects, held := r.hand.counts()
	if full := held >= r.cfg.MaxHeld; full != r.full {
		r.full = full
		if full {
			r.cfg.Logger.LogAttrs(r.ctx, slog.LevelError, "paused: too many messages wait for their dead letters to be stored",
				r.attrs(slog.Int("held", held))...)
		}
	}
	if r.full {
		return
	}
	if r.pace.starting && busy == 0 && time.Since(r.polled) >= pollEvery {
		r.polled = time.Now()
		if l, err := r.lookUp(r.ctx); err == nil && (l.ackPending == 0 || l.ackFloor >= r.pace.floor) {
			r.pace.cleared = true
		}
	}
	n := r.pace.batch(r.cfg.Workers, busy, suspects)
	if l.maxBatch > 0 {
		n = min(n, l.maxBatch)
	}
	if n <= 0 {
		return
	}
	expires := pullExpires
	if l.maxExpires > 0 {
		expires = min(expires, l.maxExpires)
	}
	if err := r.pull.ask(n, expires); err != nil {
		r.lost(err.Error())
	}
}

// receive takes in what arrived in the inbox.
func (r *run) receive(msg *nats.Msg) {
	switch s, text := r.pull.receive(msg); s {
	case statusAlive:
	case statusOver:
		r.losses = 0
		r.pace.idle(time.Now())
	case statusLost:
		r.lost(text)
	case statusNone:
		r.losses = 0
		r.take(msg)
	}
}

// take puts a message in hand and in the queue.
func (r *run) take(msg *nats.Msg) {
	md, err := msg.Metadata()
	if err != nil {
		r.cfg.Logger.LogAttrs(r.ctx, slog.LevelWarn, "dropped a message that is no delivery", slog.Any("err", err))
		return
	}
	m := &message{msg: msg, d: newDelivery(msg, md)}
	if l := r.live.Load(); l != nil && l.maxDeliver > 0 {
		m.d.Last = m.d.NumDelivered >= uint64(l.maxDeliver)
	}
	r.hand.add(m)
	r.pace.arrived(m, time.Now())
	r.queue = append(r.queue, m)
}

// lost gives up on the open request and has the consumer looked up: at once, or
// later when the last requests were lost too.
func (r *run) lost(why string) {
	r.pull.waiting = 0
	if r.failures > 0 {
		return // it is looked up already
	}
	r.failures = 1
	var wait time.Duration
	if r.losses++; r.losses > 1 {
		wait = troubleDelay.After(r.losses - 1)
	}
	r.cfg.Logger.LogAttrs(r.ctx, slog.LevelInfo, "pull ended, looking up the consumer",
		r.attrs(slog.String("reason", why), slog.Duration("delay", wait))...)
	r.trouble.Reset(wait)
}

// lookAgain looks the consumer up, once.
func (r *run) lookAgain() error {
	l, err := r.lookUp(r.ctx)
	if err != nil {
		return err
	}
	if r.live.Swap(l) == nil {
		r.pace.begin(l, time.Now())
	}
	r.failures, r.refusals, r.missingSince, r.polled = 0, 0, time.Time{}, time.Now()
	return nil
}

// retry has the consumer looked up again later, unless nothing can help.
func (r *run) retry(err error) (retried bool) {
	if r.nc.IsClosed() || r.hopeless(err) {
		return false
	}
	r.failures++
	wait := troubleDelay.After(r.failures)
	r.cfg.Logger.LogAttrs(r.ctx, slog.LevelWarn, "consumer not available, will retry",
		r.attrs(slog.Duration("delay", wait), slog.Any("err", err))...)
	r.trouble.Reset(wait)
	return true
}

// drain ends everything in the order that loses nothing: no more arrives, what
// no handler saw goes back, handlers finish, answers are flushed.
func (r *run) drain() {
	r.stop()
	r.cfg.Logger.LogAttrs(r.drainCtx, slog.LevelInfo, "consumer is stopping", r.attrs()...)
	r.unsubscribe()
	last := r.queue[:0]
	for _, m := range r.queue {
		if m.d.Last && r.live.Load() != nil {
			// Handing it back would end it without a handler ever seeing it
			// this time. It is handled instead.
			last = append(last, m)
			continue
		}
		r.send(m, ackNak)
		r.hand.remove(m)
	}
	deadline := time.AfterFunc(r.cfg.DrainTimeout, func() { r.cancel(ErrStopping) })
	defer deadline.Stop()
	if r.live.Load() != nil {
		for _, m := range last {
			r.ready <- m
		}
	}
	close(r.ready)
	r.workers.Wait()
	r.aside.Wait()
	r.flush("flush acks")
}

// unsubscribe ends the open request and takes in what was on its way.
func (r *run) unsubscribe() {
	// Drain keeps the subscription in the client until the server has heard of
	// its end, so that nothing is delivered to nobody: that would cost an ack
	// wait and one of the message's deliveries.
	if err := r.pull.sub.Drain(); err != nil {
		return
	}
	r.flush("flush unsubscribe")
	for {
		select {
		case m := <-r.pull.msgs:
			r.receive(m)
		default:
			return
		}
	}
}

func (r *run) attrs(more ...slog.Attr) []slog.Attr {
	return append([]slog.Attr{slog.String("stream", r.cfg.Stream), slog.String("consumer", r.cfg.Durable)}, more...)
}

func (r *run) flush(what string) {
	if !r.nc.IsConnected() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.ctx), flushTimeout)
	defer cancel()
	if err := r.nc.FlushWithContext(ctx); err != nil {
		r.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "broker did not confirm", slog.String("step", what), slog.Any("err", err))
	}
}
