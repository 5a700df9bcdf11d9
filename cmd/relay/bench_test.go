package main

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox/cmd/relay/internal/bench"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// benchLines are what a whole run on SQLite has, and what it is compared with.
var benchLines = map[string]string{
	"sqlite/no keys":                           "raw publish",
	"sqlite/1000 keys":                         "raw publish",
	"sqlite/one key":                           "raw publish",
	"writers/relay":                            "raw publish",
	"writers/transactions":                     "",
	"writers/transaction/p50":                  "without relay",
	"writers/transaction/p99":                  "without relay",
	"writers/with its queue/p50":               "without relay",
	"writers/with its queue/p99":               "without relay",
	"append/sqlite/p50":                        "without event",
	"append/sqlite/p99":                        "without event",
	"latency/sqlite/committed":                 "",
	"latency/sqlite/p50":                       "",
	"latency/sqlite/p99":                       "",
	"consumer/without ledger, 1 worker":        "Consume with Ack",
	"consumer/with ledger, 1 worker":           "Consume with Ack",
	"consumer/with ledger, batches, 1 worker":  "a commit for each",
	"consumer/without ledger, 8 workers":       "Consume with Ack",
	"consumer/with ledger, 8 workers":          "Consume with Ack",
	"consumer/with ledger, batches, 8 workers": "a commit for each",
	"idle/broker and relay, sqlite":            "broker alone",
}

// benchPostgresLines come with --db postgres://...
var benchPostgresLines = map[string]string{
	"postgres/no keys, 24h retention":   "raw publish",
	"postgres/1000 keys, 24h retention": "raw publish",
	"postgres/one key, 24h retention":   "raw publish",
	"postgres/no keys, retention 0":     "raw publish",
	"postgres/1000 keys, retention 0":   "raw publish",
	"postgres/one key, retention 0":     "raw publish",
	"append/postgres/p50":               "without event",
	"append/postgres/p99":               "without event",
	"latency/postgres/committed":        "",
	"latency/postgres/p50":              "",
	"latency/postgres/p99":              "",
	"idle/broker and relay, postgres":   "broker alone",
}

// benchmark runs relay bench with few rows, checks that no file is left, and
// returns what it wrote.
func benchmark(t *testing.T, args ...string) (report map[string]any, results []bench.Line) {
	t.Helper()
	dir := t.TempDir()
	cmd := relayCmd(t.Context(), dir, append([]string{"bench", "--json", "--rows", "200", "--rounds", "2"}, args...)...)
	cmd.Env = append(cmd.Env, "TMPDIR="+dir, "TMP="+dir)
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("relay bench: %v\n%s", err, exit.Stderr)
		}
		t.Fatal(err)
	}
	expectEmpty(t, dir)
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	var typed struct{ Results []bench.Line }
	if err := json.Unmarshal(out, &typed); err != nil {
		t.Fatal(err)
	}
	return report, typed.Results
}

func expectEmpty(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		t.Errorf("left in the temporary folder: %v, %v", left, err)
	}
}

func TestBenchOnSQLite(t *testing.T) {
	t.Parallel()
	report, results := benchmark(t)
	checkReport(t, report)
	checkLines(t, results, benchLines)
}

func TestBenchOnPostgres(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	report, results := benchmark(t, "--db", url, "--only", "postgres,append,latency,idle")
	checkReport(t, report, "postgres")
	want := map[string]string{}
	for _, lines := range []map[string]string{benchLines, benchPostgresLines} {
		for id, beside := range lines {
			switch part, _, _ := strings.Cut(id, "/"); part {
			case "postgres", "append", "latency", "idle":
				want[id] = beside
			}
		}
	}
	checkLines(t, results, want)
	durability, _ := report["durability"].(map[string]any)
	for key, value := range map[string]string{
		"postgres_fsync": "off", "postgres_synchronous_commit": "on", "postgres_full_page_writes": "off", // of pgtest's server
		"broker_sync": "1s", "sqlite_relay_synchronous": "FULL", "sqlite_writers_synchronous": "NORMAL",
	} {
		if os.Getenv("JETBOX_TEST_POSTGRES") != "" && strings.HasPrefix(key, "postgres_") {
			continue // a server with settings of its own
		}
		if durability[key] != value {
			t.Errorf("durability: %s is %v, want %q", key, durability[key], value)
		}
	}
	eventuallySQL(t, url, noBenchSchema)
}

const noBenchSchema = `SELECT count(*) = 0 FROM pg_namespace WHERE nspname LIKE 'jetbox_bench_%'`

// checkReport checks the keys that the help of relay bench documents.
func checkReport(t *testing.T, report map[string]any, more ...string) {
	t.Helper()
	want := append([]string{
		"version", "go", "platform", "nats_server", "nats_go", "sqlite", "cores", "gogc", "dir", "rows", "rounds", "rate",
		"payload_bytes", "elapsed_s", "durability", "results",
	}, more...)
	for _, key := range want {
		if v, ok := report[key]; !ok || v == "" || v == 0.0 {
			t.Errorf("key %q is %v, there: %v", key, v, ok)
		}
	}
	for key := range report {
		if !slices.Contains(want, key) {
			t.Errorf("key %q is not documented", key)
		}
	}
	if report["rows"] != 200.0 || report["rounds"] != 2.0 || report["rate"] != 1000.0 || report["payload_bytes"] != 512.0 {
		t.Errorf("rows %v, rounds %v, rate %v, payload %v", report["rows"], report["rounds"], report["rate"], report["payload_bytes"])
	}
}

func checkLines(t *testing.T, lines []bench.Line, want map[string]string) {
	t.Helper()
	want = withMemory(want)
	for _, l := range lines {
		beside, ok := want[l.ID]
		if !ok || !strings.HasPrefix(l.ID, l.Part+"/") || l.Beside != beside {
			t.Errorf("line %q of part %q beside %q is not expected: %v, %q", l.ID, l.Part, l.Beside, ok, beside)
		}
		delete(want, l.ID)
		checkLine(t, l)
	}
	for id := range want {
		t.Errorf("no line %q", id)
	}
}

// withMemory adds the lines that only Linux has, if the parts of the run are all.
func withMemory(lines map[string]string) map[string]string {
	out := map[string]string{}
	for id, beside := range lines {
		out[id] = beside
	}
	if _, all := out["consumer/with ledger, 1 worker"]; all && runtime.GOOS == "linux" {
		out["memory/50 rows"], out["memory/200 rows"] = "", ""
	}
	return out
}

// checkLine checks that a line agrees with itself. Nothing about how fast anything
// was.
func checkLine(t *testing.T, l bench.Line) {
	t.Helper()
	rounds := 2
	if l.Part == "memory" || l.Part == "idle" {
		rounds = 1
	}
	if len(l.Values) != rounds || l.Unit == "" {
		t.Errorf("%s: %d rounds in %q, want %d", l.ID, len(l.Values), l.Unit, rounds)
		return
	}
	// An idle process may need less than its clock shows; a consumer can have an
	// event before the commit has returned.
	least := math.SmallestNonzeroFloat64
	if l.Part == "idle" || l.Part == "latency" {
		least = 0
	}
	for _, v := range append(slices.Clone(l.Values), l.Median) {
		if v < least || math.IsNaN(v) || math.IsInf(v, 0) {
			t.Errorf("%s: %v", l.ID, v)
		}
	}
	if !near(l.Median, (l.Values[0]+l.Values[rounds-1])/2) {
		t.Errorf("%s: median %v of %v", l.ID, l.Median, l.Values)
	}
	if l.Beside == "" {
		return
	}
	if len(l.BesideValues) != rounds || len(l.Ratios) != rounds {
		t.Errorf("%s: %d yardsticks and %d ratios, want %d", l.ID, len(l.BesideValues), len(l.Ratios), rounds)
		return
	}
	for i, v := range l.Values {
		want := v / l.BesideValues[i]
		if l.BesideValues[i] == 0 {
			want = 0 // an idle broker
		}
		if !near(l.Ratios[i], want) {
			t.Errorf("%s: ratio %v of %v and %v", l.ID, l.Ratios[i], v, l.BesideValues[i])
		}
	}
	if !near(l.Ratio, (l.Ratios[0]+l.Ratios[rounds-1])/2) || !near(l.BesideMedian, (l.BesideValues[0]+l.BesideValues[rounds-1])/2) {
		t.Errorf("%s: ratio %v of %v, yardstick %v of %v", l.ID, l.Ratio, l.Ratios, l.BesideMedian, l.BesideValues)
	}
}

func near(a, b float64) (is bool) { return math.Abs(a-b) <= 1e-9*math.Max(math.Abs(a), math.Abs(b)) }

// Ctrl-C while a backlog is drained: no report, no files, no schema, status 1.
func TestInterruptedBenchLeavesNothing(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("a process cannot be interrupted there")
	}
	url := pgtest.URL(t)
	dir := t.TempDir()
	p := start(t, dir, "bench", "--db", url, "--only", "postgres", "--rows", "300", "--rounds", "1000", "--data-dir", dir)
	eventually(t, "a first figure", func() (holds bool, state string) {
		return strings.Contains(p.stderr.String(), "round 1 of 1000: postgres/"), p.stderr.String()
	})
	p.signal(t, os.Interrupt)
	if status := p.wait(t); status != exitFailed {
		t.Errorf("exit status %d, want %d", status, exitFailed)
	}
	if out := p.stdout.String(); out != "" {
		t.Errorf("stdout of an interrupted run:\n%s", out)
	}
	if !strings.Contains(p.stderr.String(), "relay: stopped by signal: interrupt\n") {
		t.Errorf("stderr does not say why:\n%s", p.stderr)
	}
	expectEmpty(t, dir)
	eventuallySQL(t, url, noBenchSchema)
}

// A role that may not create a schema is told so before anything takes time.
func TestBenchNeedsTheRightToCreateASchema(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	mustRunSQL(t, url, `DO $$ BEGIN CREATE ROLE jetbox_bench_nobody LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$`)
	began := time.Now()
	cmd := relayCmd(t.Context(), t.TempDir(), "bench", "--db", strings.Replace(url, "postgres@", "jetbox_bench_nobody@", 1), "--only", "postgres")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	_ = cmd.Run() // the status is in ProcessState
	if status := cmd.ProcessState.ExitCode(); status != exitFailed || !strings.Contains(stderr.String(), "permission denied") {
		t.Errorf("exit status %d after %v, want %d and the reason:\n%s", status, time.Since(began), exitFailed, &stderr)
	}
	if strings.Contains(stderr.String(), "round 1") {
		t.Errorf("measured before it was told:\n%s", &stderr)
	}
}
