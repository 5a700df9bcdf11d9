package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// Config names an outbox.
type Config struct {
	// Path is the SQLite file. Mandatory. It is created when missing.
	Path string

	// Table is the outbox's name. Default [DefaultTable].
	Table string
}

func (c Config) withDefaults() Config {
	if c.Table == "" {
		c.Table = DefaultTable
	}
	return c
}

// Store is an outbox in an SQLite file: what a relay takes its rows from, and
// what an operator looks into. It is safe for concurrent use. It starts no
// goroutine.
type Store struct {
	table string

	// db is for writers and operators, relay for the relay's own transactions:
	// one connection, so that its claims, records and prunes take turns. reader
	// looks for what is to be claimed beside them.
	db     *sql.DB
	relay  *sql.DB
	reader *sql.DB

	path   string      // absolute
	opened os.FileInfo // what stood there then

	mu         sync.Mutex // guards what follows
	seen       observedLease
	changes    int64     // the file's last data_version, as the relay's connection sees it
	activeAt   time.Time // when it last moved
	wroteAt    time.Time // when the relay's last transaction ended
	checkpoint int       // pages in the WAL file after which the relay copies them
	pruned     int64     // where the last prune stopped looking
	swept      time.Time // when stranded rows were last looked for
}

// Open opens the file. It does not create the tables ([Store.Migrate] does), nor
// look whether they are there ([Store.Check] does). The caller closes the store.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	cfg = cfg.withDefaults()
	if err := checkTable(cfg.Table); err != nil {
		return nil, err
	}
	db, err := OpenDB(ctx, cfg.Path)
	if err != nil {
		return nil, err
	}
	relay, err := openPool(ctx, cfg.Path, relaySettings, 1)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	reader, err := openPool(ctx, cfg.Path, readerSettings, 1)
	if err != nil {
		return nil, errors.Join(err, relay.Close(), db.Close())
	}
	s := &Store{table: cfg.Table, db: db, relay: relay, reader: reader}
	if s.path, err = filepath.Abs(cfg.Path); err == nil {
		s.opened, err = os.Stat(s.path)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open outbox: %w", err), s.Close())
	}
	return s, nil
}

// replaced is an error when the file is not the one that was opened: writers that
// come now use another, as after a restore, and nobody would relay what they
// commit.
func (s *Store) replaced() error {
	now, err := os.Stat(s.path)
	if err == nil && !os.SameFile(now, s.opened) {
		err = errors.New("another file has taken its place")
	}
	if err != nil {
		return fmt.Errorf("the file is not the one that was opened, restart to use the new one: %w", err)
	}
	return nil
}

// Close releases the file. Stop the relay first.
func (s *Store) Close() error {
	return errors.Join(s.reader.Close(), s.relay.Close(), s.db.Close())
}

// DB is the pool for writers, as [OpenDB] makes it. It belongs to the store.
func (s *Store) DB() *sql.DB { return s.db }

// Table is the outbox's name.
func (s *Store) Table() string { return s.table }

func (s *Store) sql(query string) string { return expand(s.table, query) }

// holder names this process for people.
func holder() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	return fmt.Sprintf("%s pid %d", host, os.Getpid())
}
