package postgres

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// statsSQL: of the rows that are due, the oldest is sought among those of every
// kind: in the queue; waiting although its time has come, since no relay wakes
// it; waiting for a retry; behind its key.
const statsSQL = `SELECT
	(SELECT count(*) FROM {queue}) + (SELECT count(*) FROM {wait} WHERE due IS NOT NULL OR hold = 3),
	(SELECT count(DISTINCT q.id) FROM {claim} c JOIN {queue} q ON q.id BETWEEN c.first AND c.last AND q.shard = ANY (c.shards)),
	least(
		(SELECT o.created_at FROM {queue} q JOIN {outbox} o USING (id) ORDER BY q.id LIMIT 1),
		(SELECT min(o.created_at) FROM {wait} w JOIN {outbox} o USING (id) WHERE w.due <= now()),
		(SELECT min(o.created_at) FROM {wait} w JOIN {outbox} o USING (id) WHERE w.hold = 2 AND w.due IS NOT NULL),
		(SELECT o.created_at FROM {outbox} o WHERE o.id = (SELECT min(id) FROM {wait} WHERE hold = 3))),
	(SELECT count(*) FROM {dead}),
	pg_total_relation_size('{outbox}') + pg_total_relation_size('{queue}') + pg_total_relation_size('{wait}')`

// Stats reads the state of the outbox from the database.
func (s *Store) Stats(ctx context.Context) (outbox.Stats, error) {
	var (
		st     outbox.Stats
		oldest *time.Time
		r      roll
	)
	b := new(batch)
	b.Queue(s.sql(statsSQL)).QueryRow(func(row pgx.Row) error {
		return row.Scan(&st.Pending, &st.Claimed, &oldest, &st.DeadLetter, &st.TableBytes)
	})
	s.queueRoll(b, &r, "")
	if err := s.send(ctx, b); err != nil {
		return outbox.Stats{}, fmt.Errorf("read state of outbox %q: %w", s.cfg.Table, err)
	}
	if oldest != nil {
		st.OldestPending = oldest.UTC()
	}
	st.Shards = r.all
	for _, l := range r.leases {
		l.Shards, l.Expires = len(l.shards), l.Expires.UTC()
		st.Leases = append(st.Leases, l.Lease)
	}
	return st, nil
}
