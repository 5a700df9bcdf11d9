//go:build unix

package main

import (
	"context"
	"os/exec"
	"syscall"
)

// shell returns a command in a process group of its own: a signal from the
// terminal stops relay, which lets the command finish, and a timeout ends the
// command with all its children.
func shell(ctx context.Context, command string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", command)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	return cmd
}
