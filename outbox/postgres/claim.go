package postgres

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/outboxrow"
)

const (
	// wakeBatch bounds how many sleeping rows one transaction wakes, and
	// sleepBatch how many it puts to sleep.
	wakeBatch  = 2000
	sleepBatch = 5000

	// claimBytes ends a claim early whose payloads are long: a batch is in
	// memory as a whole, some of it twice while it is on its way.
	claimBytes = 16 << 20
)

// Claim returns rows that may go now, lowest id first, and records a claim on those
// that are in none before it returns: PROCESSING is a pending row inside one. The
// claim stays until their outcomes are recorded. None is no error.
//
// Rows met on the way that may not go yet are put to sleep, out of the queue, so
// that they cost the next claims nothing; rows whose time has come are woken.
func (s *Store) Claim(ctx context.Context, l jetbox.Lease, ask jetbox.Ask) ([]jetbox.Row, error) {
	ask.InHand = append([]int64{}, ask.InHand...) // nil would be NULL
	rows, err := s.claim(ctx, l, ask)
	if err != nil {
		return nil, fmt.Errorf("claim rows of outbox %q: %w", s.cfg.Table, err)
	}
	return rows, nil
}

func (s *Store) claim(ctx context.Context, l jetbox.Lease, ask jetbox.Ask) ([]jetbox.Row, error) {
	if err := s.sweep(ctx, l); err != nil {
		return nil, err
	}
	s.tidy(ctx)
	ask.Limit = s.fitting(ask.Limit)
	for {
		q, err := s.look(ctx, l, ask, nil)
		if err != nil {
			return nil, err
		}
		var woken bool
		if q.due {
			if woken, err = s.wakeDue(ctx, l, q.at); err == nil && woken {
				q, err = s.look(ctx, l, ask, &q.at)
			}
			if err != nil {
				return nil, err
			}
		}
		if len(q.ids) == 0 {
			return nil, nil
		}
		c, err := s.tryClaim(ctx, l, ask, q)
		if err != nil {
			return nil, err
		}
		moved, err := s.putToSleep(ctx, l, q.of, c)
		if err != nil {
			return nil, err
		}
		// Nothing found but something moved: what may go was hidden behind rows
		// that have now been put to sleep, or is being woken in turns.
		if len(c.rows) > 0 || (!moved && !woken) {
			s.worked(len(c.rows) > 0)
			return c.rows, nil
		}
	}
}

// fitting returns how many rows are to be asked for: after a claim that was too long
// for claimBytes, no more than had room in it.
func (s *Store) fitting(limit int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fit == 0 || limit <= s.fit {
		return limit
	}
	return s.fit
}

// fits learns how many rows have room in a claim.
func (s *Store) fits(c *claimed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case c.cut:
		s.fit = max(1, c.read)
	case s.fit > 0:
		s.fit *= 2
		if s.fit > recordBatch {
			s.fit = 0
		}
	}
}

// claimable returns the shards to claim from; nil stands for all of the outbox.
func (s *Store) claimable() []int16 {
	s.mu.Lock()
	defer s.mu.Unlock()
	shards, all := s.hand.keep()
	if all {
		return nil
	}
	return append([]int16{}, shards...)
}

// look is the beginning of the queue, of the relay's own shards and without what
// is in hand.
type look struct {
	of       []int16   // the shards asked for; nil stands for all
	at       time.Time // the moment, by the database, that decides what is due
	ids      []int64 // ascending
	shards   []int16 // of each
	due      bool    // the time of some row has come, which may have to be woken
	standing []standing
}

// standing is a claim that may cover some of the rows found.
type standing struct {
	First, Last int64
	Shards      []int16
	Age         int64 // in microseconds
	Before      json.RawMessage
}

// lookSQL returns the statement that reads the beginning of the queue, of all shards
// or of those in $5, less the rows in $3, at the moment $4 or now. Nothing of the outbox itself is read, and
// a relay with nothing to do costs no write.
func (s *Store) lookSQL(allShards bool, n int) string {
	first := `SELECT id, shard FROM {queue} WHERE id <> ALL($3::bigint[]) AND ` + notRecalling + ` ORDER BY id LIMIT {n}`
	if !allShards {
		first = `SELECT q.id, m.shard FROM unnest($5::smallint[]) AS m (shard) CROSS JOIN LATERAL (
				SELECT id FROM {queue} WHERE shard = m.shard AND id <> ALL($3::bigint[]) ORDER BY id LIMIT {n}) q
			WHERE ` + notRecalling + ` ORDER BY q.id LIMIT {n}`
	}
	return s.sql(strings.ReplaceAll(`WITH first AS MATERIALIZED (`+first+`),
		own AS MATERIALIZED (
			SELECT array_agg(id) AS ids, array_agg(shard) AS shards, min(id) AS lowest, max(id) AS highest FROM first
			WHERE shard = ANY (ARRAY(SELECT s.shard FROM {shard} s WHERE s.owner = $1)))
		SELECT `+fenced+`, ids, shards, coalesce($4, now()),
			coalesce((SELECT w.due FROM {wait} w WHERE w.due IS NOT NULL ORDER BY w.due LIMIT 1) <= coalesce($4, now()), false),
			(SELECT json_agg(json_build_object('first', c.first, 'last', c.last, 'shards', c.shards, 'before', c.before,
					'age', (extract(epoch FROM clock_timestamp() - c.claimed_at) * 1000000)::bigint) ORDER BY c.id)
				FROM {claim} c WHERE c.last >= own.lowest AND c.first <= own.highest)
		FROM own`, "{n}", fmt.Sprint(n)))
}

func (s *Store) look(ctx context.Context, l jetbox.Lease, ask jetbox.Ask, at *time.Time) (*look, error) {
	q := &look{of: s.claimable()}
	args := []any{l.Owner, l.Epoch, ask.InHand, at}
	if q.of != nil {
		args = append(args, q.of)
	}
	b := newBatch()
	b.Queue(s.lookSQL(q.of == nil, ask.Limit), args...).QueryRow(func(row pgx.Row) error {
		var held bool
		err := row.Scan(&held, &q.ids, &q.shards, &q.at, &q.due, &q.standing)
		if err == nil && !held {
			err = jetbox.ErrLeaseLost
		}
		return err
	})
	return q, s.send(ctx, b)
}

// earlier returns, for each row found, the oldest claim that covers it, nil for none.
func (q *look) earlier() []*standing {
	of := make([]*standing, len(q.ids))
	for i, id := range q.ids {
		for j := range q.standing {
			if c := &q.standing[j]; c.First <= id && id <= c.Last && slices.Contains(c.Shards, q.shards[i]) {
				of[i] = c
				break
			}
		}
	}
	return of
}

// wakeSQL moves rows whose time has come into the queue, whoever's shards they
// are in: relays that do it at once do not wait for each other.
const wakeSQL = `WITH due AS (
		DELETE FROM {wait} WHERE id IN (
			SELECT id FROM {wait} WHERE due <= $4 ORDER BY due LIMIT $3 FOR UPDATE SKIP LOCKED)
			AND ` + fenced + `
		RETURNING id, shard)
	INSERT INTO {queue} (id, shard) SELECT id, shard FROM due ON CONFLICT DO NOTHING`

func (s *Store) wakeDue(ctx context.Context, l jetbox.Lease, at time.Time) (woken bool, err error) {
	b := newBatch()
	s.fence(b, l)
	b.Queue(s.sql(wakeSQL), l.Owner, l.Epoch, wakeBatch, at).Exec(func(tag pgconn.CommandTag) error {
		woken = tag.RowsAffected() > 0
		return nil
	})
	err = s.send(ctx, b)
	return woken, err
}

// heldKeys are the keys, by their hashes, that are held or have rows behind: one
// step in the index for each, however many rows wait behind it. NULL stands for more
// than are worth listing. Asked once for a statement, it spares a look into the
// index for each row, where a few keys wait with many rows.
const heldKeys = `(SELECT CASE WHEN count(*) <= 100 THEN array_agg(hash) END FROM (
		WITH RECURSIVE k (hash) AS (
			(SELECT w.key_hash FROM {wait} w WHERE w.hold IN (2, 3) ORDER BY w.key_hash LIMIT 1)
			UNION ALL
			SELECT (SELECT w.key_hash FROM {wait} w WHERE w.hold IN (2, 3) AND w.key_hash > k.hash ORDER BY w.key_hash LIMIT 1)
			FROM k WHERE k.hash IS NOT NULL)
		SELECT hash FROM k WHERE hash IS NOT NULL LIMIT 101) h)::bigint[]`

// Conditions on a row o of the queue. The first part of each is asked once for
// the whole statement: in most outboxes nothing waits. All mean the same moment, $2,
// as the look and the waking of rows before it: a row that becomes due between two
// statements would else hold its key back in one and not be woken in the other.
const (
	isLater = `coalesce(o.available_at > $2, false)`

	// An earlier row of its key waits for a retry, is frozen, or is itself behind
	// one.
	isBehind = `coalesce(
		EXISTS (SELECT FROM {wait} WHERE hold IN (2, 3)) AND o.aggregate_id <> '' AND
			coalesce({hash o} = ANY (` + heldKeys + `), true) AND
			EXISTS (SELECT FROM {wait} w WHERE w.hold IN (2, 3) AND {w has the key of o} AND w.id < o.id), false)`

	// A scheduled row of its key has become due: it is woken in the order of
	// times, not of ids, so this one could pass it by.
	isOvertaking = `coalesce(
		EXISTS (SELECT FROM {wait} WHERE due <= $2) AND o.aggregate_id <> '' AND
			EXISTS (SELECT FROM {wait} w WHERE w.hold = 1 AND {w has the key of o} AND w.due <= $2 AND w.id < o.id), false)`
)

// readSQL reads the rows in $1, as far as they have room in a claim.
var readSQL = strings.ReplaceAll(`SELECT o.status <> 'PENDING', `+isLater+`, `+isBehind+`, `+isOvertaking+`,
		o.attempts = 0 AND o.last_error IS NULL, `+eventColumns+`
	FROM (SELECT o.*, coalesce(sum(octet_length(o.payload)) OVER (ORDER BY o.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS bytes
		FROM {outbox} o WHERE o.id = ANY($1::bigint[])) o
	WHERE o.bytes < {bytes} ORDER BY o.id`, "{bytes}", fmt.Sprint(claimBytes))

// owned is whether the shards in $3 are all the relay's. While it holds the lock
// of the fence, nobody takes one away.
const owned = `NOT EXISTS (SELECT FROM unnest($3::smallint[]) AS m (shard) WHERE NOT EXISTS (
	SELECT FROM {shard} s WHERE s.shard = m.shard AND s.owner = $1))`

// mayClaim is whether rows of the shards in $3 may be claimed now.
const mayClaim = fenced + ` AND ` + notRecalling + ` AND ` + owned

const insertClaimSQL = `INSERT INTO {claim} (owner, shards, first, last, claimed_at, before)
	SELECT $1, $3::smallint[], $4, $5, clock_timestamp(), $6::jsonb WHERE ` + mayClaim

// claimed is what one try has found.
type claimed struct {
	may                  bool // or else nothing is claimed
	rows                 []jetbox.Row
	later, behind, stale []int64 // ids of rows that are to leave the queue, by reason
	sent                 []int64 // of these, what was claimed before
	read                 int     // so many rows were read
	cut                  bool    // there was no room for all

	q       *look
	claims  []*standing // of each row in q
	earlier outboxrow.Claims
}

// tryClaim reads the rows found, and records a claim for those that are in none.
func (s *Store) tryClaim(ctx context.Context, l jetbox.Lease, ask jetbox.Ask, q *look) (*claimed, error) {
	before, err := json.Marshal(append([]jetbox.Position{}, ask.Before...))
	if err != nil {
		return nil, err
	}
	c := &claimed{q: q, claims: q.earlier(), rows: make([]jetbox.Row, 0, len(q.ids))}
	b := newBatch()
	s.fence(b, l)
	b.Queue(s.sql(`SELECT `+mayClaim), l.Owner, l.Epoch, distinct(q.shards)).QueryRow(func(row pgx.Row) error {
		return row.Scan(&c.may)
	})
	b.Queue(s.sql(readSQL), q.ids, q.at).Query(c.take)
	if first, last, shards := c.unclaimed(); len(shards) > 0 {
		b.Queue(s.sql(insertClaimSQL), l.Owner, l.Epoch, shards, first, last, string(before))
	}
	if err := s.send(ctx, b); err != nil || !c.may {
		return new(claimed), err
	}
	s.fits(c)
	return c, nil
}

// unclaimed returns the range of the rows that no claim covers, and their shards.
func (c *claimed) unclaimed() (first, last int64, shards []int16) {
	for i, id := range c.q.ids {
		if c.claims[i] != nil {
			continue
		}
		if shards == nil {
			first = id
		}
		last = id
		if shard := c.q.shards[i]; !slices.Contains(shards, shard) {
			shards = append(shards, shard)
		}
	}
	return first, last, shards
}

func distinct(shards []int16) []int16 {
	return slices.Compact(slices.Sorted(slices.Values(shards)))
}

// take sorts out the rows that come, lowest id first. One that was found and does
// not come was deleted by hand, unless there was no room for it.
func (c *claimed) take(rows pgx.Rows) error {
	defer rows.Close()
	if !c.may {
		return nil
	}
	var (
		r                                           record
		settled, later, behind, overtaking, untried bool
	)
	into := append([]any{&settled, &later, &behind, &overtaking, &untried}, r.eventFields()...)
	at, size := 0, 0
	for rows.Next() {
		r = record{}
		if err := rows.Scan(into...); err != nil {
			return err
		}
		for ; c.q.ids[at] < r.ID; at++ {
			c.stale = append(c.stale, c.q.ids[at])
		}
		claim := c.claims[at]
		at++
		c.read++
		size += len(r.Payload)
		fresh := untried && claim == nil
		switch {
		case settled: // marked by hand, and no longer the relay's
			c.stale = append(c.stale, r.ID)
			continue
		case later:
			c.later = append(c.later, r.ID)
		case behind:
			c.behind = append(c.behind, r.ID)
		case !overtaking:
			row := r.row()
			row.Fresh = fresh
			if claim != nil {
				var err error
				if row.Earlier, err = c.earlier.Of(time.Duration(claim.Age)*time.Microsecond, string(claim.Before)); err != nil {
					return err
				}
			}
			c.rows = append(c.rows, row)
		}
		if !fresh && (later || behind) {
			c.sent = append(c.sent, r.ID)
		}
	}
	if c.cut = size >= claimBytes && at < len(c.q.ids); !c.cut {
		c.stale = append(c.stale, c.q.ids[at:]...)
	}
	return rows.Err()
}
