package embedded

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// The settings that durability and shutdown rest on are the ones the running
// server has, not only the ones we wrote down.
func TestEffectiveSettingsOfTheRunningServer(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name       string
		cfg        Config
		wantSync   time.Duration
		wantAlways bool
	}{
		{"default", Config{}, time.Second, false},
		{"sync", Config{Sync: 3 * time.Second}, 3 * time.Second, false},
		{"always", Config{SyncAlways: true}, time.Second, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			cfg := tt.cfg
			cfg.Dir = t.TempDir()
			s, err := Start(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			}()
			js := s.current.Load().JetStreamConfig()
			if js.SyncInterval != tt.wantSync || js.SyncAlways != tt.wantAlways {
				t.Errorf("sync = %v, always %v, want %v, %v", js.SyncInterval, js.SyncAlways, tt.wantSync, tt.wantAlways)
			}
			if js.MaxMemory != defaultMaxMemory || js.MaxStore <= 0 {
				t.Errorf("limits = %d in memory, %d on disk, want %d and a share of the disk", js.MaxMemory, js.MaxStore, defaultMaxMemory)
			}
			if rel, err := filepath.Rel(cfg.Dir, js.StoreDir); err != nil || !filepath.IsLocal(rel) {
				t.Errorf("streams are in %s, want them in %s", js.StoreDir, cfg.Dir)
			}
			opts, err := s.options()
			if err != nil {
				t.Fatal(err)
			}
			if !opts.NoSigs || opts.MaxPayload != 1<<20 {
				t.Errorf("NoSigs = %v, MaxPayload = %d, want true and 1 MiB", opts.NoSigs, opts.MaxPayload)
			}
		})
	}
}

func TestBelowResolvesSymbolicLinks(t *testing.T) {
	t.Parallel()
	parent, elsewhere := t.TempDir(), t.TempDir()
	link := filepath.Join(elsewhere, "link")
	if err := os.Symlink(parent, link); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		dir  string
		want bool
	}{
		{filepath.Join(parent, "data"), true},
		{parent, true},
		{parent + "x", false},
		{elsewhere, false},
		{link, true},
	}
	for _, tt := range tests {
		if got := below(tt.dir, parent); got != tt.want {
			t.Errorf("below(%s, %s) = %v, want %v", tt.dir, parent, got, tt.want)
		}
	}
}

// Syncing follows no link out of the directory, and what is no file, or gone,
// does not stop it.
func TestSyncTreeSkipsWhatIsNoFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "a", "b"), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "a", "b", "blk"), []byte("x"), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(dir, "nowhere"), filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{dir, filepath.Join(dir, "gone")} {
		if err := syncTree(dir); err != nil {
			t.Errorf("syncTree(%s): %v", dir, err)
		}
	}
}
