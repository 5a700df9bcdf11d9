package postgres

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-5e04d8fb/jetbox/dedup"
	"github.com/seed-5e04d8fb/jetbox/internal/expiry"
)

// DefaultTable is the ledger's name unless configured.
const DefaultTable = "jetbox_ledger"

const defaultMaxHold = 5 * time.Minute

// Config tunes a [Ledger]. The zero value is ready to use.
type Config struct {
	// Table is where the entries are, with or without a schema. Without one it is
	// where the search path finds it. Default [DefaultTable].
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

	// MaxHold is how long apply may take, and how long it may leave its
	// transaction without a statement before the server ends it. A session that
	// has a shorter idle_in_transaction_session_timeout keeps that. Default 5m.
	MaxHold time.Duration

	// Logger is told by Run when removing begins to fail and when it no longer
	// does. Default [slog.Default].
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Table == "" {
		c.Table = DefaultTable
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

func (c Config) validate() error {
	if c.Retention < 0 {
		return fmt.Errorf("dedup/postgres: Retention is %v, want a positive duration", c.Retention)
	}
	if c.MaxHold < time.Millisecond || c.MaxHold > 24*time.Hour {
		return fmt.Errorf("dedup/postgres: MaxHold is %v, want 1ms to 24h", c.MaxHold)
	}
	_, err := newNames(c.Table)
	return err
}

// Ledger remembers handled events in a table. Tx is what effects are written
// with: *sql.Tx or pgx.Tx. It is safe for concurrent use, also by several
// processes.
type Ledger[Tx any] struct {
	cfg     Config
	names   names
	access  access[Tx]
	sweeper *expiry.Sweeper
	checked atomic.Bool // the tables are what this program knows
}

// New returns a ledger for transactions of database/sql, with any driver that
// speaks PostgreSQL. It keeps db, which the caller closes after the last Do. It
// asks the database nothing and starts nothing; the first Do finds out whether
// the tables are there.
func New(db *sql.DB, cfg Config) (*Ledger[*sql.Tx], error) {
	if db == nil {
		return nil, errors.New("dedup/postgres: the database is nil")
	}
	return newLedger[*sql.Tx](sqlAccess{db}, cfg)
}

// NewPgx is [New] for transactions of pgx.
func NewPgx(pool *pgxpool.Pool, cfg Config) (*Ledger[pgx.Tx], error) {
	if pool == nil {
		return nil, errors.New("dedup/postgres: the pool is nil")
	}
	return newLedger[pgx.Tx](pgxAccess{pool}, cfg)
}

func newLedger[Tx any](a access[Tx], cfg Config) (*Ledger[Tx], error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	n, err := newNames(cfg.Table)
	if err != nil {
		return nil, err
	}
	l := &Ledger[Tx]{cfg: cfg, names: n, access: a}
	l.sweeper = &expiry.Sweeper{
		Retention: cfg.Retention, KeepFunc: cfg.KeepFunc, Logger: cfg.Logger,
		Consumers: l.consumers, Remove: l.remove,
	}
	return l, nil
}

// Seen reports whether there is a committed entry. It takes no lock: a handler
// that prepares something slow may ask first. Only Do decides.
func (l *Ledger[Tx]) Seen(ctx context.Context, consumer, key string) (seen bool, err error) {
	const query = `SELECT EXISTS (SELECT FROM {ledger} WHERE consumer = $1::text AND key = $2::text)`
	if err := l.ready(ctx); err != nil {
		return false, err
	}
	err = retry(ctx, func() error {
		return l.access.query(ctx, l.names.sql(query), []any{storable(consumer), storable(key)}, &seen)
	})
	if err != nil {
		return false, fmt.Errorf("look for %q in the ledger: %w", key, noTables(err))
	}
	return seen, nil
}

// Run removes entries that are old enough, at once and then every minute, until
// ctx is canceled. Then it returns nil. It works in small transactions and rests
// in between. Of several that run on one ledger, one at a time removes anything.
func (l *Ledger[Tx]) Run(ctx context.Context) error { return l.sweeper.Run(ctx) }

// Prune removes all entries that are old enough, as Run does, and returns how
// many there were. It leaves to others what they are removing just then.
func (l *Ledger[Tx]) Prune(ctx context.Context) (removed int64, err error) {
	removed, err = l.sweeper.Prune(ctx)
	if err != nil {
		return removed, fmt.Errorf("prune ledger: %w", err)
	}
	return removed, nil
}

// consumers goes from one consumer to the next by the primary key.
func (l *Ledger[Tx]) consumers(ctx context.Context) ([]string, error) {
	const query = `WITH RECURSIVE c(consumer) AS (SELECT min(consumer) FROM {ledger}
		UNION ALL SELECT (SELECT min(l.consumer) FROM {ledger} l WHERE l.consumer > c.consumer) FROM c WHERE c.consumer IS NOT NULL)
		SELECT coalesce(jsonb_agg(consumer) FILTER (WHERE consumer IS NOT NULL), '[]')::text FROM c`
	if err := l.ready(ctx); err != nil {
		return nil, err
	}
	var list string
	err := retry(ctx, func() error { return l.access.query(ctx, l.names.sql(query), nil, &list) })
	if err != nil {
		return nil, noTables(err)
	}
	var names []string
	if err := json.Unmarshal([]byte(list), &names); err != nil {
		return nil, err
	}
	for i, n := range names {
		names[i] = original(n)
	}
	return names, nil
}

func (l *Ledger[Tx]) remove(ctx context.Context, consumer string, before time.Time, limit int) (removed int, err error) {
	// The lock keeps two that remove the same entries from waiting for each
	// other; who does not get it finds nothing to do.
	const query = `WITH alone AS MATERIALIZED (SELECT pg_try_advisory_xact_lock(hashtextextended($1::text, 0)) AS got),
		old AS MATERIALIZED (SELECT consumer, key FROM {ledger}
			WHERE (SELECT got FROM alone) AND consumer = $2::text AND handled_at < least(
				statement_timestamp() - ($3::text || ' ms')::interval,
				coalesce(to_timestamp(nullif($4::text, '')::double precision / 1000), 'infinity'))
			ORDER BY handled_at LIMIT $5::text::integer),
		gone AS (DELETE FROM {ledger} l USING old WHERE l.consumer = old.consumer AND l.key = old.key RETURNING 1)
		SELECT count(*) FROM gone`
	var cut string
	if !before.IsZero() {
		cut = strconv.FormatInt(before.UnixMilli(), 10)
	}
	args := []any{"jetbox prune " + l.cfg.Table, storable(consumer), millis(l.cfg.Retention), cut, strconv.Itoa(limit)}
	err = retry(ctx, func() error { return l.access.query(ctx, l.names.sql(query), args, &removed) })
	return removed, noTables(err)
}

func millis(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// names fills the ledger's names into SQL.
type names struct {
	schema string // or empty
	*strings.Replacer
}

func (n names) sql(query string) string { return n.Replace(query) }
