package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// Config names an outbox.
type Config struct {
	// URL says where the database is, as libpq understands it; pool_max_conns
	// and the other settings of pgxpool are understood too. Mandatory.
	URL string

	// Table is the outbox's name, with or without a schema. Default
	// [DefaultTable], in the first schema of the search path.
	Table string

	// Shards is into how many shards Migrate divides a new outbox: the most
	// relays that can be active on it at once. Default [DefaultShards].
	Shards int

	// NoNotify turns notifications by the database off: Wait then polls.
	NoNotify bool

	// Logger is told when notifications begin or cease to arrive. Default: no
	// logging.
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Table == "" {
		c.Table = DefaultTable
	}
	if c.Shards == 0 {
		c.Shards = DefaultShards
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Store is an outbox in a PostgreSQL database: what a relay takes its rows from,
// and what an operator looks into. It is safe for concurrent use. Its pool of
// connections starts goroutines, which end with Close; it starts no other.
type Store struct {
	cfg           Config
	schema, table string
	names
	pool *pgxpool.Pool
	db   *sql.DB
	gate *gate

	mu       sync.Mutex // guards what follows
	hand     hand
	seen     map[string]observed // other relays' leases, by owner
	pruned   int64               // where the last prune stopped looking
	swept    time.Time           // when stranded rows were last looked for
	reset    time.Time           // when the pool was last emptied
	wake     wakeState
	vacuumed vacuumed
	fit      int // rows that have room in one claim; 0 stands for as many as asked for
}

// minVersion is the oldest server that has what the schema uses.
const minVersion = 13_00_00

// Open connects to the database. It does not create the tables ([Store.Migrate]
// does), nor look whether they are there ([Store.Check] does). The caller closes
// the store.
//
// The pool is the store's own. Unless the URL says otherwise, it prepares no
// statements by name (default_query_exec_mode=cache_describe), so that a pooler in front of
// the database, in transaction mode too, does not matter.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	cfg = cfg.withDefaults()
	schema, table, err := splitTable(cfg.Table)
	if err == nil {
		err = checkShards(cfg.Shards)
	}
	if err != nil {
		return nil, err
	}
	pool, gate, err := newPool(ctx, cfg.URL)
	if err != nil {
		return nil, err
	}
	s := &Store{
		cfg: cfg, schema: schema, table: table, pool: pool, gate: gate,
		db: stdlib.OpenDBFromPool(pool), seen: make(map[string]observed),
	}
	if err := s.do(ctx, s.settle); err != nil {
		return nil, errors.Join(fmt.Errorf("open outbox %q: %w", cfg.Table, err), s.Close())
	}
	return s, nil
}

// settle asks the server what has to be known of it.
func (s *Store) settle(ctx context.Context) error {
	var (
		version, prepared int
		current           *string
	)
	err := s.pool.QueryRow(ctx, `SELECT current_setting('server_version_num')::int,
		current_setting('max_prepared_transactions')::int, current_schema()`).Scan(&version, &prepared, &current)
	switch {
	case err != nil:
		return err
	case version < minVersion:
		return fmt.Errorf("the server is PostgreSQL %d, this needs 13", version/10000)
	}
	if s.schema == "" {
		if current == nil {
			return errors.New("no schema of the search path exists: name one, as SCHEMA.TABLE")
		}
		s.schema = *current
	}
	s.names = newNames(s.schema, s.table)
	s.wake.prepared = prepared > 0
	return nil
}

// closeTimeout is how long Close waits for the server's good-byes.
const closeTimeout = 2 * time.Second

// Close closes the connections. Stop the relay first. For connections to a server
// that does not answer it waits a moment, and then says so: the pool gives them up
// by itself within half a minute.
func (s *Store) Close() error {
	s.hangUp()
	err := s.db.Close()
	closed := make(chan struct{})
	go func() { // ends with the pool's own limits
		s.pool.Close()
		close(closed)
	}()
	t := time.NewTimer(closeTimeout)
	defer t.Stop()
	select {
	case <-closed:
		return err
	case <-t.C:
		return errors.Join(err, errors.New("the database does not answer, its connections are closed without it"))
	}
}

// DB is a handle on the store's pool, for writers. It belongs to the store.
func (s *Store) DB() *sql.DB { return s.db }

// Pool is the store's pool, for writers that use pgx. It belongs to the store.
func (s *Store) Pool() *pgxpool.Pool { return s.pool }

// Table is the outbox's name, as configured.
func (s *Store) Table() string { return s.cfg.Table }

const (
	// opTimeout bounds each call of the relay's: a connection whose other end
	// is gone without a word must not stop it for longer.
	opTimeout = 15 * time.Second

	// lockTimeout bounds the wait for a row that somebody else has locked. It is
	// below any sensible lease.
	lockTimeout = 2 * time.Second

	migrateTimeout = time.Minute
)

// do runs one operation within opTimeout, and sees to what its error means for
// the connections.
func (s *Store) do(ctx context.Context, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, opTimeout, fmt.Errorf("the database did not answer within %v", opTimeout))
	defer cancel()
	err := f(ctx)
	s.gate.note(err)
	if isReadOnly(err) {
		s.renew()
	}
	return noTables(withCause(ctx, err))
}

// withCause says that it was our own limit, where that is so.
func withCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// renew empties the pool: after a failover its sessions are still on the server
// that may only be read, and new ones may find the one that can be written.
func (s *Store) renew() {
	const rest = 3 * time.Second
	s.mu.Lock()
	due := time.Since(s.reset) > rest
	if due {
		s.reset = time.Now()
	}
	s.mu.Unlock()
	if due {
		s.pool.Reset()
	}
}

// inTx runs f in a transaction and commits. It is for migrations and operators:
// a relay holds no transaction open.
func (s *Store) inTx(ctx context.Context, timeout time.Duration, f func(ctx context.Context, tx pgx.Tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SELECT set_config('lock_timeout', $1, true), set_config('idle_in_transaction_session_timeout', $2, true),
			set_config('statement_timeout', $2, true), set_config('synchronous_commit', 'on', true)`,
			millis(timeout/2), millis(timeout))
		if err != nil {
			return err
		}
		return f(ctx, tx)
	})
	s.gate.note(err)
	return noTables(err)
}

func millis(d time.Duration) string { return fmt.Sprint(d.Milliseconds()) }

// batch is a transaction of the relay's, sent as one message with all of its
// statements. The server carries it out without us: nothing of it stays open
// when this process is stopped in the middle.
type batch struct{ pgx.Batch }

// relaySettings hold for the transaction. The statistics of tables that fill and
// empty all the time are never right: without these, a server that believes them
// reads whole tables, merges all published rows with the few that are claimed, or
// collects a hundred thousand rows behind a key where the first will do. To compile
// such plans takes tens of milliseconds and never pays.
const relaySettings = `SELECT set_config('lock_timeout', $1, true), set_config('statement_timeout', $2, true),
	set_config('synchronous_commit', $3, true), set_config('jit', 'off', true),
	set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('enable_mergejoin', 'off', true)`

// newBatch returns an empty batch whose commit is synced to disk.
func newBatch() *batch { return batchWith("on") }

// newUnsyncedBatch returns an empty batch that is visible at once, and that a crash of
// the server may take back as long as no later commit has been synced.
func newUnsyncedBatch() *batch { return batchWith("off") }

func batchWith(syncCommit string) *batch {
	b := new(batch)
	b.Queue(relaySettings, millis(lockTimeout), millis(opTimeout), syncCommit)
	return b
}

// send carries the batch out. The functions given to its queries read their
// results, in order; the first error ends it, and then nothing has happened.
func (s *Store) send(ctx context.Context, b *batch) error {
	return s.do(ctx, func(ctx context.Context) error { return s.pool.SendBatch(ctx, &b.Batch).Close() })
}

// holder names this process for people.
func holder() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	return fmt.Sprintf("%s pid %d", host, os.Getpid())
}

// noTables tells the usual first mistake from other errors.
func noTables(err error) error {
	if hasCode(err, codeUndefinedTable, codeInvalidSchema) {
		return fmt.Errorf("%w: %w", outbox.ErrNoTables, err)
	}
	return err
}
