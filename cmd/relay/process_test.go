package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
)

// patience bounds every wait of these tests for something that must happen.
const patience = 20 * time.Second

// proc is relay in a process of its own, in a directory of its own.
type proc struct {
	cmd    *exec.Cmd
	dir    string
	stdout *transcript
	stderr *transcript
	ended  chan struct{} // closed when the process has ended
}

// relayCmd returns relay with these arguments, run in dir, without settings from
// the tests' environment.
func relayCmd(ctx context.Context, dir string, args ...string) *exec.Cmd {
	exe, err := os.Executable()
	if err != nil {
		panic(err)
	}
	cmd := exec.CommandContext(ctx, exe, args...)
	cmd.Args[0] = "relay"
	cmd.Dir = dir
	for _, entry := range os.Environ() {
		if !isSetting(entry) {
			cmd.Env = append(cmd.Env, entry)
		}
	}
	return cmd
}

// start starts relay. It is killed when the test ends.
func start(t *testing.T, dir string, args ...string) *proc {
	t.Helper()
	p := &proc{
		cmd:    relayCmd(context.WithoutCancel(t.Context()), dir, args...),
		dir:    dir,
		stdout: newTranscript(),
		stderr: newTranscript(),
		ended:  make(chan struct{}),
	}
	p.cmd.Stdout, p.cmd.Stderr = p.stdout, p.stderr
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait() // the status is in ProcessState
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.ended
		if t.Failed() {
			t.Logf("relay %s\nstdout:\n%s\nstderr:\n%s", strings.Join(args, " "), p.stdout, p.stderr)
		}
	})
	return p
}

// once runs relay to its end and returns its stdout.
func once(t *testing.T, dir string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := relayCmd(ctx, dir, args...).Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("relay %s: %v\n%s", strings.Join(args, " "), err, exit.Stderr)
		}
		t.Fatal(err)
	}
	return string(out)
}

// signal sends a signal.
func (p *proc) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatalf("send %v: %v", s, err)
	}
}

// wait waits for the end and returns the exit status.
func (p *proc) wait(t *testing.T) int {
	t.Helper()
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	select {
	case <-p.ended:
		return p.cmd.ProcessState.ExitCode()
	case <-timeout.C:
		t.Fatal("relay did not end")
		return -1
	}
}

// transcript collects lines and lets tests wait for one.
type transcript struct {
	mu    sync.Mutex // guards what follows
	text  strings.Builder
	grown chan struct{} // closed and replaced when there is more
}

func newTranscript() *transcript { return &transcript{grown: make(chan struct{})} }

func (s *transcript) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.grown)
	s.grown = make(chan struct{})
	return s.text.Write(p)
}

func (s *transcript) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// line waits for a whole line that contains all words.
func (s *transcript) line(t *testing.T, words ...string) string {
	t.Helper()
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	for {
		s.mu.Lock()
		text, grown := s.text.String(), s.grown
		s.mu.Unlock()
	lines:
		for l := range strings.Lines(text) {
			if !strings.HasSuffix(l, "\n") {
				break
			}
			for _, w := range words {
				if !strings.Contains(l, w) {
					continue lines
				}
			}
			return l
		}
		select {
		case <-grown:
		case <-timeout.C:
			t.Fatalf("no line with %q in:\n%s", words, text)
		}
	}
}

// field waits for the JSON log line with the message and returns one of its
// fields.
func (p *proc) field(t *testing.T, msg, key string) string {
	t.Helper()
	var fields map[string]any
	if err := json.Unmarshal([]byte(p.stderr.line(t, `"msg":"`+msg+`"`)), &fields); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(fields[key])
}

// relayRun is a running relay with an embedded broker, on free ports.
type relayRun struct {
	*proc
	nats, http string
}

func startRun(t *testing.T, args ...string) *relayRun {
	t.Helper()
	return startRunIn(t, t.TempDir(), args...)
}

func startRunIn(t *testing.T, dir string, args ...string) *relayRun {
	t.Helper()
	p := start(t, dir, append([]string{"run", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-format", "json"}, args...)...)
	r := &relayRun{proc: p}
	r.nats = p.field(t, "embedded broker started", "url")
	r.http = "http://" + p.field(t, "serving HTTP", "address")
	r.ready(t)
	return r
}

// ready waits until /readyz says yes.
func (r *relayRun) ready(t *testing.T) {
	t.Helper()
	eventually(t, "ready", func() (bool, string) {
		status, body := get(t, r.http+"/readyz")
		return status == http.StatusOK, body
	})
}

// db opens the database as an application would.
func (p *proc) store(t *testing.T) *sqlite.Store {
	t.Helper()
	s, err := sqlite.Open(t.Context(), sqlite.Config{Path: filepath.Join(p.dir, "jetbox.db")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func (p *proc) sql(t *testing.T, query string, args ...any) {
	t.Helper()
	if _, err := p.store(t).DB().ExecContext(t.Context(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// connectJS connects to a broker for the test.
func connectJS(t *testing.T, url string) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

func get(t *testing.T, url string) (status int, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(bufio.NewReader(resp.Body))
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(text)
}

// eventually polls until f reports true; its text is shown otherwise.
func eventually(t *testing.T, what string, f func() (holds bool, state string)) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		holds, state := f()
		if holds {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: did not happen; last state: %s", what, state)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
