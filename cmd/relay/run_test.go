package main

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// The first steps of the help text, in an empty directory: run, emit, consume,
// and a plain INSERT from another program.
func TestRunEmitConsumeAndPlainInsertArrive(t *testing.T) {
	t.Parallel()
	r := startRun(t)
	once(t, r.dir, "emit", "events.hello", `{"x":1}`)
	c := start(t, r.dir, "consume", "--durable", "d", "--print", "--nats", r.nats)
	if got := c.stdout.line(t, "events.hello"); got != "events.hello {\"x\":1}\n" {
		t.Errorf("printed %q", got)
	}
	r.sql(t, `INSERT INTO outbox (subject, payload) VALUES ('events.plain', 'hi')`)
	c.stdout.line(t, "events.plain hi")

	c.signal(t, os.Interrupt)
	if code := c.wait(t); code != exitFine {
		t.Errorf("relay consume ended with %d after SIGINT, want %d", code, exitFine)
	}
	r.signal(t, syscall.SIGTERM)
	if code := r.wait(t); code != exitFine {
		t.Errorf("relay run ended with %d after SIGTERM, want %d", code, exitFine)
	}
	for _, name := range []string{"jetbox.db", "jetbox-data"} {
		if _, err := os.Stat(filepath.Join(r.dir, name)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	r.stderr.line(t, `"msg":"stopped"`)
}

// Streams are created as the contract says, and not changed afterwards (BR-43).
func TestRunCreatesStreamsAndLeavesThemAlone(t *testing.T) {
	t.Parallel()
	r := startRun(t, "--subjects", "events.>,orders.*")
	js := connectJS(t, r.nats)
	s, err := js.Stream(t.Context(), "EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	cfg := s.CachedInfo().Config
	if got := fmt.Sprint(cfg.Subjects, cfg.Storage, cfg.Replicas, cfg.Duplicates, cfg.MaxAge, cfg.AllowBatchPublish); got != "[events.> orders.*] File 1 2m0s 0s true" {
		t.Errorf("stream EVENTS was created with %s", got)
	}
	for _, name := range []string{dlqStream, advisoryStream} {
		if _, err := js.Stream(t.Context(), name); err != nil {
			t.Errorf("stream %s: %v", name, err)
		}
	}
	cfg.MaxAge, cfg.Duplicates = time.Hour, time.Minute
	if _, err := js.UpdateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	second := start(t, r.dir, "run", "--nats", r.nats, "--http", "off", "--log-format", "json", "--lease", "1s")
	second.stderr.line(t, "stream differs", `"setting":"max_age","have":"1h0m0s","want":"0s"`)
	second.stderr.line(t, "stream differs", `"setting":"duplicate_window","have":"1m0s"`)
	second.stderr.line(t, `"setting":"subjects"`)
	second.stderr.line(t, `"msg":"standing by"`)
	if s, err = js.Stream(t.Context(), "EVENTS"); err != nil || s.CachedInfo().Config.MaxAge != time.Hour {
		t.Errorf("a second relay changed the stream: MaxAge %v, %v", s.CachedInfo().Config.MaxAge, err)
	}
}

// A second relay stands by, healthy, and takes over when the first is stopped.
func TestRunStandbyIsReadyAndTakesOver(t *testing.T) {
	t.Parallel()
	broker := embedded.RunTest(t, func(c *embedded.Config) { c.Listen = "127.0.0.1:0" })
	dir := t.TempDir()
	var procs [2]*proc
	var urls [2]string
	for i := range procs {
		procs[i] = start(t, dir, "run", "--nats", broker.ClientURL(), "--http", "127.0.0.1:0", "--log-format", "json", "--lease", "2s")
		urls[i] = "http://" + procs[i].field(t, "serving HTTP", "address")
		role := []string{"active", "standby"}[i]
		eventually(t, role, func() (bool, string) {
			status, body := get(t, urls[i]+"/readyz")
			return status == http.StatusOK && strings.Contains(body, `"role":"`+role+`"`), body
		})
	}
	if _, body := get(t, urls[1]+"/readyz"); !strings.Contains(body, "standing by for") {
		t.Errorf("standby says %s", body)
	}
	if _, body := get(t, urls[1]+"/metrics"); !strings.Contains(body, `jetbox_relay_shards{outbox="outbox"} 0`) {
		t.Error("the standby holds a shard")
	}
	procs[0].signal(t, syscall.SIGTERM)
	if code := procs[0].wait(t); code != exitFine {
		t.Errorf("first relay ended with %d", code)
	}
	eventually(t, "takeover", func() (bool, string) {
		_, body := get(t, urls[1]+"/readyz")
		return strings.Contains(body, `"role":"active"`), body
	})
}

// BR-37, and: readiness tells the truth from the first second on. A broker that
// is not there yet is waited for; one that goes away is not the end.
func TestRunWaitsForBrokerVisibly(t *testing.T) {
	t.Parallel()
	broker := embedded.RunTest(t, func(c *embedded.Config) { c.Listen = "127.0.0.1:0" })
	if err := broker.Close(); err != nil {
		t.Fatal(err)
	}
	p := start(t, t.TempDir(), "run", "--nats", broker.ClientURL(), "--http", "127.0.0.1:0", "--log-format", "json")
	url := "http://" + p.field(t, "serving HTTP", "address")
	eventually(t, "the reason", func() (bool, string) {
		status, body := get(t, url+"/readyz")
		return status == http.StatusServiceUnavailable && strings.Contains(body, `"role":"starting","reason":"waiting for NATS: `), body
	})
	if status, body := get(t, url+"/livez"); status != http.StatusOK {
		t.Errorf("/livez: %d %s", status, body)
	}
	p.stderr.line(t, `"msg":"waiting","for":"NATS"`)
	if err := broker.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "ready", func() (bool, string) {
		status, body := get(t, url+"/readyz")
		return status == http.StatusOK, body
	})
	if err := broker.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "not ready", func() (bool, string) {
		status, body := get(t, url+"/readyz")
		return status == http.StatusServiceUnavailable, body
	})
	p.signal(t, syscall.SIGTERM)
	if code := p.wait(t); code != exitFine {
		t.Errorf("ended with %d", code)
	}
}

// A command that waits for its input ends at the first signal, and has done
// nothing.
func TestEmitEndsAtSignalWhileReading(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	once(t, dir, "migrate")
	for _, args := range [][]string{{"emit", "--lines", "events.a"}, {"emit", "events.a", "-"}} {
		cmd := relayCmd(t.Context(), dir, args...)
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		stderr := newTranscript()
		cmd.Stderr = stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// More than a pipe holds: when it is written, relay reads.
		if _, err := stdin.Write(bytes.Repeat([]byte("line\n"), 1<<16)); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); cmd.ProcessState.ExitCode() != exitFailed {
			t.Errorf("relay %q ended with %v, want status %d", args, err, exitFailed)
		}
		if !strings.Contains(stderr.String(), "stopped by signal: interrupt") {
			t.Errorf("relay %q said %q", args, stderr)
		}
	}
	if out := once(t, dir, "outbox", "list"); out != "" {
		t.Errorf("rows were appended:\n%s", out)
	}
}

// A relay that is asked to stop before it has begun ends well too.
func TestRunStopsWhileWaitingForBroker(t *testing.T) {
	t.Parallel()
	p := start(t, t.TempDir(), "run", "--nats", "nats://127.0.0.1:1", "--http", "off", "--log-format", "json")
	p.stderr.line(t, `"for":"NATS"`)
	p.signal(t, syscall.SIGTERM)
	if code := p.wait(t); code != exitFine {
		t.Errorf("ended with %d, want %d", code, exitFine)
	}
}

// BR-70: from the first signal on it is not ready, and what has a PubAck is
// recorded before it ends.
func TestSigtermWaitsUntilOutcomeIsRecorded(t *testing.T) {
	t.Parallel()
	r := startRun(t)
	// The database refuses the mark: the stream has the message, the row waits.
	r.sql(t, `CREATE TRIGGER no_mark BEFORE UPDATE OF status ON outbox WHEN new.status = 'PUBLISHED'
		BEGIN SELECT raise(ABORT, 'not now'); END`)
	once(t, r.dir, "emit", "events.a", "x")
	r.stderr.line(t, "cannot record outcomes", "not now")
	eventually(t, "not ready because of it", func() (bool, string) {
		status, body := get(t, r.http+"/readyz")
		return status == http.StatusServiceUnavailable && strings.Contains(body, "not now"), body
	})
	r.signal(t, syscall.SIGTERM)
	eventually(t, "stopping", func() (bool, string) {
		status, body := get(t, r.http+"/readyz")
		return status == http.StatusServiceUnavailable && strings.Contains(body, `"role":"stopping"`), body
	})
	r.sql(t, `DROP TRIGGER no_mark`)
	if code := r.wait(t); code != exitFine {
		t.Errorf("ended with %d, want %d", code, exitFine)
	}
	e, err := r.store(t).Show(t.Context(), 1)
	if err != nil || e.State != jetbox.Published || e.StreamSeq != 1 {
		t.Errorf("row 1 is %s at sequence %d, %v; want it PUBLISHED at 1", e.State, e.StreamSeq, err)
	}
}

// BR-41: the second signal ends at once, whatever hangs, and loses nothing.
func TestSecondSignalEndsAtOnce(t *testing.T) {
	t.Parallel()
	r := startRun(t, "--drain-timeout", "10m", "--lease", "1s")
	r.sql(t, `CREATE TRIGGER no_mark BEFORE UPDATE OF status ON outbox WHEN new.status = 'PUBLISHED'
		BEGIN SELECT raise(ABORT, 'not now'); END`)
	once(t, r.dir, "emit", "events.a", "x")
	r.stderr.line(t, "cannot record outcomes")
	r.signal(t, syscall.SIGINT)
	r.stderr.line(t, `"msg":"stopping; once more ends it at once"`)
	time.Sleep(2 * sameSignal) // a real wait: what comes sooner is the same signal
	r.signal(t, syscall.SIGINT)
	if code := r.wait(t); code != exitFailed {
		t.Errorf("ended with %d, want %d", code, exitFailed)
	}
	r.stderr.line(t, "relay: second signal (interrupt), ending at once")
	if text := r.stderr.String(); strings.Contains(text, "panic") {
		t.Errorf("panicked:\n%s", text)
	}
	r.sql(t, `DROP TRIGGER no_mark`)
	again := startRunIn(t, r.dir, "--lease", "1s")
	eventually(t, "row 1 published by the next relay", func() (bool, string) {
		e, err := again.store(t).Show(t.Context(), 1)
		return err == nil && e.State == jetbox.Published, fmt.Sprint(e.State, err)
	})
}

// BR-41: signals at any moment of the start.
func TestSignalsAtAnyMomentEndCleanly(t *testing.T) {
	t.Parallel()
	for i := range 12 {
		p := start(t, t.TempDir(), "run", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-format", "json")
		p.stderr.line(t, `"msg":"outbox opened"`) // from here on signals are ours
		time.Sleep(time.Duration(i) * 5 * time.Millisecond)
		s := []os.Signal{os.Interrupt, syscall.SIGTERM}[i%2]
		p.signal(t, s)
		if i%3 == 0 {
			_ = p.cmd.Process.Signal(s) // it may have ended by now
		}
		if code := p.wait(t); code != exitFine {
			t.Errorf("run %d ended with %d after %v", i, code, s)
		}
		if text := p.stderr.String(); strings.Contains(text, "panic") || strings.Contains(text, "goroutine") {
			t.Errorf("run %d panicked:\n%s", i, text)
		}
	}
}

func TestNoSetupNeedsWhatIsThere(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := start(t, dir, "run", "--no-setup", "--listen", "off", "--http", "off")
	if code := p.wait(t); code != exitFailed {
		t.Errorf("ended with %d without a database, want %d", code, exitFailed)
	}
	p.stderr.line(t, "relay: hint: relay migrate creates it")

	once(t, dir, "migrate")
	p = start(t, dir, "run", "--no-setup", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-format", "json")
	url := "http://" + p.field(t, "serving HTTP", "address")
	p.stderr.line(t, "stream does not exist", `"stream":"EVENTS"`)
	eventually(t, "not ready without its stream", func() (bool, string) {
		status, body := get(t, url+"/readyz")
		return status == http.StatusServiceUnavailable && strings.Contains(body, "EVENTS"), body
	})
}

// BR-42: dead letters must never be events.
func TestRunRefusesEventStreamThatTakesDeadLetters(t *testing.T) {
	t.Parallel()
	broker := embedded.RunTest(t, func(c *embedded.Config) { c.Listen = "127.0.0.1:0" })
	js := connectJS(t, broker.ClientURL())
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>", "dlq.*.x"}}); err != nil {
		t.Fatal(err)
	}
	p := start(t, t.TempDir(), "run", "--nats", broker.ClientURL(), "--http", "off")
	if code := p.wait(t); code != exitFailed {
		t.Errorf("ended with %d, want %d", code, exitFailed)
	}
	p.stderr.line(t, `relay: stream EVENTS has the subject "dlq.*.x", which overlaps "dlq.>"`)
	p.stderr.line(t, "relay: hint: ")
}

func TestRunRefusesRetentionBelowStreamsWindow(t *testing.T) {
	t.Parallel()
	broker := embedded.RunTest(t, func(c *embedded.Config) { c.Listen = "127.0.0.1:0" })
	js := connectJS(t, broker.ClientURL())
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}, Duplicates: time.Hour}); err != nil {
		t.Fatal(err)
	}
	p := start(t, t.TempDir(), "run", "--nats", broker.ClientURL(), "--http", "off", "--retention", "30m")
	if code := p.wait(t); code != exitUsage {
		t.Errorf("ended with %d, want %d", code, exitUsage)
	}
	p.stderr.line(t, "relay: --retention 30m is shorter than the duplicate window 1h of the stream")

	p = start(t, t.TempDir(), "run", "--nats", broker.ClientURL(), "--http", "off", "--retention", "0", "--log-format", "json")
	p.stderr.line(t, "--retention 0 deletes published rows at once")
	p.stderr.line(t, "lease acquired")
}

// What another process has is named, with the ways out.
func TestRunSaysWhoHasAddressOrDirectory(t *testing.T) {
	t.Parallel()
	r := startRun(t)
	addr := strings.TrimPrefix(r.nats, "nats://")
	p := start(t, t.TempDir(), "run", "--listen", addr, "--http", "off")
	if code := p.wait(t); code != exitFailed {
		t.Errorf("ended with %d, want %d", code, exitFailed)
	}
	p.stderr.line(t, "relay: embedded: address not available")
	p.stderr.line(t, "relay: hint: if a broker runs there, --nats URL uses it")

	p = start(t, r.dir, "run", "--listen", "127.0.0.1:0", "--http", "off")
	if code := p.wait(t); code != exitFailed {
		t.Errorf("ended with %d, want %d", code, exitFailed)
	}
	p.stderr.line(t, "in use by another server")

	p = start(t, t.TempDir(), "run", "--listen", "off", "--http", strings.TrimPrefix(r.http, "http://"))
	if code := p.wait(t); code != exitFailed {
		t.Errorf("ended with %d, want %d", code, exitFailed)
	}
	p.stderr.line(t, "relay: hint: another relay run may have it: --http takes another address, or off")
}

// The whole life of a dead row, as an operator sees it.
func TestDeadRowIsRetriedAndDiscarded(t *testing.T) {
	t.Parallel()
	r := startRun(t, "--max-attempts", "1")
	once(t, r.dir, "emit", "nobody.listens", "x")
	once(t, r.dir, "emit", "nobody.listens", "y")
	store := r.store(t)
	dead := func(n int64) {
		t.Helper()
		eventually(t, fmt.Sprintf("%d dead rows", n), func() (bool, string) {
			s, err := store.Stats(t.Context())
			return err == nil && s.DeadLetter == n && s.Pending == 0, fmt.Sprint(s, err)
		})
	}
	dead(2)
	if out := once(t, r.dir, "outbox", "list", "--status", "DEAD_LETTER"); strings.Count(out, "\n") != 3 || !strings.Contains(out, "nobody.listens") {
		t.Errorf("outbox list printed\n%s", out)
	}
	status := relayCmd(t.Context(), r.dir, "status", "--check", "--nats", r.nats)
	if out, _ := status.Output(); status.ProcessState.ExitCode() != exitFound || !strings.Contains(string(out), "problem       2 dead rows in the outbox") {
		t.Errorf("status --check ended with %d and said\n%s", status.ProcessState.ExitCode(), out)
	}
	js := connectJS(t, r.nats)
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "NOBODY", Subjects: []string{"nobody.>"}}); err != nil {
		t.Fatal(err)
	}
	// A relay believes for a while that nobody takes a subject: start afresh.
	r.signal(t, syscall.SIGTERM)
	r.wait(t)
	if out := once(t, r.dir, "outbox", "retry", "1"); out != "1 row retried\n" {
		t.Errorf("outbox retry printed %q", out)
	}
	startRunIn(t, r.dir, "--lease", "1s")
	dead(1)
	if out := once(t, r.dir, "outbox", "discard", "--all"); out != "1 row discarded\n" {
		t.Errorf("outbox discard printed %q", out)
	}
	dead(0)
	var states []jetbox.State
	for e, err := range store.List(t.Context(), outbox.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		states = append(states, e.State)
	}
	if fmt.Sprint(states) != "[PUBLISHED]" {
		t.Errorf("rows are %v, want the retried one, published", states)
	}
}
