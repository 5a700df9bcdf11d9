package main

import (
	"errors"
	"flag"
	"os/exec"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// TestMain makes the test binary act as relay when it is started under that
// name, so that processes are tested without building anything.
func TestMain(m *testing.M) {
	testscript.Main(withPostgres{m}, map[string]func(){"relay": main})
}

// withPostgres stops the server of the tests when they have run.
type withPostgres struct{ *testing.M }

func (w withPostgres) Run() int {
	// These tests wait for processes most of the time: more at once than there are
	// cores. The command line still decides.
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	return pgtest.Main(w.M)
}

func TestScripts(t *testing.T) {
	t.Parallel()
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits,
		},
	})
}

// exits runs a command and checks its exit status: exits STATUS COMMAND...
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits STATUS COMMAND...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	var exit *exec.ExitError
	if err := ts.Exec(args[1], args[2:]...); errors.As(err, &exit) {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("exit status %d, want %d", got, want)
	}
}
