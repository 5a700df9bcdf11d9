// Package sqlite keeps a ledger of handled events in an SQLite database, in the
// transaction of their effect.
//
// The entry and the effect are committed together: both are there or neither,
// whatever dies and whenever. A call for a key that is being handled, in this
// process or another, waits until the first transaction has ended, so the same
// event cannot happen twice at the same time.
//
// SQLite has one writer. From the first statement of [Ledger.Do] to the commit
// the database's write lock is held, apply included: do slow things before. An
// apply that holds it for longer than [Config.MaxHold] is rolled back, also when
// it does not return. Only a process that is stopped by a signal keeps it until
// it goes on. How much of a committed transaction survives a power failure is up
// to the database's synchronous setting; entry and effect survive or vanish
// together.
//
// The ledger neither opens nor closes the database and changes no setting of
// it. It is written for modernc.org/sqlite. WAL mode, a busy_timeout and a pool
// of at least two connections are recommended; an in-memory database needs a
// pool of exactly one.
//
// Entries older than the retention are removed in small batches by [Ledger.Run],
// which the caller starts, and where it does not run, every few hundred calls of
// Do. With a KeepFunc, only Run and [Ledger.Prune] remove anything.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"time"

	"github.com/seed-5e04d8fb/jetbox/dedup"
	"github.com/seed-5e04d8fb/jetbox/internal/expiry"
)

// Config tunes a [Ledger]. The zero value is ready to use.
type Config struct {
	// Table is where the entries are. Default "jetbox_ledger".
	Table string

	// Retention is how long an entry is kept. An event that comes back later
	// happens again: see package dedup. Default [dedup.DefaultRetention].
	Retention time.Duration

	// KeepFunc returns from when on a consumer's entries are needed, such as the
	// time of the oldest message that may still be delivered; younger ones are
	// not removed, whatever the retention. The zero time adds nothing. An error
	// keeps all of that consumer's. Its clock, the broker's for instance, may be a
	// minute ahead of the ledger's: with more, entries are removed too early. It
	// has 2m to answer. Optional; Run and Prune call it on their goroutine.
	KeepFunc func(ctx context.Context, consumer string) (time.Time, error)

	// MaxHold is how long a transaction may hold the write lock before it is
	// rolled back. Default 1m.
	MaxHold time.Duration

	// Logger is told by Run when removing begins to fail and when it no longer
	// does. Default [slog.Default].
	Logger *slog.Logger
}

const (
	defaultTable   = "jetbox_ledger"
	defaultMaxHold = time.Minute
)

func (c Config) withDefaults() Config {
	if c.Table == "" {
		c.Table = defaultTable
	}
	if c.Retention == 0 {
		c.Retention = dedup.DefaultRetention
	}
	if c.MaxHold == 0 {
		c.MaxHold = defaultMaxHold
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
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
	if c.MaxHold < 0 {
		return fmt.Errorf("dedup/sqlite: MaxHold is %v, want a positive duration", c.MaxHold)
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
	db      *sql.DB
	cfg     Config
	sweeper *expiry.Sweeper

	insert, find, consumers, remove string
}

// New creates the table if it is missing, also when several processes start at
// once, and refuses one made by a newer version: dedup.ErrSchemaTooNew. It keeps
// db, which the caller closes after the last Do. It starts nothing.
func New(ctx context.Context, db *sql.DB, cfg Config) (*Ledger, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if err := refuseMemoryPool(ctx, db); err != nil {
		return nil, fmt.Errorf("dedup/sqlite: %w", err)
	}
	if err := migrate(ctx, db, cfg.Table); err != nil {
		return nil, fmt.Errorf("dedup/sqlite: table %s: %w", cfg.Table, err)
	}
	t := `"` + cfg.Table + `"`
	l := &Ledger{
		db:     db,
		cfg:    cfg,
		insert: `INSERT INTO ` + t + ` (consumer, key, handled_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING`,
		find:   `SELECT EXISTS (SELECT 1 FROM ` + t + ` WHERE consumer = ? AND key = ?)`,
		// From one consumer to the next, by the primary key.
		consumers: `WITH RECURSIVE c(consumer) AS (SELECT min(consumer) FROM ` + t + `
			UNION ALL SELECT (SELECT min(consumer) FROM ` + t + ` WHERE consumer > c.consumer) FROM c WHERE c.consumer IS NOT NULL)
			SELECT consumer FROM c WHERE consumer IS NOT NULL`,
		remove: `DELETE FROM ` + t + ` WHERE (consumer, key) IN
			(SELECT consumer, key FROM ` + t + ` WHERE consumer = ? AND handled_at < ? ORDER BY handled_at LIMIT ?)`,
	}
	l.sweeper = &expiry.Sweeper{
		Retention: cfg.Retention, KeepFunc: cfg.KeepFunc, Logger: cfg.Logger,
		Consumers: l.listConsumers, Remove: l.removeSome,
	}
	return l, nil
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

// Seen reports whether there is a committed entry. It takes no lock: a handler
// that prepares something slow may ask first. Only Do decides.
func (l *Ledger) Seen(ctx context.Context, consumer, key string) (seen bool, err error) {
	err = retryBusy(ctx, func() error {
		return l.db.QueryRowContext(ctx, l.find, consumer, key).Scan(&seen)
	})
	if err != nil {
		return false, fmt.Errorf("look for %q in the ledger: %w", key, err)
	}
	return seen, nil
}

// Run removes entries that are old enough, at once and then every minute, until
// ctx is canceled. Then it returns nil. It works in small transactions and rests
// in between, so that handlers get the lock.
func (l *Ledger) Run(ctx context.Context) error { return l.sweeper.Run(ctx) }

// Prune removes all entries that are old enough, as Run does, and returns how
// many there were.
func (l *Ledger) Prune(ctx context.Context) (removed int64, err error) {
	removed, err = l.sweeper.Prune(ctx)
	if err != nil {
		return removed, fmt.Errorf("prune ledger: %w", err)
	}
	return removed, nil
}

func (l *Ledger) listConsumers(ctx context.Context) (names []string, err error) {
	err = retryBusy(ctx, func() error {
		names = nil
		rows, err := l.db.QueryContext(ctx, l.consumers)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var name string
			if err := rows.Scan(&name); err != nil {
				return err
			}
			names = append(names, name)
		}
		return rows.Err()
	})
	return names, err
}

func (l *Ledger) removeSome(ctx context.Context, consumer string, before time.Time, limit int) (removed int, err error) {
	// Time comes from Go's clock, as the entries' does.
	cut := time.Now().Add(-l.cfg.Retention)
	if !before.IsZero() && before.Before(cut) {
		cut = before
	}
	err = retryBusy(ctx, func() error {
		res, err := l.db.ExecContext(ctx, l.remove, consumer, cut.UnixMilli(), limit)
		if err != nil {
			return err
		}
		n, err := res.RowsAffected()
		removed = int(n)
		return err
	})
	return removed, err
}
