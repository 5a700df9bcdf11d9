package embedded_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// childEnv makes this test binary run a broker instead of the tests. Its value
// is the directory.
const childEnv = "JETBOX_EMBEDDED_CHILD"

// childExit is what a child that ended by its own decision exits with.
const childExit = 42

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		os.Exit(child(dir, os.Stdout))
	}
	os.Exit(m.Run())
}

// child publishes to a broker of its own until a signal comes, and prints the
// sequence of every PubAck.
func child(dir string, out io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	srv, err := embedded.Start(ctx, embedded.Config{Dir: dir, Listen: "127.0.0.1:0", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return fail(err)
	}
	nc, err := srv.Connect()
	if err != nil {
		return fail(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return fail(err)
	}
	if _, err := js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
		return fail(err)
	}
	for ctx.Err() == nil {
		ack, err := js.Publish(ctx, "s", []byte("x"))
		if err != nil {
			break
		}
		fmt.Fprintln(out, ack.Sequence)
	}
	nc.Close()
	if err := srv.Close(); err != nil {
		return fail(err)
	}
	return childExit
}

// startChild runs child in a process of its own and returns its PubAcks, a line
// each.
func startChild(t *testing.T, dir string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, exe)
	cmd.Env = append(os.Environ(), childEnv+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd, bufio.NewScanner(out)
}

// readAcks returns the last sequence of the next n lines, or of all when n is 0.
func readAcks(t *testing.T, acks *bufio.Scanner, n int) uint64 {
	t.Helper()
	var last uint64
	for i := 0; (n == 0 || i < n) && acks.Scan(); i++ {
		seq, err := strconv.ParseUint(acks.Text(), 10, 64)
		if err != nil { // a line that the kill cut short
			continue
		}
		last = max(last, seq)
	}
	if n > 0 && last == 0 {
		t.Fatalf("child acknowledged nothing: %v", acks.Err())
	}
	return last
}

// kill -9 of the process takes no message whose PubAck had arrived, and leaves
// no lock behind. The second round recovers what the first one left.
func TestKilledProcessLosesNoAcknowledgedMessage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for round := range 2 {
		cmd, acks := startChild(t, dir)
		last := readAcks(t, acks, 500)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		last = max(last, readAcks(t, acks, 0)) // what was in the pipe
		if err := cmd.Wait(); err == nil {
			t.Fatal("child ended by itself")
		}

		srv := embedded.RunTest(t, func(c *embedded.Config) { c.Dir = dir })
		state := streamInfo(t, connect(t, srv), "S").State
		if state.LastSeq < last || state.Msgs != state.LastSeq {
			t.Errorf("round %d: %d messages up to sequence %d, want all up to %d", round, state.Msgs, state.LastSeq, last)
		}
		if err := srv.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A second process on the directory is told who has it.
func TestSecondProcessOnTheDirectoryIsRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd, acks := startChild(t, dir)
	readAcks(t, acks, 1)
	srv, err := embedded.Start(t.Context(), embedded.Config{Dir: dir})
	if err == nil {
		_ = srv.Close()
		t.Fatal("started on the directory of another process")
	}
	if want := fmt.Sprintf("process %d", cmd.Process.Pid); !strings.Contains(err.Error(), want) {
		t.Errorf("err = %q, want %q in it", err, want)
	}
}

// Signals are the application's: the server neither exits the process nor
// shuts itself down first.
func TestSignalsBelongToTheApplication(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		for range 5 {
			cmd, acks := startChild(t, t.TempDir())
			readAcks(t, acks, 20)
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			readAcks(t, acks, 0)
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != childExit {
				t.Errorf("%v: exit status %d, want the application's own, %d", sig, code, childExit)
			}
		}
	}
}
