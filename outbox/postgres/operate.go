package postgres

import (
	"context"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// where turns a filter into conditions on the outbox o and the view of states v,
// and their arguments, which come after n others.
func where(f outbox.Filter, n int) (string, []any) {
	conds := []string{"true"}
	var args []any
	add := func(cond string, arg any) {
		args = append(args, arg)
		conds = append(conds, strings.ReplaceAll(cond, "?", "$"+strconv.Itoa(n+len(args))))
	}
	if f.State != "" {
		add("v.status = ?", string(f.State))
		// Implied by the view's state; says where such rows are found.
		switch f.State {
		case jetbox.Processing:
			conds = append(conds, "o.id IN (SELECT q.id FROM {claim} c JOIN {queue} q ON q.id BETWEEN c.first AND c.last AND q.shard = ANY (c.shards))")
		case jetbox.DeadLetter:
			conds = append(conds, "o.id IN (SELECT id FROM {dead})")
		}
	}
	if len(f.IDs) > 0 {
		add("o.id = ANY(?::bigint[])", f.IDs)
	}
	if f.Subject != "" {
		add("o.subject = ?", f.Subject)
	}
	if f.Reason != "" {
		add("strpos(coalesce(o.last_error, ''), ?) > 0", f.Reason)
	}
	return strings.Join(conds, " AND "), args
}

// List returns the rows a filter chooses, lowest id first. It reads them in
// pages: no snapshot of the database is held while the caller works on one.
func (s *Store) List(ctx context.Context, f outbox.Filter) iter.Seq2[outbox.Entry, error] {
	return func(yield func(outbox.Entry, error) bool) {
		const page = 200
		left := f.Limit
		for after := int64(-1 << 63); ; {
			n := page
			if f.Limit > 0 {
				n = min(n, left)
			}
			entries, err := s.page(ctx, f, after, n)
			if err != nil {
				yield(outbox.Entry{}, fmt.Errorf("list outbox %q: %w", s.cfg.Table, err))
				return
			}
			for _, e := range entries {
				if !yield(e, nil) {
					return
				}
				after = e.ID
			}
			left -= len(entries)
			if len(entries) < n || (f.Limit > 0 && left == 0) {
				return
			}
		}
	}
}

func (s *Store) page(ctx context.Context, f outbox.Filter, after int64, n int) (entries []outbox.Entry, err error) {
	cond, args := where(f, 2)
	err = s.do(ctx, func(ctx context.Context) error {
		rows, err := s.pool.Query(ctx, s.sql(`SELECT `+entryColumns+` FROM {outbox} o JOIN {status} v USING (id)
			WHERE o.id > $1 AND `+cond+` ORDER BY o.id LIMIT $2`), append([]any{after, n}, args...)...)
		if err != nil {
			return err
		}
		entries, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (outbox.Entry, error) {
			var r record
			err := row.Scan(r.entryFields()...)
			return r.entry(), err
		})
		return err
	})
	return entries, err
}

// Show returns one row, or outbox.ErrNotFound.
func (s *Store) Show(ctx context.Context, id int64) (outbox.Entry, error) {
	for e, err := range s.List(ctx, outbox.Filter{IDs: []int64{id}}) {
		return e, err
	}
	return outbox.Entry{}, fmt.Errorf("row %d of outbox %q: %w", id, s.cfg.Table, outbox.ErrNotFound)
}

// Retry makes dead rows pending again, with no attempts and the same key, and
// returns how many. A filter without a state means dead rows; IDs that name a
// row in another state are outbox.ErrIllegalState, and then nothing is changed.
func (s *Store) Retry(ctx context.Context, f outbox.Filter) (retried int, err error) {
	return s.changeDead(ctx, "retry", f, func(b *batch, ids []int64) {
		// The trigger of such an update puts them into the queue.
		b.Queue(s.sql(`WITH copies AS (DELETE FROM {dead} WHERE id = ANY($1::bigint[]))
			UPDATE {outbox} SET status = 'PENDING', attempts = 0, available_at = NULL,
				last_error = CASE WHEN `+isInDoubt+` THEN '`+outbox.OutcomeUnknown+`' END
			WHERE id = ANY($1::bigint[]) AND status = 'DEAD_LETTER'`), ids)
	})
}

// Discard deletes dead rows and their copies, and returns how many. A key that
// was frozen for one goes on. The filter is as for Retry.
func (s *Store) Discard(ctx context.Context, f outbox.Filter) (discarded int, err error) {
	return s.changeDead(ctx, "discard", f, func(b *batch, ids []int64) {
		b.Queue(s.sql(`WITH gone AS (SELECT NULL::bigint AS id WHERE false),
			copies AS (DELETE FROM {dead} WHERE id = ANY($1::bigint[])),
			settled AS (
				DELETE FROM {outbox} WHERE id = ANY($1::bigint[]) AND status = 'DEAD_LETTER'
				RETURNING id, aggregate_type, aggregate_id)`+wakeKeysSQL), ids)
	})
}

// operateTimeout bounds what an operator does in one transaction.
const operateTimeout = 5 * time.Minute

func (s *Store) changeDead(ctx context.Context, verb string, f outbox.Filter, change func(b *batch, ids []int64)) (n int, err error) {
	if f.State == "" {
		f.State = jetbox.DeadLetter
	}
	err = s.inTx(ctx, operateTimeout, func(ctx context.Context, tx pgx.Tx) error {
		if f.State != jetbox.DeadLetter {
			return fmt.Errorf("%w: only %s rows can be changed, not %s", outbox.ErrIllegalState, jetbox.DeadLetter, f.State)
		}
		if err := s.allDead(ctx, tx, f.IDs); err != nil {
			return err
		}
		ids, err := s.deadIDs(ctx, tx, f)
		if err != nil || len(ids) == 0 {
			return err
		}
		n = len(ids)
		b := new(batch)
		change(b, ids)
		return tx.SendBatch(ctx, &b.Batch).Close()
	})
	if err != nil {
		return 0, fmt.Errorf("%s rows of outbox %q: %w", verb, s.cfg.Table, err)
	}
	return n, nil
}

// allDead checks that rows named by their ids are there and dead.
func (s *Store) allDead(ctx context.Context, tx pgx.Tx, ids []int64) error {
	if len(ids) == 0 {
		return nil
	}
	var (
		id     int64
		status *string
	)
	err := tx.QueryRow(ctx, s.sql(`SELECT u.id, o.status FROM unnest($1::bigint[]) WITH ORDINALITY AS u (id, n)
		LEFT JOIN {outbox} o ON o.id = u.id WHERE o.status IS DISTINCT FROM 'DEAD_LETTER' ORDER BY u.n LIMIT 1`), ids).Scan(&id, &status)
	switch {
	case err == pgx.ErrNoRows: //nolint:errorlint // Scan returns it bare
		return nil
	case err != nil:
		return err
	case status == nil:
		return fmt.Errorf("row %d: %w", id, outbox.ErrNotFound)
	}
	return fmt.Errorf("row %d is %s, not %s: %w", id, *status, jetbox.DeadLetter, outbox.ErrIllegalState)
}

// deadIDs chooses the rows and locks them, so that another operator waits.
func (s *Store) deadIDs(ctx context.Context, tx pgx.Tx, f outbox.Filter) ([]int64, error) {
	cond, args := where(f, 0)
	limit := ""
	if f.Limit > 0 {
		limit = " LIMIT " + strconv.Itoa(f.Limit)
	}
	rows, err := tx.Query(ctx, s.sql(`SELECT o.id FROM {outbox} o JOIN {status} v USING (id)
		WHERE `+cond+` AND o.status = 'DEAD_LETTER' ORDER BY o.id`+limit+` FOR NO KEY UPDATE OF o`), args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[int64])
}
