//go:build unix

package jetbox_test

import (
	"os"
	"testing"
	"time"
)

// A relay is killed after its rows are stored and before it records them, and kept down
// while others publish to the stream for longer than its window: BR-11, BR-35. The next
// one finds what is there, in no more memory than the rows in question take.
func TestChaosRelayKilledForLongerThanTheWindow(t *testing.T) {
	t.Parallel()
	engines(t, func(t *testing.T, fast bool) {
		down, others := forgotten(), scaled(5000, 100_000, 1_000_000)
		if *chaosFor > 0 {
			down = 5 * time.Second
		}
		s := newForgetful(t, fast)
		// More than two batches: some rows are claimed and never sent. Of a key one
		// row is on the wire at a time, where each is acknowledged.
		const rows, keys = 1800, 7
		stored := childBatch / 3
		if fast {
			stored = childBatch
		}
		killed, _ := s.loseAcks(rows, keys, stored)
		s.end(killed, os.Kill)
		begin := time.Now()
		s.foreign(others)
		pause(t.Context(), down-time.Since(begin))
		s.start(1)
		s.verifyOurs(others)
		s.looked()
		s.usedEngine(fast)
		const most = 100 << 20
		used := peak(s.alive[0])
		if used > most {
			t.Errorf("the relay that looked among %d messages took %d MiB, want at most %d", others, used>>20, most>>20)
		}
		t.Logf("%d messages of others, the relay that looked took %d MiB at most", others, used>>20)
	})
}

// Tens of thousands of rows of unknown outcome at once: half of them are stored, the
// others were claimed and never sent.
func TestChaosManyRowsOfUnknownOutcomeAtOnce(t *testing.T) {
	t.Parallel()
	rows := scaled(5000, 50_000, 50_000)
	s := newForgetful(t, false)
	s.child.Batch = rows / 2
	g := newGate(t, s.child.Broker)
	killed := s.startBehind(g)
	s.awaitShares(patience)
	s.insert("first", 1)
	s.awaitStored(1, patience)
	g.hold(fromBroker)
	s.insert("row", rows)
	s.awaitOnStream(1 + rows/2)
	s.await("the rest claimed", patience, func() (string, bool) {
		st := s.stats()
		return "", st.Claimed == int64(rows)
	})
	s.end(killed, os.Kill)
	pause(t.Context(), forgotten())
	s.child.Batch = 2000 // as relay run does, while there is a backlog
	begin := time.Now()
	s.start(1)
	s.verifyOurs(0)
	s.looked()
	t.Logf("%d rows of unknown outcome settled in %v, lease included", rows, time.Since(begin).Round(time.Millisecond))
}
