//go:build unix

package jetbox_test

import (
	"fmt"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// pauses is how long a relay stands still: longer than the window, and as long as the
// issue says where chaos runs at length.
func pauses() time.Duration {
	if *chaosFor > 0 {
		return 10 * time.Second
	}
	return forgotten()
}

// A relay is stopped when the database has its claim and it has not heard so. Another
// one takes over and finishes. The first goes on beyond the window: it sends nothing,
// and changes nothing: BR-10.
func TestChaosRelayPausedBetweenClaimAndPublish(t *testing.T) {
	t.Parallel()
	engines(t, func(t *testing.T, fast bool) {
		s := newForgetful(t, fast)
		s.start(1)
		s.awaitShares(patience)
		s.insert("first", 20)
		s.awaitStored(20, patience)
		paused := s.alive[0]

		// The claim is held up in the database, where it goes on without its client.
		s.exec(`CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NEW; END $$`)
		s.exec(`CREATE TRIGGER hold_up BEFORE INSERT ON outbox_claim FOR EACH ROW EXECUTE FUNCTION hold_up()`)
		conn, err := s.pool.Acquire(t.Context())
		s.must(err)
		defer conn.Release()
		_, err = conn.Exec(t.Context(), `SELECT pg_advisory_lock(1)`)
		s.must(err)
		s.insertKeyed("row", 400, 7)
		s.await("a claim held up", patience, func() (string, bool) {
			var n int
			s.must(s.pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
				AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`).Scan(&n))
			return fmt.Sprint(n), n > 0
		})
		s.must(paused.Process.Signal(syscall.SIGSTOP))
		_, err = conn.Exec(t.Context(), `SELECT pg_advisory_unlock(1)`)
		s.must(err)
		s.await("the claim of a relay that is stopped", patience, func() (string, bool) {
			st := s.stats()
			return fmt.Sprintf("%+v", st), st.Claimed == 400
		})
		if n := s.onStream(); n != 20 {
			t.Fatalf("%d messages on the stream, want the relay stopped before it sends", n)
		}
		s.takeOverAndWakeUp(paused, func() {})
		s.verifyOurs(0)
		s.looked()
		s.usedEngine(fast)
	})
}

// A relay is stopped in the middle of a key, with a PubAck on its way to it. It is told
// beyond the window, when another one has sent the rest of the key.
func TestChaosRelayPausedInTheMiddleOfAKey(t *testing.T) {
	t.Parallel()
	s := newForgetful(t, false)
	paused, g := s.loseAcks(60, 2, 22)
	s.must(paused.Process.Signal(syscall.SIGSTOP))
	s.takeOverAndWakeUp(paused, g.open)
	s.verifyOurs(0)
	s.looked()
}

// takeOverAndWakeUp has another relay finish what one has in hand that is stopped, and
// wakes that one up, when awake has run. It must not send anything, nor change
// anything.
func (s *several) takeOverAndWakeUp(paused *exec.Cmd, awake func()) {
	s.t.Helper()
	s.start(1)
	s.awaitDrained()
	pause(s.t.Context(), pauses())
	const all = `true`
	before, acks, msgs := s.dump(all), s.acks.Load(), s.onStream()
	awake()
	s.must(paused.Process.Signal(syscall.SIGCONT))
	s.awaitShares(patience) // it has noticed, and is one of two
	pause(s.t.Context(), s.child.Lease)
	s.wantUnchanged(before, s.dump(all))
	if n, a := s.onStream(), s.acks.Load(); n != msgs || a != acks {
		s.t.Errorf("the relay that woke up has sent %d messages, %d are stored", a-acks, n-msgs)
	}
}
