// Package expiry removes what a ledger need not remember any longer, in small
// steps that leave the database to its users most of the time.
//
// It promises that nothing is removed for a consumer whose KeepFunc failed, and
// that at most a tenth of the time goes into removing, and in Run another into
// asking KeepFunc. It starts no goroutine: Run is the caller's.
package expiry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"
)

const (
	// Step is how many entries are removed at once: a few milliseconds' work.
	Step = 500

	// passingEvery is for how many new entries Passing removes one step of old
	// ones: more than were added.
	passingEvery = 256

	// share of the time that goes into removing, and into asking: one part in so
	// many each.
	share = 10

	minRest     = 10 * time.Millisecond
	longestRest = time.Minute

	// skew is how far the clocks of broker and ledger may be apart.
	skew = time.Minute

	// keepTimeout bounds one question to KeepFunc, which may have to read as many
	// dead letters as there are.
	keepTimeout = 2 * time.Minute
)

// Sweeper removes old entries. It is safe for concurrent use.
type Sweeper struct {
	Retention time.Duration

	// Consumers returns those with entries. Remove removes up to limit entries
	// of one that are older than the retention and, unless before is zero, were
	// made before that.
	Consumers func(ctx context.Context) ([]string, error)
	Remove    func(ctx context.Context, consumer string, before time.Time, limit int) (removed int, err error)

	// KeepFunc returns from when on a consumer's entries are needed, whatever
	// the retention; zero for none. Optional. It is asked by Run and Prune.
	KeepFunc func(ctx context.Context, consumer string) (time.Time, error)

	Logger *slog.Logger

	made    atomic.Int64
	running atomic.Int64
}

// Passing is called after so many entries were made, and now and then removes
// some, as long as nobody else does. KeepFunc may take long, so with one it does
// nothing. What fails is tried again in the next round.
func (s *Sweeper) Passing(ctx context.Context, entries int) {
	made := s.made.Add(int64(entries))
	due := made/passingEvery - (made-int64(entries))/passingEvery
	if due == 0 || s.KeepFunc != nil || s.running.Load() > 0 {
		return
	}
	consumers, err := s.Consumers(ctx)
	for err == nil && due > 0 && len(consumers) > 0 {
		var n int
		if n, err = s.Remove(ctx, consumers[0], time.Time{}, Step); n == Step {
			due--
		} else {
			consumers = consumers[1:]
		}
	}
}

// Run removes what is old enough until ctx is canceled, and returns nil. It logs
// when it begins to fail and when it no longer does.
func (s *Sweeper) Run(ctx context.Context) error {
	s.running.Add(1)
	defer s.running.Add(-1)
	failing := false
	for {
		removed, asked, err := s.prune(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !failing:
			s.Logger.LogAttrs(ctx, slog.LevelWarn, "old entries cannot be removed, and are kept until they can", slog.Any("err", err))
		case err == nil && failing:
			s.Logger.LogAttrs(ctx, slog.LevelInfo, "old entries are removed again", slog.Int64("removed", removed))
		}
		failing = err != nil
		if !rest(ctx, max(time.Second, min(longestRest, s.Retention/share), (share-1)*asked)) {
			return nil
		}
	}
}

// Prune removes everything that is old enough and returns how much it was. What
// cannot be decided for one consumer does not keep the others' entries.
func (s *Sweeper) Prune(ctx context.Context) (removed int64, err error) {
	removed, _, err = s.prune(ctx)
	return removed, err
}

// prune is Prune, and returns how long KeepFunc was asked.
func (s *Sweeper) prune(ctx context.Context) (removed int64, asked time.Duration, err error) {
	consumers, err := s.Consumers(ctx)
	if err != nil {
		return 0, 0, err
	}
	var failed []error
	for _, c := range consumers {
		began := time.Now()
		before, err := s.before(ctx, c)
		asked += time.Since(began)
		if err == nil {
			var n int64
			n, err = s.removeBefore(ctx, c, before)
			removed += n
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("of %s: %w", c, err))
		}
	}
	return removed, asked, errors.Join(failed...)
}

func (s *Sweeper) removeBefore(ctx context.Context, consumer string, before time.Time) (removed int64, err error) {
	for {
		began := time.Now()
		n, err := s.Remove(ctx, consumer, before, Step)
		removed += int64(n)
		if err != nil || n < Step {
			return removed, err
		}
		if !rest(ctx, max(minRest, (share-1)*time.Since(began))) {
			return removed, ctx.Err()
		}
	}
}

func (s *Sweeper) before(ctx context.Context, consumer string) (time.Time, error) {
	if s.KeepFunc == nil {
		return time.Time{}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, keepTimeout)
	defer cancel()
	oldest, err := s.KeepFunc(ctx, consumer)
	if err != nil {
		return time.Time{}, fmt.Errorf("what may still be delivered: %w", err)
	}
	if oldest.IsZero() {
		return time.Time{}, nil
	}
	return oldest.Add(-skew), nil
}

// rest waits and reports whether ctx is still alive.
func rest(ctx context.Context, d time.Duration) (alive bool) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
