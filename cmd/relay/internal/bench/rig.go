package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

const (
	// brokerSync is that of relay run.
	brokerSync = time.Second

	// maxPending is how many messages raw publish has on their way at most.
	maxPending = 8192

	// patience is how long a measurement may make no progress.
	patience = 30 * time.Second
)

// rig is what the parts measure with.
type rig struct {
	cfg     Config
	dir     string
	results results
	closers []func() error

	broker *embedded.Server
	nc     *nats.Conn
	js     jetstream.JetStream
}

func openRig(ctx context.Context, cfg Config, dir string) (*rig, error) {
	r := &rig{cfg: cfg, dir: dir, results: results{progress: cfg.Progress}}
	if err := r.open(ctx); err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

func (r *rig) open(ctx context.Context) (err error) {
	r.broker, err = embedded.Start(ctx, embedded.Config{
		Dir: filepath.Join(r.dir, "broker"), Sync: brokerSync, Logger: r.cfg.Logger,
	})
	if err != nil {
		return err
	}
	r.closers = append(r.closers, r.broker.Close)
	if r.nc, err = r.broker.Connect(connOptions()...); err != nil {
		return err
	}
	r.closers = append(r.closers, func() error { r.nc.Close(); return nil })
	r.js, err = jetstream.New(r.nc, jetstream.WithPublishAsyncMaxPending(maxPending))
	return err
}

// connOptions are what a relay's connection should have.
func connOptions() []nats.Option {
	return []nats.Option{nats.MaxReconnects(-1), nats.ReconnectBufSize(-1)}
}

func (r *rig) close() error {
	var errs []error
	for _, f := range slices.Backward(r.closers) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// sample returns events that were recorded a moment ago.
func (r *rig) sample(n, keys int) sample { return newSample(n, keys, time.Now().Add(-time.Second)) }

// freshStream makes the event stream anew: each measurement finds it empty, and
// knows no message ID of the one before.
func (r *rig) freshStream(ctx context.Context) error {
	const tries = 50
	defer runtime.GC() // what others left behind is not on the next one's bill
	for range tries {
		if err := r.js.DeleteStream(ctx, r.cfg.Stream.Name); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return fmt.Errorf("delete stream %s: %w", r.cfg.Stream.Name, err)
		}
		s, err := r.js.CreateStream(ctx, r.cfg.Stream)
		if err != nil {
			return fmt.Errorf("create stream %s: %w", r.cfg.Stream.Name, err)
		}
		// A stream that is created at once after its deletion may have all of its
		// messages again, without their IDs (nats-server 2.15.3).
		if s.CachedInfo().State.Msgs == 0 {
			return nil
		}
	}
	return fmt.Errorf("stream %s is not empty after %d tries to create it anew", r.cfg.Stream.Name, tries)
}

// expectStored checks that a measurement has left so many messages on the stream.
func (r *rig) expectStored(ctx context.Context, want int) error {
	s, err := r.js.Stream(ctx, r.cfg.Stream.Name)
	if err != nil {
		return fmt.Errorf("look up stream %s: %w", r.cfg.Stream.Name, err)
	}
	if got := s.CachedInfo().State.Msgs; got != uint64(want) {
		return fmt.Errorf("stream %s has %d messages, want %d", r.cfg.Stream.Name, got, want)
	}
	return nil
}

// warmUp lets broker and client grow their buffers.
func (r *rig) warmUp(ctx context.Context) error {
	_, err := r.publishRaw(ctx, r.sample(max(r.cfg.Rows/4, 1), noKey))
	return err
}

// startRelay runs a relay on an outbox, as relay run does unless cfg says
// otherwise.
func (r *rig) startRelay(ctx context.Context, b *box, cfg relay.Config) (*task, error) {
	cfg.Stream, cfg.Source, cfg.BrokerSync, cfg.Logger = r.cfg.Stream.Name, source, brokerSync, r.cfg.Logger
	rel, err := relay.New(b.store, r.js, cfg)
	if err != nil {
		return nil, err
	}
	return start(ctx, rel.Run), nil
}

// task is a function that runs beside a measurement.
type task struct {
	cancel context.CancelFunc
	ended  chan struct{}
	err    error // once ended is closed
}

func start(ctx context.Context, f func(context.Context) error) *task {
	ctx, cancel := context.WithCancel(ctx)
	t := &task{cancel: cancel, ended: make(chan struct{})}
	go func() {
		defer close(t.ended)
		t.err = f(ctx)
	}()
	return t
}

// stop cancels the function, waits for its end and returns its error. Stopping
// twice does no harm.
func (t *task) stop() error {
	t.cancel()
	<-t.ended
	return t.err
}

var (
	errEnded = errors.New("ended before it was done")
	errStuck = fmt.Errorf("no progress for %v", patience)
)

// await waits until done reports true. It gives up when the task ends first, or
// when progress stays the same for too long.
func (t *task) await(ctx context.Context, progress func() int64, done func(context.Context) (bool, error)) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	last, since := int64(-1), time.Now()
	for {
		if now := progress(); now != last {
			last, since = now, time.Now()
		}
		if ok, err := done(ctx); ok || err != nil {
			return err
		}
		if time.Since(since) > patience {
			return errStuck
		}
		select {
		case <-tick.C:
		case <-t.ended:
			return errors.Join(errEnded, t.err)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// sleepUntil returns false when ctx is done before.
func sleepUntil(ctx context.Context, at time.Time) (slept bool) {
	d := time.Until(at)
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func removeFiles(path string) error {
	var errs []error
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if err := os.Remove(path + suffix); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
