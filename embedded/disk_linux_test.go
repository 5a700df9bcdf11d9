package embedded_test

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// Catalog BR-34: a stream remembers that the disk was full until the server is
// restarted (nats-server 2.15). Err says so, and a restart heals it.
func TestServerThatMetAFullDiskSaysSoUntilItsRestart(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		if os.Getenv("CI") == "true" && os.Geteuid() == 0 {
			t.Fatalf("cannot mount a small tmpfs as root: %v", err)
		}
		t.Skipf("no small disk to fill, needs root: mount tmpfs: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	srv, err := embedded.Start(t.Context(), embedded.Config{Dir: filepath.Join(dir, "data"), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer srv.Close()
	nc, err := srv.Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(300*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
		t.Fatal(err)
	}
	publish := func() error {
		_, err := js.Publish(t.Context(), "s", make([]byte, 64<<10), jetstream.WithRetryAttempts(0))
		return err
	}
	if err := publish(); err != nil {
		t.Fatal(err)
	}
	if err := srv.Err(); err != nil {
		t.Fatalf("Err() = %v before anything went wrong", err)
	}

	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 8<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("filling the disk: %v, want ENOSPC", err)
	}
	for range 5 {
		err = publish()
	}
	if err == nil || srv.Err() == nil {
		t.Fatalf("on a full disk: publish = %v, Err() = %v, want an error of both", err, srv.Err())
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	if err := publish(); err == nil {
		t.Log("the server has learned to forget: heal in cmd/relay may go")
	}
	if err := srv.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	for began := time.Now(); publish() != nil; {
		if time.Since(began) > 10*time.Second {
			t.Fatalf("after the restart: publish = %v, Err() = %v", publish(), srv.Err())
		}
	}
	if err := srv.Err(); err != nil {
		t.Fatalf("Err() = %v after the restart", err)
	}
}
