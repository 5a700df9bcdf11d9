package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/delay"
)

// What a client answers to a delivery. The answers are published to the
// message's reply subject without waiting: a confirmed ack costs a round trip
// per message and is still forgotten by a server that is killed.
const (
	ackAck      = "+ACK"
	ackNak      = "-NAK"
	ackProgress = "+WPI"
	ackTerm     = "+TERM"
)

// handlerGrace is how long a handler may take to notice that its context was
// canceled before its message is left to be delivered again.
const handlerGrace = 5 * time.Second

// work hands messages to the handler until there are no more.
func (r *run) work() {
	ended := false
	defer func() {
		// runtime.Goexit in a handler ends this goroutine: another takes over.
		if !ended {
			r.workers.Go(r.work)
		}
	}()
	var buf []*message
	for {
		buf = r.hand.next(buf[:0], r.most, r.cfg.HandleTimeout+handlerGrace)
		if len(buf) == 0 {
			break
		}
		if r.batch != nil {
			r.handleBatch(buf)
			clear(buf)
			continue
		}
		r.handle(buf[0])
		buf[0] = nil // it is not kept while this worker waits
	}
	ended = true
}

// ready decodes a message and does what comes before its handler. It reports
// whether there is something to handle now.
func (r *run) ready(m *message) (ready bool) {
	m.d.decode(m.msg)
	if m.d.skip() {
		r.settle(m, Skip, 0, ackAck)
		return false
	}
	return r.intend(m)
}

// handle runs the handler and settles the message. The verdict is reached in a
// deferred call, which runs after a return, a panic and runtime.Goexit alike: a
// handler that did not return nil never has its message acknowledged.
func (r *run) handle(m *message) {
	if !r.ready(m) {
		return
	}
	start := time.Now()
	ctx, cancel := context.WithDeadlineCause(r.drainCtx, start.Add(r.cfg.HandleTimeout), ErrHandleTimeout)
	defer cancel()
	err := ErrGoexit
	defer func() {
		if p := recover(); p != nil {
			err = &PanicError{Value: p, Stack: debug.Stack()}
		}
		took := time.Since(start)
		r.judge(m, because(ctx, err), took, took)
	}()
	err = r.handler(ctx, m.d)
}

// because adds why ctx was canceled to an error that comes of it.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && cause != nil && errors.Is(err, ctx.Err()) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// judge turns what the handler returned into a verdict. It reports whether the
// message is to come again. took is what the handler took, share what of it was
// for this message.
func (r *run) judge(m *message, err error, took, share time.Duration) (again bool) {
	if err != nil {
		share = 0 // failures are quick or slow for reasons of their own
	} else {
		share = max(share, 1)
	}
	overdue, last := r.hand.stop(m, share)
	switch {
	case err == nil:
		if m.d.duplicate && r.cfg.DuplicateFunc != nil {
			r.cfg.DuplicateFunc(m.d)
		}
		r.withdraw(m, func() { r.settle(m, Ack, took, ackAck) })

	case jetbox.IsPermanent(err):
		r.failed(m, err, "park")
		r.park(m, jetbox.ReasonTerminated, err, func() { r.handled(m, Term, took) })

	case last && r.cfg.DeadLetters != nil:
		r.failed(m, err, "park")
		r.park(m, jetbox.ReasonMaxDeliveries, err, func() { r.handled(m, Term, took) })

	case overdue:
		// The server has given it to somebody else, or will. Acks are not
		// fenced: a nak now would hit that delivery.
		r.failed(m, err, "none, the server delivers again")
		r.settle(m, Nak, took, "")
		return true

	case last:
		// Nothing comes after this one; without a delay the server says so
		// (MAX_DELIVERIES) as soon as somebody pulls.
		r.failed(m, err, "none, it was the last delivery")
		r.settle(m, Nak, took, ackNak)

	default:
		d := r.delay(m)
		r.failed(m, err, "retry", slog.Duration("delay", d))
		r.nak(m, d)
		r.settle(m, Nak, took, "")
		return true
	}
	return false
}

// failed logs an attempt and what comes next.
func (r *run) failed(m *message, err error, next string, attrs ...slog.Attr) {
	attrs = append(append(m.attrs(), slog.String("next", next)), attrs...)
	r.cfg.Logger.LogAttrs(r.drainCtx, slog.LevelWarn, "handler failed", append(attrs, slog.Any("err", err))...)
}

// delay is how long this failed delivery waits for the next one.
func (r *run) delay(m *message) time.Duration {
	p := delay.Policy{Initial: r.cfg.Backoff, Max: r.cfg.MaxBackoff}
	return p.After(int(min(m.d.NumDelivered, 64)))
}

// settle sends the answer, if any, and lets go of the message.
func (r *run) settle(m *message, v Verdict, took time.Duration, answer string) {
	if answer != "" {
		r.send(m, answer)
	}
	r.hand.remove(m)
	r.handled(m, v, took)
}

func (r *run) handled(m *message, v Verdict, took time.Duration) {
	if r.cfg.HandledFunc != nil {
		r.cfg.HandledFunc(m.d, v, took)
	}
}

// nak asks for another delivery after d. With the server's BackOff empty the
// delay is exact.
func (r *run) nak(m *message, d time.Duration) {
	r.hand.handedBack(m, d)
	r.send(m, nakAfter(d))
}

func nakAfter(d time.Duration) (answer string) {
	return ackNak + ` {"delay":` + strconv.FormatInt(d.Nanoseconds(), 10) + `}`
}

// send answers a delivery. An answer that cannot be sent is no more lost than
// one the server forgets: the message is delivered again.
func (r *run) send(m *message, answer string) {
	if err := r.nc.Publish(r.hand.answerTo(m), []byte(answer)); err != nil {
		r.cfg.Logger.LogAttrs(r.drainCtx, slog.LevelWarn, "answer not sent, the server will deliver again",
			append(m.attrs(), slog.String("answer", answer), slog.Any("err", err))...)
	}
}
