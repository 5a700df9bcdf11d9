package consumer

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/seed-5e04d8fb/jetbox/internal/delay"
)

// pollEvery is how often a slow start looks whether it is over, and lanes whether
// what they wait for is settled.
const pollEvery = time.Second

// troubleDelay spaces look-ups and requests that keep failing.
var troubleDelay = delay.Policy{Initial: 100 * time.Millisecond, Max: 5 * time.Second}

// run is one call of Run. Its loop owns the puller and the pace; the workers and
// the messages held aside share the hand.
type run struct {
	*Consumer

	ctx      context.Context // ends when nothing more is to be started
	stop     context.CancelFunc
	drainCtx context.Context // outlives it by DrainTimeout at most
	cancel   context.CancelCauseFunc

	live    atomic.Pointer[live]
	hand    *hand
	workers sync.WaitGroup
	aside   sync.WaitGroup

	pull *puller
	pace pace
	gaps gaps

	trouble      *time.Timer // fires when the consumer is to be looked up
	failures     int         // look-ups that failed in a row
	losses       int         // requests lost in a row
	polled       time.Time   // when unsettled messages were last asked for
	missingSince time.Time   // of the stream
	refusals     int         // by the server, in a row
	reported     string      // differences already logged
	paused       pause       // what was logged last
	arrivedAt    time.Time   // of the last message
	askedAt      time.Time   // of the last request
	ousted       bool        // not active any more, with what it had then
	newAt        time.Time   // of the last one that had not been delivered before
	fresh        time.Time   // when no redelivery waited for us for the last time
}

func newRun(ctx context.Context, c *Consumer) *run {
	r := &run{Consumer: c, hand: newHand(c.cfg.MaxBehindKey)}
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
	p, err := newPuller(r.js, r.cfg, r.cfg.Workers*r.most)
	if err != nil {
		return err
	}
	r.pull = p
	r.trouble = time.NewTimer(0) // look up first
	defer r.trouble.Stop()
	watch := time.NewTicker(pollEvery)
	defer watch.Stop()
	keepCtx, stopKeeping := context.WithCancel(context.WithoutCancel(r.ctx))
	var keeper sync.WaitGroup
	defer keeper.Wait()
	defer stopKeeping()

	for {
		r.next()
		select {
		case <-r.ctx.Done():
			r.drain()
			return nil
		case m := <-r.pull.msgs:
			r.receive(m)
			r.receiveMore()
		case <-r.hand.changed:
		case now := <-watch.C:
			r.watch(now)
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

// watch does what is due now and then.
func (r *run) watch(now time.Time) {
	if r.pull.silent(now) {
		r.lost("no heartbeat")
	}
	l := r.live.Load()
	if l == nil || r.failures > 0 {
		return
	}
	r.pace.probe = r.pace.starting && (r.pace.gated || now.After(r.pace.until))
	if r.pull.pin != "" && now.Sub(r.askedAt) >= l.pinnedTTL/3 {
		r.askedAt = now
		if err := r.pull.touch(); err != nil {
			r.lost(err.Error())
		}
	}
	if r.pull.open() && now.Sub(r.arrivedAt) >= pollEvery && now.Sub(r.askedAt) >= pollEvery {
		r.fresh = now // nothing waits, or it would have come
	}
	if r.ousted {
		r.letGo()
	}
	r.giveUp(now)
}

// giveUp ends the waiting for messages that another instance has. The
// server delivers again before it delivers anew: when something new has come
// since that message was due, or nothing at all, it is not waiting for us.
func (r *run) giveUp(now time.Time) {
	overdue := r.fresh.Add(-pollEvery)
	if !r.hand.stuck(overdue) {
		return
	}
	l, err := r.lookUp(r.ctx)
	if err != nil {
		return // the broker is away: wait on
	}
	then := now.Add(-l.ackWait)
	if overdue.Before(then) {
		then = overdue
	}
	if lost, key := r.hand.giveUp(l.ackFloor, then); lost > 0 {
		r.cfg.Logger.LogAttrs(r.ctx, slog.LevelWarn, "messages to be retried did not come back, going on with later ones of their keys",
			r.attrs(slog.Int("messages", lost), slog.String("key", key))...)
	}
}

// next asks for as many messages as the workers can take, at the pace of the
// moment. Nothing is asked while the consumer is looked up or has never been.
func (r *run) next() {
	l := r.live.Load()
	if l == nil || r.failures > 0 {
		return
	}
	c := r.hand.counts()
	limit := r.cfg.Workers*r.most + ahead(r.cfg.Workers, c, l.ackWait)
	r.pollStart(c)
	due := 0
	full := r.full(c, l)
	if full || r.pace.starting {
		due = r.hand.due(time.Now(), r.fresh.Add(-pollEvery))
	}
	n := r.pace.target(limit, due, c)
	if full {
		// What was handed back must come, or nothing would ever go on. When
		// something new came instead, try again later: that is one too many.
		if n = min(n, due); time.Since(r.newAt) < pollEvery {
			n = 0
		}
	}
	if r.pace.gated && !r.pace.starting && c.atGate > 0 {
		r.hand.openGate()
	}
	standby := r.cfg.SingleActive && r.pull.pin == ""
	if standby {
		n = min(n, 1) // more would be open beside it when this one gets the pin
	}
	// Half of it is enough to ask for: a request for each message would cost
	// as much as the message.
	if n <= 0 || 2*r.pull.waiting > n {
		if n > 0 && !r.pace.starting && !full && !standby {
			r.quiet(limit, c)
		}
		return
	}
	n -= r.pull.waiting
	if l.maxBatch > 0 {
		n = min(n, l.maxBatch)
	}
	expires := pullExpires
	if l.maxExpires > 0 {
		expires = min(expires, l.maxExpires)
	}
	r.pace.probe = false
	r.askedAt = time.Now()
	if err := r.pull.ask(n, expires); err != nil {
		r.lost(err.Error())
	}
}

// quiet spares the loop to hear of messages that leave the hand, until there
// are so few that it would ask for more.
func (r *run) quiet(limit int, c counts) {
	need := max(2*r.pull.waiting, 1)
	if r.pace.most(c) < need {
		r.hand.quietUntil(-1) // only what arrives can change that
	} else if r.hand.quietUntil(limit - need) {
		r.hand.nudge()
	}
}

// pollStart asks now and then whether what was out at the start has settled.
func (r *run) pollStart(c counts) {
	if !r.pace.starting || r.pace.cleared || c.busy > c.lapsed || time.Since(r.polled) < pollEvery {
		return
	}
	r.polled = time.Now()
	if l, err := r.lookUp(r.ctx); err == nil && (l.ackPending <= c.inHand()+c.aside+c.retries || l.ackFloor >= r.pace.floor) {
		r.pace.cleared = true
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
	case statusUnpinned:
		r.cfg.Logger.LogAttrs(r.ctx, slog.LevelInfo, "this instance is not active any more", r.attrs()...)
		r.ousted = true
	case statusNone:
		r.losses = 0
		r.take(msg)
	}
}

// receiveMore takes in what else is there.
func (r *run) receiveMore() {
	for range maxAhead {
		select {
		case m := <-r.pull.msgs:
			r.receive(m)
		default:
			return
		}
	}
}

// take puts a message in hand.
func (r *run) take(msg *nats.Msg) {
	md, err := msg.Metadata()
	if err != nil {
		r.cfg.Logger.LogAttrs(r.ctx, slog.LevelWarn, "dropped a message that is no delivery", slog.Any("err", err))
		return
	}
	now := time.Now()
	r.arrivedAt = now
	if md.NumDelivered == 1 {
		r.fresh, r.newAt = now, now
	}
	m := &message{msg: msg, d: newDelivery(msg, md), again: md.NumDelivered > 1, pending: md.NumPending}
	maxDeliver := r.live.Load().maxDeliver // nothing was asked for before
	m.d.Last = maxDeliver > 0 && m.d.NumDelivered >= uint64(maxDeliver)
	m.alone = m.d.Last && r.cfg.DeadLetters != nil
	if r.cfg.SingleActive {
		r.pinned(msg, m.d)
	}
	if r.cfg.GapFunc != nil {
		r.lookForGap(m)
	}
	var key string
	if !r.cfg.Unordered {
		key = m.d.lane()
	}
	r.hand.add(m, key, key != "" && r.pace.stops(m.d, maxDeliver))
	r.pace.arrived(m, now)
}

// lost gives up on the open request and has the consumer looked up: at once, or
// later when the last requests were lost too.
func (r *run) lost(why string) {
	r.pull.forget()
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
		now := time.Now()
		r.pace.begin(l, now, now.Add(l.ackWait), false)
		r.pull.group = l.group
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

func (r *run) attrs(more ...slog.Attr) []slog.Attr {
	return append([]slog.Attr{slog.String("stream", r.cfg.Stream), slog.String("consumer", r.cfg.Durable)}, more...)
}
