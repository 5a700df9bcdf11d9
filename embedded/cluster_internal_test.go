package embedded

import (
	"errors"
	"log/slog"
	"path/filepath"
	"testing"
	"time"
)

// Of two clusters that started together one took a port that the other had drawn, and
// its node became the other's.
func TestClusterTurnsAwayTheNodesOfAnother(t *testing.T) {
	t.Parallel()
	c := RunTestCluster(t, 2)
	addrs, err := freeAddrs(1)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	stray, err := newServer(Config{Dir: filepath.Join(dir, "n0"), Listen: "127.0.0.1:0", Name: "stray", Logger: slog.New(slog.DiscardHandler)},
		&peering{cluster: nameOf(dir), addr: addrs[0], routes: append(addrs, c.nodes[0].peers.routes...)})
	if err != nil {
		t.Fatal(err)
	}
	if err := stray.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer stray.Close()
	// It tries at once.
	for end := time.Now().Add(500 * time.Millisecond); time.Now().Before(end); time.Sleep(clusterPoll) {
		if n := stray.current.Load().NumRoutes(); n > 0 {
			t.Fatalf("a node of another cluster has %d routes", n)
		}
	}
	if err := c.WaitReady(t.Context()); err != nil {
		t.Error(err)
	}
}

// What the server says of a port that was taken after we had looked is worth another try.
func TestPortTakenMeanwhileIsAnAddressNotAvailable(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"Error listening on port: 127.0.0.1:4222, \"in use\"", "Error listening on router port: 6222 - in use"} {
		l := &serverLog{log: slog.New(slog.DiscardHandler)}
		l.Fatalf("%s", text)
		if err := l.fatalError(); !errors.Is(err, ErrListen) {
			t.Errorf("%q is the error %v, want ErrListen", text, err)
		}
	}
	l := &serverLog{log: slog.New(slog.DiscardHandler)}
	l.Fatalf("Can't start JetStream: no space left on device")
	if err := l.fatalError(); err == nil || errors.Is(err, ErrListen) {
		t.Errorf("another failure is the error %v", err)
	}
}
