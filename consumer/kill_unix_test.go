//go:build unix

package consumer_test

import (
	"database/sql"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

func stopSelf() { _ = syscall.Kill(os.Getpid(), syscall.SIGSTOP) }

// BR-51: a process is stopped before its commit for longer than the ack wait,
// and another gets the event. It waits for the first one's fate, which goes on
// and commits; the late duplicate is "seen". One effect, no error.
func TestConsumerStoppedBeforeItsCommitLeavesOneEffect(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, b *killBroker, db *sql.DB, dbURL string) {
		w := b.world(t, db, dbURL, 1)
		first := w.start(t, stopAfterEffect)
		waitFor(t, "the first process stands", func() bool {
			var status syscall.WaitStatus
			pid, err := syscall.Wait4(first.cmd.Process.Pid, &status, syscall.WUNTRACED|syscall.WNOHANG, nil)
			return err == nil && pid > 0 && status.Stopped()
		})
		second := w.start(t, stopAfterEffect) // finds the mark and goes through
		waitFor(t, "the event is delivered again", func() bool {
			c, err := w.js.Consumer(t.Context(), w.stream, durable)
			return err == nil && c.CachedInfo().NumRedelivered > 0
		})
		time.Sleep(2 * killAckWait) // a real wait: for what must not happen
		if w.settled(t) {
			t.Error("the second process settled an event whose fate was open")
		}
		if err := os.WriteFile(filepath.Join(w.marks, markGoOn), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := first.cmd.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "everything is settled", func() bool { return w.settled(t) })
		for _, c := range []*child{first, second} {
			if !c.end(t) {
				t.Error("a process was killed")
			}
		}
		w.wantOneEffectEach(t)
	})
}

func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !done(); {
		if time.Now().After(deadline) {
			t.Fatalf("waited for 30s: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
