package expiry_test

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed-5e04d8fb/jetbox/internal/expiry"
)

// steps is a ledger with so many old entries of one consumer, each step of which
// takes a while.
type steps struct {
	left, calls int
	takes       time.Duration
}

func (s *steps) sweeper() *expiry.Sweeper {
	return &expiry.Sweeper{
		Retention: time.Hour,
		Logger:    slog.New(slog.DiscardHandler),
		Consumers: func(context.Context) ([]string, error) { return []string{"idle", "c"}, nil },
		Remove: func(_ context.Context, consumer string, _ time.Time, limit int) (int, error) {
			if consumer == "idle" {
				return 0, nil
			}
			s.calls++
			time.Sleep(s.takes)
			n := min(limit, s.left)
			s.left -= n
			return n, nil
		},
	}
}

// BR-61: handlers have the database for nine tenths of the time.
func TestPruneRestsBetweenItsSteps(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const full = 10
		s := &steps{left: full * expiry.Step, takes: 20 * time.Millisecond}
		began := time.Now()
		n, err := s.sweeper().Prune(t.Context())
		if n != full*expiry.Step || err != nil || s.calls != full+1 {
			t.Errorf("Prune = %d, %v in %d steps, want %d in %d", n, err, s.calls, full*expiry.Step, full+1)
		}
		if took, want := time.Since(began), full*200*time.Millisecond; took < want {
			t.Errorf("it took %v, want at least %v: nine parts of ten are rest", took, want)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		s.left = full * expiry.Step
		if n, err := s.sweeper().Prune(ctx); n != expiry.Step || err == nil {
			t.Errorf("Prune that is stopped = %d, %v, want one step and an error", n, err)
		}
	})
}

// Asking what may still come back can take long, where there are many dead letters:
// then it is asked less often, and answered all the same.
func TestRunAsksForATenthOfTheTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &steps{left: expiry.Step}
		sw := s.sweeper()
		const takes = 30 * time.Second
		asked := 0
		sw.KeepFunc = func(ctx context.Context, _ string) (time.Time, error) {
			asked++
			select {
			case <-time.NewTimer(takes).C:
			case <-ctx.Done():
			}
			return time.Time{}, ctx.Err()
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if err := sw.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
		if most := int(time.Hour/takes)/10 + 2; asked > most || asked < most/2 {
			t.Errorf("asked %d times in an hour, %v each, want about %d", asked, takes, most)
		}
		if s.left != 0 {
			t.Errorf("%d entries left, want none", s.left)
		}
	})
}

// Where nobody runs it, calls remove in passing more than they add; where somebody
// does, or has to ask what may still come back, they leave it alone.
func TestCallsRemoveInPassingUnlessSomebodyElseDoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const calls = 1000
		pass := func(sw *expiry.Sweeper, entries int) {
			for range calls / entries {
				sw.Passing(t.Context(), entries)
			}
		}
		for _, entries := range []int{1, 100, 1000} {
			s := &steps{left: 10 * calls}
			pass(s.sweeper(), entries)
			if removed := 10*calls - s.left; removed < calls {
				t.Errorf("%d entries, %d at once: %d removed, want at least as many", calls, entries, removed)
			}
			if s.calls > 4 {
				t.Errorf("%d entries, %d at once: removed in %d steps, want 4 at most", calls, entries, s.calls)
			}
		}

		s := &steps{left: 10 * calls}
		keeping := s.sweeper()
		keeping.KeepFunc = func(context.Context, string) (time.Time, error) { return time.Time{}, nil }
		pass(keeping, 1)

		s2 := &steps{}
		running := s2.sweeper()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- running.Run(ctx) }()
		synctest.Wait()
		before := s2.calls
		pass(running, 1)
		if s.calls != 0 || s2.calls != before {
			t.Errorf("removed in passing: %d steps with a KeepFunc and %d beside Run, want none", s.calls, s2.calls-before)
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		pass(running, 1)
		if s2.calls == before {
			t.Error("nothing is removed in passing after Run has ended")
		}
	})
}
