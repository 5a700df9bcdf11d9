package demo_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/seed-5e04d8fb/jetbox/cmd/relay/internal/demo"
)

// A claim that does not hold ends the demo with an error, in the story and in
// the result. Here the relay to be killed never relays: this test binary, asked
// for no test. That all claims hold with a real one is shown by the scripts of
// cmd/relay.
func TestFailedClaimFailsTheDemo(t *testing.T) {
	t.Parallel()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	err = demo.Run(t.Context(), demo.Config{
		Out:  &out,
		JSON: true,
		Relay: func(ctx context.Context, _ ...string) *exec.Cmd {
			return exec.CommandContext(ctx, exe, "-test.run=^$")
		},
		Logger: slog.New(slog.DiscardHandler),
	})
	if err == nil || !strings.Contains(err.Error(), "demo, cycle 4: the relay process did not get to the mark") {
		t.Errorf("error %v, want one about the mark in cycle 4", err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	for i, text := range lines {
		var line struct {
			Cycle int
			Holds *bool
			Error string
		}
		if err := json.Unmarshal([]byte(text), &line); err != nil {
			t.Fatalf("line %q: %v", text, err)
		}
		if last := i == len(lines)-1; line.Holds == nil || *line.Holds == last || (line.Error != "") != last {
			t.Errorf("line %d of %d: %s", i+1, len(lines), text)
		}
	}
}
