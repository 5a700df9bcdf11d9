package sqlite

import (
	"context"
	"database/sql"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// sweepEvery is how often a claim looks for stranded rows.
const sweepEvery = time.Minute

// sweep wakes rows that wait behind nothing. Settling a row wakes the next of its
// key, but a row that somebody deletes or marks by hand, in plain SQL, is never
// settled, and those behind it would wait for ever. To wake one too early is
// harmless: the claim that meets it finds out what it waits for.
func (s *Store) sweep(ctx context.Context, l jetbox.Lease) error {
	s.mu.Lock()
	due := time.Since(s.swept) >= sweepEvery
	if due {
		s.swept = time.Now()
	}
	s.mu.Unlock()
	if !due {
		return nil
	}
	// Read without the write lock, which a long scan would keep from others.
	ids, err := s.stranded(ctx)
	if err != nil || len(ids) == 0 {
		return err
	}
	list, err := jsonIDs(ids)
	if err != nil {
		return err
	}
	return s.fenced(ctx, l, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, s.sql(`UPDATE "{t}" SET hold = 0 WHERE id IN (SELECT value FROM json_each(?))
			AND (hold = 3 OR (hold = 2 AND status = 'PUBLISHED'))`), list)
		return err
	})
}

// stranded returns rows that hold their key although they are published, and else
// the first waiting row of each key that nothing holds.
func (s *Store) stranded(ctx context.Context) ([]int64, error) {
	rows, err := s.db.QueryContext(ctx, s.sql(`
		SELECT id FROM "{t}" INDEXED BY "{t}_retry" WHERE hold = 2 AND status = 'PUBLISHED'
		UNION ALL
		SELECT o.id FROM (
			SELECT min(id) AS id, aggregate_id, coalesce(aggregate_type, '') AS aggregate_type
			FROM "{t}" INDEXED BY "{t}_behind" WHERE hold = 3 GROUP BY 2, 3
		) o WHERE NOT EXISTS (SELECT 1 FROM "{t}" p INDEXED BY "{t}_retry" WHERE p.hold = 2 AND `+sameKey+` AND p.id < o.id)`))
	if err != nil {
		return nil, noTables(err)
	}
	return readIDs(rows)
}
