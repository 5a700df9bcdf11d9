package kv_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/dedup/deduptest"
	"github.com/seed-5e04d8fb/jetbox/dedup/kv"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

func connect(t *testing.T, srv *embedded.Server) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	nc, err := srv.Connect()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return nc, js
}

func newLedger(t *testing.T, js jetstream.JetStream, cfg kv.Config) *kv.Ledger {
	t.Helper()
	l, err := kv.New(t.Context(), js, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestLedgerKeepsThePromisesOfALedger(t *testing.T) {
	t.Parallel() // its server starts when the bubbles of this package are over
	_, js := connect(t, embedded.RunTest(t))
	var buckets atomic.Int64
	t.Run("suite", func(t *testing.T) {
		deduptest.Run(t, func(t *testing.T) deduptest.Fixture[struct{}] {
			var mu sync.Mutex
			effects := map[string]int{}
			return deduptest.Fixture[struct{}]{
				Ledger: newLedger(t, js, kv.Config{Bucket: fmt.Sprint("b", buckets.Add(1))}),
				Single: true,
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
	})
}

// inBubble runs f with a server on a fake clock. Not parallel: servers with file
// storage share a goroutine of the process.
func inBubble(t *testing.T, f func(t *testing.T, srv *embedded.Server)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { f(t, embedded.RunTest(t)) })
}

func applies(name string, into *[]string) func(context.Context, struct{}) error {
	return func(context.Context, struct{}) error {
		*into = append(*into, name)
		return nil
	}
}

// A process that is cut off from the broker in the middle of an apply looks dead
// after the lease: the one that waits takes over then, not before.
func TestKeyOfADeadProcessIsTakenOverAfterTheLease(t *testing.T) {
	inBubble(t, func(t *testing.T, srv *embedded.Server) {
		const lease = 30 * time.Second
		nc1, js1 := connect(t, srv)
		_, js2 := connect(t, srv)
		var log strings.Builder
		first := newLedger(t, js1, kv.Config{Lease: lease, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		second := newLedger(t, js2, kv.Config{Lease: lease})
		inside, end := make(chan struct{}), make(chan struct{})
		done := make(chan error, 1)
		go func() {
			_, err := first.Do(t.Context(), "c", "k", func(context.Context, struct{}) error {
				close(inside)
				<-end
				return nil
			})
			done <- err
		}()
		<-inside
		nc1.Close()
		began := time.Now()
		var applied []string
		seen, err := second.Do(t.Context(), "c", "k", applies("second", &applied))
		if took := time.Since(began); seen || err != nil || took < lease || took > lease+time.Second {
			t.Errorf("Do = %v, %v after %v, want false, nil after %v", seen, err, took, lease)
		}
		// The late one has had its effect too; its mark is not there to make.
		close(end)
		if err := <-done; err != nil || !strings.Contains(log.String(), "not marked") {
			t.Errorf("the late Do: %v, logged %q, want success and a warning", err, log.String())
		}
		if seen, err := second.Do(t.Context(), "c", "k", applies("again", &applied)); !seen || err != nil || len(applied) != 1 {
			t.Errorf("Do afterwards = %v, %v, applied %v, want seen", seen, err, applied)
		}
	})
}

// An apply that takes longer than the lease keeps its key; who waits is told its
// fate.
func TestSlowApplyKeepsItsKey(t *testing.T) {
	inBubble(t, func(t *testing.T, srv *embedded.Server) {
		_, js1 := connect(t, srv)
		_, js2 := connect(t, srv)
		first := newLedger(t, js1, kv.Config{Lease: 10 * time.Second})
		second := newLedger(t, js2, kv.Config{Lease: 10 * time.Second})
		var wg sync.WaitGroup
		wg.Go(func() {
			seen, err := first.Do(t.Context(), "c", "k", func(ctx context.Context, _ struct{}) error {
				time.Sleep(5 * time.Minute)
				return ctx.Err()
			})
			if seen || err != nil {
				t.Errorf("first Do = %v, %v, want false, nil", seen, err)
			}
		})
		synctest.Wait()
		var applied []string
		if seen, err := second.Do(t.Context(), "c", "k", applies("second", &applied)); !seen || err != nil || len(applied) > 0 {
			t.Errorf("second Do = %v, %v, want seen", seen, err)
		}
		wg.Wait()
	})
}

// Entries of somebody else, taken from us while we were stopped: apply is told.
func TestApplyIsToldThatItsKeyWasTaken(t *testing.T) {
	inBubble(t, func(t *testing.T, srv *embedded.Server) {
		_, js := connect(t, srv)
		l := newLedger(t, js, kv.Config{Lease: 10 * time.Second})
		bucket, err := js.KeyValue(t.Context(), kv.DefaultBucket)
		if err != nil {
			t.Fatal(err)
		}
		_, err = l.Do(t.Context(), "c", "k", func(ctx context.Context, _ struct{}) error {
			names, err := bucket.Keys(ctx)
			if err != nil || len(names) != 1 {
				return fmt.Errorf("entries %v: %w", names, err)
			}
			if _, err := bucket.Put(ctx, names[0], []byte(`{"state":"in progress","holder":"other"}`)); err != nil {
				return err
			}
			<-ctx.Done()
			return context.Cause(ctx)
		})
		if err == nil || !strings.Contains(err.Error(), "taken over") {
			t.Errorf("Do: %v, want that the key was taken over", err)
		}
		// The other's entry is not ours to delete.
		if names, err := bucket.Keys(t.Context()); err != nil || len(names) != 1 {
			t.Errorf("entries %v, %v, want the other's", names, err)
		}
	})
}

func TestEntriesGoWithTheRetention(t *testing.T) {
	inBubble(t, func(t *testing.T, srv *embedded.Server) {
		_, js := connect(t, srv)
		l := newLedger(t, js, kv.Config{Retention: time.Hour})
		var applied []string
		for _, step := range []struct {
			wait time.Duration
			seen bool
		}{{0, false}, {59 * time.Minute, true}, {2 * time.Minute, false}} {
			time.Sleep(step.wait)
			if seen, err := l.Do(t.Context(), "c", "k", applies("x", &applied)); seen != step.seen || err != nil {
				t.Errorf("after another %v: Do = %v, %v, want %v, nil", step.wait, seen, err, step.seen)
			}
		}
		if _, err := kv.New(t.Context(), js, kv.Config{Retention: 2 * time.Hour}); err == nil ||
			!strings.Contains(err.Error(), "2h0m0s") || !strings.Contains(err.Error(), "1h0m0s") {
			t.Errorf("New with a longer retention than the bucket's: %v, want an error with both numbers", err)
		}
		for _, cfg := range []kv.Config{{Lease: time.Millisecond}, {Retention: time.Second}, {Retention: -1}, {Replicas: -1}, {Bucket: "a b"}} {
			if _, err := kv.New(t.Context(), js, cfg); err == nil {
				t.Errorf("New(%+v) is accepted", cfg)
			}
		}
	})
}

// Without a broker nothing is applied.
func TestLedgerWithoutABrokerAppliesNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, srv *embedded.Server) {
		nc, js := connect(t, srv)
		l := newLedger(t, js, kv.Config{})
		nc.Close()
		var applied []string
		if seen, err := l.Do(t.Context(), "c", "k", applies("x", &applied)); seen || err == nil || len(applied) > 0 {
			t.Errorf("Do = %v, %v, applied %v, want an error and nothing applied", seen, err, applied)
		}
		if _, err := l.Seen(t.Context(), "c", "k"); err == nil || errors.Is(err, jetstream.ErrKeyNotFound) {
			t.Errorf("Seen: %v, want an error", err)
		}
	})
}
