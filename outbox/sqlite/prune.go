package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// pruneScan is how many rows one step of a prune looks at.
const pruneScan = 1000

// Prune removes published rows that were recorded before the given time, or moves
// them to the archive, in small transactions with pauses for other writers. It
// returns how many. Rows in any other state stay, however old.
func (s *Store) Prune(ctx context.Context, l jetbox.Lease, before time.Time, archive bool) (pruned int, err error) {
	for after := int64(-1 << 63); ; {
		ids, last, err := s.prunable(ctx, after, before)
		if err != nil {
			return pruned, fmt.Errorf("prune outbox %q: %w", s.table, err)
		}
		for len(ids) > 0 {
			n := min(recordBatch, len(ids))
			err := s.fenced(ctx, l, func(tx *sql.Tx) error { return s.remove(ctx, tx, ids[:n], archive) })
			if err != nil {
				return pruned, fmt.Errorf("prune outbox %q: %w", s.table, err)
			}
			pruned += n
			ids = ids[n:]
			if err := sleep(ctx, pause); err != nil {
				return pruned, err
			}
		}
		if last == 0 {
			return pruned, nil
		}
		after = last
	}
}

// prunable looks at the rows after an id. last is where it stopped, 0 at the end
// of what can be pruned: rows are published in about the order of their ids, so
// the first one too young ends the sweep. No index over published rows is needed
// for it, which every record would have to keep up.
func (s *Store) prunable(ctx context.Context, after int64, before time.Time) (ids []int64, last int64, err error) {
	rows, err := s.db.QueryContext(ctx, s.sql(`SELECT id, status, coalesce(published_at, 0) FROM "{t}"
		WHERE id > ? ORDER BY id LIMIT ?`), after, pruneScan)
	if err != nil {
		return nil, 0, noTables(err)
	}
	defer rows.Close()
	n := 0
	for rows.Next() {
		var (
			id, at int64
			status string
		)
		if err := rows.Scan(&id, &status, &at); err != nil {
			return nil, 0, err
		}
		n++
		last = id
		if status != string(jetbox.Published) {
			continue
		}
		if at >= before.UnixMilli() {
			return ids, 0, nil
		}
		ids = append(ids, id)
	}
	if n < pruneScan {
		last = 0
	}
	return ids, last, rows.Err()
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
