package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seed-5e04d8fb/jetbox"
)

// lease is one relay's row, with what belongs to it.
type lease struct {
	jetbox.Lease
	member
	length time.Duration
}

// observed is what this process remembers of another relay's lease: when it saw
// it change last, by its own monotonic clock.
type observed struct {
	expires time.Time
	length  time.Duration
	since   time.Time
}

// roll is the state of all leases.
type roll struct {
	leases []lease // in the order of their epochs
	free   []int16 // shards that nobody has
	all    int
}

func (r *roll) of(owner string) *lease {
	for i := range r.leases {
		if r.leases[i].Owner == owner {
			return &r.leases[i]
		}
	}
	return nil
}

// Acquire announces a relay, or renews what it has, for the length it asks for.
// Relays whose lease has ended lose their shards; the caller takes of the free
// ones up to its share, and is told how many it has and how many of those are
// another's due. While it has none, Held is false and the lease returned is that
// of a relay that has some.
//
// The database's clock decides. Only a lease that this process has watched for
// its whole length, and for the one asked for, without seeing a renewal has ended
// whatever the clock says: one that was set back must freeze nothing.
func (s *Store) Acquire(ctx context.Context, c jetbox.Candidate) (jetbox.Lease, error) {
	if c.Owner == "" {
		return jetbox.Lease{}, fmt.Errorf("acquire lease of outbox %q: the owner has no name", s.cfg.Table)
	}
	l, err := s.acquire(ctx, c)
	if err != nil {
		return jetbox.Lease{}, fmt.Errorf("acquire lease of outbox %q: %w", s.cfg.Table, err)
	}
	return l, nil
}

func (s *Store) acquire(ctx context.Context, c jetbox.Candidate) (jetbox.Lease, error) {
	r, err := s.announce(ctx, c)
	if err != nil {
		return jetbox.Lease{}, err
	}
	s.observe(r)
	own := r.of(c.Owner)
	if own == nil {
		return jetbox.Lease{}, errors.New("the lease was taken away while it was renewed")
	}
	members := make([]member, len(r.leases))
	for i, l := range r.leases {
		members[i] = l.member
	}
	due := share(members, c.Owner, r.all)
	if want := min(due-len(own.shards), len(r.free)); want > 0 {
		if err := s.take(ctx, own, r.free[:want]); err != nil {
			return jetbox.Lease{}, err
		}
	}
	h := hand{owner: own.Owner, epoch: own.Epoch, shards: own.shards, all: r.all, share: due}
	s.mu.Lock()
	if s.hand.epoch != h.epoch {
		s.wake.idle = false // a row of the relay's that is new says nothing of the kind
	}
	s.hand = h
	s.mu.Unlock()
	l := *own
	if len(h.shards) == 0 {
		l = r.busiest()
		l.Held = false
		return l.Lease, nil
	}
	l.Held, l.Shards, l.Excess, l.Peers = true, len(h.shards), h.excess(), len(r.leases)-1
	return l.Lease, nil
}

// busiest returns the lease with the most shards, or none.
func (r *roll) busiest() (most lease) {
	for _, l := range r.leases {
		if len(l.shards) > len(most.shards) {
			most = l
		}
	}
	most.Shards = len(most.shards)
	return most
}

const (
	// expelSQL removes the leases that have ended and frees their shards, and those
	// of owners who have no lease at all. It goes by the owners that it has found,
	// not by the absence of one: a shard that somebody takes meanwhile is his.
	expelSQL = `WITH gone AS (
			DELETE FROM {relay} WHERE owner <> $1 AND (expires_at < clock_timestamp()
				OR EXISTS (SELECT FROM unnest($2::text[], $3::timestamptz[]) AS s (owner, expires_at)
					WHERE s.owner = {relay}.owner AND s.expires_at = {relay}.expires_at))
			RETURNING owner),
		orphans AS MATERIALIZED (
			SELECT s.owner FROM {shard} s WHERE s.owner IS NOT NULL AND NOT EXISTS (SELECT FROM {relay} r WHERE r.owner = s.owner))
		UPDATE {shard} SET owner = NULL WHERE owner IN (SELECT owner FROM gone UNION ALL SELECT owner FROM orphans)`

	announceSQL = `INSERT INTO {relay} AS r (owner, holder, epoch, expires_at, length_ms, unable)
		SELECT $1, $2, 1 + greatest((SELECT max(epoch) FROM {shard}), (SELECT max(epoch) FROM {relay})),
			clock_timestamp() + $3::bigint * interval '1 millisecond', $3::bigint, $4
		ON CONFLICT (owner) DO UPDATE SET expires_at = excluded.expires_at, length_ms = excluded.length_ms, unable = excluded.unable`

	// rollSQL: a relay renews within a third of its lease; one that has not is
	// likely dead, and is no longer waited for.
	rollSQL = `SELECT r.owner, r.holder, r.epoch, r.expires_at, r.length_ms,
			NOT r.unable AND clock_timestamp() < r.expires_at - r.length_ms * 2 / 3 * interval '1 millisecond' + interval '1 second',
			ARRAY(SELECT s.shard FROM {shard} s WHERE s.owner = r.owner ORDER BY s.shard)
		FROM {relay} r WHERE r.owner = $1 OR r.expires_at >= clock_timestamp() ORDER BY r.epoch, r.owner`

	shardsSQL = `SELECT count(*), ARRAY(SELECT shard FROM {shard} WHERE owner IS NULL ORDER BY shard) FROM {shard}`

	// fenceSQL proves that a lease is still its owner's, and keeps anybody from
	// taking it away until the end of the transaction. It does not ask whether
	// it has ended: while nobody has taken over, nobody else can have sent the rows.
	fenceSQL = `SELECT FROM {relay} WHERE owner = $1 AND epoch = $2 FOR KEY SHARE`

	// fenced is the condition that the other statements of the transaction are
	// under: they are sent before the fence has answered.
	fenced = `EXISTS (SELECT FROM {relay} WHERE owner = $1 AND epoch = $2)`

	takeSQL = `UPDATE {shard} SET owner = $1, epoch = $2 WHERE owner IS NULL AND shard = ANY($3::smallint[]) AND ` + fenced + `
		RETURNING shard`
)

func (s *Store) announce(ctx context.Context, c jetbox.Candidate) (*roll, error) {
	owners, expires := s.silent(c)
	r := new(roll)
	b := newBatch()
	b.Queue(s.sql(expelSQL), c.Owner, owners, expires)
	b.Queue(s.sql(announceSQL), c.Owner, holder(), c.Length.Milliseconds(), c.Unable)
	s.queueRoll(b, r, c.Owner)
	return r, s.send(ctx, b)
}

// queueRoll adds the queries that read the state of all leases that live, and of
// owner's whatever its end.
func (s *Store) queueRoll(b *batch, r *roll, owner string) {
	b.Queue(s.sql(rollSQL), owner).Query(func(rows pgx.Rows) error {
		var l lease
		var ms int64
		_, err := pgx.ForEachRow(rows, []any{&l.Owner, &l.Holder, &l.Epoch, &l.Expires, &ms, &l.able, &l.shards}, func() error {
			l.length, l.owner = time.Duration(ms)*time.Millisecond, l.Owner
			l.shards = slices.Clone(l.shards)
			r.leases = append(r.leases, l)
			return nil
		})
		return err
	})
	b.Queue(s.sql(shardsSQL)).QueryRow(func(row pgx.Row) error { return row.Scan(&r.all, &r.free) })
}

// take adds to a lease those of the shards that nobody else has taken meanwhile.
func (s *Store) take(ctx context.Context, l *lease, shards []int16) error {
	b := newBatch()
	s.fence(b, l.Lease)
	var taken []int16
	b.Queue(s.sql(takeSQL), l.Owner, l.Epoch, shards).Query(func(rows pgx.Rows) (err error) {
		taken, err = pgx.CollectRows(rows, pgx.RowTo[int16])
		return err
	})
	if err := s.send(ctx, b); err != nil {
		return err
	}
	l.shards = append(l.shards, taken...)
	slices.Sort(l.shards)
	return nil
}

// fence adds the statement that proves the lease. Those after it must be under
// the condition fenced.
func (s *Store) fence(b *batch, l jetbox.Lease) {
	b.Queue(s.sql(fenceSQL), l.Owner, l.Epoch).Exec(func(tag pgconn.CommandTag) error {
		if tag.RowsAffected() == 0 {
			return jetbox.ErrLeaseLost
		}
		return nil
	})
}

// silent returns the leases that have not been renewed for as long as they last,
// nor for as long as the candidate asks, as far as this process has seen.
func (s *Store) silent(c jetbox.Candidate) (owners []string, expires []time.Time) {
	owners, expires = []string{}, []time.Time{}
	s.mu.Lock()
	defer s.mu.Unlock()
	for owner, o := range s.seen {
		if owner != c.Owner && time.Since(o.since) > max(c.Length, o.length) {
			owners = append(owners, owner)
			expires = append(expires, o.expires)
		}
	}
	return owners, expires
}

// observe remembers what is new in the leases of others.
func (s *Store) observe(r *roll) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for owner := range s.seen {
		if r.of(owner) == nil {
			delete(s.seen, owner)
		}
	}
	for _, l := range r.leases {
		if o, ok := s.seen[l.Owner]; !ok || !o.expires.Equal(l.Expires) {
			s.seen[l.Owner] = observed{expires: l.Expires, length: l.length, since: now}
		}
	}
}

// Yield gives back the shards that another relay should have. What is unresolved
// in them stays claimed, for their next holder to see. Claim must not run
// meanwhile.
func (s *Store) Yield(ctx context.Context, l jetbox.Lease) error {
	s.mu.Lock()
	surplus := slices.Clone(s.hand.surplus())
	s.mu.Unlock()
	if len(surplus) == 0 {
		return nil
	}
	b := newBatch()
	s.fence(b, l)
	b.Queue(s.sql(`UPDATE {shard} SET owner = NULL WHERE owner = $1 AND shard = ANY($3::smallint[]) AND `+fenced), l.Owner, l.Epoch, surplus)
	if err := s.send(ctx, b); err != nil {
		return fmt.Errorf("yield shards of outbox %q: %w", s.cfg.Table, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hand.shards = slices.DeleteFunc(slices.Clone(s.hand.shards), func(n int16) bool { return slices.Contains(surplus, n) })
	return nil
}

// Release gives everything back, so that other relays start at once. A lease that
// was lost already is no error. An epoch of 0 stands for whichever the owner has:
// a relay that only stood by takes its leave with it.
func (s *Store) Release(ctx context.Context, l jetbox.Lease) error {
	b := newBatch()
	b.Queue(s.sql(`WITH gone AS (DELETE FROM {relay} WHERE owner = $1 AND (epoch = $2 OR $2 = 0) RETURNING owner)
		UPDATE {shard} SET owner = NULL WHERE owner IN (SELECT owner FROM gone)`), l.Owner, l.Epoch)
	if err := s.send(ctx, b); err != nil {
		return fmt.Errorf("release lease of outbox %q: %w", s.cfg.Table, err)
	}
	s.mu.Lock()
	s.hand = hand{}
	s.mu.Unlock()
	return nil
}
