package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"log/slog"
	"net"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// outboxStore is an outbox, whatever its database: what the commands use of it.
type outboxStore interface {
	relay.Source

	Append(ctx context.Context, tx *sql.Tx, events ...*jetbox.Event) error
	DB() *sql.DB

	List(ctx context.Context, f outbox.Filter) iter.Seq2[outbox.Entry, error]
	Show(ctx context.Context, id int64) (outbox.Entry, error)
	Retry(ctx context.Context, f outbox.Filter) (int, error)
	Discard(ctx context.Context, f outbox.Filter) (int, error)
	Stats(ctx context.Context) (outbox.Stats, error)

	Migrate(ctx context.Context) error
	Check(ctx context.Context) error
	Table() string
	Close() error
}

// resharder is a store with a number of shards that can be changed.
type resharder interface {
	Reshard(ctx context.Context, shards int) error
}

// database says where an outbox is. It is a plain value.
type database struct {
	file  string // of SQLite, or empty
	url   string // of PostgreSQL, or empty
	table string
}

// database returns what --db and --table name.
func (g *globals) database() (database, error) {
	d := database{table: g.table}
	scheme, _, found := strings.Cut(g.db, ":")
	switch {
	case isPostgres(g.db):
		d.url = g.db
		if _, err := pgconn.ParseConfig(g.db); err != nil {
			return database{}, fmt.Errorf("--db: %w", err)
		}
	case scheme == "sqlite":
		var err error
		if d.file, err = sqlite.ParseURL(g.db); err != nil {
			return database{}, usagef("--db: %w", err)
		}
	case scheme == "postgres", scheme == "postgresql":
		return database{}, usagef("--db %q: want postgres://...", mask(g.db))
	case found && !strings.ContainsAny(scheme, "/= "):
		return database{}, usagef("--db %q: the scheme %q is unknown, want sqlite:FILE or postgres://...", mask(g.db), scheme)
	default:
		return database{}, usagef("--db %q has no scheme, want sqlite:FILE or postgres://...", mask(g.db))
	}
	return d, nil
}

func isPostgres(dbURL string) (is bool) {
	scheme, _, found := strings.Cut(dbURL, "://")
	return found && (scheme == "postgres" || scheme == "postgresql")
}

// String is the database's name for people and logs, without its password.
func (d database) String() string {
	if d.url != "" {
		return mask(d.url)
	}
	return d.file
}

// migrationSQL returns the SQL that creates the outbox. It fails where the table's
// name or the number of shards cannot be.
func (d database) migrationSQL(shards int) (string, error) {
	if d.url != "" {
		return postgres.MigrationSQL(d.table, shards)
	}
	return sqlite.MigrationSQL(d.table)
}

// openOptions are what only some databases take.
type openOptions struct {
	shards   int // of a new outbox; 0 is the default
	noNotify bool
	log      *slog.Logger
}

// open connects, and creates an SQLite file that is missing. The caller closes
// the store.
func (d database) open(ctx context.Context, o openOptions) (outboxStore, error) {
	if d.url != "" {
		s, err := postgres.Open(ctx, postgres.Config{
			URL: d.url, Table: d.table, Shards: o.shards, NoNotify: o.noNotify, Logger: o.log,
		})
		if err != nil {
			return nil, err
		}
		return s, nil
	}
	s, err := sqlite.Open(ctx, sqlite.Config{Path: d.file, Table: d.table})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// openExisting opens an outbox that must be there with its tables.
func (d database) openExisting(ctx context.Context, o openOptions) (outboxStore, error) {
	if d.file != "" {
		// Opening it would leave an empty file behind a misspelled name.
		if _, err := os.Stat(d.file); errors.Is(err, fs.ErrNotExist) {
			return nil, withHint(fmt.Errorf("database %s does not exist: %w", d.file, fs.ErrNotExist),
				"relay migrate creates it, so does relay run; --db names another")
		} else if err != nil {
			return nil, err
		}
	}
	store, err := d.open(ctx, o)
	if err != nil {
		return nil, err
	}
	if err := store.Check(ctx); err != nil {
		return nil, errors.Join(err, d.close(store))
	}
	return store, nil
}

// closeTime is how long a database may take to say goodbye.
const closeTime = time.Second

// close closes the store, or leaves that to the end of the process, where
// PostgreSQL does not answer: its pool waits for some 15 seconds for each
// connection, and nothing is left to do.
func (d database) close(store outboxStore) error {
	if d.url == "" {
		return store.Close()
	}
	closed := make(chan error, 1)
	go func() { closed <- store.Close() }()
	timer := time.NewTimer(closeTime)
	defer timer.Stop()
	select {
	case err := <-closed:
		return err
	case <-timer.C:
		return nil
	}
}

// openStore opens the outbox of --db and --table, which must be there. The caller
// closes it.
func (a *app) openStore(ctx context.Context) (outboxStore, error) {
	d, err := a.global.database()
	if err != nil {
		return nil, err
	}
	return d.openExisting(ctx, openOptions{log: a.log})
}

// away reports whether opening the database failed for a reason that may end by
// itself: no server, no network, one that starts, stops or is full. What a person
// has to put right is none: a refused login, an unknown database, a missing right.
func (d database) away(err error) (away bool) {
	var (
		answer  *pgconn.PgError
		connect *pgconn.ConnectError
		network net.Error
	)
	switch {
	case d.url == "":
		return false // a file is there or not
	case errors.As(err, &answer):
		return hasClass(answer, "08", "40", "53", "55", "57", "58", codeReadOnly)
	case isTLSMistake(err), refusedTLS(err):
		return false
	}
	return errors.As(err, &connect) || errors.As(err, &network) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// Codes of PostgreSQL, appendix A of its manual.
const (
	codeReadOnly        = "25006"
	codeBadPassword     = "28P01"
	codeNoLogin         = "28000"
	codeNoDatabase      = "3D000"
	codeNoRight         = "42501"
	codeTooManySessions = "53300"
)

// refusedTLS reports whether every address that was tried has a server without
// TLS. pgx has no name for that error.
func refusedTLS(err error) (refused bool) {
	var connect *pgconn.ConnectError
	if !errors.As(err, &connect) {
		return false
	}
	text := connect.Error() // one line, or one for each address after the first
	return strings.Count(text, "server refused TLS connection") == max(1, strings.Count(text, "\n"))
}

// hasClass reports whether an error's code begins with one of these.
func hasClass(err *pgconn.PgError, classes ...string) (has bool) {
	for _, c := range classes {
		if strings.HasPrefix(err.Code, c) {
			return true
		}
	}
	return false
}

// databaseHint returns the remedy for an error of PostgreSQL.
func databaseHint(err error) string {
	var (
		answer  *pgconn.PgError
		parse   *pgconn.ParseConfigError
		connect *pgconn.ConnectError
	)
	if errors.As(err, &answer) {
		switch answer.Code {
		case codeBadPassword:
			return "see the user and the password in --db; without one there, PGPASSWORD or ~/.pgpass"
		case codeNoLogin:
			return "the server lets this user not in from here: see the role, and the server's pg_hba.conf"
		case codeNoDatabase:
			return "create the database first (createdb NAME), or name another in --db"
		case codeNoRight:
			return "README.md lists what the role of a writer and that of a relay need; relay migrate is for the owner"
		case codeReadOnly:
			return "this server is a standby: --db may name several hosts, with target_session_attrs=read-write"
		case codeTooManySessions:
			return "pool_max_conns=N in --db makes a relay take fewer connections"
		}
		return ""
	}
	switch {
	case errors.As(err, &parse):
		return "in a user or password @ is written %40, / %2F, : %3A and % %25; all the rest is as libpq's manual says"
	case !errors.As(err, &connect):
		return ""
	case refusedTLS(err):
		return "the server has no TLS: sslmode in --db says whether it is wanted"
	case isTLSMistake(err):
		return "sslmode and sslrootcert in --db say whom to trust, sslcert and sslkey are the client's own"
	}
	return "is PostgreSQL running there? --db names another"
}
