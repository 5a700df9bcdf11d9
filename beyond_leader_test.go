//go:build unix

package jetbox_test

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// A stream of three nodes changes its leader again and again while a relay looks on it
// for what a relay that was killed may have sent, and until everything is settled.
func TestChaosLeaderChangesDuringTheLook(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts a cluster")
	}
	engines(t, func(t *testing.T, fast bool) {
		if *chaosFor == 0 && fast {
			t.Skip("one engine is enough for a short run: make chaos")
		}
		nodes := embedded.RunTestCluster(t, 3)
		cfg := forgetful(fast)
		cfg.Replicas = 3
		s := newSeveralAt(t, pgtest.URL(t), 500*time.Millisecond, cfg, nodes.URL())
		stored := childBatch / 3
		if fast {
			stored = childBatch
		}
		killed, _ := s.loseAcks(1800, 7, stored)
		s.end(killed, os.Kill)
		others := scaled(5000, 100_000, 500_000)
		s.foreign(others)
		pause(t.Context(), forgotten())

		ctx, stop := context.WithCancel(t.Context())
		var changer sync.WaitGroup
		changes := 0
		changer.Go(func() {
			for ctx.Err() == nil {
				if _, err := s.nc.RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN.EVENTS", nil); err == nil {
					changes++
				}
				pause(ctx, 300*time.Millisecond)
			}
		})
		s.start(1)
		s.awaitDrained()
		stop()
		changer.Wait()
		s.must(nodes.WaitReady(t.Context()))
		s.await("the last leader", patience, func() (string, bool) {
			_, err := s.js.Stream(t.Context(), "EVENTS")
			return fmt.Sprint(err), err == nil
		})
		s.verifyOurs(others)
		s.looked()
		if changes == 0 {
			t.Error("the leader did not change: the test shows nothing")
		}
		t.Logf("%d changes of the leader", changes)
	})
}
