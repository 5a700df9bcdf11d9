package consumer

import (
	"context"
	"log/slog"
	"slices"
	"time"
)

// alive returns where the signals for what is in hand go, in stream order, and
// the messages that have just become overdue. The order matters when the process
// dies: the server delivers first what it heard of first.
func (h *hand) alive(now time.Time, ackWait time.Duration) (replies []string, lapsed []*message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	keep := make([]*message, 0, len(h.messages))
	for _, m := range h.messages {
		if m.deadline.IsZero() || !now.After(m.deadline) {
			keep = append(keep, m)
			continue
		}
		h.burden(m, -1)
		m.lapsed = true
		h.burden(m, 1)
		lapsed = append(lapsed, m)
	}
	for _, m := range lapsed {
		h.forget(m)
		h.expect(m, now.Add(ackWait))
		h.leave(m)
	}
	slices.SortFunc(keep, bySequence)
	for _, m := range keep {
		replies = append(replies, m.reply)
	}
	return replies, lapsed
}

// keepAlive sends in-progress signals for everything in hand, three in an ack
// wait, until ctx is done. The ack wait runs from the delivery, not from the
// start of the handler, so it covers what waits for a worker too.
func (r *run) keepAlive(ctx context.Context) {
	for sleep(ctx, r.live.Load().signalEvery()) {
		if !r.nc.IsConnected() {
			continue // they would pile up in the client and say nothing true later
		}
		replies, lapsed := r.hand.alive(time.Now(), r.live.Load().ackWait)
		for _, reply := range replies {
			if err := r.nc.Publish(reply, []byte(ackProgress)); err != nil {
				r.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "in-progress signals not sent", r.attrs(slog.Any("err", err))...)
				break
			}
		}
		for _, m := range lapsed {
			r.cfg.Logger.LogAttrs(ctx, slog.LevelError, "handler ignores its canceled context, the server will deliver again", m.attrs()...)
		}
	}
}
