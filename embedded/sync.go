package embedded

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
)

// syncTree syncs every file and folder below dir. The server does not do it
// when it stops (nats-server 2.15 closes its blocks unsynced), and a killed one
// cannot: without this, what was written in the last moments would stay at the
// mercy of a power failure for as long as the kernel likes, not for Config.Sync.
// Syncing a file that is clean costs microseconds.
func syncTree(dir string) error {
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err == nil && (d.IsDir() || d.Type().IsRegular()) {
			err = syncFile(name, d.IsDir())
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the server removes old blocks in the background
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("embedded: sync directory %s: %w", dir, err)
	}
	return nil
}

func syncFile(name string, isDir bool) error {
	flag := os.O_RDWR // Windows flushes only what is open for writing
	if isDir {
		if runtime.GOOS == "windows" {
			return nil // has no such thing
		}
		flag = os.O_RDONLY
	}
	f, err := os.OpenFile(name, flag, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
