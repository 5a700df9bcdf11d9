package deduptest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

func (s *suite[Tx]) batcher() Batcher[Tx] {
	s.Helper()
	b, ok := s.Ledger.(Batcher[Tx])
	if ok == s.Single {
		s.Fatalf("the ledger has DoAll: %v, the fixture says Single: %v", ok, s.Single)
	}
	if !ok {
		s.Skip("this ledger takes one key at a time")
	}
	return b
}

// wantDoAll makes an effect named after each fresh key.
func (s *suite[Tx]) wantDoAll(consumer string, keys []string, wantFresh ...int) {
	s.Helper()
	ran := false
	seen, err := s.batcher().DoAll(s.ctx, consumer, keys, func(ctx context.Context, tx Tx, fresh []int) error {
		if ran = true; !slices.Equal(fresh, wantFresh) {
			s.Errorf("DoAll(%q, %q): fresh are %v, want %v", consumer, keys, fresh, wantFresh)
		}
		for _, i := range fresh {
			if err := s.Effect(ctx, tx, keys[i]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		s.Fatalf("DoAll(%q, %q): %v", consumer, keys, err)
	}
	if ran != (len(wantFresh) > 0) {
		s.Errorf("DoAll(%q, %q) applied: %v, want %v", consumer, keys, ran, len(wantFresh) > 0)
	}
	for i := range keys {
		if want := !slices.Contains(wantFresh, i); len(seen) != len(keys) || seen[i] != want {
			s.Fatalf("DoAll(%q, %q): seen = %v, want %v for %d", consumer, keys, seen, want, i)
		}
	}
}

func (s *suite[Tx]) wantSeen(consumer, key string, want bool) {
	s.Helper()
	if seen, err := s.Ledger.Seen(s.ctx, consumer, key); seen != want || err != nil {
		s.Errorf("Seen(%q, %.40q) = %v, %v, want %v, nil", consumer, key, seen, err, want)
	}
}

func (s *suite[Tx]) seen() {
	s.wantSeen("c", "k", false)
	inside, end := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		s.wantDo("c", "k", s.failing("e", func() error {
			close(inside)
			<-end
			return nil
		}), false)
	})
	<-inside
	// It answers no, or waits, as it must on a pool of one connection.
	answered := make(chan bool, 1)
	wg.Go(func() {
		seen, err := s.Ledger.Seen(s.ctx, "c", "k")
		if err != nil {
			s.Errorf("Seen while apply runs: %v", err)
		}
		answered <- seen
	})
	timer := time.NewTimer(50 * time.Millisecond)
	defer timer.Stop()
	select {
	case seen := <-answered:
		if seen {
			s.Error("Seen while apply runs = true, want false")
		}
	case <-timer.C:
	}
	close(end)
	wg.Wait()
	s.wantSeen("c", "k", true)
	s.wantSeen("d", "k", false)
	if _, err := s.Ledger.Do(s.ctx, "c", "failed", s.failing("f", func() error { return errApply })); !errors.Is(err, errApply) {
		s.Errorf("Do: %v, want apply's error", err)
	}
	s.wantSeen("c", "failed", false)
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	if _, err := s.Ledger.Seen(ctx, "c", "k"); !errors.Is(err, context.Canceled) {
		s.Errorf("Seen with a canceled context: %v, want context canceled", err)
	}
}

func (s *suite[Tx]) batch() {
	s.wantDoAll("c", nil)
	s.wantDoAll("c", []string{"b", "a", "c"}, 0, 1, 2)
	s.wantDoAll("c", []string{"c", "d", "a", "d", "a\x00", "D"}, 1, 4, 5)
	s.wantDoAll("c", []string{"a", "b", "d", "b"})
	s.wantDoAll("other", []string{"a", "z"}, 0, 1)
	for name, want := range map[string]int{"a": 2, "b": 1, "c": 1, "d": 1, "z": 1, "D": 1} {
		s.wantCount(name, want)
	}
	s.wantSeen("c", "d", true)
	s.wantSeen("other", "b", false)
}

func (s *suite[Tx]) batchFails() {
	b := s.batcher()
	s.wantDoAll("c", []string{"old"}, 0)
	keys := []string{"new1", "old", "new2"}
	call := func(end func() error) (err error) {
		defer func() {
			if p := recover(); p != nil {
				err = errApply
			}
		}()
		_, err = b.DoAll(s.ctx, "c", keys, func(ctx context.Context, tx Tx, fresh []int) error {
			if err := s.Effect(ctx, tx, "failed"); err != nil {
				return err
			}
			return end()
		})
		return err
	}
	for name, end := range map[string]func() error{
		"error": func() error { return errApply },
		"panic": func() error { panic("boom") },
	} {
		if err := call(end); !errors.Is(err, errApply) {
			s.Errorf("DoAll with an %s: %v, want apply's own", name, err)
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() { _ = call(func() error { runtime.Goexit(); return nil }) })
	wg.Wait()
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	if _, err := b.DoAll(ctx, "c", keys, func(context.Context, Tx, []int) error { return nil }); !errors.Is(err, context.Canceled) {
		s.Errorf("DoAll with a canceled context: %v", err)
	}
	if s.Transactional {
		s.wantCount("failed", 0)
	}
	s.wantDoAll("c", keys, 0, 2)
}

// Batches that have the same keys in another order wait for each other, and
// never in a circle.
func (s *suite[Tx]) batchesCross() {
	b := s.batcher()
	const callers, keys = 8, 12
	var applied atomic.Int64
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			mine := make([]string, 0, keys)
			for _, i := range rand.Perm(keys) {
				mine = append(mine, fmt.Sprint("k", i))
			}
			for some := range slices.Chunk(mine, 5) {
				_, err := b.DoAll(s.ctx, "c", some, func(ctx context.Context, tx Tx, fresh []int) error {
					applied.Add(int64(len(fresh)))
					for _, i := range fresh {
						if err := s.Effect(ctx, tx, some[i]); err != nil {
							return err
						}
					}
					return nil
				})
				if err != nil {
					s.Errorf("DoAll(%q): %v", some, err)
				}
			}
		})
	}
	wg.Wait()
	for i := range keys {
		s.wantCount(fmt.Sprint("k", i), 1)
	}
	if n := applied.Load(); n != keys {
		s.Errorf("%d keys applied, want %d", n, keys)
	}
}

func (s *suite[Tx]) batchAndSingles() {
	b := s.batcher()
	s.wantDo("c", "single", s.effect("single"), false)
	s.wantDoAll("c", []string{"single", "batch"}, 1)
	s.wantDo("c", "batch", s.effect("batch"), true)

	// A single call waits for the fate of a batch with its key.
	inside, fail := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := b.DoAll(s.ctx, "c", []string{"x", "k", "y"}, func(context.Context, Tx, []int) error {
			close(inside)
			<-fail
			return errApply
		})
		if !errors.Is(err, errApply) {
			s.Errorf("DoAll: %v, want apply's error", err)
		}
	})
	<-inside
	wg.Go(func() { s.wantDo("c", "k", s.effect("k"), false) })
	runtime.Gosched()
	close(fail)
	wg.Wait()
	s.wantCount("k", 1)
	s.wantDoAll("c", []string{"x", "k", "y"}, 0, 2)
}

func (s *suite[Tx]) batchLarge() {
	keys := make([]string, 700)
	var fresh []int
	for i := range keys {
		keys[i] = fmt.Sprintf("key %d", i)
		fresh = append(fresh, i)
	}
	b := s.batcher()
	none := func(context.Context, Tx, []int) error { return nil }
	if _, err := b.DoAll(s.ctx, "c", keys[100:200], none); err != nil {
		s.Fatal(err)
	}
	seen, err := b.DoAll(s.ctx, "c", keys, func(_ context.Context, _ Tx, got []int) error {
		if want := slices.Concat(fresh[:100], fresh[200:]); !slices.Equal(got, want) {
			s.Errorf("%d fresh keys, want %d", len(got), len(want))
		}
		return nil
	})
	if err != nil || seen[99] || !seen[100] || !seen[199] || seen[200] {
		s.Errorf("DoAll: %v, seen around the first hundreds: %v", err, seen[98:202])
	}
}
