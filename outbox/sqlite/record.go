package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

const (
	// recordBatch is how many outcomes one transaction records while other
	// connections write: with pause between two transactions it keeps the
	// writers' wait at the 99th percentile near 5 ms, because SQLite's write
	// lock is unfair and only a pause lets a waiting writer in.
	recordBatch = 300
	pause       = 2 * time.Millisecond

	// aloneBatch is the same for a file nobody else writes: then there is no
	// pause either.
	aloneBatch = 2000

	// After so many pages in the WAL file a commit of the relay's copies them to the
	// database file. Where others write it does so before theirs would: by default
	// they do at 1000, and a writer should not wait for what the relay has written.
	crowdedPages = 400
	alonePages   = 4000
)

// Record writes what became of claimed rows, in transactions that leave other
// writers room, and shrinks the claims to what is unresolved. Only rows
// that are still pending change, so repeating it is harmless. No row is touched
// that no outcome names.
func (s *Store) Record(ctx context.Context, l jetbox.Lease, outcomes []jetbox.Outcome) error {
	outcomes, unsent := outbox.SplitUnsent(outcomes)
	for first := true; first || len(outcomes) > 0; first = false {
		n := min(s.batch(ctx), len(outcomes))
		if n == 0 && len(unsent) == 0 {
			return nil
		}
		var back []int64 // with the last of them: a claim has two ends
		if n == len(outcomes) {
			back = unsent
		}
		err := s.fenced(ctx, l, func(tx *sql.Tx) error { return s.record(ctx, tx, outcomes[:n], back) })
		if err != nil {
			return fmt.Errorf("record outcomes in outbox %q: %w", s.table, err)
		}
		outcomes = outcomes[n:]
	}
	return nil
}

// batch sizes the transactions by whether others write to the file.
func (s *Store) batch(ctx context.Context) (size int) {
	if _, err := s.changed(ctx); err != nil || !s.alone() {
		return recordBatch
	}
	return aloneBatch
}

// alone reports that no other connection has written to the file lately.
func (s *Store) alone() (alone bool) {
	const lately = time.Second
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.activeAt) > lately
}

// leaveRoom waits until other writers have had their pause after the relay's last
// transaction, whatever kind it was.
func (s *Store) leaveRoom(ctx context.Context) error {
	alone := s.alone()
	if err := s.setCheckpoint(ctx, alone); err != nil || alone {
		return err
	}
	s.mu.Lock()
	left := pause - time.Since(s.wroteAt)
	s.mu.Unlock()
	if left <= 0 {
		return nil
	}
	return sleep(ctx, left)
}

// setCheckpoint sees to it that the relay's connection copies the WAL file in time.
func (s *Store) setCheckpoint(ctx context.Context, alone bool) error {
	pages := crowdedPages
	if alone {
		pages = alonePages
	}
	s.mu.Lock()
	same := s.checkpoint == pages
	s.checkpoint = pages
	s.mu.Unlock()
	if same {
		return nil
	}
	_, err := s.relay.ExecContext(ctx, fmt.Sprintf("PRAGMA wal_autocheckpoint = %d", pages))
	return err
}

// wrote notes the end of a transaction of the relay's.
func (s *Store) wrote() {
	s.mu.Lock()
	s.wroteAt = time.Now()
	s.mu.Unlock()
}

func (s *Store) record(ctx context.Context, tx *sql.Tx, outcomes []jetbox.Outcome, unsent []int64) error {
	now := time.Now().UnixMilli()
	// Per row, without a context: the driver would start a goroutine for each to
	// wait for its end. The transaction's own context still ends all of this.
	bg := context.WithoutCancel(ctx)
	if err := s.recordPublished(bg, tx, outcomes, now); err != nil {
		return err
	}
	if err := s.recordAnchors(bg, tx, outcomes, now); err != nil {
		return err
	}
	for _, o := range outcomes {
		var err error
		switch o.State {
		case jetbox.Published:
		case jetbox.Pending:
			err = s.recordRetry(bg, tx, o, now)
		case jetbox.DeadLetter:
			err = s.recordDead(bg, tx, o, now)
		default:
			err = fmt.Errorf("outcome of row %d: state %q is not one a publish ends in", o.Pos, o.State)
		}
		if err != nil {
			return err
		}
	}
	var behind bool // whether any key waits at all: most outboxes have none
	if err := tx.QueryRowContext(ctx, s.sql(`SELECT EXISTS (SELECT 1 FROM "{t}" INDEXED BY "{t}_behind" WHERE hold = 3)`)).
		Scan(&behind); err != nil {
		return err
	}
	gone := make(map[jetbox.Removal][]int64)
	for _, o := range outcomes {
		if o.State == jetbox.Pending || o.Freeze {
			continue
		}
		if behind {
			if err := s.wakeKey(bg, tx, o.Pos); err != nil {
				return err
			}
		}
		if o.State == jetbox.Published && o.Remove != jetbox.Keep {
			gone[o.Remove] = append(gone[o.Remove], o.Pos)
		}
	}
	for how, ids := range gone {
		if err := s.remove(bg, tx, ids, how == jetbox.Archive); err != nil {
			return err
		}
	}
	return s.shrinkClaims(ctx, tx, unsent)
}

// recordPublished marks runs of rows: consecutive ids, each of them acknowledged,
// under consecutive sequences of one stream. That is what a drain without keys
// makes, and half the cost of a statement per row. It is no range that could
// cover a row nobody named.
func (s *Store) recordPublished(ctx context.Context, tx *sql.Tx, outcomes []jetbox.Outcome, now int64) error {
	stmt, err := tx.PrepareContext(ctx, s.sql(`UPDATE "{t}" SET status = 'PUBLISHED', published_at = ?1, stream = ?2,
		stream_seq = ?3 + (id - ?4), last_error = NULL, hold = 0 WHERE id BETWEEN ?4 AND ?5 AND status = 'PENDING'`))
	if err != nil {
		return err
	}
	defer stmt.Close()
	for i := 0; i < len(outcomes); {
		first := outcomes[i]
		n := 1
		if first.State == jetbox.Published {
			for i+n < len(outcomes) && follows(first, outcomes[i+n], n) {
				n++
			}
			to := first.Pos + int64(n) - 1
			if _, err := stmt.ExecContext(ctx, now, null(first.Stream), nullSeq(first.StreamSeq), first.Pos, to); err != nil {
				return err
			}
		}
		i += n
	}
	return nil
}

// follows reports that o is n places after first in a run.
func follows(first, o jetbox.Outcome, n int) (follows bool) {
	return o.State == jetbox.Published && o.Stream == first.Stream && first.StreamSeq != 0 &&
		o.Pos == first.Pos+int64(n) && o.StreamSeq == first.StreamSeq+uint64(n)
}

func (s *Store) recordRetry(ctx context.Context, tx *sql.Tx, o jetbox.Outcome, now int64) error {
	attempted := 0
	if o.Attempted {
		attempted = 1
	}
	_, err := tx.ExecContext(ctx, s.sql(`UPDATE "{t}" SET attempts = attempts + ?, last_error = ?, available_at = ?,
		hold = 2 WHERE id = ? AND status = 'PENDING'`), attempted, outbox.LastError(o), now+o.Delay.Milliseconds(), o.Pos)
	return err
}

func (s *Store) recordDead(ctx context.Context, tx *sql.Tx, o jetbox.Outcome, now int64) error {
	attempted, hold := 0, holdNone
	if o.Attempted {
		attempted = 1
	}
	if o.Freeze {
		hold = holdRetry
	}
	res, err := tx.ExecContext(ctx, s.sql(`UPDATE "{t}" SET status = 'DEAD_LETTER', attempts = attempts + ?,
		last_error = ?, hold = ? WHERE id = ? AND status = 'PENDING'`), attempted, outbox.LastError(o), hold, o.Pos)
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return err
	}
	_, err = tx.ExecContext(ctx, s.sql(`INSERT OR REPLACE INTO "{t}_dead_letter" ({columns}, dead_at)
		SELECT {columns}, ? FROM "{t}" WHERE id = ?`), now, o.Pos)
	return err
}

// wakeKey wakes the next rows behind a row that no longer holds its key. Only
// some: each of them, when it is settled, wakes the next, so that a key with a
// hundred thousand rows behind it comes back without one long transaction.
func (s *Store) wakeKey(ctx context.Context, tx *sql.Tx, id int64) error {
	_, err := tx.ExecContext(ctx, s.sql(`UPDATE "{t}" SET hold = 0 WHERE id IN (
		SELECT b.id FROM "{t}" o CROSS JOIN "{t}" b INDEXED BY "{t}_behind"
		WHERE o.id = ?1 AND b.hold = 3 AND b.aggregate_id = o.aggregate_id
			AND coalesce(b.aggregate_type, '') = coalesce(o.aggregate_type, '')
			AND NOT EXISTS (SELECT 1 FROM "{t}" p INDEXED BY "{t}_retry" WHERE p.hold = 2
				AND p.aggregate_id = b.aggregate_id AND coalesce(p.aggregate_type, '') = coalesce(b.aggregate_type, '')
				AND p.id < b.id)
		ORDER BY b.id LIMIT ?2)`), id, wakeBatch)
	return err
}

// shrinkClaims cuts the claims down to rows that are still unresolved, without those
// that were not sent.
func (s *Store) shrinkClaims(ctx context.Context, tx *sql.Tx, unsent []int64) error {
	list, err := jsonIDs(append([]int64{}, unsent...))
	if err != nil {
		return err
	}
	const rest = `FROM "{t}" INDEXED BY "{t}_ready" WHERE status = 'PENDING' AND hold = 0
		AND id BETWEEN c.first AND c.last AND id NOT IN (SELECT value FROM json_each(?1))`
	_, err = tx.ExecContext(ctx, s.sql(`DELETE FROM "{t}_claim" AS c WHERE NOT EXISTS (SELECT 1 `+rest+`)`), list)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, s.sql(`UPDATE "{t}_claim" AS c SET first = (SELECT min(id) `+rest+`), last = (SELECT max(id) `+rest+`)`), list)
	return err
}

func nullSeq(seq uint64) any {
	if seq == 0 {
		return nil
	}
	return int64(seq)
}
