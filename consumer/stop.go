package consumer

import (
	"context"
	"log/slog"
	"time"
)

// flushTimeout bounds what Run waits for the broker when it stops.
const flushTimeout = 5 * time.Second

// drain ends everything in the order that loses nothing: no more arrives, what
// no handler saw goes back, handlers finish, answers are flushed.
func (r *run) drain() {
	r.stop()
	r.cfg.Logger.LogAttrs(r.drainCtx, slog.LevelInfo, "consumer is stopping", r.attrs()...)
	r.unsubscribe()
	r.handBack(false)
	deadline := time.AfterFunc(r.cfg.DrainTimeout, func() { r.cancel(ErrStopping) })
	defer deadline.Stop()
	r.workers.Wait()
	r.aside.Wait()
	r.handBack(true)
	r.flush("flush acks")
	r.unpin()
}

// unpin lets another instance be the active one at once. Without the permission
// to do so it becomes that after an ack wait.
func (r *run) unpin() {
	if r.pull.pin == "" || !r.nc.IsConnected() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.ctx), flushTimeout)
	defer cancel()
	s, err := r.js.Stream(ctx, r.cfg.Stream)
	if err == nil {
		err = s.UnpinConsumer(ctx, r.cfg.Durable, r.pull.group)
	}
	if err != nil {
		r.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "others have to wait for the consumer", r.attrs(slog.Any("err", err))...)
	}
}

// handBack asks for other deliveries of what no handler saw.
func (r *run) handBack(all bool) {
	for _, m := range r.hand.handBack(all) {
		if m.wait > 0 {
			r.send(m.message, nakAfter(m.wait))
		} else {
			r.send(m.message, ackNak)
		}
	}
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
