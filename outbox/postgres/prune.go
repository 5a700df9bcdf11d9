package postgres

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-5e04d8fb/jetbox"
)

const (
	// pruneScan is how many rows one step of a prune looks at.
	pruneScan = 1000

	// pruneLook is how many steps a prune goes on, beyond the first rows that
	// are too young, without finding anything.
	pruneLook = 10

	// prunePause is the pause between two steps, for everybody else.
	prunePause = 5 * time.Millisecond
)

// Prune removes published rows that were recorded before the given time, or moves
// them to the archive, in small steps with pauses. It returns how many. Rows in
// any other state stay, however old. Of several relays only the one with the
// first shard prunes.
//
// Rows are published in about the order of their ids, so a sweep ends where none
// may go any more, and no index over published rows is needed, which every
// record would have to keep up. But a row that was scheduled, or had to wait, is
// published after many with higher ids. So each call also looks at some thousand
// rows further on, from where the call before it stopped: in a table of any size
// every row gets its turn. So does a pending row that the queue does not know,
// because its trigger was disabled when it came.
func (s *Store) Prune(ctx context.Context, l jetbox.Lease, before time.Time, archive bool) (pruned int, err error) {
	p := pruning{Store: s, lease: l, archive: archive}
	front := int64(end)
	if p.before, err = s.byServer(ctx, before); err == nil {
		front, err = p.sweep(ctx, math.MinInt64, 1)
	}
	if err == nil && front != end {
		s.mu.Lock()
		from := max(front, s.pruned)
		s.mu.Unlock()
		from, err = p.sweep(ctx, from, pruneLook)
		s.mu.Lock()
		s.pruned = from
		s.mu.Unlock()
	}
	if err != nil {
		return p.n, fmt.Errorf("prune outbox %q: %w", s.cfg.Table, err)
	}
	return p.n, nil
}

// byServer turns a time of this process's clock into one of the server's, which
// is rather too early than too late.
func (s *Store) byServer(ctx context.Context, t time.Time) (at time.Time, err error) {
	err = s.do(ctx, func(ctx context.Context) error {
		if err := s.pool.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&at); err != nil {
			return err
		}
		at = at.Add(-time.Since(t))
		return nil
	})
	return at, err
}

// end is the position after the last row.
const end = math.MinInt64

// pruning is one call of Prune.
type pruning struct {
	*Store
	lease   jetbox.Lease
	before  time.Time
	archive bool
	n       int // rows removed
}

// sweep removes what it may from the rows after an id, until so many steps had
// nothing to remove. It returns where it stopped.
func (p *pruning) sweep(ctx context.Context, after int64, patience int) (stopped int64, err error) {
	for patience > 0 {
		step, err := p.step(ctx, after)
		if err != nil {
			return after, err
		}
		p.n += step.removed
		if step.removed == 0 {
			patience--
		}
		if step.rows < pruneScan {
			return end, nil
		}
		after = step.last
		if err := sleep(ctx, prunePause); err != nil {
			return after, err
		}
	}
	return after, nil
}

// pruneStep is what one step did.
type pruneStep struct {
	rows, removed int
	last          int64
}

// pruneSQL looks at the next rows of the table.
const pruneSQL = `WITH page AS MATERIALIZED (
		SELECT id, status, published_at < $4 AS old
		FROM {outbox} WHERE id > $3 AND ` + fenced + ` AND EXISTS (
			SELECT FROM {shard} WHERE owner = $1 AND shard = 0)
		ORDER BY id LIMIT $5),
	found AS (
		INSERT INTO {queue} (id, shard)
		SELECT o.id, {fn_shard}(o.aggregate_type, o.aggregate_id, o.id) FROM page p JOIN {outbox} o USING (id)
		WHERE p.status = 'PENDING' AND NOT EXISTS (SELECT FROM {queue} q WHERE q.id = p.id) AND NOT EXISTS (SELECT FROM {wait} w WHERE w.id = p.id)
			AND o.status = 'PENDING'
		ON CONFLICT DO NOTHING),
	removed AS (
		DELETE FROM {outbox} o USING page p WHERE o.id = p.id AND p.status = 'PUBLISHED' AND p.old AND o.status = 'PUBLISHED'
		RETURNING o.*)`

func (p *pruning) step(ctx context.Context, after int64) (step pruneStep, err error) {
	query := pruneSQL
	if p.archive {
		query += `, archived AS (INSERT INTO {archive} (` + columns + `, archived_at) SELECT ` + columns + `, clock_timestamp() FROM removed
			ON CONFLICT (id) DO UPDATE SET (` + columns + `, archived_at) = ROW(excluded.*))`
	}
	query += ` SELECT count(*), (SELECT count(*) FROM removed), coalesce(max(id), 0) FROM page`
	b := newBatch()
	p.fence(b, p.lease)
	b.Queue(p.sql(query), p.lease.Owner, p.lease.Epoch, after, p.before, pruneScan).
		QueryRow(func(row pgx.Row) error { return row.Scan(&step.rows, &step.removed, &step.last) })
	return step, p.send(ctx, b)
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
