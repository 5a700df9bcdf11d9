package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/dlq"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

const (
	stream = "EVENTS"

	// lease is short, so that nobody waits long for that of the killed relay.
	lease = 600 * time.Millisecond

	// patience bounds every wait for something that must happen.
	patience = 20 * time.Second
)

// Config says where the story goes and how a relay is started as a process.
// All fields are mandatory.
type Config struct {
	// Out gets the story: text, or with JSON one object per line.
	Out  io.Writer
	JSON bool

	// Relay returns the command "relay" with these arguments, not yet started.
	Relay func(ctx context.Context, args ...string) *exec.Cmd

	// Logger gets what the parts have to say.
	Logger *slog.Logger
}

// Run tells the story. It takes a few seconds.
func Run(ctx context.Context, cfg Config) (err error) {
	dir, err := os.MkdirTemp("", "jetbox-demo-")
	if err != nil {
		return fmt.Errorf("make a directory for the demo: %w", err)
	}
	d := &demo{cfg: cfg, dir: dir, tell: &narrator{w: cfg.Out, json: cfg.JSON, began: time.Now()}}
	defer func() { err = errors.Join(err, d.close()) }()
	if err := d.open(ctx); err != nil {
		return err
	}
	d.tell.begin(dir)
	for i, cycle := range []struct {
		title string
		tell  func(context.Context) error
	}{
		{"An order and its event are committed together, or not at all", d.commit},
		{"The relay publishes the event, and one handler acts on it", d.publish},
		{"An event that always fails is parked, and holds up nobody", d.poison},
		{"A relay killed between PubAck and mark leaves no second copy", d.crash},
	} {
		d.tell.cycle(i+1, cycle.title)
		if err := cycle.tell(ctx); err != nil {
			d.tell.failed(err)
			return fmt.Errorf("demo, cycle %d: %w", i+1, err)
		}
	}
	d.tell.end()
	return nil
}

// demo holds the parts. close releases them in the reverse order.
type demo struct {
	cfg     Config
	dir     string
	tell    *narrator
	closers []func() error

	broker  *embedded.Server
	js      jetstream.JetStream
	store   *sqlite.Store
	shop    *shop
	billing *billing
	letters *dlq.Letters

	stopRelay  func() error
	duplicates counter // of PubAcks, as the relay in this process counts them
	letter     string  // of the poisoned order
}

func (d *demo) onClose(f func() error) { d.closers = append(d.closers, f) }

func (d *demo) close() error {
	var errs []error
	for len(d.closers) > 0 {
		last := len(d.closers) - 1
		errs = append(errs, d.closers[last]())
		d.closers = d.closers[:last]
	}
	return errors.Join(append(errs, os.RemoveAll(d.dir))...)
}

func (d *demo) open(ctx context.Context) error {
	// A port, because the relay that is killed is another process.
	broker, err := embedded.Start(ctx, embedded.Config{
		Dir: filepath.Join(d.dir, "broker"), Listen: "127.0.0.1:0", Logger: d.cfg.Logger,
	})
	if err != nil {
		return err
	}
	d.broker = broker
	d.onClose(broker.Close)
	nc, err := broker.Connect(nats.MaxReconnects(-1), nats.ReconnectBufSize(-1))
	if err != nil {
		return err
	}
	d.onClose(func() error { nc.Close(); return nil })
	if d.js, err = jetstream.New(nc); err != nil {
		return err
	}
	if _, err := d.js.CreateStream(ctx, jetstream.StreamConfig{Name: stream, Subjects: []string{"events.>"}}); err != nil {
		return fmt.Errorf("create stream %s: %w", stream, err)
	}
	if d.letters, err = dlq.New(d.js, dlq.Config{Logger: d.cfg.Logger}); err != nil {
		return err
	}
	if _, err := d.letters.Setup(ctx, stream); err != nil {
		return err
	}
	return d.openTables(ctx)
}

func (d *demo) openTables(ctx context.Context) error {
	store, err := sqlite.Open(ctx, sqlite.Config{Path: d.dbFile()})
	if err != nil {
		return err
	}
	d.store = store
	d.onClose(store.Close)
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	if d.shop, err = openShop(ctx, store); err != nil {
		return err
	}
	d.billing, err = openBilling(ctx, filepath.Join(d.dir, "billing.db"))
	if err != nil {
		return err
	}
	d.onClose(d.billing.close)
	return nil
}

func (d *demo) dbFile() string { return filepath.Join(d.dir, "shop.db") }

// background runs f until the demo ends, or until the function it returns is
// called, which waits for it.
func (d *demo) background(ctx context.Context, f func(context.Context) error) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel()
		return <-done
	})
	d.onClose(stop)
	return stop
}

// startRelay runs a relay in this process until stopRelay is called.
func (d *demo) startRelay(ctx context.Context) error {
	r, err := relay.New(d.store, d.js, relay.Config{
		Stream:       stream,
		PollInterval: 20 * time.Millisecond,
		Lease:        lease,
		Logger:       d.cfg.Logger,
		Hooks: relay.Hooks{PublishedFunc: func(_, _ time.Duration, duplicate bool) {
			if duplicate {
				d.duplicates.add()
			}
		}},
	})
	if err != nil {
		return err
	}
	d.stopRelay = d.background(ctx, r.Run)
	return nil
}

// counter counts in several goroutines.
type counter struct {
	mu sync.Mutex
	n  int // guarded by mu
}

func (c *counter) add() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
}

func (c *counter) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

// eventually waits until f reports true, and says what was missing otherwise.
func eventually(ctx context.Context, what string, f func(context.Context) (holds bool, err error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		holds, err := f(ctx)
		if holds && err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if err != nil && !errors.Is(err, ctx.Err()) {
				return fmt.Errorf("%s: %w", what, err)
			}
			return fmt.Errorf("%s: did not happen within %v: %w", what, patience, context.Cause(ctx))
		}
	}
}
