//go:build unix

package bench

import (
	"os"
	"syscall"
	"time"
)

// cpuTime returns the CPU time that this process has used.
func cpuTime() (used time.Duration, err error) {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0, os.NewSyscallError("getrusage", err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), nil
}
