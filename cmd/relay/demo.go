package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/seed-5e04d8fb/jetbox/cmd/relay/internal/demo"
)

func demoCommand() *command {
	return &command{
		name:  "demo",
		short: "show the whole story in seconds, with nothing to set up",
		long: `
Commit, relay, crash and duplicate, poison and replay, on real parts in a
temporary directory. Every line was checked before it is written; exits 0 only
if all of them held. --log-format json writes one object per line, --log-level
debug shows on stderr what the parts say.`,
		run: func(ctx context.Context, a *app, _ []string) error {
			exe, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program, to start a relay that can be killed: %w", err)
			}
			log := slog.New(slog.DiscardHandler) // failures are part of the story
			if a.global.logLevel <= slog.LevelDebug {
				log = a.log
			}
			return demo.Run(ctx, demo.Config{
				Out:    a.stdout,
				JSON:   a.global.logFormat == "json",
				Logger: log,
				Relay: func(ctx context.Context, args ...string) *exec.Cmd {
					cmd := exec.CommandContext(ctx, exe, args...)
					cmd.Args[0] = os.Args[0]
					cmd.Env = slices.DeleteFunc(slices.Clone(a.environ), isSetting)
					return cmd
				},
			})
		},
	}
}

// isSetting reports whether an environment variable would change what a relay
// does.
func isSetting(entry string) (setting bool) {
	return strings.HasPrefix(entry, envPrefix) || strings.HasPrefix(entry, "NATS_")
}
