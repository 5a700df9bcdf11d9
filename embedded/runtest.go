package embedded

import (
	"context"
	"log/slog"
	"runtime"
	"time"
)

// testSync keeps a bubble in which hours pass from spending its real time on
// thousands of syncs. No test can see a sync but by cutting the power.
const testSync = time.Minute

// TB is the part of testing.TB that RunTest needs. It keeps package testing
// out of programs that embed a server.
type TB interface {
	Helper()
	TempDir() string
	Cleanup(func())
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// RunTest starts a server for a test and closes it when the test ends. It has
// no port, a directory of the test's own and no log, and syncs once a minute,
// unless adjust says otherwise. It works inside a synctest bubble; see the
// package comment.
//
//	srv := embedded.RunTest(t)
//	nc, err := srv.Connect()
func RunTest(t TB, adjust ...func(*Config)) *Server {
	t.Helper()
	dropTimers()
	cfg := Config{Logger: slog.New(slog.DiscardHandler)}
	for _, f := range adjust {
		f(&cfg)
	}
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
	}
	if cfg.Sync == 0 && !cfg.SyncAlways {
		cfg.Sync = testSync
	}
	s, err := Start(context.Background(), cfg)
	if err != nil {
		t.Fatalf("start the test's broker: %v", err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close the test's broker: %v", err)
		}
		dropTimers()
	})
	return s
}

// RunTestCluster starts a cluster of n nodes for a test, on loopback ports and
// so not in a bubble, and closes it when the test ends.
func RunTestCluster(t TB, n int) *Cluster {
	t.Helper()
	dropTimers()
	c, err := StartCluster(context.Background(), t.TempDir(), n)
	if err != nil {
		t.Fatalf("start the test's cluster: %v", err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("close the test's cluster: %v", err)
		}
	})
	return c
}

// dropTimers empties the pool of timers that nats.go keeps for the process. A
// timer that a bubble leaves there (every reconnect uses one) ends the process
// with "reset of synctest timer from outside bubble" when a later test draws
// it. A pool survives one collection, not two.
func dropTimers() {
	runtime.GC()
	runtime.GC()
}
