package postgres_test

import (
	"errors"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
)

// peer is one of several relays on an outbox.
type peer struct {
	*postgres.Store
	t     *testing.T
	owner string
	lease jetbox.Lease
}

func newPeers(t *testing.T, shards int, owners ...string) (peers []*peer) {
	t.Helper()
	cfg := postgres.Config{URL: pgtest.URL(t), Shards: shards}
	migrated(t, cfg)
	for _, owner := range owners {
		peers = append(peers, &peer{Store: another(t, cfg), t: t, owner: owner})
	}
	return peers
}

// turn is what a relay does in turns: it renews, and yields what it has too many.
func (p *peer) turn(length time.Duration, unable bool) {
	p.t.Helper()
	var err error
	p.lease, err = p.Acquire(p.t.Context(), jetbox.Candidate{Owner: p.owner, Length: length, Unable: unable})
	check(p.t, err)
	if p.lease.Held && p.lease.Excess > 0 {
		check(p.t, p.Yield(p.t.Context(), p.lease))
	}
}

// shards is what the database says that each relay has.
func shards(t *testing.T, s *postgres.Store) map[string]int {
	t.Helper()
	st, err := s.Stats(t.Context())
	check(t, err)
	got := make(map[string]int)
	for _, l := range st.Leases {
		got[l.Owner] = l.Shards
	}
	return got
}

func wantShards(t *testing.T, s *postgres.Store, want map[string]int) {
	t.Helper()
	got := shards(t, s)
	for owner, n := range want {
		if got[owner] != n {
			t.Errorf("shards = %v, want %v", got, want)
			return
		}
	}
}

func TestRelaysShareTheShardsAsTheyComeAndGo(t *testing.T) {
	t.Parallel()
	peers := newPeers(t, 16, "a", "b", "c")
	a, b, c := peers[0], peers[1], peers[2]
	round := func(peers ...*peer) {
		for range 3 {
			for _, p := range peers {
				p.turn(time.Minute, false)
			}
		}
	}
	a.turn(time.Minute, false)
	wantShards(t, a.Store, map[string]int{"a": 16})
	round(a, b)
	wantShards(t, a.Store, map[string]int{"a": 8, "b": 8})
	round(a, b, c)
	wantShards(t, a.Store, map[string]int{"a": 6, "b": 5, "c": 5})

	// One that cannot publish hands everything over, as long as others can.
	for range 3 {
		a.turn(time.Minute, false)
		b.turn(time.Minute, true)
		c.turn(time.Minute, false)
	}
	wantShards(t, a.Store, map[string]int{"a": 8, "b": 0, "c": 8})
	for range 3 {
		for _, p := range peers {
			p.turn(time.Minute, true)
		}
	}
	wantShards(t, a.Store, map[string]int{"a": 6, "b": 5, "c": 5})

	check(t, b.Release(t.Context(), b.lease))
	check(t, c.Release(t.Context(), jetbox.Lease{Owner: "c"})) // whatever its epoch
	round(a)
	wantShards(t, a.Store, map[string]int{"a": 16, "b": 0, "c": 0})
}

// A key has one relay at any time, and every key has one.
func TestRelaysThatShareClaimEachRowOnce(t *testing.T) {
	t.Parallel()
	peers := newPeers(t, 16, "a", "b", "c")
	for range 3 {
		for _, p := range peers {
			p.turn(time.Minute, false)
		}
	}
	add(t, peers[0].Store, 20, append(keys(40), "")...)
	seen, owner := make(map[int64]string), make(map[string]string)
	for range 3 {
		for _, p := range peers {
			rows, err := p.Claim(t.Context(), p.lease, jetbox.Ask{Limit: 1000})
			check(t, err)
			if len(rows) == 0 {
				t.Errorf("%s gets nothing of 41 keys", p.owner)
			}
			last := make(map[string]int64)
			for _, r := range rows {
				key := r.Event.OrderingKey()
				if before, ok := seen[r.Pos]; ok && before != p.owner {
					t.Errorf("row %d was claimed by %s and %s", r.Pos, before, p.owner)
				}
				if key != "" && owner[key] != "" && owner[key] != p.owner {
					t.Errorf("key %s is with %s and %s", key, owner[key], p.owner)
				}
				if r.Pos < last[key] {
					t.Errorf("row %d of key %q comes after %d", r.Pos, key, last[key])
				}
				seen[r.Pos], owner[key], last[key] = p.owner, p.owner, r.Pos
			}
		}
		delete(owner, "")
	}
	if len(seen) != 20*41 {
		t.Errorf("%d rows were claimed, want %d", len(seen), 20*41)
	}
}

// Catalog BR-10. What a dead relay had claimed is of unknown outcome, for whoever
// takes its shards over, and it changes nothing when it wakes.
func TestDeadRelaysShardsMoveWithWhatItHadClaimed(t *testing.T) {
	t.Parallel()
	peers := newPeers(t, 16, "a", "b")
	a, b := peers[0], peers[1]
	const length = 300 * time.Millisecond
	for range 3 {
		a.turn(length, false)
		b.turn(length, false)
	}
	add(t, a.Store, 3, keys(30)...)
	rows, err := a.Claim(t.Context(), a.lease, jetbox.Ask{Limit: 1000})
	check(t, err)
	began := time.Now()
	for b.lease.Shards < 16 {
		b.turn(length, false)
		if time.Since(began) > 10*time.Second {
			t.Fatalf("b has %+v long after a's lease", b.lease)
		}
	}
	if n := value[int64](t, b.Store, `SELECT count(*) FROM outbox_status WHERE status = 'PROCESSING'`); n != int64(len(rows)) {
		t.Errorf("%d rows are processing, want the %d that a had claimed", n, len(rows))
	}
	if err := a.Record(t.Context(), a.lease, published(rows...)); !errors.Is(err, jetbox.ErrLeaseLost) {
		t.Errorf("Record by the dead relay = %v, want ErrLeaseLost", err)
	}
	if err := a.Yield(t.Context(), a.lease); err != nil && !errors.Is(err, jetbox.ErrLeaseLost) {
		t.Errorf("Yield by the dead relay = %v", err)
	}
	if _, err := a.Claim(t.Context(), a.lease, jetbox.Ask{Limit: 10}); !errors.Is(err, jetbox.ErrLeaseLost) {
		t.Errorf("Claim by the dead relay = %v, want ErrLeaseLost", err)
	}
	if got := drain(t, b.Store, b.lease, 1000); len(got) != 90 {
		t.Errorf("b drained %d rows, want 90", len(got))
	}
	a.turn(length, false)
	wantShards(t, b.Store, map[string]int{"a": 0})
}

// A relay that announces itself and dies before it takes its share must not keep
// shards from those that work.
func TestShareOfARelayThatDiedJustAfterJoiningIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	peers := newPeers(t, 16, "a", "b")
	a, b := peers[0], peers[1]
	const length = 3 * time.Second
	a.turn(length, false)
	b.turn(length, false) // and never again
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		a.turn(length, false)
		if took := time.Since(began); a.lease.Shards == 16 && took > length/2 {
			break
		} else if took > length {
			t.Fatalf("after %v a has %d shards, and b none", took, a.lease.Shards)
		}
	}
}

// An operator may remove a relay's row by hand: nothing stays with it.
func TestShardsOfAnOwnerWithoutALeaseAreFree(t *testing.T) {
	t.Parallel()
	peers := newPeers(t, 16, "a", "b")
	a, b := peers[0], peers[1]
	a.turn(time.Hour, false)
	exec(t, a.Store, `DELETE FROM outbox_relay`)
	b.turn(time.Hour, false)
	wantShards(t, a.Store, map[string]int{"b": 16})
	if _, err := a.Claim(t.Context(), a.lease, jetbox.Ask{Limit: 10}); err != nil {
		t.Errorf("Claim with nothing to claim: %v", err)
	}
	add(t, b.Store, 1, "k")
	if _, err := a.Claim(t.Context(), a.lease, jetbox.Ask{Limit: 10}); !errors.Is(err, jetbox.ErrLeaseLost) {
		t.Errorf("Claim without a lease = %v, want ErrLeaseLost", err)
	}
}
