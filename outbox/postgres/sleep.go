package postgres

import (
	"context"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// sleepSQL moves rows from the queue to those that wait. Whether an earlier row of
// their key holds them is asked again: it may have gone since the look, and then nobody
// would wake them. A row whose time somebody has taken away meanwhile is due at once.
const sleepSQL = `WITH these AS (
		SELECT o.id FROM {outbox} o WHERE o.id = ANY($3::bigint[]) AND ($4::smallint <> 3 OR ` + isBehind + `)),
	gone AS (DELETE FROM {queue} q USING these t WHERE q.id = t.id AND ` + fenced + ` RETURNING q.id, q.shard)
	INSERT INTO {wait} (id, hold, shard, due, key_hash, aggregate_type, aggregate_id)
		SELECT o.id, $4::smallint, g.shard, CASE WHEN $4::smallint = 1 THEN coalesce(o.available_at, '-infinity') END,
			{hash o}, o.aggregate_type, o.aggregate_id
		FROM gone g JOIN {outbox} o ON o.id = g.id
		ON CONFLICT (id) DO UPDATE SET hold = excluded.hold, due = excluded.due`

// Values of the column hold: why a pending row is not in the queue.
const (
	holdLater  = 1 // scheduled: until due, holds nobody
	holdRetry  = 2 // waits until due, and its key waits with it; or dead, its key frozen
	holdBehind = 3 // behind an earlier row of its key
)

// doubted is the last error of a row that may have been sent, and leaves its claim.
// isInDoubt says that of a row.
const (
	doubted = `CASE WHEN ` + isInDoubt + ` THEN last_error
		ELSE '` + outbox.OutcomeUnknown + `' || coalesce(': ' || last_error, '') END`
	isInDoubt = `coalesce(starts_with(last_error, '` + outbox.OutcomeUnknown + `'), false)`
)

// putToSleep moves what may not go yet out of the queue.
func (s *Store) putToSleep(ctx context.Context, l jetbox.Lease, shards []int16, c *claimed) (moved bool, err error) {
	if len(c.later)+len(c.behind)+len(c.stale) == 0 {
		return false, nil
	}
	b := newUnsyncedBatch() // what is awake after a crash is put to sleep again
	s.fence(b, l)
	if len(c.sent) > 0 {
		// With this they leave their claims: the next to claim them must not
		// take them for rows that were never sent.
		b.Queue(s.sql(`UPDATE {outbox} SET last_error = `+doubted+`
			WHERE id = ANY($3::bigint[]) AND status = 'PENDING' AND `+fenced), l.Owner, l.Epoch, c.sent)
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

// firstIDs is a query for the first ids of the queue, $3 at most, of all shards or of
// those in $4.
func firstIDs(shards []int16) string {
	if shards == nil {
		return `SELECT id FROM {queue} ORDER BY id LIMIT $3`
	}
	return `SELECT q.id FROM unnest($4::smallint[]) AS m (shard)
		CROSS JOIN LATERAL (SELECT id FROM {queue} WHERE shard = m.shard ORDER BY id LIMIT $3) q ORDER BY q.id LIMIT $3`
}

func firstArgs(l jetbox.Lease, n int, shards []int16) []any {
	args := []any{l.Owner, l.Epoch, n}
	if shards != nil {
		args = append(args, shards)
	}
	return args
}

// dropGone removes from the queue what has no pending row any more, deleted or marked
// by hand, as far as a claim beside so many rows in hand looks.
func (s *Store) dropGone(ctx context.Context, l jetbox.Lease, shards []int16, hand int) (moved bool, err error) {
	b := newUnsyncedBatch()
	s.fence(b, l)
	b.Queue(s.sql(`DELETE FROM {queue} q USING (`+firstIDs(shards)+`) f
		WHERE q.id = f.id AND `+fenced+` AND NOT EXISTS (SELECT FROM {outbox} o WHERE o.id = f.id AND o.status = 'PENDING')`),
		firstArgs(l, hand+sleepBatch, shards)...).Exec(func(tag pgconn.CommandTag) error {
		moved = tag.RowsAffected() > 0
		s.left(int(tag.RowsAffected()))
		return nil
	})
	err = s.send(ctx, b)
	return moved, err
}

// queueMoreSleep puts more rows to sleep without reading them, for a claim that
// has found only such: a hundred thousand rows behind one key must not take a
// transaction for each few. The first rows of the queue are looked at; a row
// that the statement itself puts behind its key is behind one that was there
// before, so it makes no difference whether the others see it.
func (s *Store) queueMoreSleep(b *batch, l jetbox.Lease, shards []int16) {
	b.Queue(s.sql(`WITH behind AS (SELECT o.id FROM (`+firstIDs(shards)+`) f JOIN {outbox} o ON o.id = f.id WHERE `+isBehind+`),
			gone AS (DELETE FROM {queue} q USING behind b WHERE q.id = b.id AND `+fenced+` RETURNING q.id, q.shard),
			sent AS (UPDATE {outbox} SET last_error = `+doubted+` WHERE status = 'PENDING' AND id IN (
				SELECT g.id FROM gone g WHERE EXISTS (SELECT FROM {claim} c WHERE g.id BETWEEN c.first AND c.last AND g.shard = ANY (c.shards))))
		INSERT INTO {wait} (id, hold, shard, key_hash, aggregate_type, aggregate_id)
			SELECT o.id, 3, g.shard, {hash o}, o.aggregate_type, o.aggregate_id FROM gone g JOIN {outbox} o ON o.id = g.id
			ON CONFLICT DO NOTHING`), firstArgs(l, sleepBatch, shards)...).Exec(func(tag pgconn.CommandTag) error {
		s.left(int(tag.RowsAffected()))
		return nil
	})
}
