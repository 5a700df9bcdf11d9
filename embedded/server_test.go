package embedded_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// The tests of this file have real time and real ports. They run after the
// bubbles, because they are parallel and the bubbles are not.

// Every setting that cannot work is refused, by its name.
func TestStartRefusesBadConfigByFieldName(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name  string
		cfg   embedded.Config
		field string
	}{
		{"no directory", embedded.Config{}, "Dir is empty"},
		{"listen without port", embedded.Config{Dir: "x", Listen: "127.0.0.1"}, `Listen is "127.0.0.1"`},
		{"port out of range", embedded.Config{Dir: "x", Listen: "127.0.0.1:65536"}, `Listen is "127.0.0.1:65536"`},
		{"blank in name", embedded.Config{Dir: "x", Name: "a b"}, `Name is "a b"`},
		{"negative sync", embedded.Config{Dir: "x", Sync: -time.Second}, "Sync is -1s"},
		{"sync of no length", embedded.Config{Dir: "x", Sync: time.Nanosecond}, "Sync is 1ns"},
		{"two sync settings", embedded.Config{Dir: "x", Sync: time.Second, SyncAlways: true}, "Sync is 1s and SyncAlways"},
		{"negative store", embedded.Config{Dir: "x", MaxStore: -1}, "MaxStore is -1"},
		{"negative memory", embedded.Config{Dir: "x", MaxMemory: -1}, "MaxMemory is -1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			srv, err := embedded.Start(t.Context(), tt.cfg)
			if err == nil {
				_ = srv.Close()
				t.Fatalf("Start(%+v) succeeded", tt.cfg)
			}
			if !strings.Contains(err.Error(), tt.field) {
				t.Errorf("Start(%+v): err = %q, want %q in it", tt.cfg, err, tt.field)
			}
		})
	}
}

// A listening server serves other programs and this process, and has the same
// address after a restart.
func TestListeningServerKeepsItsAddressAcrossRestarts(t *testing.T) {
	t.Parallel()
	srv := embedded.RunTest(t, func(c *embedded.Config) { c.Listen = "127.0.0.1:0" })
	reconnected := make(chan struct{}, 10)
	nc, err := nats.Connect(srv.ClientURL(),
		nats.ReconnectWait(10*time.Millisecond), nats.MaxReconnects(-1),
		nats.ReconnectHandler(func(*nats.Conn) { reconnected <- struct{}{} }))
	if err != nil {
		t.Fatalf("connect to %q: %v", srv.ClientURL(), err)
	}
	defer nc.Close()
	if got := nc.ConnectedServerName(); got != "jetbox" {
		t.Errorf("server name = %q, want jetbox", got)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	publish(t, connect(t, srv), "s", "id")

	url := srv.ClientURL()
	if err := srv.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if srv.ClientURL() != url {
		t.Errorf("URL after the restart = %s, want %s", srv.ClientURL(), url)
	}
	await(t, "reconnect", reconnected)
	if ack := publish(t, js, "s", "id"); !ack.Duplicate {
		t.Errorf("repeat after the restart = %+v, want a duplicate", ack)
	}
}

func await(t *testing.T, what string, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.NewTimer(30 * time.Second).C:
		t.Fatalf("no %s within 30s", what)
	}
}

// A port that somebody has is an error to match, with the address in it, and
// leaves the directory free.
func TestPortInUseIsErrListen(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	addr, dir := l.Addr().String(), t.TempDir()
	srv, err := embedded.Start(t.Context(), embedded.Config{Dir: dir, Listen: addr, Logger: slog.New(slog.DiscardHandler)})
	if err == nil {
		_ = srv.Close()
	}
	if !errors.Is(err, embedded.ErrListen) || !strings.Contains(err.Error(), addr) {
		t.Errorf("Start on %s: err = %v, want ErrListen with the address", addr, err)
	}
	embedded.RunTest(t, func(c *embedded.Config) { c.Dir = dir })
}

// One directory has one server, and the other learns who it is.
func TestSecondServerOnTheDirectoryIsRefused(t *testing.T) {
	t.Parallel()
	first := embedded.RunTest(t)
	second, err := embedded.Start(t.Context(), embedded.Config{Dir: first.Dir()})
	if err == nil {
		_ = second.Close()
	}
	if !errors.Is(err, embedded.ErrDirInUse) || !strings.Contains(err.Error(), first.Dir()) {
		t.Fatalf("second server: err = %v, want ErrDirInUse with the directory", err)
	}
	js := connect(t, first) // the first one did not notice
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	embedded.RunTest(t, func(c *embedded.Config) { c.Dir = first.Dir() })
}

// A directory that cannot be one is an error with the path, not a server in
// another place.
func TestUnusableDirectoryIsAnError(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	blocked := t.TempDir() // the server's own folder cannot be made
	if err := os.WriteFile(filepath.Join(blocked, "jetstream"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dirs := []string{file, filepath.Join(file, "below"), blocked}
	if os.Geteuid() != 0 { // root may write anywhere
		readOnly := t.TempDir()
		if err := os.Chmod(readOnly, 0o500); err != nil {
			t.Fatal(err)
		}
		dirs = append(dirs, readOnly)
	}
	for _, dir := range dirs {
		srv, err := embedded.Start(t.Context(), embedded.Config{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
		if err == nil {
			_ = srv.Close()
			t.Errorf("Start in %s succeeded", dir)
		} else if !strings.Contains(err.Error(), dir) {
			t.Errorf("Start in %s: err = %q, want the path in it", dir, err)
		}
	}
}

// Start does not go on after its context, and leaves the directory free.
func TestStartGivesUpWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := t.TempDir()
	if _, err := embedded.Start(ctx, embedded.Config{Dir: dir}); !errors.Is(err, context.Canceled) {
		t.Errorf("Start: err = %v, want context.Canceled", err)
	}
	embedded.RunTest(t, func(c *embedded.Config) { c.Dir = dir })
}

// A start that is given up in the middle is undone, and then the directory is
// free again.
func TestStartGivenUpInTheMiddleIsUndone(t *testing.T) {
	t.Parallel()
	cfg := embedded.Config{Dir: t.TempDir(), Logger: slog.New(slog.DiscardHandler)}
	for patience := 100 * time.Microsecond; patience < 10*time.Millisecond; patience *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		srv, err := embedded.Start(ctx, cfg)
		cancel()
		switch {
		case err == nil:
			if err := srv.Close(); err != nil {
				t.Fatal(err)
			}
		case errors.Is(err, embedded.ErrDirInUse): // the one before is not undone yet
		case !errors.Is(err, context.DeadlineExceeded):
			t.Errorf("Start for %v: err = %v, want the deadline", patience, err)
		}
	}
	deadline := time.Now().Add(30 * time.Second)
	for {
		srv, err := embedded.Start(t.Context(), cfg)
		if err == nil {
			_ = srv.Close()
			return
		}
		if !errors.Is(err, embedded.ErrDirInUse) || time.Now().After(deadline) {
			t.Fatalf("start after the ones given up: %v", err)
		}
		time.Sleep(time.Millisecond)
	}
}

// What will hurt later is said loudly when the server starts: data in a
// temporary directory, a port that others reach without a password.
func TestListeningServerWarnsAboutTemporaryDirectoryAndOpenPort(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, listen string
		want         []string
	}{
		{"no port", "", nil},
		{"loopback", "127.0.0.1:0", []string{"below the temporary directory"}},
		{"every interface", ":0", []string{"below the temporary directory", "no authentication"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var log bytes.Buffer
			srv := embedded.RunTest(t, func(c *embedded.Config) {
				c.Listen = tt.listen
				c.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
			})
			if err := srv.Close(); err != nil { // then nobody writes to log
				t.Fatal(err)
			}
			got := log.String()
			if n := strings.Count(got, "level=WARN"); n != len(tt.want) {
				t.Errorf("%d warnings, want %d:\n%s", n, len(tt.want), got)
			}
			for _, want := range tt.want {
				if !strings.Contains(got, want) {
					t.Errorf("no warning about %q in:\n%s", want, got)
				}
			}
		})
	}
}

// The limits are ours, not three quarters of the machine's memory.
func TestStoreLimitsAreEnforced(t *testing.T) {
	t.Parallel()
	srv := embedded.RunTest(t, func(c *embedded.Config) { c.MaxStore, c.MaxMemory = 1<<20, 1<<20 })
	js := connect(t, srv)
	for _, storage := range []jetstream.StorageType{jetstream.FileStorage, jetstream.MemoryStorage} {
		name := "S-" + storage.String()
		createStream(t, js, jetstream.StreamConfig{Name: name, Subjects: []string{name}, Storage: storage})
		var err error
		for n := 0; err == nil && n < 5; n++ {
			_, err = send(t, js, name, 500_000)
		}
		if err == nil {
			t.Errorf("%s: 2.5 MB stored with a limit of 1 MiB", storage)
		}
	}
}

// Closing twice is closing once, and a closed server starts again.
func TestCloseIsIdempotentAndRestartRevives(t *testing.T) {
	t.Parallel()
	srv := embedded.RunTest(t)
	for range 2 {
		if err := srv.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	if _, err := srv.Connect(); err == nil {
		t.Error("connected to a closed server")
	}
	if err := srv.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	connect(t, srv)
}

// All goroutines have ended when Close returns. Not parallel: it counts those
// of the whole process.
func TestCloseLeavesNoGoroutine(t *testing.T) {
	before := runtime.NumGoroutine()
	for range 3 {
		srv, err := embedded.Start(t.Context(), embedded.Config{
			Dir: t.TempDir(), Listen: "127.0.0.1:0", Logger: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			t.Fatal(err)
		}
		nc, err := srv.Connect()
		if err != nil {
			t.Fatal(err)
		}
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
		publish(t, js, "s", "id")
		nc.Close()
		if err := srv.Close(); err != nil {
			t.Fatal(err)
		}
	}
	// The client's goroutines end a moment after its Close.
	deadline := time.Now().Add(10 * time.Second)
	for runtime.NumGoroutine() > before {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
		}
		time.Sleep(time.Millisecond)
	}
}
