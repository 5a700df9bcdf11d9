package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

const (
	// pruneScan is how many rows one step of a prune looks at.
	pruneScan = 1000

	// pruneLook is how many steps a prune goes on, beyond the first rows that
	// are too young, without finding anything.
	pruneLook = 10
)

// Prune removes published rows that were recorded before the given time, or moves
// them to the archive, in small transactions with pauses for other writers. It
// returns how many. Rows in any other state stay, however old.
//
// Rows are published in about the order of their ids, so a sweep ends where they
// begin to be too young, and no index over published rows is needed, which every
// record would have to keep up. But a row that was scheduled, or had to wait, is
// published after many with higher ids. So each call also looks at some thousand
// rows further on, from where the call before it stopped: in a table of any size
// every row gets its turn.
func (s *Store) Prune(ctx context.Context, l jetbox.Lease, before time.Time, archive bool) (pruned int, err error) {
	p := pruning{Store: s, lease: l, before: before.UnixMilli(), archive: archive}
	front, err := p.sweep(ctx, math.MinInt64, 1)
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
		return p.n, fmt.Errorf("prune outbox %q: %w", s.table, err)
	}
	return p.n, nil
}

// end is the position after the last row.
const end = math.MinInt64

// pruning is one call of Prune.
type pruning struct {
	*Store
	lease   jetbox.Lease
	before  int64
	archive bool
	n       int // rows removed
}

// sweep removes what it may from the rows after an id, until it has met young
// rows in so many steps that had nothing to remove. It returns where it stopped.
func (p *pruning) sweep(ctx context.Context, after int64, patience int) (stopped int64, err error) {
	for patience > 0 {
		step, err := p.look(ctx, after)
		if err != nil {
			return after, err
		}
		if len(step.ids) > 0 {
			if err := p.removeAll(ctx, step.ids); err != nil {
				return after, err
			}
		} else if step.young {
			patience--
		}
		if step.rows < pruneScan {
			return end, nil
		}
		after = step.last
	}
	return after, nil
}

func (p *pruning) removeAll(ctx context.Context, ids []int64) error {
	for len(ids) > 0 {
		n := min(recordBatch, len(ids))
		err := p.fenced(ctx, p.lease, func(tx *sql.Tx) error { return p.remove(ctx, tx, ids[:n], p.archive) })
		if err != nil {
			return err
		}
		p.n += n
		ids = ids[n:]
		if err := sleep(ctx, pause); err != nil {
			return err
		}
	}
	return nil
}

// pruneStep is what one look at the rows after an id has found.
type pruneStep struct {
	ids   []int64 // may go
	young bool    // some were published too lately
	rows  int
	last  int64
}

func (p *pruning) look(ctx context.Context, after int64) (step pruneStep, err error) {
	rows, err := p.db.QueryContext(ctx, p.sql(`SELECT id, status, coalesce(published_at, 0) FROM "{t}"
		WHERE id > ? ORDER BY id LIMIT ?`), after, pruneScan)
	if err != nil {
		return pruneStep{}, noTables(err)
	}
	defer rows.Close()
	for rows.Next() {
		var (
			at     int64
			status string
		)
		if err := rows.Scan(&step.last, &status, &at); err != nil {
			return pruneStep{}, err
		}
		step.rows++
		switch {
		case status != string(jetbox.Published):
		case at < p.before:
			step.ids = append(step.ids, step.last)
		default:
			step.young = true
		}
	}
	return step, rows.Err()
}

func (s *Store) remove(ctx context.Context, tx *sql.Tx, ids []int64, archive bool) error {
	list, err := jsonIDs(ids)
	if err != nil {
		return err
	}
	if archive {
		_, err := tx.ExecContext(ctx, s.sql(`INSERT OR REPLACE INTO "{t}_archive" ({columns}, archived_at)
			SELECT {columns}, ? FROM "{t}" WHERE status = 'PUBLISHED' AND id IN (SELECT value FROM json_each(?))`),
			time.Now().UnixMilli(), list)
		if err != nil {
			return err
		}
	}
	_, err = tx.ExecContext(ctx, s.sql(`DELETE FROM "{t}"
		WHERE status = 'PUBLISHED' AND id IN (SELECT value FROM json_each(?))`), list)
	return err
}
