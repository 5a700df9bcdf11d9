package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/seed-5e04d8fb/jetbox/cmd/relay/internal/bench"
)

type benchFlags struct {
	rows, rounds, rate int

	only    []string
	dataDir string
	json    bool
}

func benchCommand() *command {
	var f benchFlags
	return &command{
		name:  "bench",
		short: "measure this machine: relay and consumer beside raw JetStream, latencies",
		long: `
Needs nothing: a broker in this process, SQLite files in a temporary folder. With
--db postgres://... it measures that server too, in schemas named
jetbox_bench_..., which it drops: the role needs the right to create one. It puts
load on the server, and touches no other table. Other settings of database and
broker are of no effect.

Parts for --only: ` + strings.Join(bench.Parts(), ", ") + `.

The yardstick of a drain is raw asynchronous publish of the same messages, byte
for byte with all their headers, to the same stream, 8192 on their way, measured
before and after it (mean). Progress goes to stderr. An interrupted run writes no
table.

--json writes one object: version, go, platform, nats_server, nats_go, sqlite,
postgres, cores, gogc (-1 is off), dir, rows, rounds, rate, payload_bytes,
elapsed_s, durability (broker_sync, sqlite_relay_synchronous,
sqlite_writers_synchronous, postgres_fsync, postgres_synchronous_commit,
postgres_full_page_writes) and results: for each line part, id, unit, median,
rounds (the figure of each), and where it is compared with something beside,
beside_median, beside_rounds, ratio (the median of the rounds' ratios) and
ratio_rounds. What concerns PostgreSQL is missing without it. The parts memory and
idle are measured in the first round only.`,
		flags: func(fs *flag.FlagSet) {
			define(fs, &f.rows, "rows", 20_000, positiveInt, "backlog of `ROWS` to drain; the writers get four times as many")
			define(fs, &f.rounds, "rounds", 3, positiveInt, "`NUMBER` of times everything is measured; the median counts")
			define(fs, &f.rate, "rate", 1000, positiveInt, "`EVENTS` a second while latency is measured")
			defineList(fs, &f.only, "only", "", oneOf(bench.Parts()...), "`PARTS` to measure, separated by commas; default all")
			define(fs, &f.dataDir, "data-dir", "", someText, "empty `DIR` for the files instead of the system's temporary one; created when\nmissing, else left as it was")
			fs.BoolVar(&f.json, "json", false, "write one JSON object instead of a table")
		},
		run: func(ctx context.Context, a *app, _ []string) error { return runBench(ctx, a, f) },
	}
}

func runBench(ctx context.Context, a *app, f benchFlags) (err error) {
	d, err := a.global.database()
	if err != nil {
		return err
	}
	if i := slices.IndexFunc(f.only, bench.NeedsPostgres); i >= 0 && d.url == "" {
		return withHint(usagef("--only %s needs a PostgreSQL server", f.only[i]), "name its database with --db postgres://...")
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program, to measure a relay in a process of its own: %w", err)
	}
	dir, leave, err := benchDir(f.dataDir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, leave()) }()
	log := slog.New(slog.DiscardHandler) // its cost would be measured
	if a.global.logLevel <= slog.LevelDebug {
		log = a.log
	}
	report, err := bench.Run(ctx, bench.Config{
		Rows: f.rows, Rounds: f.rounds, Rate: f.rate, Only: f.only,
		Dir:      dir,
		Postgres: d.url,
		Stream:   (&globals{stream: "EVENTS", subjects: []string{"events.>"}}).eventStream(1),
		Relay: func(ctx context.Context, args ...string) *exec.Cmd {
			cmd := exec.CommandContext(ctx, exe, args...)
			cmd.Args[0] = os.Args[0]
			cmd.Env = slices.DeleteFunc(slices.Clone(a.environ), isSetting)
			return cmd
		},
		Version:  benchVersion(debug.ReadBuildInfo()),
		Progress: a.stderr,
		Logger:   log,
	})
	if err != nil {
		return err
	}
	if f.json {
		return writeJSON(a.stdout, report)
	}
	return report.WriteTable(a.stdout)
}

// benchDir returns the folder for the files, and what leaves it as it was.
func benchDir(dir string) (path string, leave func() error, err error) {
	nothing := func() error { return nil }
	if dir == "" {
		return os.TempDir(), nothing, nil
	}
	switch empty, err := isEmptyDir(dir); {
	case errors.Is(err, fs.ErrNotExist):
		if err := os.Mkdir(dir, 0o700); err != nil {
			return "", nil, err
		}
		return dir, func() error { return os.Remove(dir) }, nil
	case err != nil:
		return "", nil, usagef("--data-dir: %w", err)
	case !empty:
		return "", nil, usagef("--data-dir %q is not empty", dir)
	}
	return dir, nothing, nil
}

func isEmptyDir(dir string) (empty bool, err error) {
	f, err := os.Open(dir)
	if err != nil {
		return false, err
	}
	defer f.Close()
	if _, err := f.Readdirnames(1); !errors.Is(err, io.EOF) {
		return false, err
	}
	return true, nil
}

func benchVersion(info *debug.BuildInfo, ok bool) string {
	if !ok {
		return "(devel)"
	}
	return strings.TrimSpace(info.Main.Version + " " + commitOf(info))
}
