package consumer

import (
	"log/slog"
	"math"
	"time"

	"github.com/nats-io/nats.go"
)

// letGoWithin is how soon an instance that is connected lets go of what it had
// when another is active.
const letGoWithin = 2 * pollEvery

// pinned notices that this instance has become the active one. What the last one
// had in hand comes back first: what is newer waits for it.
func (r *run) pinned(msg *nats.Msg, d *Delivery) {
	pin := msg.Header.Get(headerPin)
	if pin == "" || pin == r.pull.pin {
		return
	}
	if !r.ousted {
		r.hand.forgetNaks() // others may have had what this one handed back
	}
	r.pull.pin, r.ousted = pin, false
	r.cfg.Logger.LogAttrs(r.ctx, slog.LevelInfo, "this instance is active", r.attrs()...)
	l, err := r.lookUp(r.ctx)
	if err != nil {
		// All before this one may be out.
		l = r.live.Load()
		l = &live{ackPending: math.MaxInt, delivered: max(d.StreamSeq-1, l.delivered), ackWait: l.ackWait}
	} else if d.NumDelivered == 1 { // it is not among those that are out
		l.ackPending--
		l.delivered = min(l.delivered, d.StreamSeq-1)
	}
	now := time.Now()
	r.pace.begin(l, now, now.Add(max(l.ackWait, r.cfg.MaxBackoff)+letGoWithin), true)
}

// letGo leaves to the instance that is active now what no worker has. That one
// gathers what is out for a time only, and must not get it later. As long as the
// server has no active one, as after its restart, this one goes on.
//
// Nothing is handed back. The other one may have it already, if this process was
// paused: naks are not fenced, and one would end a last delivery there.
func (r *run) letGo() {
	l, err := r.lookUp(r.ctx)
	if err != nil || l.pinned == "" {
		return
	}
	r.receiveMore()
	if !r.ousted {
		return // it is this one
	}
	r.ousted = false
	if n := r.hand.letGo(); n > 0 {
		r.cfg.Logger.LogAttrs(r.ctx, slog.LevelInfo, "another instance is active and gets what no worker here has",
			r.attrs(slog.Int("messages", n))...)
	}
	now := time.Now()
	r.pace.begin(&live{}, now, now, false)
	r.hand.openGate() // for what is on its last delivery
}
