package sqlite

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	sqlite3 "modernc.org/sqlite/lib"
)

// The real thing, where this process may mount: a disk of 3 MB.
func TestFullDiskRecordsNothingAndRecovers(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=3m"); err != nil {
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
	s, err := Open(t.Context(), Config{Path: filepath.Join(dir, "outbox.db")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	if err := s.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	filler := filepath.Join(dir, "filler")
	fill := func(on bool) {
		t.Helper()
		if !on {
			if err := os.Remove(filler); err != nil {
				t.Fatal(err)
			}
			return
		}
		// What the WAL has already is written again: no space needed for that.
		var busy, log, done int
		if err := s.db.QueryRowContext(t.Context(), "PRAGMA wal_checkpoint(TRUNCATE)").Scan(&busy, &log, &done); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filler, make([]byte, 4<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("filling the disk: %v, want ENOSPC", err)
		}
	}
	cannotRecord(t, s, fill, sqlite3.SQLITE_FULL)
}
