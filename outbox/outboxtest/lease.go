package outboxtest

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

func leaseScenarios() []scenario {
	return []scenario{
		{"the lease is exclusive, renewed by its owner and handed over by a release", migrated(leaseLife)},
		{"a lease counts the shards of who has it, and names him to others", migrated(leaseShares)},
		{"an expired lease is taken over under a higher epoch", migrated(leaseExpires)},
		{"of two contenders for an expired lease one gets what the other does not", migrated(leaseContenders)},
		{"a late renewal and a takeover never both succeed", migrated(leaseLateRenewal)},
		{"a standby with a shorter lease does not steal a live one", migrated(leaseOfAnotherLength)},
		{"after a takeover the old lease changes nothing", migrated(leaseFences)},
		{"a lease that ran out unnoticed still records", migrated(leaseExpiredStillRecords)},
	}
}

func leaseLife(t *testing.T, b *bench) {
	other := b.another()
	if st := b.stats(); len(st.Leases) != 0 {
		t.Errorf("leases of a new outbox = %+v, want none", st.Leases)
	}
	before := time.Now()
	l := b.leaseFor("a", time.Minute)
	if l.Owner != "a" || l.Holder == "" || l.Expires.Before(before.Add(50*time.Second)) || l.Expires.After(time.Now().Add(70*time.Second)) {
		t.Errorf("lease = %+v, want a's for a minute", l)
	}
	seen, err := other.Acquire(t.Context(), jetbox.Candidate{Owner: "b", Length: time.Minute})
	b.check(err)
	if seen.Held || seen.Owner != "a" || seen.Epoch != l.Epoch || seen.Holder != l.Holder {
		t.Errorf("Acquire by another = %+v, want to be told %+v, not held", seen, l)
	}
	renewed := b.leaseFor("a", long)
	if renewed.Epoch != l.Epoch || !renewed.Expires.After(l.Expires) {
		t.Errorf("renewed lease = %+v, want the epoch of %+v and a later end", renewed, l)
	}
	if of := holders(other.stats()); len(of) != 1 || of[0].Owner != "a" || of[0].Epoch != l.Epoch || of[0].Holder != l.Holder {
		t.Errorf("Stats say %+v, want %+v", of, renewed)
	}

	b.check(b.Release(t.Context(), renewed))
	got := other.lease("b") // at once, not after an hour
	if got.Epoch <= l.Epoch {
		t.Errorf("epoch after a handover = %d, want more than %d", got.Epoch, l.Epoch)
	}
	// A lease that is somebody else's now is not released.
	b.check(b.Release(t.Context(), renewed))
	seen, err = b.Acquire(t.Context(), jetbox.Candidate{Owner: "a", Length: time.Minute})
	b.check(err)
	if seen.Held || seen.Owner != "b" {
		t.Errorf("Acquire after a stale release = %+v, want b's", seen)
	}
}

// holders are the leases of those that hold something.
func holders(st outbox.Stats) []jetbox.Lease {
	return slices.DeleteFunc(slices.Clone(st.Leases), func(l jetbox.Lease) bool { return l.Shards == 0 })
}

// wantShare fails unless a lease that is held has some of the outbox's shards, and
// not more than others ought to have of them.
func (b *bench) wantShare(l jetbox.Lease) {
	b.t.Helper()
	if all := b.stats().Shards; l.Held && (l.Shards < 1 || l.Shards > all || l.Excess < 0 || l.Excess > l.Shards) {
		b.t.Errorf("lease %+v of an outbox with %d shards", l, all)
	}
}

func leaseShares(t *testing.T, b *bench) {
	all := b.stats().Shards
	if all < 1 {
		t.Fatalf("Stats say %d shards, want at least 1", all)
	}
	other := b.another()
	for _, unable := range []bool{false, true} { // alone, it is better than none
		l, err := b.Acquire(t.Context(), jetbox.Candidate{Owner: "a", Length: time.Minute, Unable: unable})
		b.check(err)
		if !l.Held || l.Shards != all || l.Excess != 0 {
			t.Errorf("lease of the only relay, unable %v, = %+v, want all of %d shards and to keep them", unable, l, all)
		}
	}
	l := b.leaseFor("a", time.Minute)
	seen, err := other.Acquire(t.Context(), jetbox.Candidate{Owner: "b", Length: time.Minute})
	b.check(err)
	if seen.Held || seen.Owner != "a" || seen.Holder != l.Holder || seen.Holder == "" {
		t.Errorf("Acquire while a has all = %+v, want a named", seen)
	}
	held := 0
	for _, of := range b.stats().Leases {
		held += of.Shards
		if of.Held || of.Holder == "" || !of.Expires.After(time.Now()) {
			t.Errorf("Stats have %+v, want it live, with a name, and held by nobody who asks", of)
		}
	}
	if held != all {
		t.Errorf("%d shards are held in Stats, want %d", held, all)
	}
	// A standby that stops knows no epoch of its own.
	b.check(other.Release(t.Context(), jetbox.Lease{Owner: "b"}))
	if st := b.stats(); len(st.Leases) != 1 || st.Leases[0].Owner != "a" {
		t.Errorf("after b took its leave the leases are %+v, want a's alone", st.Leases)
	}
	b.check(b.Release(t.Context(), l))
	if of := holders(b.stats()); len(of) != 0 {
		t.Errorf("after the release %+v hold something", of)
	}
	b.wantShare(other.lease("b"))
	b.check(other.Release(t.Context(), jetbox.Lease{Owner: "b"}))
	if st := b.stats(); len(st.Leases) != 0 {
		t.Errorf("after the release of whichever lease b has: %+v, want none", st.Leases)
	}
}

func leaseExpires(t *testing.T, b *bench) {
	other := b.another()
	const length = 150 * time.Millisecond
	asked := time.Now()
	l := b.leaseFor("a", length)
	got := other.takeOver("b", length)
	if took := time.Since(asked); took < length-time.Millisecond {
		t.Errorf("taken over after %v, the lease lasts %v", took, length)
	}
	if got.Epoch <= l.Epoch || got.Owner != "b" {
		t.Errorf("lease after the takeover = %+v, want b's with an epoch above %d", got, l.Epoch)
	}
	back := b.takeOver("a", length)
	if back.Epoch <= got.Epoch {
		t.Errorf("lease taken back = %+v, want an epoch above %d", back, got.Epoch)
	}
}

// race calls Acquire of both stores at once and fails unless no shard is held twice:
// of an outbox with one shard, exactly one holds it.
func race(t *testing.T, one, two *bench, owners [2]string) {
	t.Helper()
	start, leases := make(chan struct{}), make(chan jetbox.Lease, 2)
	for i, s := range []*bench{one, two} {
		go func() {
			<-start
			l, err := s.Acquire(t.Context(), jetbox.Candidate{Owner: owners[i], Length: long})
			if err != nil {
				t.Errorf("Acquire by %s: %v", owners[i], err)
			}
			leases <- l
		}()
	}
	close(start)
	all, shards := one.stats().Shards, 0
	var held []string
	for range 2 {
		if l := <-leases; l.Held {
			shards += max(1, l.Shards)
			held = append(held, fmt.Sprintf("%s epoch %d with %d", l.Owner, l.Epoch, l.Shards))
		}
	}
	if shards < 1 || shards > all {
		t.Fatalf("held by %v, want each of %d shards held once at most", held, all)
	}
}

const races = 50

func leaseContenders(t *testing.T, b *bench) {
	one, two := b.another(), b.another()
	for range races {
		b.releaseAll()
		b.leaseFor("old", time.Millisecond)
		pass()
		race(t, one, two, [2]string{"one", "two"})
	}
}

// releaseAll frees the lease whoever holds it.
func (b *bench) releaseAll() {
	b.t.Helper()
	for _, l := range b.stats().Leases {
		b.check(b.Release(b.t.Context(), l))
	}
}

// A relay that renews just after the end must not be told that it holds the
// lease when another has found it expired: both would send.
func leaseLateRenewal(t *testing.T, b *bench) {
	other := b.another()
	for range races {
		b.releaseAll()
		b.leaseFor("old", time.Millisecond)
		pass()
		race(t, b, other, [2]string{"old", "new"})
	}
}

func leaseOfAnotherLength(t *testing.T, b *bench) {
	other := b.another()
	b.leaseFor("a", time.Minute)
	for end := time.Now().Add(150 * time.Millisecond); time.Now().Before(end); pass() {
		l, err := other.Acquire(t.Context(), jetbox.Candidate{Owner: "b", Length: 20 * time.Millisecond})
		b.check(err)
		if l.Held {
			t.Fatalf("b holds %+v while a's lease lasts a minute", l)
		}
	}
}

// Catalog BR-10: a relay that slept through a takeover changes nothing.
func leaseFences(t *testing.T, b *bench) {
	ids := b.add(keyed("", 12)...)
	old := b.lease("a")
	b.claimIDs(old, 10, ids[:10]...)
	b.record(old, published(ids[0])...)
	before := pass()
	b.check(b.Release(t.Context(), old))

	other := b.another()
	now := other.lease("b")
	other.claimIDs(now, 10, ids[1:11]...)
	other.record(now, published(ids[1:4]...)...)
	other.record(now, retry(ids[4], long), dead(ids[5], false))
	dump, states := b.dump(), b.states()

	for _, l := range []jetbox.Lease{
		old,
		{Owner: "a", Epoch: now.Epoch, Held: true}, // the right epoch of the wrong owner
		{Owner: "b", Epoch: old.Epoch, Held: true},
		{Owner: "b", Epoch: now.Epoch + 1, Held: true},
		{},
	} {
		if rows, err := b.Claim(t.Context(), l, jetbox.Ask{Limit: 10}); !errors.Is(err, jetbox.ErrLeaseLost) || len(rows) > 0 {
			t.Errorf("Claim under %+v = %d rows, %v, want none, ErrLeaseLost", l, len(rows), err)
		}
		outcomes := append(published(ids[6:9]...), retry(ids[9], 0), dead(ids[10], true), retry(ids[4], 0))
		if err := b.Record(t.Context(), l, outcomes); !errors.Is(err, jetbox.ErrLeaseLost) {
			t.Errorf("Record under %+v = %v, want ErrLeaseLost", l, err)
		}
		outcomes = published(ids[1])
		outcomes[0].Remove = jetbox.Delete
		if err := b.Record(t.Context(), l, outcomes); !errors.Is(err, jetbox.ErrLeaseLost) {
			t.Errorf("Record with a removal under %+v = %v, want ErrLeaseLost", l, err)
		}
		for _, archive := range []bool{true, false} {
			if n, err := b.Prune(t.Context(), l, before, archive); !errors.Is(err, jetbox.ErrLeaseLost) || n != 0 {
				t.Errorf("Prune under %+v = %d, %v, want 0, ErrLeaseLost", l, n, err)
			}
		}
	}
	if after := b.dump(); after != dump {
		t.Errorf("the old lease changed the outbox from\n%s\nto\n%s", dump, after)
	}
	if after := b.states(); fmt.Sprint(after) != fmt.Sprint(states) {
		t.Errorf("the old lease changed the states from %v to %v", states, after)
	}
	other.claimIDs(now, 10, ids[6:12]...)
}

// While nobody has taken over, nobody else can have sent the rows: what the
// broker acknowledged is recorded, or it would be published again.
func leaseExpiredStillRecords(t *testing.T, b *bench) {
	ids := b.add(keyed("", 2)...)
	l := b.leaseFor("a", time.Millisecond)
	b.claimIDs(l, 10, ids...)
	pass()
	b.record(l, published(ids...)...)
	b.wantStates(jetbox.Published, ids...)
}
