//go:build unix

package jetbox_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// TestChaosRelaysJoinAndLeave goes from three relays to four and to two under
// load, and then stops one of the two for longer than its lease. After each change
// the shards are shared fairly again, none is without an owner for longer than
// about a lease, and in the end the invariants of sharedRun.check hold. The relay
// that was stopped changes nothing that was recorded meanwhile, and joins again:
// BR-10.
func TestChaosRelaysJoinAndLeave(t *testing.T) {
	r := rand.New(rand.NewPCG(sharedSeed(t), 1))
	lease := time.Second
	if *chaosFor > 0 {
		lease = 3 * time.Second
	}
	settle := 2*lease + 3*time.Second
	s := newSeveral(t, pgtest.URL(t), lease)
	s.start(3)
	s.awaitShares(patience)
	w := s.write(4, r.Uint64(), 200*time.Millisecond)
	w.doomed(20)
	for begin, round := time.Now(), 0; round == 0 || time.Since(begin) < *chaosFor; round++ {
		w.backlog(2000)
		vacancy, duplicates := s.watchVacancies(), s.duplicates.Load()
		s.start(1)
		joined := s.awaitShares(settle)
		begin := time.Now()
		s.end(s.random(r), syscall.SIGTERM)
		s.end(s.random(r), syscall.SIGTERM)
		stopped := time.Since(begin)
		left := s.awaitShares(settle)
		// Who has to give something back settles it first, so nothing was sent by two.
		if d := s.duplicates.Load() - duplicates; d != 0 {
			t.Errorf("%d rows were sent twice while relays came and went", d)
		}
		paused, back := s.pauseOne(r, w, settle)
		longest := vacancy()
		t.Logf("lease %v: the fourth relay had its part after %v, two stopped in %v and their shards were shared after %v; "+
			"a stopped process was taken over after %v and had its part again %v after it went on; the longest that a shard was free: %v",
			lease, ms(joined), ms(stopped), ms(left), ms(paused), ms(back), ms(longest))
		if longest > lease+time.Second {
			t.Errorf("a shard had no owner for %v, with a lease of %v", longest, lease)
		}
		s.start(1) // three again
		s.awaitShares(settle)
	}
	w.end()
	s.verify(w)
	committed, rolledBack, held := w.counts()
	t.Logf("%d rows committed, %d rolled back, %d transactions held open; %d PubAcks, %d of them for duplicates",
		committed, rolledBack, held, s.acks.Load(), s.duplicates.Load())
}

func ms(d time.Duration) time.Duration { return d.Round(time.Millisecond) }

// pauseOne stops the process of one of two relays for longer than its lease, in the
// middle of its work, and returns how long it took until the other had all
// shards, and until the first had its part again.
func (s *several) pauseOne(r *rand.Rand, w *sharedWriters, settle time.Duration) (takenOver, back time.Duration) {
	s.t.Helper()
	paused := s.random(r)
	acks := s.acks.Load()
	w.backlog(2000)
	for begin := time.Now(); s.acks.Load() == acks && time.Since(begin) < settle; {
		pause(s.t.Context(), time.Millisecond)
	}
	s.must(paused.Process.Signal(syscall.SIGSTOP))
	begin := time.Now()
	takenOver = s.await("the other relay has all shards", settle, func() (string, bool) {
		st := s.stats()
		return fmt.Sprintf("%+v", st), len(st.Leases) == 1 && !isOf(st.Leases[0], paused) && st.Leases[0].Shards == st.Shards
	})
	pause(s.t.Context(), max(time.Until(begin.Add(s.child.Lease*3/2)), s.child.Lease/4))
	before := s.dump(settled)
	if len(before) == 0 {
		s.t.Fatal("nothing is recorded, the comparison shows nothing")
	}
	s.must(paused.Process.Signal(syscall.SIGCONT))
	back = s.awaitShares(settle)
	s.wantUnchanged(before, s.dump(settled))
	return takenOver, back
}

// watchVacancies looks at the shards all the time, until the function returned is
// called, which says how long one had no owner at most.
func (s *several) watchVacancies() (longest func() time.Duration) {
	ctx, cancel := context.WithCancel(s.t.Context())
	var (
		wg   sync.WaitGroup
		most time.Duration
	)
	wg.Go(func() {
		since := make(map[int16]time.Time)
		for ctx.Err() == nil {
			rows, err := s.pool.Query(ctx, `SELECT shard, owner IS NULL FROM outbox_shard`)
			if err == nil {
				for rows.Next() {
					var (
						shard int16
						free  bool
					)
					if err = rows.Scan(&shard, &free); err != nil {
						break
					}
					if _, was := since[shard]; !was && free {
						since[shard] = time.Now()
					}
					if free {
						most = max(most, time.Since(since[shard]))
					} else {
						delete(since, shard)
					}
				}
				rows.Close()
				err = rows.Err()
			}
			if err != nil && ctx.Err() == nil {
				s.t.Errorf("look at the shards: %v", err)
				return
			}
			pause(ctx, 20*time.Millisecond)
		}
	})
	s.t.Cleanup(func() { cancel(); wg.Wait() })
	return func() time.Duration {
		cancel()
		wg.Wait()
		return most
	}
}
