package postgres

import (
	"context"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// sweepEvery is how often a claim looks for stranded rows.
const sweepEvery = time.Minute

const (
	// dropSQL removes what holds its key for nothing: a waiting row that is no
	// longer pending, nor dead, because somebody has marked or deleted it.
	dropSQL = `DELETE FROM {wait} w WHERE w.hold = 2 AND ` + fenced + ` AND NOT EXISTS (
		SELECT FROM {outbox} o WHERE o.id = w.id AND o.status IN ('PENDING', 'DEAD_LETTER'))`

	// strandedSQL wakes the first waiting row of each key that nothing holds.
	strandedSQL = `WITH woken AS (
			DELETE FROM {wait} o USING (
				SELECT min(id) AS id FROM {wait} WHERE hold = 3 GROUP BY key_hash, aggregate_id, coalesce(aggregate_type, '')) f
			WHERE o.id = f.id AND ` + fenced + ` AND NOT EXISTS (
				SELECT FROM {wait} p WHERE p.hold IN (2, 3) AND p.hold + 0 = 2 AND {p has the key of o} AND p.id < o.id)
			RETURNING o.id, o.shard)
		INSERT INTO {queue} (id, shard) SELECT id, shard FROM woken ON CONFLICT DO NOTHING`
)

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
	var waiting bool
	err := s.do(ctx, func(ctx context.Context) error {
		return s.pool.QueryRow(ctx, s.sql(`SELECT EXISTS (SELECT FROM {wait} WHERE hold = 2) OR EXISTS (SELECT FROM {wait} WHERE hold = 3)`)).Scan(&waiting)
	})
	if err != nil || !waiting {
		return err
	}
	b := newBatch()
	s.fence(b, l)
	b.Queue(s.sql(dropSQL), l.Owner, l.Epoch)
	b.Queue(s.sql(strandedSQL), l.Owner, l.Epoch)
	return s.send(ctx, b)
}
