// Package deduptest is the conformance suite of ledgers: every promise package
// dedup makes for all of them, as a test.
//
// It uses nothing but the ledger's methods and the functions of a [Fixture],
// needs no clock and no particular database, and runs its subtests in parallel.
package deduptest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Ledger is what is tested; see package consumer.
type Ledger[Tx any] interface {
	Do(ctx context.Context, consumer, key string, apply func(ctx context.Context, tx Tx) error) (seen bool, err error)
	Seen(ctx context.Context, consumer, key string) (seen bool, err error)
}

// Batcher is a ledger that takes several keys in one transaction.
type Batcher[Tx any] interface {
	DoAll(ctx context.Context, consumer string, keys []string, apply func(ctx context.Context, tx Tx, fresh []int) error) (seen []bool, err error)
}

// Fixture is one empty ledger and a place for effects.
type Fixture[Tx any] struct {
	Ledger Ledger[Tx]

	// Effect writes an effect of that name with tx.
	Effect func(ctx context.Context, tx Tx, name string) error

	// Count returns how many effects of that name are there for others to see.
	Count func(ctx context.Context, name string) (int, error)

	// Transactional says that a failed apply takes its effects back.
	Transactional bool

	// Single says that the ledger is no [Batcher].
	Single bool

	// Pruning is for a ledger that is pruned. Nil where entries expire by
	// themselves.
	Pruning *Pruning
}

// Pruning is how the suite makes a ledger forget.
type Pruning struct {
	// Age makes all entries older by d.
	Age func(ctx context.Context, d time.Duration) error

	// Prune is the ledger's own. Its retention is Retention.
	Prune     func(ctx context.Context) (removed int64, err error)
	Retention time.Duration

	// Keep is what the ledger's KeepFunc calls. The suite sets it.
	Keep func(consumer string) (time.Time, error)
}

// deadline is for calls that must not wait for ever. Nothing takes that long.
const deadline = 30 * time.Second

var errApply = errors.New("apply failed")

// Run checks the ledgers that newFixture makes, one for each subtest.
func Run[Tx any](t *testing.T, newFixture func(t *testing.T) Fixture[Tx]) {
	t.Helper()
	tests := []struct {
		name string
		run  func(*suite[Tx])
	}{
		{"first call applies and second is seen", (*suite[Tx]).repeat},
		{"same key from 16 goroutines has one effect", (*suite[Tx]).concurrent},
		{"concurrent call takes over from a failed one", (*suite[Tx]).takeOver},
		{"error leaves no entry", (*suite[Tx]).applyError},
		{"error is apply's own", (*suite[Tx]).errorIdentity},
		{"panic leaves no entry and no open transaction", (*suite[Tx]).applyPanic},
		{"goexit leaves no entry and no open transaction", (*suite[Tx]).goexit},
		{"consumers are independent", (*suite[Tx]).consumers},
		{"keys are independent", (*suite[Tx]).keys},
		{"canceled context applies nothing", (*suite[Tx]).canceled},
		{"context canceled in apply leaves no entry", (*suite[Tx]).canceledInside},
		{"waiting ends with the context", (*suite[Tx]).waitCanceled},
		{"keys and consumers of any text", (*suite[Tx]).anyText},
		{"seen tells of what succeeded only", (*suite[Tx]).seen},
		{"batch applies what is fresh", (*suite[Tx]).batch},
		{"failed batch leaves nothing", (*suite[Tx]).batchFails},
		{"batches with the same keys in another order end", (*suite[Tx]).batchesCross},
		{"batch and single calls share their entries", (*suite[Tx]).batchAndSingles},
		{"batch of hundreds", (*suite[Tx]).batchLarge},
		{"old entries are pruned and young ones stay", (*suite[Tx]).prune},
		{"what may still be delivered is kept", (*suite[Tx]).pruneKeeps},
		{"handlers go on while entries are pruned", (*suite[Tx]).pruneWhileHandling},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), deadline)
			defer cancel()
			tt.run(&suite[Tx]{T: t, Fixture: newFixture(t), ctx: ctx})
		})
	}
}

type suite[Tx any] struct {
	*testing.T
	Fixture[Tx]

	ctx context.Context
}

// effect returns an apply that leaves one effect.
func (s *suite[Tx]) effect(name string) func(context.Context, Tx) error {
	return func(ctx context.Context, tx Tx) error { return s.Effect(ctx, tx, name) }
}

// failing returns an apply that leaves an effect and then calls end.
func (s *suite[Tx]) failing(name string, end func() error) func(context.Context, Tx) error {
	return func(ctx context.Context, tx Tx) error {
		if err := s.Effect(ctx, tx, name); err != nil {
			return err
		}
		return end()
	}
}

func (s *suite[Tx]) wantCount(name string, want int) {
	s.Helper()
	got, err := s.Count(s.ctx, name)
	if err != nil {
		s.Fatalf("count effects of %s: %v", name, err)
	}
	if got != want {
		s.Errorf("effects of %s = %d, want %d", name, got, want)
	}
}

func (s *suite[Tx]) wantDo(consumer, key string, apply func(context.Context, Tx) error, wantSeen bool) {
	s.Helper()
	seen, err := s.Ledger.Do(s.ctx, consumer, key, apply)
	if err != nil || seen != wantSeen {
		s.Fatalf("Do(%q, %.40q) = %v, %v, want %v, nil", consumer, key, seen, err, wantSeen)
	}
}

// wantNoEntry checks that a failed call left nothing: the next one applies.
func (s *suite[Tx]) wantNoEntry(consumer, key, failed string) {
	s.Helper()
	if s.Transactional {
		s.wantCount(failed, 0)
	}
	s.wantDo(consumer, key, s.effect("second"), false)
	s.wantCount("second", 1)
	s.wantDo(consumer, key, s.effect("second"), true)
	s.wantCount("second", 1)
}

func (s *suite[Tx]) repeat() {
	s.wantDo("c", "k", s.effect("e"), false)
	s.wantCount("e", 1)
	for range 3 {
		s.wantDo("c", "k", s.effect("e"), true)
	}
	s.wantCount("e", 1)
}

func (s *suite[Tx]) concurrent() {
	const callers = 16
	var applied, seen atomic.Int64
	start := make(chan struct{})
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			<-start
			ok, err := s.Ledger.Do(s.ctx, "c", "k", func(ctx context.Context, tx Tx) error {
				applied.Add(1)
				return s.Effect(ctx, tx, "e")
			})
			if err != nil {
				s.Errorf("Do: %v", err)
			}
			if ok {
				seen.Add(1)
			}
		})
	}
	close(start)
	wg.Wait()
	if a, n := applied.Load(), seen.Load(); a != 1 || n != callers-1 {
		s.Errorf("applied %d times and seen %d times, want 1 and %d", a, n, callers-1)
	}
	s.wantCount("e", 1)
}

// A second call while the first one's apply runs must not answer "seen" for
// something that is then undone.
func (s *suite[Tx]) takeOver() {
	inside, fail := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := s.Ledger.Do(s.ctx, "c", "k", s.failing("first", func() error {
			close(inside)
			<-fail
			return errApply
		}))
		if !errors.Is(err, errApply) {
			s.Errorf("first Do: %v, want apply's error", err)
		}
	})
	<-inside
	wg.Go(func() {
		seen, err := s.Ledger.Do(s.ctx, "c", "k", s.effect("second"))
		if seen || err != nil {
			s.Errorf("second Do = %v, %v, want false, nil", seen, err)
		}
	})
	runtime.Gosched()
	close(fail)
	wg.Wait()
	if s.Transactional {
		s.wantCount("first", 0)
	}
	s.wantCount("second", 1)
}

func (s *suite[Tx]) applyError() {
	for range 3 {
		_, err := s.Ledger.Do(s.ctx, "c", "k", s.failing("first", func() error { return errApply }))
		if !errors.Is(err, errApply) {
			s.Fatalf("Do: %v, want apply's error", err)
		}
	}
	s.wantNoEntry("c", "k", "first")
}

func (s *suite[Tx]) errorIdentity() {
	want := fmt.Errorf("wrapped: %w", errApply)
	seen, err := s.Ledger.Do(s.ctx, "c", "k", func(context.Context, Tx) error { return want })
	if seen || !errors.Is(err, want) {
		s.Errorf("Do = %v, %v, want false and apply's error", seen, err)
	}
}

func (s *suite[Tx]) applyPanic() {
	func() {
		defer func() {
			if p := recover(); p != "boom" {
				s.Errorf("recovered %v, want the panic of apply", p)
			}
		}()
		_, _ = s.Ledger.Do(s.ctx, "c", "k", s.failing("first", func() error { panic("boom") }))
	}()
	s.wantNoEntry("c", "k", "first")
}

func (s *suite[Tx]) goexit() {
	var wg sync.WaitGroup
	wg.Go(func() {
		_, _ = s.Ledger.Do(s.ctx, "c", "k", s.failing("first", func() error { runtime.Goexit(); return nil }))
		s.Error("Do returned, want the goroutine to end")
	})
	wg.Wait()
	s.wantNoEntry("c", "k", "first")
}

func (s *suite[Tx]) consumers() {
	s.wantDo("a", "k", s.effect("e"), false)
	s.wantDo("b", "k", s.effect("e"), false)
	s.wantDo("a", "k", s.effect("e"), true)
	s.wantCount("e", 2)
	// Joined to one text, these two would be the same.
	s.wantDo("x/y", "z", s.effect("f"), false)
	s.wantDo("x", "y/z", s.effect("f"), false)
	s.wantCount("f", 2)
}

func (s *suite[Tx]) keys() {
	for i := range 20 {
		s.wantDo("c", fmt.Sprint("k", i), s.effect("e"), false)
	}
	s.wantCount("e", 20)
}

func (s *suite[Tx]) canceled() {
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	seen, err := s.Ledger.Do(ctx, "c", "k", s.effect("e"))
	if seen || !errors.Is(err, context.Canceled) {
		s.Errorf("Do with a canceled context = %v, %v, want false and context canceled", seen, err)
	}
	s.wantCount("e", 0)
	s.wantDo("c", "k", s.effect("e"), false)
}

func (s *suite[Tx]) canceledInside() {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	_, err := s.Ledger.Do(ctx, "c", "k", s.failing("first", func() error { cancel(); return ctx.Err() }))
	if !errors.Is(err, context.Canceled) {
		s.Errorf("Do canceled inside apply: %v, want context canceled", err)
	}
	s.wantNoEntry("c", "k", "first")
}

func (s *suite[Tx]) waitCanceled() {
	inside, end := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := s.Ledger.Do(s.ctx, "c", "k", s.failing("first", func() error {
			close(inside)
			<-end
			return nil
		}))
		if err != nil {
			s.Errorf("first Do: %v", err)
		}
	})
	<-inside
	ctx, cancel := context.WithTimeout(s.ctx, 50*time.Millisecond)
	defer cancel()
	seen, err := s.Ledger.Do(ctx, "c", "k", s.effect("second"))
	if seen || !errors.Is(err, context.DeadlineExceeded) {
		s.Errorf("Do that waits for another = %v, %v, want false and deadline exceeded", seen, err)
	}
	close(end)
	wg.Wait()
	s.wantCount("first", 1)
	s.wantCount("second", 0)
}

func (s *suite[Tx]) anyText() {
	texts := []string{
		strings.Repeat("x", 512),
		strings.Repeat("é", 256),
		"käse 🧀 日本",
		"e\u0301", "\u00e9", // composed and decomposed differ
		"K", "k", "k ", " k",
		"it's \"quoted\" \\ % _ ; --",
		"a\x00b", "a\x00c",
		"123", "0123", "1e3", "null",
	}
	for i, text := range texts {
		name := fmt.Sprint("e", i)
		s.wantDo("c", text, s.effect(name), false)
		s.wantDo(text, "c", s.effect(name), false)
		s.wantDo("c", text, s.effect(name), true)
		s.wantDo(text, "c", s.effect(name), true)
		s.wantCount(name, 2)
	}
}
