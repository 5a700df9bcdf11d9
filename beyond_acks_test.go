//go:build unix

package jetbox_test

import (
	"testing"
	"time"
)

// The link is cut so that PubAcks are lost for longer than the window, and the relay goes
// on. In a bubble, with SQLite: TestPubAcksLostForLongerThanTheWindowLeaveOneCopy.
func TestChaosPubAcksLostBeyondTheWindow(t *testing.T) {
	if *chaosFor == 0 {
		t.Skip("takes as long as the link is cut: make chaos")
	}
	t.Parallel()
	engines(t, func(t *testing.T, fast bool) {
		s := newForgetful(t, fast)
		const rows, keys = 1800, 7
		stored := childBatch / 3
		if fast {
			stored = childBatch
		}
		_, g := s.loseAcks(rows, keys, stored)
		const others = 5000
		s.foreign(others)
		pause(t.Context(), 10*time.Second)
		if st := s.stats(); st.Pending != rows {
			t.Fatalf("without PubAcks: %+v", st)
		}
		g.cut()
		s.verifyOurs(others)
		s.looked()
		s.usedEngine(fast)
	})
}
