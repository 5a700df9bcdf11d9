package consumer

import (
	"context"
	"log/slog"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/delay"
	"github.com/seed-5e04d8fb/jetbox/internal/termreason"
)

// DeadLetters stores what a consumer could not handle. Its methods are called
// by several workers at once, may be repeated for the same failure, and return
// nil only for what is durably stored. A failure is identified by Stream,
// Consumer, Seq and Stored; one whose Header names a letter
// ([jetbox.HeaderLetter]) is a replay and concerns that letter.
type DeadLetters interface {
	// Intend stores that the last delivery of a message is about to be handled.
	// If nothing else is heard of it, the process died in the handler.
	Intend(ctx context.Context, f jetbox.Failure) error

	// Park stores the letter with its error for a person to see, or opens the
	// intent.
	Park(ctx context.Context, f jetbox.Failure) error

	// Withdraw closes the intent: the last delivery was handled.
	Withdraw(ctx context.Context, f jetbox.Failure) error
}

const (
	// letterTimeout bounds one attempt to store a letter, and by how much such
	// an attempt may outlive DrainTimeout.
	letterTimeout = 5 * time.Second
	// withdrawAttempts is how often an intent is tried to be closed. The effect
	// has happened, so the message must be acknowledged at some time; the worst
	// that is left behind is an intent for a person to close.
	withdrawAttempts = 5
)

// intend makes sure that the intent letter is there before the last delivery is
// handled. It reports whether the handler may run now. If not, the message
// waits aside, in progress, as those behind it do, and comes back to a worker.
func (r *run) intend(m *message) (ready bool) {
	if !m.d.Last || r.cfg.DeadLetters == nil || m.intended {
		return true
	}
	store := func(ctx context.Context) error {
		return r.cfg.DeadLetters.Intend(ctx, m.d.failure(jetbox.ReasonMaxDeliveries, ""))
	}
	if r.drainCtx.Err() == nil && r.letter(r.drainCtx, m, "intend", store) == nil {
		m.intended = true
		r.hand.restart(m, time.Now().Add(r.cfg.HandleTimeout+handlerGrace))
		return true
	}
	r.hold(m, true, func() {
		// With Run's own context: when it stops, this delivery was not handled
		// and must not be now. The server reports it as exhausted.
		if !r.letterLoop(r.ctx, m, "intend", 0, store) {
			r.hand.remove(m)
			return
		}
		m.intended = true
		if !r.hand.release(m) {
			r.hand.remove(m)
		}
	})
	return false
}

// park stores the dead letter, then terminates the message. The order is the
// guarantee: on a work queue the term deletes the message, and everywhere
// nobody would look at it again.
func (r *run) park(m *message, reason string, err error, done func()) {
	text := clip(err.Error(), maxErrText)
	why := termReason(reason + ": " + text)
	term := func() {
		r.send(m, ackTerm+" "+why)
		r.hand.remove(m)
		done()
	}
	if r.cfg.DeadLetters == nil {
		term()
		return
	}
	why = termreason.Join(why, m.d.letterName())
	store := func(ctx context.Context) error {
		return r.cfg.DeadLetters.Park(ctx, m.d.failure(reason, text))
	}
	if r.letter(r.drainCtx, m, "park", store) == nil {
		term()
		return
	}
	r.hold(m, false, func() {
		if r.letterLoop(r.drainCtx, m, "park", 0, store) {
			term()
			return
		}
		// Stopping without a letter. Another delivery will bring it to the same
		// verdict; the last one is reported by the server as exhausted.
		if !m.d.Last {
			r.nak(m, r.delay(m))
		}
		r.hand.remove(m)
	})
}

// withdraw takes the intent back, then acknowledges. When the ack is lost, the
// server reports the message as exhausted and a router opens a letter for it,
// although it was handled: a person sees one letter too many, whose replay a
// ledger absorbs. The other way round would hide a failure.
func (r *run) withdraw(m *message, ack func()) {
	if !m.intended {
		ack()
		return
	}
	closeIt := func(ctx context.Context) error {
		return r.cfg.DeadLetters.Withdraw(ctx, m.d.failure(jetbox.ReasonMaxDeliveries, ""))
	}
	if r.letter(r.drainCtx, m, "withdraw", closeIt) == nil {
		ack()
		return
	}
	r.hold(m, false, func() {
		if !r.letterLoop(r.drainCtx, m, "withdraw", withdrawAttempts, closeIt) {
			r.cfg.Logger.LogAttrs(r.ctx, slog.LevelWarn, "handled, but its intent letter could not be withdrawn",
				m.attrs()...)
		}
		ack()
	})
}

// letter makes one attempt, and says what failed. It outlives the cancel: what
// came of a handler has no other place.
func (r *run) letter(ctx context.Context, m *message, step string, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), letterTimeout)
	defer cancel()
	err := f(ctx)
	if err != nil {
		r.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "dead letter not stored, will retry",
			append(m.attrs(), slog.String("step", step), slog.Any("err", err))...)
	}
	return err
}

// letterLoop retries until it worked, ctx is done or the attempts are used up
// (0 is no limit).
func (r *run) letterLoop(ctx context.Context, m *message, step string, attempts int, f func(context.Context) error) (stored bool) {
	policy := delay.Policy{Initial: r.cfg.Backoff, Max: r.cfg.MaxBackoff}
	for n := 1; attempts == 0 || n <= attempts; n++ {
		if !sleep(ctx, policy.After(n)) {
			return false
		}
		if r.letter(ctx, m, step, f) == nil {
			return true
		}
	}
	return false
}

// hold keeps a message aside, off the workers and in progress, while f settles
// it or gives it back. With keep, later ones of its key wait for it.
func (r *run) hold(m *message, keep bool, f func()) {
	r.hand.hold(m, keep)
	r.aside.Go(f)
}

// sleep waits and reports whether ctx allowed it.
func sleep(ctx context.Context, d time.Duration) (slept bool) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
