//go:build !unix

package main

import (
	"context"
	"os/exec"
)

// shell returns a command. Its children outlive a timeout here.
func shell(ctx context.Context, command string) *exec.Cmd {
	return exec.CommandContext(ctx, "cmd", "/C", command)
}
