package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/seed-5e04d8fb/jetbox/internal/delay"
)

const (
	// healEvery is how often the embedded broker is asked whether it still
	// stores what it gets.
	healEvery = 5 * time.Second

	// healRoom is how much its disk must take before it is restarted.
	healRoom = 4 << 20
)

// healDelays keep a disk that fills up again at once from costing a restart
// every few seconds.
var healDelays = delay.Policy{Initial: healEvery, Max: time.Minute}

// broken is an embedded broker, as far as it can be healed.
type broken interface {
	Err() error
	Dir() string
	Restart(ctx context.Context) error
}

// heal restarts the broker when it has failed to write and its disk has room
// again, until ctx is done: the server itself remembers the failure for good.
// Clients reconnect.
func heal(ctx context.Context, b broken, log *slog.Logger) {
	failures := 0
	for sleep(ctx, healDelays.After(failures)) == nil {
		cause := b.Err()
		if cause == nil {
			failures = 0
			continue
		}
		failures++
		if err := hasRoom(b.Dir()); err != nil {
			failures = 0 // looking costs little: be back soon after there is room
			log.LogAttrs(ctx, slog.LevelDebug, "embedded broker cannot write yet", slog.Any("err", err))
			continue
		}
		log.LogAttrs(ctx, slog.LevelWarn, "embedded broker failed to write and is restarted, its disk has room", slog.Any("err", cause))
		restart, cancel := context.WithTimeout(ctx, recoverTimeout)
		err := b.Restart(restart)
		cancel()
		if err != nil {
			log.LogAttrs(ctx, slog.LevelError, "embedded broker does not start again, will retry", slog.Any("err", err))
		}
	}
}

// hasRoom writes to a folder what it takes away again.
func hasRoom(dir string) (err error) {
	f, err := os.CreateTemp(dir, ".room-*")
	if err != nil {
		return fmt.Errorf("look for room in %s: %w", filepath.Clean(dir), err)
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	if _, err := f.Write(make([]byte, healRoom)); err != nil {
		return err
	}
	return f.Sync()
}
