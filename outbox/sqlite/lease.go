package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// shards is how many an outbox in a file has.
const shards = 1

// storedLease is the lease as the file has it.
type storedLease struct {
	jetbox.Lease
	length time.Duration // as its owner asked for it
}

// observedLease is what a standby remembers of somebody else's lease: when it
// saw it change last, by its own monotonic clock.
type observedLease struct {
	epoch   int64
	expires int64
	since   time.Time
}

// Acquire takes the lease for a candidate when it is free, expired or the
// candidate's own, and then makes it last as long as asked for. Otherwise it
// changes nothing and returns who has it, with Held false. A lease that this
// process has watched for its whole length, and for the one asked for, without
// seeing a renewal is expired too, whatever its time says: a clock that was set
// back must not freeze the outbox.
//
// That a candidate is unable to publish makes no difference. All relays of a file
// are on one host and would meet the same broker, so the outbox has one shard,
// and its holder keeps it.
func (s *Store) Acquire(ctx context.Context, c jetbox.Candidate) (jetbox.Lease, error) {
	if c.Owner == "" {
		return jetbox.Lease{}, fmt.Errorf("acquire lease of outbox %q: the owner has no name", s.table)
	}
	lease, err := s.acquire(ctx, c.Owner, c.Length)
	if err != nil {
		return jetbox.Lease{}, fmt.Errorf("acquire lease of outbox %q: %w", s.table, err)
	}
	return lease, nil
}

func (s *Store) acquire(ctx context.Context, owner string, length time.Duration) (jetbox.Lease, error) {
	if err := s.replaced(); err != nil {
		return jetbox.Lease{}, err
	}
	var lease jetbox.Lease
	err := retryBusy(ctx, func(ctx context.Context) error {
		now := time.Now()
		current, err := s.lease(ctx, s.db)
		if err != nil {
			return err
		}
		mine := current.Owner == owner
		if current.Owner != "" && !mine && now.Before(current.Expires) && !s.silent(current, now, length) {
			lease = current.Lease
			return nil
		}
		next := jetbox.Lease{
			Owner: owner, Holder: holder(), Epoch: current.Epoch, Held: true, Shards: shards, Expires: now.Add(length),
		}
		if !mine {
			next.Epoch++
		}
		// What was read above is the condition: of two relays that both find
		// the lease expired, one changes the row and the other none. The end
		// belongs to it: an owner that has renewed meanwhile, under the same
		// epoch, was told that it may send.
		res, err := s.relay.ExecContext(ctx, s.sql(`UPDATE "{t}_lease"
			SET owner = ?, holder = ?, epoch = ?, expires_at = ?, length = ?
			WHERE shard = 0 AND epoch = ? AND coalesce(owner, '') = ? AND expires_at = ?`),
			owner, next.Holder, next.Epoch, next.Expires.UnixMilli(), length.Milliseconds(),
			current.Epoch, current.Owner, current.Expires.UnixMilli())
		if err != nil {
			return err
		}
		n, err := res.RowsAffected()
		if err != nil {
			return err
		}
		if n == 1 {
			lease = next
			return nil
		}
		current, err = s.lease(ctx, s.db)
		lease = current.Lease
		lease.Held = lease.Owner == owner
		return err
	})
	return lease, err
}

// silent reports whether the lease has not been renewed for as long as it lasts,
// nor for length, as far as this process has seen.
func (s *Store) silent(l storedLease, now time.Time, length time.Duration) (silent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	expires := l.Expires.UnixMilli()
	if s.seen.epoch != l.Epoch || s.seen.expires != expires {
		s.seen = observedLease{epoch: l.Epoch, expires: expires, since: now}
	}
	return now.Sub(s.seen.since) > max(length, l.length)
}

// Release gives the lease back, so that another relay starts at once. A lease
// that was lost already is no error. An epoch of 0 stands for whichever the owner
// has.
func (s *Store) Release(ctx context.Context, l jetbox.Lease) error {
	err := retryBusy(ctx, func(ctx context.Context) error {
		_, err := s.relay.ExecContext(ctx, s.sql(`UPDATE "{t}_lease" SET owner = NULL, holder = NULL, expires_at = 0
			WHERE shard = 0 AND owner = ?1 AND (epoch = ?2 OR ?2 = 0)`), l.Owner, l.Epoch)
		return noTables(err)
	})
	if err != nil {
		return fmt.Errorf("release lease of outbox %q: %w", s.table, err)
	}
	return nil
}

func (s *Store) lease(ctx context.Context, q queryer) (storedLease, error) {
	var (
		owner, holder          sql.NullString
		epoch, expires, length int64
	)
	err := q.QueryRowContext(ctx, s.sql(`SELECT owner, holder, epoch, expires_at, length FROM "{t}_lease" WHERE shard = 0`)).
		Scan(&owner, &holder, &epoch, &expires, &length)
	if err != nil {
		return storedLease{}, noTables(err)
	}
	l := jetbox.Lease{Owner: owner.String, Holder: holder.String, Epoch: epoch, Expires: time.UnixMilli(expires)}
	if owner.Valid {
		l.Shards = shards
	}
	return storedLease{l, time.Duration(length) * time.Millisecond}, nil
}

// fenced runs f in a transaction of the relay whose first statement is an update
// of the lease row: it takes the write lock and proves that the lease is still
// the caller's. It does not ask whether the lease has expired: while nobody has
// taken it over, nobody else can have sent the rows.
func (s *Store) fenced(ctx context.Context, l jetbox.Lease, f func(tx *sql.Tx) error) error {
	if err := s.leaveRoom(ctx); err != nil {
		return err
	}
	defer s.wrote()
	return inTx(ctx, s.relay, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, s.sql(`UPDATE "{t}_lease" SET epoch = epoch
			WHERE shard = 0 AND owner = ? AND epoch = ?`), l.Owner, l.Epoch)
		if err != nil {
			return noTables(err)
		}
		n, err := res.RowsAffected()
		if err != nil {
			return err
		}
		if n == 0 {
			return jetbox.ErrLeaseLost
		}
		return f(tx)
	})
}
