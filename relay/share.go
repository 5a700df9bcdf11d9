package relay

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/seed-5e04d8fb/jetbox"
)

// errGivenBack ends a session that holds no shard any more because it gave them
// back.
var errGivenBack = errors.New("all shards were given back")

// share is the lease of a session: as the last renewal had it, less what was given
// back since. It is safe for concurrent use.
type share struct {
	mu    sync.Mutex   // guards what follows
	lease jetbox.Lease // the zero value between sessions

	yielding bool // a Yield runs
	yields   int  // how many have ended
	leaving  bool // the last one was of all that is held
}

// begin starts a session, or with the zero value ends it.
func (s *share) begin(l jetbox.Lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lease, s.leaving = l, false
}

func (s *share) now() jetbox.Lease {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lease
}

// yielded is how many Yields have ended; see renew.
func (s *share) yielded() (yields int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.yields
}

// renew takes over what a renewal says, unless a Yield that runs, or that has
// ended since the renewal was asked for after so many of them, makes it old. The
// error ends the session.
func (s *share) renew(l jetbox.Lease, yields int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	same := l.Epoch == s.lease.Epoch
	switch {
	case l.Held && same:
		if !s.yielding && yields == s.yields {
			s.lease, s.leaving = l, false
		}
		return nil
	case s.leaving, !l.Held && same:
		return errGivenBack
	default:
		return jetbox.ErrLeaseLost
	}
}

// beginYield returns the lease to yield with, or ok false when there is no excess.
func (s *share) beginYield() (l jetbox.Lease, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease.Excess <= 0 {
		return jetbox.Lease{}, false
	}
	s.yielding, s.leaving = true, s.lease.Excess >= s.lease.Shards
	return s.lease, true
}

// endYield counts what was given back, if it was, and returns what is left.
func (s *share) endYield(done bool) (left int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.yielding = false
	s.yields++
	if done {
		s.lease.Shards = max(0, s.lease.Shards-s.lease.Excess)
		s.lease.Excess = 0
	}
	return s.lease.Shards
}

// yield gives back the shards that another relay should have. The loop calls it
// between two batches: nothing is on its way.
func (s *session) yield() error {
	y, ok := s.src.(Yielder)
	if !ok {
		return nil
	}
	l, ok := s.share.beginYield()
	if !ok {
		return nil
	}
	err := y.Yield(s.ctx, l)
	left := s.share.endYield(err == nil)
	// Done or not, as far as is known: who has the shards now may have sent rows that
	// lie in a claim of this relay's alone, so none is taken out of it any more.
	s.unrecorded = slices.DeleteFunc(s.unrecorded, func(o jetbox.Outcome) bool { return o.Unsent })
	switch {
	case errors.Is(err, jetbox.ErrLeaseLost):
		return err
	case err != nil:
		err = fmt.Errorf("give back shards: %w", err)
		if !s.stopped() {
			s.fault(s.ctx, partDatabase, err)
		}
		return err
	}
	s.fault(s.ctx, partDatabase, nil)
	s.cfg.Logger.LogAttrs(s.ctx, slog.LevelInfo, "shards given back to other relays",
		slog.Int("count", l.Excess), slog.Int("left", left))
	if left == 0 {
		return errGivenBack
	}
	return nil
}

// mustLeave reports that another relay should have everything this one holds.
func (s *session) mustLeave() (leave bool) {
	_, shared := s.src.(Yielder)
	l := s.share.now()
	return shared && l.Excess > 0 && l.Excess >= l.Shards
}
