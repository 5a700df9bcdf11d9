package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/seed-5e04d8fb/jetbox"
)

// session is the time a relay holds one lease.
type session struct {
	*Relay

	// ctx ends with the stop, or when the lease is lost: nothing new begins.
	// hard ends DrainTimeout later: what has begun is given up.
	ctx, hard context.Context

	// until is when the lease ends, in nanoseconds of our own monotonic clock
	// since began. Wall clocks jump, and other hosts' clocks differ.
	began time.Time
	until atomic.Int64

	// resting is why rows sleep that are not refused for themselves, until when
	// that is to be believed, and flowed is when others were stored last.
	resting      error
	restingUntil time.Time
	flowed       time.Time

	// unverified are rows of the batch on the wire that may be on the stream
	// already, without a way to find out.
	unverified map[int64]bool

	// absent are rows of that batch that were looked for and are not on the stream.
	// before is where the streams stood before any of it was claimed.
	absent map[int64]bool
	before []jetbox.Position

	// size is how many rows the next claim asks for.
	size int

	// unrecorded are outcomes that could not be recorded before everything had to
	// be given back. They are, if it is kept after all; otherwise the next holder
	// finds rows of unknown outcome, as after a crash.
	unrecorded []jetbox.Outcome
}

// extend sets the end of the lease, counted from before it was asked for.
func (s *session) extend(asked time.Time) {
	if s.began.IsZero() {
		s.began = asked
	}
	s.until.Store(int64(asked.Sub(s.began) + s.cfg.Lease))
}

// maySend reports whether another message may be sent: neither stopped nor past
// the end of the lease. A relay that slept through its lease finds it past.
func (s *session) maySend() (ok bool) {
	return !s.stopped() && time.Since(s.began) < time.Duration(s.until.Load())
}

// keepLease renews the lease, whatever the batches do, until ctx is done. When
// another relay has it, or nothing is left of it, lost is called.
func (s *session) keepLease(lost context.CancelCauseFunc) {
	for {
		had := s.share.now()
		pause(s.ctx, s.renewEvery(had))
		if s.ctx.Err() != nil {
			return
		}
		asked, yields := time.Now(), s.share.yielded()
		l, err := s.src.Acquire(s.ctx, s.candidate())
		if err != nil {
			// Not fatal: until another relay takes it, the lease is ours. But
			// nothing is sent past its end.
			s.fault(s.ctx, partDatabase, fmt.Errorf("renew lease: %w", err))
			continue
		}
		if err := s.share.renew(l, yields); err != nil {
			lost(err)
			return
		}
		s.extend(asked)
		if l.Shards > had.Shards {
			s.watch.suspect() // their relay may have left a recall behind
		}
		if l.Excess > 0 || l.Shards > had.Shards {
			s.Wake() // an idle loop would give back, or look into, these when it polls
		}
	}
}

// renewEvery is the time between two renewals. With others it is also how long a
// shard that one of them has left stays without a relay.
func (s *session) renewEvery(l jetbox.Lease) time.Duration {
	const least = 100 * time.Millisecond
	if l.Peers > 0 {
		return min(s.cfg.Lease/3, max(s.cfg.Lease/10, least))
	}
	return s.cfg.Lease / 3
}

// loop claims, publishes and records until there is an end to the session: nil
// after a stop, ErrLeaseLost after a takeover, errGivenBack with no shard left.
func (s *session) loop() error {
	wait := s.outageBackoff()
	for s.ctx.Err() == nil {
		claimed, err := s.step()
		switch {
		case errors.Is(err, jetbox.ErrLeaseLost), errors.Is(err, errGivenBack):
			return err
		case err != nil:
			pause(s.ctx, wait.NextBackOff())
		case claimed == 0:
			wait.Reset()
			s.publishFault(nil) // what could not be published is gone, or sleeps
			s.idle()
		default:
			wait.Reset()
		}
	}
	return s.record(s.unrecorded)
}

// step records what is left in hand, gives back what another relay should have, and
// claims, publishes and records batches until there is nothing to claim or something in the way.
func (s *session) step() (claimed int, err error) {
	if err := s.past(); err != nil {
		return 0, err
	}
	// First what was sent and not, while nobody else can have claimed it. A relay that
	// is to leave anyway does not wait for a database that cannot record.
	if !s.mustLeave() {
		if err := s.record(s.unrecorded); err != nil {
			return 0, err
		}
	}
	if err := s.yield(); err != nil {
		return 0, err
	}
	if err := s.record(s.unrecorded); err != nil {
		return 0, err
	}
	if err := s.checkStreams(); err != nil {
		return 0, err
	}
	c, err := s.claim(nil)
	if err != nil || len(c.rows) == 0 {
		return 0, err
	}
	return len(c.rows), s.flow(c)
}

// stopped reports that nothing new may begin.
func (s *session) stopped() (stopped bool) { return s.ctx.Err() != nil }

// past is an error while the lease is past its end: it could not be renewed, but
// nobody has taken it over either. Nothing may be sent, so nothing is claimed.
func (s *session) past() error {
	if s.stopped() || s.maySend() {
		return nil
	}
	err := errors.New("the lease has ended and is not renewed")
	s.fault(s.ctx, partDatabase, err)
	return err
}

// outageBackoff paces the loop while broker or database are away.
func (s *session) outageBackoff() backoff.BackOff {
	const first, most = 100 * time.Millisecond, 3 * time.Second
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(first),
		backoff.WithMaxInterval(min(most, max(first, s.cfg.MaxBackoff))),
		backoff.WithMaxElapsedTime(0),
	)
}

// claimed is rows to be sent, and where the streams stood before.
type claimed struct {
	rows   []jetbox.Row
	before []jetbox.Position
}

// claim returns the next rows beside those in hand.
func (s *session) claim(inHand []int64) (claimed, error) {
	before := s.positions(s.ctx)
	rows, err := s.src.Claim(s.ctx, s.share.now(), jetbox.Ask{Limit: s.size, InHand: inHand, Before: before})
	if err != nil && s.ctx.Err() == nil {
		s.fault(s.ctx, partDatabase, err)
		return claimed{}, err
	}
	if err == nil {
		s.fault(s.ctx, partDatabase, nil)
		s.resize(len(rows))
	}
	return claimed{rows, before}, err
}

// resize makes the next batch larger while there is a backlog: each costs some
// statements and a sync, whatever is in it.
func (s *session) resize(claimed int) {
	if claimed < s.size {
		s.size = s.cfg.Batch
	} else {
		s.size = min(2*s.size, s.cfg.most)
	}
}

func (s *session) idle() {
	t := time.NewTimer(s.cfg.PollInterval)
	defer t.Stop()
	select {
	case <-s.wake:
	case <-t.C:
	case <-s.ctx.Done():
	}
}

// record writes outcomes, for as long as it takes: what the broker has must be
// recorded before anything else is published, or a full disk makes the relay
// publish the same rows for ever. The stream has them even when ctx is done
// already; a clean stop must not publish the whole batch again. It gives up when
// another relay should have everything: perhaps that one can record.
func (s *session) record(outcomes []jetbox.Outcome) error {
	if len(outcomes) == 0 {
		return nil
	}
	wait := s.outageBackoff()
	for {
		err := s.src.Record(s.hard, s.share.now(), outcomes)
		if err == nil {
			s.unrecorded = nil
			s.fault(s.ctx, partRecord, nil)
			return nil
		}
		if errors.Is(err, jetbox.ErrLeaseLost) || s.hard.Err() != nil {
			return err
		}
		s.cfg.Hooks.FailedFunc(classRecord)
		s.fault(s.ctx, partRecord, fmt.Errorf("cannot record outcomes, publishing stops: %w", err))
		if s.mustLeave() {
			s.unrecorded = outcomes
			return err
		}
		pause(s.hard, wait.NextBackOff())
	}
}

// prune removes rows past their retention, from time to time. Where rows leave
// the table as they are recorded, it finds those that an earlier setting kept.
func (s *session) prune() {
	p, ok := s.src.(Pruner)
	if !ok {
		return
	}
	keep := max(0, s.cfg.Retention)
	if s.cfg.Archive {
		keep = 0
	}
	every := time.Minute
	if keep > 0 {
		every = min(every, max(time.Second, keep/10))
	}
	for s.ctx.Err() == nil {
		_, err := p.Prune(s.ctx, s.share.now(), time.Now().Add(-keep), s.cfg.Archive)
		if err != nil && s.ctx.Err() == nil && !errors.Is(err, jetbox.ErrLeaseLost) {
			s.cfg.Logger.LogAttrs(s.ctx, slog.LevelWarn, "prune failed, will retry", slog.Any("err", err))
		}
		pause(s.ctx, every)
	}
}
