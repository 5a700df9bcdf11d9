package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed-5e04d8fb/jetbox/dedup"
	"github.com/seed-5e04d8fb/jetbox/dedup/deduptest"
)

func newMemory(t testing.TB, retention time.Duration) *dedup.Memory {
	t.Helper()
	m, err := dedup.NewMemory(retention)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestMemoryKeepsThePromisesOfALedger(t *testing.T) {
	t.Parallel()
	deduptest.Run(t, func(t *testing.T) deduptest.Fixture[struct{}] {
		var mu sync.Mutex
		effects := map[string]int{}
		return deduptest.Fixture[struct{}]{
			Ledger: newMemory(t, time.Hour),
			Effect: func(_ context.Context, _ struct{}, name string) error {
				mu.Lock()
				defer mu.Unlock()
				effects[name]++
				return nil
			},
			Count: func(_ context.Context, name string) (int, error) {
				mu.Lock()
				defer mu.Unlock()
				return effects[name], nil
			},
		}
	})
}

func TestMemoryRefusesANegativeRetention(t *testing.T) {
	t.Parallel()
	if _, err := dedup.NewMemory(-time.Second); err == nil {
		t.Error("NewMemory(-1s) = nil error, want one")
	}
}

// BR-61: the memory of a long-lived process is what arrives in one retention.
func TestMemoryShrinksByRetention(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const perSecond, retention = 500, 10
		m := newMemory(t, retention*time.Second)
		for second := range 60 {
			for i := range perSecond {
				key := fmt.Sprintf("%d-%d", second, i)
				if seen, err := m.Do(t.Context(), "c", key, noEffect); seen || err != nil {
					t.Fatalf("Do(%s) = %v, %v, want false, nil", key, seen, err)
				}
			}
			if n := m.Len(); n > 2*perSecond*retention {
				t.Fatalf("after %d seconds: %d entries, want at most %d", second, n, 2*perSecond*retention)
			}
			time.Sleep(time.Second)
		}
	})
}

func TestMemoryForgetsExactlyAfterTheRetention(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newMemory(t, time.Minute)
		for _, step := range []struct {
			wait time.Duration
			seen bool
		}{{0, false}, {59 * time.Second, true}, {time.Second, false}, {30 * time.Second, true}} {
			time.Sleep(step.wait)
			if seen, err := m.Do(t.Context(), "c", "k", noEffect); seen != step.seen || err != nil {
				t.Errorf("after %v: Do = %v, %v, want %v, nil", step.wait, seen, err, step.seen)
			}
		}
	})
}

// A call that waits for another's fate hears about it the moment it is decided.
func TestMemoryWaitsForTheFirstOnesFate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, fate := range []error{nil, errors.New("failed")} {
			m := newMemory(t, time.Hour)
			start := time.Now()
			go func() {
				_, err := m.Do(t.Context(), "c", "k", func(context.Context, struct{}) error {
					time.Sleep(10 * time.Second)
					return fate
				})
				if !errors.Is(err, fate) {
					t.Errorf("first Do: %v, want %v", err, fate)
				}
			}()
			synctest.Wait()
			seen, err := m.Do(t.Context(), "c", "k", noEffect)
			if wait := time.Since(start); seen != (fate == nil) || err != nil || wait != 10*time.Second {
				t.Errorf("first ends with %v: Do = %v, %v after %v, want %v, nil after 10s", fate, seen, err, wait, fate == nil)
			}
		}
	})
}

func noEffect(context.Context, struct{}) error { return nil }

func ExampleMemory() {
	ledger, err := dedup.NewMemory(24 * time.Hour)
	if err != nil {
		panic(err)
	}
	for range 2 {
		seen, err := ledger.Do(context.Background(), "EVENTS/mailer", "order-1", func(context.Context, struct{}) error {
			fmt.Println("send the mail")
			return nil
		})
		fmt.Println("seen:", seen, "err:", err)
	}
	// Output:
	// send the mail
	// seen: false err: <nil>
	// seen: true err: <nil>
}
