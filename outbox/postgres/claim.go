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
	shards := s.claimable()
	if len(ask.InHand) == 0 {
		if idle, err := s.idle(ctx, shards); err != nil || idle {
			return nil, err
		}
	}
	ask.Limit = s.fitting(ask.Limit)
	for {
		c, err := s.look(ctx, l, shards, ask, nil)
		if err != nil {
			return nil, err
		}
		var woken bool
		if c.due {
			if woken, err = s.wakeDue(ctx, l, c.at); err == nil && woken {
				c, err = s.look(ctx, l, shards, ask, &c.at)
			}
			if err != nil {
				return nil, err
			}
		}
		if err := s.insertClaim(ctx, l, ask, c); err != nil {
			return nil, err
		}
		moved, err := s.putToSleep(ctx, l, shards, c)
		if err == nil && c.incomplete(ask) {
			moved, err = s.dropGone(ctx, l, shards, len(ask.InHand))
		}
		if err != nil {
			return nil, err
		}
		// Nothing found but something moved: what may go was hidden behind rows
		// that have now been put to sleep, or is being woken in turns.
		if len(c.rows) > 0 || (!moved && !woken) {
			s.worked(len(c.rows) > 0)
			s.fits(c)
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

// claimed is what a look into the queue has found: rows that may go, and others.
type claimed struct {
	at  time.Time // the moment, by the database, that decides what is due
	due bool      // the time of some row has come, which may have to be woken

	rows                 []jetbox.Row
	later, behind, stale []int64 // ids of rows that are to leave the queue, by reason
	sent                 []int64 // of these, what was claimed before

	read   int  // so many rows were read
	queued int  // of so many that were found
	cut    bool // there was no room for all

	standing    []standing
	earlier     outboxrow.Claims
	first, last int64   // of the rows that are in no claim yet
	shards      []int16 // of these rows
}

// standing is a claim that the database has.
type standing struct {
	First, Last int64
	Shards      []int16
	Age         int64 // in microseconds
	Before      json.RawMessage
}

// stateSQL says whether the lease holds, which moment this is ($3 or now), whether some
// row is due by then, and which claims there are, the oldest first.
const stateSQL = `SELECT ` + fenced + `, coalesce($3, now()),
	coalesce((SELECT w.due FROM {wait} w WHERE w.due IS NOT NULL ORDER BY w.due LIMIT 1) <= coalesce($3, now()), false),
	(SELECT json_agg(json_build_object('first', c.first, 'last', c.last, 'shards', c.shards, 'before', c.before,
			'age', (extract(epoch FROM clock_timestamp() - c.claimed_at) * 1000000)::bigint) ORDER BY c.id)
		FROM {claim} c)`

// readSQL returns the statement that reads the first rows of the queue as of the moment
// $2, of all shards or of those in $4, less those in $3, as far as they have room in a
// claim. It is one statement: between two, a row that holds up its key could move
// from those that wait into the queue, and be in neither. {n} is a constant for the
// planner.
func (s *Store) readSQL(allShards bool, n int) string {
	first := `SELECT id, shard FROM {queue} WHERE id <> ALL($3::bigint[]) AND ` + notRecalling + ` ORDER BY id LIMIT {n}`
	if !allShards {
		first = `SELECT q.id, m.shard FROM unnest($4::smallint[]) AS m (shard) CROSS JOIN LATERAL (
				SELECT id FROM {queue} WHERE shard = m.shard AND id <> ALL($3::bigint[]) ORDER BY id LIMIT {n}) q
			WHERE ` + notRecalling + ` ORDER BY q.id LIMIT {n}`
	}
	return s.sql(strings.NewReplacer("{n}", fmt.Sprint(n), "{bytes}", fmt.Sprint(claimBytes)).Replace(`WITH first AS MATERIALIZED (` + first + `),
		own AS MATERIALIZED (SELECT id FROM first WHERE shard = ANY (ARRAY(SELECT s.shard FROM {shard} s WHERE s.owner = $1)))
		SELECT (SELECT count(*) FROM own), o.status <> 'PENDING', ` + isLater + `, ` + isBehind + `, ` + isOvertaking + `,
			o.attempts = 0 AND o.last_error IS NULL, ` + isInDoubt + `, {fn_shard}(o.aggregate_type, o.aggregate_id, o.id), ` + eventColumns + `
		FROM (SELECT o.*, coalesce(sum(octet_length(o.payload)) OVER (ORDER BY o.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS bytes
			FROM {outbox} o WHERE o.id = ANY (ARRAY(SELECT id FROM own))) o
		WHERE o.bytes < {bytes} ORDER BY o.id`))
}

// look reads the beginning of the queue and decides what may go, without a write.
func (s *Store) look(ctx context.Context, l jetbox.Lease, shards []int16, ask jetbox.Ask, at *time.Time) (*claimed, error) {
	c := &claimed{rows: make([]jetbox.Row, 0, ask.Limit)}
	b := newBatch()
	b.Queue(s.sql(stateSQL), l.Owner, l.Epoch, at).QueryRow(func(row pgx.Row) error {
		var held bool
		err := row.Scan(&held, &c.at, &c.due, &c.standing)
		if err == nil && !held {
			err = jetbox.ErrLeaseLost
		}
		return err
	})
	args := []any{l.Owner, at, ask.InHand}
	if shards != nil {
		args = append(args, shards)
	}
	b.Queue(s.readSQL(shards == nil, ask.Limit), args...).Query(c.take)
	return c, s.send(ctx, b)
}

// incomplete reports that rows of the queue have none in the outbox any more. When none
// at all has come, that is not known; a relay with nothing in hand then makes sure.
func (c *claimed) incomplete(ask jetbox.Ask) (incomplete bool) {
	return !c.cut && (c.read < c.queued || c.read == 0 && len(ask.InHand) == 0)
}

// take sorts out the rows that come, lowest id first.
func (c *claimed) take(rows pgx.Rows) error {
	defer rows.Close()
	var (
		r                                                  record
		settled, later, behind, overtaking, untried, doubt bool
		shard                                              int16
	)
	into := append([]any{&c.queued, &settled, &later, &behind, &overtaking, &untried, &doubt, &shard}, r.eventFields()...)
	for size := 0; rows.Next(); {
		r = record{}
		if err := rows.Scan(into...); err != nil {
			return err
		}
		c.read++
		size += len(r.Payload)
		c.cut = size >= claimBytes
		claim := c.claimOf(r.ID, shard)
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
			row.Fresh, row.InDoubt = fresh, doubt
			if claim == nil {
				c.cover(r.ID, shard)
			} else if !doubt { // else it was sent before that claim too
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
	return rows.Err()
}

// claimOf returns the oldest claim that covers a row, nil for none.
func (c *claimed) claimOf(id int64, shard int16) *standing {
	for i := range c.standing {
		if st := &c.standing[i]; st.First <= id && id <= st.Last && slices.Contains(st.Shards, shard) {
			return st
		}
	}
	return nil
}

// cover makes a row one of those to be claimed. Rows come lowest id first.
func (c *claimed) cover(id int64, shard int16) {
	if c.shards == nil {
		c.first = id
	}
	c.last = id
	if !slices.Contains(c.shards, shard) {
		c.shards = append(c.shards, shard)
	}
}

// mayClaim is whether rows of the shards in $3 may be claimed now: while the relay
// holds the lock of the fence, nobody takes one away.
const mayClaim = fenced + ` AND ` + notRecalling + ` AND NOT EXISTS (
	SELECT FROM unnest($3::smallint[]) AS m (shard) WHERE NOT EXISTS (
		SELECT FROM {shard} s WHERE s.shard = m.shard AND s.owner = $1))`

const insertClaimSQL = `INSERT INTO {claim} (owner, shards, first, last, claimed_at, before)
	SELECT $1, $3::smallint[], $4, $5, clock_timestamp(), $6::jsonb WHERE ` + mayClaim

// insertClaim records a claim on the rows found that are in none, before any of them
// is sent. When they may not be claimed any more, none is left.
func (s *Store) insertClaim(ctx context.Context, l jetbox.Lease, ask jetbox.Ask, c *claimed) error {
	if len(c.shards) == 0 {
		return nil
	}
	before, err := json.Marshal(append([]jetbox.Position{}, ask.Before...))
	if err != nil {
		return err
	}
	b := newBatch()
	s.fence(b, l)
	b.Queue(s.sql(insertClaimSQL), l.Owner, l.Epoch, c.shards, c.first, c.last, string(before)).Exec(func(tag pgconn.CommandTag) error {
		if tag.RowsAffected() == 0 {
			c.rows = nil
		}
		return nil
	})
	return s.send(ctx, b)
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
	isLater = `coalesce(o.available_at > coalesce($2, now()), false)`

	// An earlier row of its key waits for a retry, is frozen, or is itself behind
	// one.
	isBehind = `coalesce(
		EXISTS (SELECT FROM {wait} WHERE hold IN (2, 3)) AND o.aggregate_id <> '' AND
			coalesce({hash o} = ANY (` + heldKeys + `), true) AND
			EXISTS (SELECT FROM {wait} w WHERE w.hold IN (2, 3) AND {w has the key of o} AND w.id < o.id), false)`

	// A scheduled row of its key has become due: it is woken in the order of
	// times, not of ids, so this one could pass it by.
	isOvertaking = `coalesce(
		EXISTS (SELECT FROM {wait} WHERE due <= coalesce($2, now())) AND o.aggregate_id <> '' AND
			EXISTS (SELECT FROM {wait} w WHERE w.hold = 1 AND {w has the key of o} AND w.due <= coalesce($2, now()) AND w.id < o.id), false)`
)
