package sqlite

import (
	"errors"
	"io/fs"
	"os"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// A takeover that has read "expired" and then finds the lease renewed under the
// same epoch must not succeed: its owner was told that it may send.
func TestTakeoverFailsWhenTheOwnerRenewsBetweenLookAndUpdate(t *testing.T) {
	t.Parallel()
	owner := newStore(t)
	other, err := Open(t.Context(), Config{Path: owner.file(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	first := acquire(t, owner, "owner", time.Millisecond)
	time.Sleep(3 * time.Millisecond)

	// The other one looks through its pool for writers and updates on the
	// relay's only connection: who has that stops it between the two.
	gate, err := other.relay.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	took := make(chan jetbox.Lease)
	go func() {
		l, err := other.Acquire(t.Context(), jetbox.Candidate{Owner: "other", Length: time.Hour})
		if err != nil {
			t.Error(err)
		}
		took <- l
	}()
	for other.relay.Stats().WaitCount == 0 {
		time.Sleep(time.Millisecond)
	}
	renewed := acquire(t, owner, "owner", time.Hour)
	if err := gate.Close(); err != nil {
		t.Fatal(err)
	}
	if l := <-took; l.Held || l.Owner != "owner" {
		t.Errorf("the other got %+v although the owner holds %+v", l, renewed)
	}
	if renewed.Epoch != first.Epoch {
		t.Errorf("renewed epoch = %d, want %d", renewed.Epoch, first.Epoch)
	}
}

func acquire(t *testing.T, s *Store, owner string, length time.Duration) jetbox.Lease {
	t.Helper()
	l, err := s.Acquire(t.Context(), jetbox.Candidate{Owner: owner, Length: length})
	if err != nil || !l.Held {
		t.Fatalf("Acquire by %s = %+v, %v, want it held", owner, l, err)
	}
	return l
}

// A clock that was set back by hours must not freeze the outbox, nor make a live
// lease look dead.
func TestClockSetBackNeitherFreezesNorStealsTheLease(t *testing.T) {
	t.Parallel()
	path := t.TempDir() + "/outbox.db"
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		var stores [2]*Store
		for i := range stores {
			s, err := Open(ctx, Config{Path: path})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if err := s.Migrate(ctx); err != nil {
				t.Fatal(err)
			}
			stores[i] = s
		}
		holder, standby := stores[0], stores[1]
		const length = 10 * time.Second
		var l jetbox.Lease
		// The holder's lease, as it looks after the clock went back by 3 hours.
		renew := func() {
			l = acquire(t, holder, "holder", length)
			if _, err := holder.db.ExecContext(ctx, `UPDATE outbox_lease SET expires_at = expires_at + 3 * 3600000`); err != nil {
				t.Fatal(err)
			}
		}
		look := func() jetbox.Lease {
			got, err := standby.Acquire(ctx, jetbox.Candidate{Owner: "standby", Length: length})
			if err != nil {
				t.Fatal(err)
			}
			return got
		}
		renew()
		for range 20 { // alive, and never stolen
			time.Sleep(length / 3)
			if got := look(); got.Held {
				t.Fatalf("the standby stole a live lease: %+v", got)
			}
			renew()
		}
		began := time.Now() // dead from here
		for !look().Held {
			time.Sleep(time.Second)
			if time.Since(began) > 2*length {
				t.Fatalf("the lease of a dead holder is frozen %v later", time.Since(began))
			}
		}
		if waited := time.Since(began); waited <= length {
			t.Errorf("taken over after %v of silence, want more than %v", waited, length)
		}
		if err := holder.Record(ctx, l, []jetbox.Outcome{{Pos: 1, State: jetbox.Published}}); err == nil {
			t.Error("Record under the old lease succeeded")
		}
	})
}

// A file that was moved away, and restored from a copy, was relayed from no more,
// by a relay that went on with the old one and was ready.
func TestLeaseOfAFileThatWasReplacedIsRefused(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("an open file cannot be moved there")
	}
	s := newStore(t)
	if _, err := s.Acquire(t.Context(), jetbox.Candidate{Owner: "a", Length: time.Minute}); err != nil {
		t.Fatal(err)
	}
	path := s.file(t)
	if err := os.Rename(path, path+".old"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Acquire(t.Context(), jetbox.Candidate{Owner: "a", Length: time.Minute}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Acquire with the file moved away = %v, want %v", err, fs.ErrNotExist)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Acquire(t.Context(), jetbox.Candidate{Owner: "a", Length: time.Minute}); err == nil {
		t.Error("Acquire with another file in its place: no error")
	}
	if err := os.Rename(path+".old", path); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Acquire(t.Context(), jetbox.Candidate{Owner: "a", Length: time.Minute}); err != nil {
		t.Errorf("Acquire with the file back in its place: %v", err)
	}
}
