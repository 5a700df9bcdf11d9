package jetbox_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// TestChaosSeveralRelays kills one of three relays again and again, while writers
// commit, hold open and roll back, and checks the invariants of sharedRun.check:
// BR-04, BR-08, BR-11.
func TestChaosSeveralRelays(t *testing.T) {
	r := rand.New(rand.NewPCG(sharedSeed(t), 1))
	lease, every, length, hold, backlog := time.Second, 400*time.Millisecond, 2500*time.Millisecond, 300*time.Millisecond, 2000
	if *chaosFor > 0 {
		lease, every, length, hold, backlog = 2500*time.Millisecond, time.Second, *chaosFor, 1500*time.Millisecond, 20_000
	}
	s := newSeveral(t, pgtest.URL(t), lease)
	s.start(3)
	s.awaitShares(patience)
	w := s.write(6, r.Uint64(), hold)
	kills := 0
	for begin := time.Now(); time.Since(begin) < length; kills++ {
		if kills%3 == 0 {
			w.backlog(backlog)
		}
		pause(t.Context(), every/2+time.Duration(r.Int64N(int64(every))))
		s.end(s.random(r), os.Kill)
		s.start(1)
	}
	flowing := s.acks.Load()
	w.end()
	drain := s.awaitDrained()
	s.verify(w)

	committed, rolledBack, held := w.counts()
	if flowing == 0 || committed < 200 || rolledBack < 50 || held < 2 {
		t.Fatalf("%d messages sent during the kills, %d rows committed, %d rolled back, %d transactions held open: the run shows nothing",
			flowing, committed, rolledBack, held)
	}
	const inHand = 2 * childBatch
	if d := s.duplicates.Load(); d > int64(kills*inHand) {
		t.Errorf("%d rows were sent twice, %d kills explain %d", d, kills, kills*inHand)
	}
	t.Logf("%d kills, %d rows committed, %d rolled back, %d transactions held open; %d PubAcks, %d of them for duplicates; %d before the last kill, drained in %v",
		kills, committed, rolledBack, held, s.acks.Load(), s.duplicates.Load(), flowing, drain.Round(time.Millisecond))
}

// takeoverLimit is how long a takeover may take. The others look whether a lease
// has ended when they renew their own, at a tenth of its length; the rest is for a
// busy machine.
func takeoverLimit(lease time.Duration) time.Duration {
	const least, busy = 100 * time.Millisecond, 800 * time.Millisecond
	return lease + max(lease/10, least) + busy
}

// TestChaosShardsOfADeadRelayMoveWithinTheLease kills one of three idle relays,
// every other time just after it has renewed its lease, which is the worst moment,
// and measures until rows of each of its shards are on the stream: BR-08.
func TestChaosShardsOfADeadRelayMoveWithinTheLease(t *testing.T) {
	r := rand.New(rand.NewPCG(sharedSeed(t), 1))
	lease := time.Second
	if *chaosFor > 0 {
		lease = 3 * time.Second
	}
	s := newSeveral(t, pgtest.URL(t), lease)
	s.start(3)
	c, err := s.js.OrderedConsumer(t.Context(), "EVENTS", jetstream.OrderedConsumerConfig{})
	s.must(err)
	stored := make(chan string, 1000)
	cc, err := c.Consume(func(m jetstream.Msg) { stored <- m.Headers().Get(jetbox.HeaderMsgID) })
	s.must(err)
	defer cc.Stop()

	begin := time.Now()
	for round := 0; round < 2 || time.Since(begin) < *chaosFor; round++ {
		s.awaitShares(patience)
		victim := s.random(r)
		shards := s.shardsOf(victim)
		if len(shards) == 0 {
			t.Fatalf("relay %d holds nothing: %+v", victim.Process.Pid, s.stats())
		}
		renewed := round%2 == 0
		if renewed {
			s.awaitRenewal(victim)
		} else {
			pause(t.Context(), time.Duration(r.Int64N(int64(lease/3))))
		}
		s.end(victim, os.Kill)
		killed := time.Now()
		waited := make(map[string]int16)
		for _, shard := range shards {
			id := fmt.Sprintf("%d.%d", round, shard)
			s.exec(`INSERT INTO outbox (event_id, subject, aggregate_type, aggregate_id, payload)
				SELECT $1, 'events.a', 'account', g::text, '' FROM generate_series(0, 100000) g
				WHERE outbox_shard_of('account', g::text, 0) = $2 LIMIT 1`, id, shard)
			waited[id] = shard
		}
		var first, last time.Duration
		for late := time.NewTimer(patience); len(waited) > 0; {
			select {
			case id := <-stored:
				delete(waited, id)
				last = time.Since(killed)
				if first == 0 {
					first = last
				}
			case <-late.C:
				t.Fatalf("rows not on the stream %v after the kill (by shard: %v): %+v", patience, waited, s.stats())
			}
		}
		t.Logf("lease %v, killed just after a renewal: %v: rows of its %d shards flow %v to %v after the kill",
			lease, renewed, len(shards), first.Round(time.Millisecond), last.Round(time.Millisecond))
		if limit := takeoverLimit(lease); last > limit {
			t.Errorf("taken over %v after the kill, want at most %v with a lease of %v", last, limit, lease)
		}
		s.start(1)
	}
}

// awaitRenewal returns just after a relay has renewed its lease.
func (s *several) awaitRenewal(cmd *exec.Cmd) {
	s.t.Helper()
	expires := func() time.Time {
		for _, l := range s.stats().Leases {
			if isOf(l, cmd) {
				return l.Expires
			}
		}
		return time.Time{}
	}
	before := expires()
	s.await("a renewal", patience, func() (string, bool) {
		e := expires()
		return e.String(), !e.Equal(before)
	})
}
