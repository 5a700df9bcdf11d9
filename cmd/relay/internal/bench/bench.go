package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Config says what to measure and with how much. All fields without a comment to
// the contrary are mandatory.
type Config struct {
	// Rows is the backlog that is drained, Rounds how often everything is
	// measured, Rate the events a second whose latency is measured.
	Rows, Rounds, Rate int

	// Only are the parts wanted, of [Parts]. Default: all.
	Only []string

	// Dir is an existing folder, in which a temporary one holds all files.
	Dir string

	// Postgres is the URL of a database to measure too. Optional.
	Postgres string

	// Stream is an event stream as jetbox creates it, with a subject space that
	// has [Subject].
	Stream jetstream.StreamConfig

	// Relay returns the command "relay" with these arguments, not yet started.
	Relay func(ctx context.Context, args ...string) *exec.Cmd

	// Version names the program in the report.
	Version string

	// Progress gets a line whenever something was measured.
	Progress io.Writer

	// Logger gets what the parts have to say.
	Logger *slog.Logger
}

// Subject is where every event goes.
const Subject = "events.order.placed"

// Names of parts that need something.
const partPostgres = "postgres"

// part is a group of measurements.
type part struct {
	name  string
	about string
	once  bool // measured in the first round only
	run   func(r *rig, ctx context.Context) error
}

func parts() []part {
	return []part{
		{name: "sqlite", about: "a backlog drained from an SQLite file; ratio to raw asynchronous publish of the same messages before and after", run: (*rig).drainSQLite},
		{name: "writers", about: "a backlog drained from an SQLite file beside an application's transactions, each an order and its event; and their latency", run: (*rig).drainBesideWriters},
		{name: partPostgres, about: "a backlog drained from PostgreSQL; ratio to raw asynchronous publish of the same messages before and after", run: (*rig).drainPostgres},
		{name: "append", about: "a transaction with one INSERT and an event; ratio to the same one without the event", run: (*rig).appendCost},
		{name: "latency", about: "from the commit to an ordered consumer, which gets a message once it is stored", run: (*rig).latency},
		{name: "consumer", about: "messages handled; ratio to jetstream's Consume with Ack before and after", run: (*rig).consumers},
		{name: "memory", about: "peak resident size of relay run in a process of its own, with the broker elsewhere", once: true, run: (*rig).memory},
		{name: "idle", about: "CPU of this process while a relay has nothing to do; beside that of the broker alone", once: true, run: (*rig).idle},
	}
}

// Parts returns the names of all parts, in their order.
func Parts() []string {
	var names []string
	for _, p := range parts() {
		names = append(names, p.name)
	}
	return names
}

// NeedsPostgres reports whether a part measures nothing without a URL of
// PostgreSQL.
func NeedsPostgres(part string) (needs bool) { return part == partPostgres }

func (c Config) wants(name string) (wanted bool) {
	return (len(c.Only) == 0 || slices.Contains(c.Only, name)) && (c.Postgres != "" || !NeedsPostgres(name))
}

// Run measures. When ctx is canceled the error is the cause, and there is no
// report.
func Run(ctx context.Context, cfg Config) (report *Report, err error) {
	began := time.Now()
	dir, err := os.MkdirTemp(cfg.Dir, "jetbox-bench-")
	if err != nil {
		return nil, fmt.Errorf("make a directory for the benchmark: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	r, err := openRig(ctx, cfg, dir)
	if err != nil {
		return nil, stopped(ctx, err)
	}
	defer func() { err = errors.Join(err, r.close()) }()
	report, err = r.measure(ctx)
	if err != nil {
		return nil, stopped(ctx, err)
	}
	report.Seconds = time.Since(began).Seconds()
	return report, nil
}

// stopped returns why ctx is done, if it is: whatever failed, failed for that.
func stopped(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func (r *rig) measure(ctx context.Context) (*Report, error) {
	report, err := r.describe(ctx)
	if err != nil {
		return nil, err
	}
	if err := r.warmUp(ctx); err != nil {
		return nil, err
	}
	for round := range r.cfg.Rounds {
		for _, p := range parts() {
			if !r.cfg.wants(p.name) || p.once && round > 0 {
				continue
			}
			r.results.begin(p, fmt.Sprintf("round %d of %d", round+1, r.cfg.Rounds))
			if err := p.run(r, ctx); err != nil {
				return nil, fmt.Errorf("measure %s: %w", p.name, err)
			}
		}
	}
	report.Results = r.results.lines
	return report, nil
}
