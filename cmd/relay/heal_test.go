package main

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// brokenBroker fails to write until it is restarted.
type brokenBroker struct {
	mu       sync.Mutex // guards what follows
	dir      string
	err      error
	restarts int
}

func (b *brokenBroker) Err() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

func (b *brokenBroker) Dir() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.dir
}

func (b *brokenBroker) Restart(context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.restarts++
	b.err = nil
	return nil
}

func (b *brokenBroker) set(dir string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.dir, b.err = dir, err
}

// Catalog BR-34: after a full disk the embedded broker refused everything until
// the process was restarted, also when there was room again.
func TestEmbeddedBrokerIsRestartedWhenItsDiskHasRoomAgain(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		b := &brokenBroker{dir: filepath.Join(dir, "missing")} // cannot be written to
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			heal(ctx, b, slog.New(slog.DiscardHandler))
		}()
		for _, step := range []struct {
			what string
			dir  string
			err  error
			want int
		}{
			{"it works", dir, nil, 0},
			{"it fails and the disk is full", filepath.Join(dir, "missing"), errors.New("no space left on device"), 0},
			{"the disk has room", dir, errors.New("no space left on device"), 1},
			{"it works again", dir, nil, 1},
		} {
			b.set(step.dir, step.err)
			time.Sleep(time.Minute)
			synctest.Wait()
			if b.restarts != step.want {
				t.Fatalf("%s: %d restarts, want %d", step.what, b.restarts, step.want)
			}
		}
		cancel()
		<-done
	})
}
