// Package sqlite keeps a ledger of handled events in an SQLite database, in the
// transaction of their effect.
//
// The entry and the effect are committed together: both are there or neither,
// whatever dies and whenever. A call for a key that is being handled, in this
// process or another, waits until the first transaction has ended, so the same
// event cannot happen twice at the same time.
//
// SQLite has one writer. From the first statement of [Ledger.Do] to the commit
// the database's write lock is held, apply included: do slow things before. How
// much of a committed transaction survives a power failure is up to the
// database's synchronous setting; entry and effect survive or vanish together.
//
// The ledger neither opens nor closes the database and changes no setting of
// it. It is written for modernc.org/sqlite. WAL mode, a busy_timeout and a pool
// of at least two connections are recommended; an in-memory database needs a
// pool of exactly one.
//
// Entries older than the retention are removed in small batches, every few
// hundred calls of Do, and by [Ledger.Prune].
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"sync/atomic"
	"time"

	"github.com/seed-5e04d8fb/jetbox/dedup"
)

// Config tunes a [Ledger]. The zero value is ready to use.
type Config struct {
	// Table is where the entries are. Default "jetbox_ledger".
	Table string

	// Retention is how long an entry is kept. An event that comes back later
	// happens again: see package dedup. Default [dedup.DefaultRetention].
	Retention time.Duration
}

// The default table, and how it is kept small: every pruneEvery calls, pruneBatch
// entries at most, which is more than were added meanwhile.
const (
	defaultTable = "jetbox_ledger"
	pruneEvery   = 256
	pruneBatch   = 512
)

func (c Config) withDefaults() Config {
	if c.Table == "" {
		c.Table = defaultTable
	}
	if c.Retention == 0 {
		c.Retention = dedup.DefaultRetention
	}
	return c
}

var tableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,62}$`)

func (c Config) validate() error {
	if !tableName.MatchString(c.Table) {
		return fmt.Errorf("dedup/sqlite: Table is %q, want letters, digits and underscores", c.Table)
	}
	if c.Retention < 0 {
		return fmt.Errorf("dedup/sqlite: Retention is %v, want a positive duration", c.Retention)
	}
	return nil
}

// ErrMemoryPool is returned by New for an in-memory database behind a pool of
// more than one connection, each of which would be a database of its own. Call
// SetMaxOpenConns(1), or use a file.
var ErrMemoryPool = errors.New("in-memory database in a pool of connections")

// Ledger remembers handled events in a table. It is safe for concurrent use,
// also by several processes.
type Ledger struct {
	db        *sql.DB
	retention time.Duration
	calls     atomic.Int64

	insert, prune string
}

// New creates the table if it is missing, also when several processes start at
// once. It keeps db, which the caller closes after the last Do.
func New(ctx context.Context, db *sql.DB, cfg Config) (*Ledger, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if err := refuseMemoryPool(ctx, db); err != nil {
		return nil, fmt.Errorf("dedup/sqlite: %w", err)
	}
	t := `"` + cfg.Table + `"`
	for _, stmt := range []string{
		`CREATE TABLE IF NOT EXISTS ` + t + ` (
			consumer   TEXT    NOT NULL,
			key        TEXT    NOT NULL,
			handled_at INTEGER NOT NULL, -- unix ms
			PRIMARY KEY (consumer, key)
		) WITHOUT ROWID`,
		`CREATE INDEX IF NOT EXISTS "` + cfg.Table + `_handled_at" ON ` + t + ` (handled_at)`,
	} {
		err := retryBusy(ctx, func() error {
			_, err := db.ExecContext(ctx, stmt)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("dedup/sqlite: create table %s: %w", cfg.Table, err)
		}
	}
	return &Ledger{
		db:        db,
		retention: cfg.Retention,
		insert:    `INSERT INTO ` + t + ` (consumer, key, handled_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING`,
		prune: `DELETE FROM ` + t + ` WHERE (consumer, key) IN
			(SELECT consumer, key FROM ` + t + ` WHERE handled_at < ? ORDER BY handled_at LIMIT ?)`,
	}, nil
}

func refuseMemoryPool(ctx context.Context, db *sql.DB) error {
	var file sql.NullString
	err := retryBusy(ctx, func() error {
		return db.QueryRowContext(ctx, `SELECT file FROM pragma_database_list WHERE name = 'main'`).Scan(&file)
	})
	if err != nil {
		return fmt.Errorf("read the database's file name: %w", err)
	}
	if n := db.Stats().MaxOpenConnections; file.String == "" && n != 1 {
		return fmt.Errorf("%w: MaxOpenConns is %d, want 1 or a file", ErrMemoryPool, n)
	}
	return nil
}

// Prune removes every entry older than the retention, in small transactions,
// and returns how many there were. Do does the same in passing; a program that
// stops handling events may want to call it.
func (l *Ledger) Prune(ctx context.Context) (removed int64, err error) {
	for {
		n, err := l.pruneSome(ctx)
		removed += n
		if err != nil {
			return removed, fmt.Errorf("prune ledger: %w", err)
		}
		if n < pruneBatch {
			return removed, nil
		}
	}
}

func (l *Ledger) pruneSome(ctx context.Context) (removed int64, err error) {
	err = retryBusy(ctx, func() error {
		// Time comes from Go's clock, as the entries' does.
		res, err := l.db.ExecContext(ctx, l.prune, time.Now().Add(-l.retention).UnixMilli(), pruneBatch)
		if err != nil {
			return err
		}
		removed, err = res.RowsAffected()
		return err
	})
	return removed, err
}
