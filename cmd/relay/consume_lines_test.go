package main

import (
	"context"
	"io"
	"os"
	"testing"
	"time"
)

// What left the command's process group cannot be killed with it, and may keep its
// stdout for ever. Nobody waits for it: neither when time is up, nor at the end.
func TestExecLinesDoesNotWaitForWhatTheCommandLeavesBehind(t *testing.T) {
	t.Parallel()
	needShell(t)
	const left, soon = "20", 10 * time.Second
	for name, command := range map[string]string{
		"its stdout only": `setsid sleep ` + left + ` 2>/dev/null & read -r line; `,
		"all its streams": `setsid sleep ` + left + ` & read -r line; `,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newLinesHandler(command+"exec sleep 60", os.Environ(), io.Discard)
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			began := time.Now()
			if err := h.handle(ctx, delivery("x")); verdictOf(err) != "retry" {
				t.Errorf("a command that hangs: %v, want a retry", err)
			}
			if took := time.Since(began); took > soon {
				t.Errorf("handle took %v", took)
			}
			h = newLinesHandler(command+`echo ok; read -r line`, os.Environ(), io.Discard)
			if err := h.handle(t.Context(), delivery("x")); err != nil {
				t.Error(err)
			}
			began = time.Now()
			// It ends with 1: there is no other line.
			if err := h.close(); err == nil {
				t.Error("close says nothing of the command's exit status")
			}
			if took := time.Since(began); took > soon {
				t.Errorf("close took %v", took)
			}
		})
	}
}
