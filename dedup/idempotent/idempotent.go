// Package idempotent is an HTTP middleware that answers a request once: one that
// comes again with the same Idempotency-Key gets the first answer again, and its
// handler does not run. It follows the IETF draft
// draft-ietf-httpapi-idempotency-key-header.
//
// A handler that writes through [Tx] has one effect, whatever crashes: what it
// writes, and the answer that is given again, are one transaction in SQLite or
// PostgreSQL. A handler whose effect is elsewhere may repeat it after a crash
// between the effect and the record of its answer, and beside itself where it goes
// on after [Config.MaxTime].
//
//	same key, same request      the first answer: status, headers, body, and
//	                            Idempotency-Replayed: true
//	same key, another body      422
//	same key, still in hand     409 with Retry-After
//	no key, or a malformed one  400, or for no key as configured: passed through
//	the database is away        503 with Retry-After
//
// A key counts for one method and path, and for one caller where
// [Config.CallerFunc] tells them apart; without it, whoever guesses another's key
// is given that one's answer. "Same request" is the same query and the same
// bytes. GET, HEAD, OPTIONS and TRACE are passed through.
//
// Answers of 500 and above, and 408, 425 and 429, mean that the request should be
// sent again: they are not kept, and what the handler wrote through Tx is rolled
// back. So it is after a panic. All other answers are kept for the retention,
// without Set-Cookie, Date and what concerns one connection. An answer is held in
// memory until its end: no flushing, no hijacking.
//
// While a request is in hand, a row says so, for at most [Config.MaxTime] and a
// little. If its process dies, a later request with the key takes over then; if it
// was only slow, it finds out when it commits, and is rolled back. The time is that
// of the PostgreSQL server, or of the host with the SQLite file.
package idempotent

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"regexp"
	"time"

	"github.com/seed-5e04d8fb/jetbox/internal/expiry"
)

// Dialect is which SQL a database speaks.
type Dialect int

const (
	// SQLite is for modernc.org/sqlite. WAL mode and a busy_timeout are
	// recommended.
	SQLite Dialect = iota + 1
	// Postgres is for any driver of database/sql.
	Postgres
)

// Config tunes a [Middleware]. The zero value is ready to use.
type Config struct {
	// Table is where the answers are; on PostgreSQL it may have a schema in
	// front. Default "jetbox_idempotency".
	Table string

	// Retention is how long an answer is given again. Default 24h.
	Retention time.Duration

	// RequireKey refuses a POST or PATCH without a key, with 400. Default: it
	// is handled, each time it comes.
	RequireKey bool

	// CallerFunc returns who sends the request, such as the account it was
	// authenticated for. Keys of different callers are independent. It runs on
	// the request's goroutine. Default: all are one.
	CallerFunc func(r *http.Request) string

	// MaxBody is the longest request body, and MaxAnswer the longest body of an
	// answer, in bytes. A longer request is refused with 413; a handler that
	// answers more gets an error, and the client 500. Default 1 MiB each.
	MaxBody   int64
	MaxAnswer int

	// MaxTime is how long a handler may take. Then its context ends, and its
	// transaction is rolled back. Default 1m.
	MaxTime time.Duration

	// Logger is told of databases that fail. Default [slog.Default].
	Logger *slog.Logger
}

const (
	defaultTable     = "jetbox_idempotency"
	defaultRetention = 24 * time.Hour
	defaultSize      = 1 << 20
	defaultMaxTime   = time.Minute

	// leaseGrace is how long after MaxTime a request may be settling.
	leaseGrace = 15 * time.Second

	// settleTimeout bounds what is written when a handler has ended.
	settleTimeout = 10 * time.Second
)

func (c Config) withDefaults() Config {
	if c.Table == "" {
		c.Table = defaultTable
	}
	if c.Retention == 0 {
		c.Retention = defaultRetention
	}
	if c.CallerFunc == nil {
		c.CallerFunc = func(*http.Request) string { return "" }
	}
	if c.MaxBody == 0 {
		c.MaxBody = defaultSize
	}
	if c.MaxAnswer == 0 {
		c.MaxAnswer = defaultSize
	}
	if c.MaxTime == 0 {
		c.MaxTime = defaultMaxTime
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

var tableName = map[Dialect]*regexp.Regexp{
	SQLite:   regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,55}$`),
	Postgres: regexp.MustCompile(`^([a-z_][a-z0-9_]{0,62}\.)?[a-z_][a-z0-9_]{0,55}$`),
}

func (c Config) validate(d Dialect) error {
	names, known := tableName[d]
	switch {
	case !known:
		return fmt.Errorf("dedup/idempotent: Dialect is %d, want SQLite or Postgres", d)
	case !names.MatchString(c.Table):
		return fmt.Errorf("dedup/idempotent: Table is %q, want a name of letters, digits and underscores", c.Table)
	case c.Retention < 0:
		return fmt.Errorf("dedup/idempotent: Retention is %v, want a positive duration", c.Retention)
	case c.MaxBody < 0:
		return fmt.Errorf("dedup/idempotent: MaxBody is %d, want a positive number of bytes", c.MaxBody)
	case c.MaxAnswer < 0:
		return fmt.Errorf("dedup/idempotent: MaxAnswer is %d, want a positive number of bytes", c.MaxAnswer)
	case c.MaxTime < time.Millisecond:
		return fmt.Errorf("dedup/idempotent: MaxTime is %v, want at least 1ms", c.MaxTime)
	case c.Retention < c.MaxTime+leaseGrace:
		return fmt.Errorf("dedup/idempotent: Retention is %v, want at least %v, which a request may take", c.Retention, c.MaxTime+leaseGrace)
	}
	return nil
}

// Middleware makes handlers idempotent. It is safe for concurrent use, also by
// several processes on one database.
type Middleware struct {
	store   *store
	cfg     Config
	sweeper *expiry.Sweeper
}

// New creates the table if it is missing, and refuses one made by a newer
// version: dedup.ErrSchemaTooNew. It keeps db, which the caller closes after the
// last request. It starts nothing.
//
// On PostgreSQL the role needs SELECT, INSERT, UPDATE and DELETE on the table and
// SELECT on the one named after it with "_schema"; where both are there, nothing
// else.
func New(ctx context.Context, db *sql.DB, d Dialect, cfg Config) (*Middleware, error) {
	if db == nil {
		return nil, errors.New("dedup/idempotent: the database is nil")
	}
	cfg = cfg.withDefaults()
	if err := cfg.validate(d); err != nil {
		return nil, err
	}
	s := newStore(db, d, cfg)
	if err := s.migrate(ctx); err != nil {
		return nil, fmt.Errorf("dedup/idempotent: table %s: %w", cfg.Table, err)
	}
	m := &Middleware{store: s, cfg: cfg}
	m.sweeper = &expiry.Sweeper{
		Retention: cfg.Retention, Logger: cfg.Logger,
		Consumers: func(context.Context) ([]string, error) { return []string{cfg.Table}, nil },
		Remove: func(ctx context.Context, _ string, _ time.Time, limit int) (int, error) {
			return s.removeOld(ctx, limit)
		},
	}
	return m, nil
}

// Run removes answers that are older than the retention, at once and then every
// minute, until ctx is canceled, and returns nil. Where it does not run, requests
// remove some in passing.
func (m *Middleware) Run(ctx context.Context) error { return m.sweeper.Run(ctx) }
