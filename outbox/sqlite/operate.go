package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

func jsonIDs(ids []int64) (string, error) {
	b, err := json.Marshal(ids)
	return string(b), err
}

// where turns a filter into conditions on the view of states, joined as v, and
// their arguments.
func where(f outbox.Filter) (string, []any, error) {
	conds := []string{"1"}
	var args []any
	add := func(cond string, arg any) {
		conds = append(conds, cond)
		args = append(args, arg)
	}
	if f.State != "" {
		add("v.status = ?", string(f.State))
		// Implied by the view's state; says which index serves.
		switch f.State {
		case jetbox.Processing:
			conds = append(conds, "o.status = 'PENDING'")
		case jetbox.DeadLetter:
			conds = append(conds, "o.status = 'DEAD_LETTER'")
		}
	}
	if len(f.IDs) > 0 {
		list, err := jsonIDs(f.IDs)
		if err != nil {
			return "", nil, err
		}
		add("o.id IN (SELECT value FROM json_each(?))", list)
	}
	if f.Subject != "" {
		add("o.subject = ?", f.Subject)
	}
	if f.Reason != "" {
		add("instr(coalesce(o.last_error, ''), ?) > 0", f.Reason)
	}
	return strings.Join(conds, " AND "), args, nil
}

// List returns the rows a filter chooses, lowest id first. It reads them in
// pages: no snapshot of the file is held while the caller works on one.
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
				yield(outbox.Entry{}, fmt.Errorf("list outbox %q: %w", s.table, err))
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

func (s *Store) page(ctx context.Context, f outbox.Filter, after int64, n int) ([]outbox.Entry, error) {
	cond, args, err := where(f)
	if err != nil {
		return nil, err
	}
	cols := "o." + strings.ReplaceAll(strings.Join(strings.Fields(columns), " "), ", ", ", o.")
	rows, err := s.db.QueryContext(ctx, s.sql(`SELECT v.status, `+cols+` FROM "{t}" o JOIN "{t}_status" v ON v.id = o.id
		WHERE `+cond+` AND o.id > ? ORDER BY o.id LIMIT ?`), append(args, after, n)...)
	if err != nil {
		return nil, noTables(err)
	}
	defer rows.Close()
	var entries []outbox.Entry
	for rows.Next() {
		var r record
		var state string
		if err := rows.Scan(append([]any{&state}, r.fields()...)...); err != nil {
			return nil, err
		}
		e := r.entry()
		e.State = jetbox.State(state)
		entries = append(entries, e)
	}
	return entries, rows.Err()
}

// Show returns one row, or outbox.ErrNotFound.
func (s *Store) Show(ctx context.Context, id int64) (outbox.Entry, error) {
	for e, err := range s.List(ctx, outbox.Filter{IDs: []int64{id}}) {
		return e, err
	}
	return outbox.Entry{}, fmt.Errorf("row %d of outbox %q: %w", id, s.table, outbox.ErrNotFound)
}

// Retry makes dead rows pending again, with no attempts and the same key, and
// returns how many. A filter without a state means dead rows; IDs that name a
// row in another state are outbox.ErrIllegalState, and then nothing is changed.
func (s *Store) Retry(ctx context.Context, f outbox.Filter) (retried int, err error) {
	return s.changeDead(ctx, "retry", f, func(tx *sql.Tx, id int64) error {
		if _, err := tx.ExecContext(ctx, s.sql(`UPDATE "{t}" SET status = 'PENDING', attempts = 0,
			last_error = CASE WHEN `+isInDoubt+` THEN '`+outbox.OutcomeUnknown+`' END, available_at = NULL, hold = 0 WHERE id = ? AND status = 'DEAD_LETTER'`), id); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, s.sql(`DELETE FROM "{t}_dead_letter" WHERE id = ?`), id)
		return err
	})
}

// Discard deletes dead rows and their copies, and returns how many. A key that
// was frozen for one goes on. The filter is as for Retry.
func (s *Store) Discard(ctx context.Context, f outbox.Filter) (discarded int, err error) {
	return s.changeDead(ctx, "discard", f, func(tx *sql.Tx, id int64) error {
		if _, err := tx.ExecContext(ctx, s.sql(`UPDATE "{t}" SET hold = 0 WHERE id = ?`), id); err != nil {
			return err
		}
		if err := s.wakeKey(ctx, tx, id); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, s.sql(`DELETE FROM "{t}" WHERE id = ? AND status = 'DEAD_LETTER'`), id); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, s.sql(`DELETE FROM "{t}_dead_letter" WHERE id = ?`), id)
		return err
	})
}

func (s *Store) changeDead(ctx context.Context, verb string, f outbox.Filter, change func(tx *sql.Tx, id int64) error) (int, error) {
	if f.State == "" {
		f.State = jetbox.DeadLetter
	}
	n := 0
	err := inTx(ctx, s.db, func(tx *sql.Tx) error {
		n = 0
		if f.State != jetbox.DeadLetter {
			return fmt.Errorf("%w: only %s rows can be changed, not %s", outbox.ErrIllegalState, jetbox.DeadLetter, f.State)
		}
		if err := s.allDead(ctx, tx, f.IDs); err != nil {
			return err
		}
		ids, err := s.deadIDs(ctx, tx, f)
		if err != nil {
			return err
		}
		for _, id := range ids {
			if err := change(tx, id); err != nil {
				return err
			}
		}
		n = len(ids)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("%s rows of outbox %q: %w", verb, s.table, err)
	}
	return n, nil
}

// allDead checks that rows named by their ids are there and dead.
func (s *Store) allDead(ctx context.Context, tx *sql.Tx, ids []int64) error {
	for _, id := range ids {
		var status string
		err := tx.QueryRowContext(ctx, s.sql(`SELECT status FROM "{t}" WHERE id = ?`), id).Scan(&status)
		switch {
		case err == sql.ErrNoRows: //nolint:errorlint // Scan returns it bare
			return fmt.Errorf("row %d: %w", id, outbox.ErrNotFound)
		case err != nil:
			return noTables(err)
		case status != string(jetbox.DeadLetter):
			return fmt.Errorf("row %d is %s, not %s: %w", id, status, jetbox.DeadLetter, outbox.ErrIllegalState)
		}
	}
	return nil
}

func (s *Store) deadIDs(ctx context.Context, tx *sql.Tx, f outbox.Filter) ([]int64, error) {
	cond, args, err := where(f)
	if err != nil {
		return nil, err
	}
	limit := -1
	if f.Limit > 0 {
		limit = f.Limit
	}
	rows, err := tx.QueryContext(ctx, s.sql(`SELECT o.id FROM "{t}" o JOIN "{t}_status" v ON v.id = o.id
		WHERE `+cond+` ORDER BY o.id LIMIT ?`), append(args, limit)...)
	if err != nil {
		return nil, noTables(err)
	}
	return readIDs(rows)
}

// readIDs reads and closes rows of one id each.
func readIDs(rows *sql.Rows) ([]int64, error) {
	defer rows.Close()
	var ids []int64
	for rows.Next() {
		var id int64
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, rows.Err()
}

// Stats reads the state of the outbox from the file.
func (s *Store) Stats(ctx context.Context) (outbox.Stats, error) {
	var (
		st       = outbox.Stats{Shards: shards}
		lease    = jetbox.Lease{Shards: shards}
		oldest   sql.NullInt64
		owner    sql.NullString
		holder   sql.NullString
		expires  int64
		now      = time.Now().UnixMilli()
		pageSize = `(SELECT page_count * page_size FROM pragma_page_count, pragma_page_size)`
	)
	err := s.db.QueryRowContext(ctx, s.sql(`SELECT
		(SELECT count(*) FROM "{t}" INDEXED BY "{t}_ready" WHERE status = 'PENDING' AND hold = 0) +
			(SELECT count(*) FROM "{t}" INDEXED BY "{t}_due" WHERE status = 'PENDING' AND hold IN (1, 2)) +
			(SELECT count(*) FROM "{t}" INDEXED BY "{t}_behind" WHERE hold = 3),
		(SELECT count(DISTINCT o.id) FROM "{t}_claim" c CROSS JOIN "{t}" o INDEXED BY "{t}_ready"
			WHERE o.status = 'PENDING' AND o.hold = 0 AND o.id BETWEEN c.first AND c.last),
		-- Of every kind of row that is due: ready; sleeping although its time has
		-- come, since no relay wakes it; waiting for a retry; behind its key.
		min(
			coalesce((SELECT created_at FROM "{t}" INDEXED BY "{t}_ready" WHERE status = 'PENDING' AND hold = 0
				AND coalesce(available_at, 0) <= ?1 ORDER BY id LIMIT 1), 9223372036854775807),
			coalesce((SELECT min(created_at) FROM "{t}" INDEXED BY "{t}_due" WHERE status = 'PENDING' AND hold IN (1, 2)
				AND coalesce(available_at, 0) <= ?1), 9223372036854775807),
			coalesce((SELECT min(created_at) FROM "{t}" INDEXED BY "{t}_retry" WHERE hold = 2 AND status = 'PENDING'),
				9223372036854775807),
			coalesce((SELECT created_at FROM "{t}" WHERE id =
				(SELECT min(id) FROM "{t}" INDEXED BY "{t}_behind" WHERE hold = 3)), 9223372036854775807)),
		(SELECT count(*) FROM "{t}" INDEXED BY "{t}_dead" WHERE status = 'DEAD_LETTER'),
		`+pageSize+`, l.owner, l.holder, l.epoch, l.expires_at
		FROM "{t}_lease" l WHERE l.shard = 0`), now).
		Scan(&st.Pending, &st.Claimed, &oldest, &st.DeadLetter, &st.TableBytes, &owner, &holder, &lease.Epoch, &expires)
	if err != nil {
		return outbox.Stats{}, fmt.Errorf("read state of outbox %q: %w", s.table, noTables(err))
	}
	if oldest.Int64 != 1<<63-1 {
		st.OldestPending = time.UnixMilli(oldest.Int64).UTC()
	}
	if owner.Valid && expires > now {
		lease.Owner, lease.Holder = owner.String, holder.String
		lease.Expires = time.UnixMilli(expires).UTC()
		st.Leases = []jetbox.Lease{lease}
	}
	return st, nil
}
