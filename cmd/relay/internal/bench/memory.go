package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
)

// memory drains a quarter of the rows and all of them: a peak that does not grow
// with the backlog is the same.
func (r *rig) memory(ctx context.Context) (err error) {
	// A broker with a port, as the relay is another process.
	broker, err := embedded.Start(ctx, embedded.Config{
		Dir: filepath.Join(r.dir, "broker-memory"), Listen: "127.0.0.1:0", Sync: brokerSync, Logger: r.cfg.Logger,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, broker.Close()) }()
	for _, rows := range []int{max(r.cfg.Rows/4, 1), r.cfg.Rows} {
		peak, err := r.peakOf(ctx, broker, rows)
		if errors.Is(err, errors.ErrUnsupported) {
			fmt.Fprintln(r.results.progress, "memory: this system does not say how much a process had")
			return nil
		}
		if err != nil {
			return fmt.Errorf("%d rows: %w", rows, err)
		}
		r.results.figure(fmt.Sprintf("%d rows", rows), megabytes, float64(peak)/1e6)
	}
	return nil
}

// peakOf returns the peak resident size of a relay that drains a backlog.
func (r *rig) peakOf(ctx context.Context, broker *embedded.Server, rows int) (peak int64, err error) {
	path := filepath.Join(r.dir, "memory.db")
	defer func() { err = errors.Join(err, removeFiles(path)) }()
	// Opened here only to fill it and to look.
	s, err := sqlite.Open(ctx, sqlite.Config{Path: path})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	b := &box{store: s, settle: checkpoint}
	if err := errors.Join(b.Migrate(ctx), b.fill(ctx, r.sample(rows, manyKeys))); err != nil {
		return 0, err
	}
	if err := emptyStream(ctx, broker, r.cfg.Stream); err != nil {
		return 0, err
	}
	var stderr bytes.Buffer
	cmd := r.cfg.Relay(ctx, "run", "--db", "sqlite:"+path, "--nats", broker.ClientURL(),
		"--stream", r.cfg.Stream.Name, "--subjects", strings.Join(r.cfg.Stream.Subjects, ","), "--http", "off", "--log-level", "error")
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start a relay: %w", err)
	}
	t := start(ctx, func(context.Context) error { return cmd.Wait() })
	err = awaitEmpty(ctx, t, b)
	if err == nil {
		if peak, err = peakResident(cmd.Process.Pid); err == nil {
			err = cmd.Process.Signal(os.Interrupt)
		}
	}
	if err != nil {
		_ = cmd.Process.Kill() // fails if it has ended
	}
	if err := errors.Join(err, t.stop()); err != nil {
		return 0, fmt.Errorf("relay in a process of its own: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return peak, nil
}

// awaitEmpty looks now and then: looking costs the relay some of its time.
func awaitEmpty(ctx context.Context, t *task, b *box) error {
	const every = 50 * time.Millisecond
	var st outbox.Stats
	next := time.Now()
	st.Pending = -1
	return t.await(ctx, func() int64 { return st.Pending }, func(ctx context.Context) (done bool, err error) {
		if time.Now().Before(next) {
			return false, nil
		}
		st, err = b.Stats(ctx)
		next = time.Now().Add(every)
		return st.Pending == 0, err
	})
}

// peakResident returns the most memory, in bytes, that a process ever had. Not from
// its rusage: Linux counts there what the process that started it had.
func peakResident(pid int) (peak int64, err error) {
	if runtime.GOOS != "linux" {
		return 0, errors.ErrUnsupported
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		var kB int64
		if _, err := fmt.Sscanf(line, "VmHWM: %d kB", &kB); err == nil {
			return kB * 1024, nil
		}
	}
	return 0, fmt.Errorf("no VmHWM in /proc/%d/status", pid)
}

func emptyStream(ctx context.Context, broker *embedded.Server, cfg jetstream.StreamConfig) error {
	nc, err := broker.Connect(nats.MaxReconnects(-1))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	s, err := js.CreateOrUpdateStream(ctx, cfg)
	if err != nil {
		return fmt.Errorf("create stream %s: %w", cfg.Name, err)
	}
	return s.Purge(ctx)
}
