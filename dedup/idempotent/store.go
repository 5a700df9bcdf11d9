package idempotent

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"
)

func newOwner() string { return rand.Text() }

// store keeps records in a table. Both databases take the same SQL, but for the
// names of types.
type store struct {
	db        *sql.DB
	dialect   Dialect
	retention time.Duration
	lease     time.Duration
	names     *strings.Replacer
}

func newStore(db *sql.DB, d Dialect, cfg Config) *store {
	schema, table, qualified := strings.Cut(cfg.Table, ".")
	prefix := `"` + schema + `".`
	if !qualified {
		prefix, table = "", cfg.Table
	}
	in := func(name string) string { return prefix + `"` + name + `"` }
	bigint, blob := "INTEGER", "BLOB"
	if d == Postgres {
		bigint, blob = "BIGINT", "BYTEA"
	}
	return &store{
		db: db, dialect: d, retention: cfg.Retention, lease: cfg.MaxTime + leaseGrace,
		names: strings.NewReplacer("{t}", in(table), "{version}", in(table+"_schema"), "{age}", `"`+table+`_age"`,
			"{bigint}", bigint, "{blob}", blob),
	}
}

func (s *store) sql(query string) string {
	return strings.ReplaceAll(s.names.Replace(query), "{now}", s.now())
}

// now is the time as SQL. The clocks of processes that share a server may differ
// by more than a lease. An index can be used with it: it is the same for a whole
// statement.
func (s *store) now() string {
	if s.dialect == Postgres {
		return "(extract(epoch FROM statement_timestamp()) * 1000)::bigint"
	}
	return fmt.Sprint(time.Now().UnixMilli())
}

// take makes the record, or takes over one whose time is up. Otherwise it returns
// the one that is there.
func (s *store) take(ctx context.Context, mine *record) (there *record, err error) {
	for {
		there, open, err := s.find(ctx, mine.id)
		if err != nil || there != nil && !open {
			return there, err
		}
		var taken bool
		if there == nil {
			taken, err = s.one(ctx, s.db, `INSERT INTO {t} (id, request, fingerprint, owner, until, changed_at)
				VALUES ($1, $2, $3, $4, {now} + $5, {now}) ON CONFLICT DO NOTHING`,
				mine.id, mine.request, mine.fingerprint, mine.owner, s.lease.Milliseconds())
		} else {
			taken, err = s.one(ctx, s.db, `UPDATE {t} SET fingerprint = $1, owner = $2, until = {now} + $3, changed_at = {now},
				status = NULL, header = NULL, body = NULL WHERE id = $4 AND owner = $5 AND (status IS NULL) = $6`,
				mine.fingerprint, mine.owner, s.lease.Milliseconds(), mine.id, there.owner, !there.done)
		}
		if err != nil || taken {
			return nil, err
		}
		// Somebody was faster; look again.
	}
}

// find returns the record, and whether its time is up.
func (s *store) find(ctx context.Context, id string) (r *record, open bool, err error) {
	var (
		status sql.Null[int]
		header []byte
	)
	r = &record{id: id}
	err = s.retryBusy(ctx, func() error {
		return s.db.QueryRowContext(ctx, s.sql(`SELECT fingerprint, owner, status, header, body,
				CASE WHEN status IS NULL THEN until <= {now} ELSE changed_at <= {now} - $1 END
				FROM {t} WHERE id = $2`), s.retention.Milliseconds(), id).
			Scan(&r.fingerprint, &r.owner, &status, &header, &r.answer.body, &open)
	})
	if errors.Is(err, sql.ErrNoRows) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	if r.done = status.Valid; !r.done {
		return r, open, nil
	}
	r.answer.status = status.V
	r.answer.header, err = parseHeader(header)
	return r, open, err
}

// begin begins a transaction in which the record is ours, and stays so to its
// end. Without a record it is a plain one.
func (s *store) begin(ctx context.Context, r *record, longest time.Duration) (tx *sql.Tx, err error) {
	err = s.retryBusy(ctx, func() error {
		if tx, err = s.db.BeginTx(ctx, nil); err != nil {
			return err
		}
		if err = s.claim(ctx, tx, r, longest); err != nil {
			return errors.Join(err, tx.Rollback())
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return tx, nil
}

func (s *store) claim(ctx context.Context, tx *sql.Tx, r *record, longest time.Duration) error {
	if s.dialect == Postgres {
		// The server's bound holds also while this process is stopped.
		_, err := tx.ExecContext(ctx, `SELECT set_config('idle_in_transaction_session_timeout', $1, true)`, fmt.Sprint(longest.Milliseconds()))
		if err != nil {
			return err
		}
	}
	if r == nil {
		return nil
	}
	// A write: on SQLite it takes the lock, which a transaction that begins by
	// reading may not get later.
	ours, err := affectsOne(tx.ExecContext(ctx, s.sql(`UPDATE {t} SET until = until WHERE id = $1 AND owner = $2 AND status IS NULL`), r.id, r.owner))
	if err == nil && !ours {
		err = errTaken
	}
	return err
}

// keep writes the answer, in the transaction of the effect where there is one.
func (s *store) keep(ctx context.Context, in execer, r *record, a answer) error {
	header, err := a.keptHeader()
	if err != nil {
		return err
	}
	body := a.body
	if body == nil {
		body = []byte{}
	}
	ours, err := s.one(ctx, in, `UPDATE {t} SET status = $1, header = $2, body = $3, changed_at = {now}
		WHERE id = $4 AND owner = $5 AND status IS NULL`, a.status, header, body, r.id, r.owner)
	if err == nil && !ours {
		err = errTaken
	}
	return err
}

// release forgets a record that is still ours.
func (s *store) release(ctx context.Context, r *record) error {
	_, err := s.one(ctx, s.db, `DELETE FROM {t} WHERE id = $1 AND owner = $2 AND status IS NULL`, r.id, r.owner)
	return err
}

func (s *store) removeOld(ctx context.Context, limit int) (removed int, err error) {
	err = s.retryBusy(ctx, func() error {
		res, err := s.db.ExecContext(ctx, s.sql(`DELETE FROM {t} WHERE id IN (SELECT id FROM {t} WHERE changed_at < {now} - $1 ORDER BY changed_at LIMIT $2)`),
			s.retention.Milliseconds(), limit)
		if err != nil {
			return err
		}
		n, err := res.RowsAffected()
		removed = int(n)
		return err
	})
	return removed, err
}

type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// one runs a statement that changes one row or none.
func (s *store) one(ctx context.Context, in execer, query string, args ...any) (changed bool, err error) {
	err = s.retryBusy(ctx, func() error {
		changed, err = affectsOne(in.ExecContext(ctx, s.sql(query), args...))
		return err
	})
	return changed, err
}

func affectsOne(res sql.Result, err error) (one bool, _ error) {
	if err != nil {
		return false, err
	}
	n, err := res.RowsAffected()
	return n == 1, err
}

// Result codes of SQLite in the lowest byte: another connection has the lock, or a
// constraint is violated.
const (
	codeBusy       = 5
	codeLocked     = 6
	codeConstraint = 19
)

// Classes of PostgreSQL's codes.
const (
	classConstraint = "23"
	classRollback   = "40" // serialization failures, deadlocks
)

// undone reports that a commit failed for sure.
func undone(err error) (sure bool) {
	var (
		postgres interface{ SQLState() string }
		sqlite   interface{ Code() int }
	)
	switch {
	case errors.As(err, &postgres):
		code := postgres.SQLState()
		return strings.HasPrefix(code, classConstraint) || strings.HasPrefix(code, classRollback)
	case errors.As(err, &sqlite):
		code := sqlite.Code() & 0xff
		return code == codeBusy || code == codeLocked || code == codeConstraint
	}
	return errors.Is(err, sql.ErrTxDone)
}

// retryBusy runs f until it fails for another reason than SQLite's lock.
func (s *store) retryBusy(ctx context.Context, f func() error) error {
	const longest = 100 * time.Millisecond
	for wait := time.Millisecond; ; wait = min(2*wait, longest) {
		err := f()
		var coded interface{ Code() int }
		if s.dialect != SQLite || !errors.As(err, &coded) || coded.Code()&0xff != codeBusy && coded.Code()&0xff != codeLocked {
			return err
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return errors.Join(ctx.Err(), err)
		}
	}
}
