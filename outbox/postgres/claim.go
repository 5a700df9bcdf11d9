package postgres

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/outboxrow"
	"github.com/seed-5e04d8fb/jetbox/outbox"
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
	for {
		if idle, err := s.idle(ctx, shards, ask.InHand); err != nil || idle {
			return nil, err
		}
		c, err := s.tryClaim(ctx, l, shards, ask)
		if err != nil {
			return nil, err
		}
		moved, err := s.putToSleep(ctx, l, shards, c)
		if err != nil {
			return nil, err
		}
		// Nothing found but something moved: what may go was hidden behind rows
		// that have now been put to sleep, or is being woken in turns.
		if len(c.rows) > 0 || (!moved && !c.woken) {
			s.worked(len(c.rows) > 0)
			return c.rows, nil
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

// idle asks without a write, so that a relay with nothing to do costs no sync. In
// the order of an index: read in any other, a queue that has just been emptied is
// read to its end.
func (s *Store) idle(ctx context.Context, shards []int16, hand []int64) (idle bool, err error) {
	const first = `(SELECT q.id FROM {queue} q WHERE q.id <> ALL($1::bigint[]) ORDER BY q.id LIMIT 1) IS NOT NULL`
	const ofShards = `EXISTS (SELECT FROM unnest($2::smallint[]) AS m (shard)
		WHERE (SELECT q.id FROM {queue} q WHERE q.shard = m.shard AND q.id <> ALL($1::bigint[]) ORDER BY q.id LIMIT 1) IS NOT NULL)`
	const due = ` OR coalesce((SELECT w.due FROM {wait} w WHERE w.due IS NOT NULL ORDER BY w.due LIMIT 1) <= clock_timestamp(), false)`
	query, args := first, []any{hand}
	if shards != nil {
		query, args = ofShards, append(args, shards)
	}
	var work bool
	err = s.do(ctx, func(ctx context.Context) error {
		return s.pool.QueryRow(ctx, s.sql(`SELECT `+query+due), args...).Scan(&work)
	})
	return !work, err
}

// claimed is what one try has found.
type claimed struct {
	rows                 []jetbox.Row
	later, behind, stale []int64 // ids of rows that are to leave the queue, by reason
	sent                 []int64 // of these, what was claimed before
	earlier              outboxrow.Claims
	woken                bool
}

// wakeSQL moves rows whose time has come into the queue, whoever's shards they
// are in: relays that do it at once do not wait for each other.
const wakeSQL = `WITH due AS (
		DELETE FROM {wait} WHERE id IN (
			SELECT id FROM {wait} WHERE due <= now() ORDER BY due LIMIT $3 FOR UPDATE SKIP LOCKED)
			AND ` + fenced + `
		RETURNING id, shard)
	INSERT INTO {queue} (id, shard) SELECT id, shard FROM due ON CONFLICT DO NOTHING`

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
// the whole statement: in most outboxes nothing waits. All mean the same moment,
// now(), the beginning of the transaction: a row that becomes due between two
// statements would else hold its key back in one and not be woken in the other.
const (
	isLater = `coalesce(o.available_at > now(), false)`

	// An earlier row of its key waits for a retry, is frozen, or is itself behind
	// one.
	isBehind = `coalesce(
		EXISTS (SELECT FROM {wait} WHERE hold IN (2, 3)) AND o.aggregate_id <> '' AND
			coalesce({hash o} = ANY (` + heldKeys + `), true) AND
			EXISTS (SELECT FROM {wait} w WHERE w.hold IN (2, 3) AND {w has the key of o} AND w.id < o.id), false)`

	// A scheduled row of its key has become due: it is woken in the order of
	// times, not of ids, so this one could pass it by.
	isOvertaking = `coalesce(
		EXISTS (SELECT FROM {wait} WHERE due <= now()) AND o.aggregate_id <> '' AND
			EXISTS (SELECT FROM {wait} w WHERE w.hold = 1 AND {w has the key of o} AND w.due <= now() AND w.id < o.id), false)`
)

// claimSQL returns the statement that reads the first rows of the queue, of all
// shards or of those in $5, less those in $3, and records a claim for those that are
// in none, with $4. Everything in it sees one moment. {n} is a constant for the
// planner.
func (s *Store) claimSQL(allShards bool, n int) string {
	const mayClaim = notRecalling + ` AND ` + fenced
	first := `SELECT id, shard FROM {queue} WHERE id <> ALL($3::bigint[]) AND ` + mayClaim + ` ORDER BY id LIMIT {n}`
	if !allShards {
		first = `SELECT q.id, m.shard FROM unnest($5::smallint[]) AS m (shard) CROSS JOIN LATERAL (
				SELECT id FROM {queue} WHERE shard = m.shard AND id <> ALL($3::bigint[]) ORDER BY id LIMIT {n}) q
			WHERE ` + mayClaim + ` ORDER BY q.id LIMIT {n}`
	}
	const inClaim = `c.first <= f.id AND f.id <= c.last AND f.shard = ANY (c.shards)`
	return s.sql(strings.NewReplacer("{n}", fmt.Sprint(n), "{bytes}", fmt.Sprint(claimBytes)).Replace(`WITH first AS MATERIALIZED (` + first + `),
		own AS MATERIALIZED (
			SELECT f.id, f.shard, EXISTS (SELECT FROM {claim} c WHERE ` + inClaim + `) AS claimed
			FROM first f JOIN {shard} s ON s.shard = f.shard AND s.owner = $1),
		new AS (
			INSERT INTO {claim} (owner, shards, first, last, claimed_at, before)
			SELECT $1, array_agg(DISTINCT shard), min(id), max(id), clock_timestamp(), $4::jsonb FROM own
			WHERE NOT claimed HAVING count(*) > 0)
		SELECT pos, status IS DISTINCT FROM 'PENDING', ` + isLater + `, ` + isBehind + `, ` + isOvertaking + `,
			NOT claimed AND attempts = 0 AND last_error IS NULL, age, before, ` + eventColumns + `
		FROM (
			SELECT f.id AS pos, f.claimed, e.age, e.before, o.*, coalesce(sum(octet_length(o.payload))
				OVER (ORDER BY f.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS bytes
			FROM own f LEFT JOIN {outbox} o ON o.id = f.id LEFT JOIN LATERAL (
				SELECT (extract(epoch FROM clock_timestamp() - c.claimed_at) * 1000000)::bigint AS age, c.before::text AS before
				FROM {claim} c WHERE f.claimed AND ` + inClaim + ` ORDER BY c.id LIMIT 1) e ON true
		) o WHERE bytes < {bytes} ORDER BY pos`))
}

func (s *Store) tryClaim(ctx context.Context, l jetbox.Lease, shards []int16, ask jetbox.Ask) (*claimed, error) {
	before, err := json.Marshal(append([]jetbox.Position{}, ask.Before...))
	if err != nil {
		return nil, err
	}
	c := new(claimed)
	b := newBatch()
	s.fence(b, l)
	b.Queue(s.sql(wakeSQL), l.Owner, l.Epoch, wakeBatch).Exec(func(tag pgconn.CommandTag) error {
		c.woken = tag.RowsAffected() > 0
		return nil
	})
	args := []any{l.Owner, l.Epoch, ask.InHand, string(before)}
	if shards != nil {
		args = append(args, shards)
	}
	b.Queue(s.claimSQL(shards == nil, ask.Limit), args...).Query(c.read)
	return c, s.send(ctx, b)
}

func (c *claimed) read(rows pgx.Rows) error {
	defer rows.Close()
	for rows.Next() {
		var (
			r                         record
			id                        int64
			later, behind, overtaking bool
			fresh                     bool
			age                       *int64
			before                    *string
		)
		// A row that was deleted by hand has left NULLs behind, and one that was
		// marked by hand is no longer the relay's.
		if raw := rows.RawValues()[1]; raw[0] == 1 || raw[0] == 't' {
			if err := rows.Scan(append([]any{&id}, make([]any, len(rows.RawValues())-1)...)...); err != nil {
				return err
			}
			c.stale = append(c.stale, id)
			continue
		}
		if err := rows.Scan(append([]any{&id, nil, &later, &behind, &overtaking, &fresh, &age, &before}, r.eventFields()...)...); err != nil {
			return err
		}
		switch {
		case later:
			c.later = append(c.later, id)
		case behind:
			c.behind = append(c.behind, id)
		case !overtaking:
			row := r.row()
			row.Fresh = fresh
			if age != nil {
				earlier, err := c.earlier.Of(time.Duration(*age)*time.Microsecond, *before)
				if err != nil {
					return err
				}
				row.Earlier = earlier
			}
			c.rows = append(c.rows, row)
		}
		if !fresh && (later || behind) {
			c.sent = append(c.sent, id)
		}
	}
	return rows.Err()
}

// sleepSQL moves rows from the queue to those that wait.
const sleepSQL = `WITH gone AS (DELETE FROM {queue} WHERE id = ANY($3::bigint[]) AND ` + fenced + ` RETURNING id, shard)
	INSERT INTO {wait} (id, hold, shard, due, key_hash, aggregate_type, aggregate_id)
		SELECT o.id, $4::smallint, g.shard, CASE WHEN $4::smallint = 1 THEN o.available_at END, {hash o}, o.aggregate_type, o.aggregate_id
		FROM gone g JOIN {outbox} o ON o.id = g.id
		ON CONFLICT (id) DO UPDATE SET hold = excluded.hold, due = excluded.due`

// Values of the column hold: why a pending row is not in the queue.
const (
	holdLater  = 1 // scheduled: until due, holds nobody
	holdRetry  = 2 // waits until due, and its key waits with it; or dead, its key frozen
	holdBehind = 3 // behind an earlier row of its key
)

// putToSleep moves what may not go yet out of the queue.
func (s *Store) putToSleep(ctx context.Context, l jetbox.Lease, shards []int16, c *claimed) (moved bool, err error) {
	if len(c.later)+len(c.behind)+len(c.stale) == 0 {
		return false, nil
	}
	b := newBatch()
	s.fence(b, l)
	if len(c.sent) > 0 {
		// With this they leave their claims: the next to claim them must not
		// take them for rows that were never sent.
		b.Queue(s.sql(`UPDATE {outbox} SET last_error = coalesce(last_error, $4)
			WHERE id = ANY($3::bigint[]) AND status = 'PENDING' AND `+fenced), l.Owner, l.Epoch, c.sent, outbox.OutcomeUnknown)
	}
	if len(c.later) > 0 {
		b.Queue(s.sql(sleepSQL), l.Owner, l.Epoch, c.later, holdLater)
	}
	if len(c.behind) > 0 {
		b.Queue(s.sql(sleepSQL), l.Owner, l.Epoch, c.behind, holdBehind)
	}
	if len(c.stale) > 0 {
		b.Queue(s.sql(`DELETE FROM {queue} WHERE id = ANY($3::bigint[]) AND `+fenced), l.Owner, l.Epoch, c.stale)
	}
	if len(c.rows) == 0 && len(c.behind) > 0 {
		s.queueMoreSleep(b, l, shards)
	}
	s.left(len(c.later) + len(c.behind) + len(c.stale))
	return true, s.send(ctx, b)
}

// queueMoreSleep puts more rows to sleep without reading them, for a claim that
// has found only such: a hundred thousand rows behind one key must not take a
// transaction for each few. The first rows of the queue are looked at; a row
// that the statement itself puts behind its key is behind one that was there
// before, so it makes no difference whether the others see it.
func (s *Store) queueMoreSleep(b *batch, l jetbox.Lease, shards []int16) {
	args := []any{l.Owner, l.Epoch, sleepBatch}
	first := `SELECT id FROM {queue} ORDER BY id LIMIT $3`
	if shards != nil {
		first = `SELECT q.id FROM unnest($4::smallint[]) AS m (shard)
			CROSS JOIN LATERAL (SELECT id FROM {queue} WHERE shard = m.shard ORDER BY id LIMIT $3) q ORDER BY q.id LIMIT $3`
		args = append(args, shards)
	}
	b.Queue(s.sql(`WITH behind AS (SELECT o.id FROM (`+first+`) f JOIN {outbox} o ON o.id = f.id WHERE `+isBehind+`),
			gone AS (DELETE FROM {queue} q USING behind b WHERE q.id = b.id AND `+fenced+` RETURNING q.id, q.shard)
		INSERT INTO {wait} (id, hold, shard, key_hash, aggregate_type, aggregate_id)
			SELECT o.id, 3, g.shard, {hash o}, o.aggregate_type, o.aggregate_id FROM gone g JOIN {outbox} o ON o.id = g.id
			ON CONFLICT DO NOTHING`), args...).Exec(func(tag pgconn.CommandTag) error {
		s.left(int(tag.RowsAffected()))
		return nil
	})
}
