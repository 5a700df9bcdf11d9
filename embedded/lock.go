package embedded

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// lockName is the file in Config.Dir that one server at a time holds. It is
// never removed: removing it would let a third server lock a new file of that
// name while the second holds the old one.
const lockName = "jetbox.lock"

// lockDir takes the directory for this server until the file it returns is
// closed, or the process dies. The operating system keeps the lock, not the
// file's content, so what a killed process leaves behind blocks nobody.
func lockDir(dir string) (*os.File, error) {
	name := filepath.Join(dir, lockName)
	f, err := openLocked(name)
	if err != nil {
		return nil, err
	}
	// The content only makes the other's error message better.
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return f, nil
}

// inUse names the holder of the lock, where the file tells.
func inUse(name string) error {
	if f, err := os.Open(name); err == nil {
		defer f.Close()
		text, _ := io.ReadAll(io.LimitReader(f, 32))
		if pid, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil {
			return fmt.Errorf("%w: %s is held by process %d", ErrDirInUse, name, pid)
		}
	}
	return fmt.Errorf("%w: %s is held", ErrDirInUse, name)
}
