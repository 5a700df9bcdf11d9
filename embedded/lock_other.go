//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd || windows)

package embedded

import "os"

// openLocked locks nothing: these systems have neither flock nor exclusive
// handles in the standard library, and a lock that a dead process leaves
// behind would be worse than none.
func openLocked(name string) (*os.File, error) {
	return os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o640)
}
