package sqlite

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"modernc.org/sqlite"
)

// settings are what a connection must have.
type settings struct {
	busyTimeout time.Duration
	full        bool // synchronous=FULL; NORMAL otherwise
	readOnly    bool
}

var (
	writerSettings = settings{busyTimeout: 5 * time.Second}

	// relaySettings wait for the lock in Go (see retryBusy): SQLite's own busy
	// handler sleeps up to 25 ms between tries and starves behind a busy writer.
	relaySettings = settings{full: true}

	// readerSettings are for looking ahead: readers wait for nobody in WAL mode.
	readerSettings = settings{readOnly: true}
)

type pragma struct {
	name  string
	value string // as set
	read  string // as SQLite reports it
}

func (s settings) pragmas() []pragma {
	ms := strconv.FormatInt(s.busyTimeout.Milliseconds(), 10)
	sync := pragma{"synchronous", "NORMAL", "1"}
	if s.full {
		sync = pragma{"synchronous", "FULL", "2"}
	}
	all := []pragma{
		// First, so that the switch to WAL below waits for other processes.
		{"busy_timeout", ms, ms},
		{"journal_mode", "WAL", "wal"},
		{"foreign_keys", "1", "1"},
		sync,
	}
	if s.readOnly {
		all = append(all, pragma{"query_only", "1", "1"})
	}
	return all
}

// OpenDB opens the SQLite file for an application: a pool whose connections
// have WAL, foreign keys, synchronous=NORMAL, a busy timeout of 5 s and
// immediate transactions, each checked when it is made. The file is created
// when missing; its folder is not. The caller closes the pool.
//
// Begin a transaction with nil options: the driver ignores the immediate mode
// for read-only ones (modernc.org/sqlite 1.62).
func OpenDB(ctx context.Context, path string) (*sql.DB, error) {
	return openPool(ctx, path, writerSettings, 0)
}

func openPool(ctx context.Context, path string, set settings, maxConns int) (*sql.DB, error) {
	if err := checkPath(path); err != nil {
		return nil, fmt.Errorf("open SQLite file %q: %w", path, err)
	}
	c, err := sqlite.NewConnector(driverDSN(path, set))
	if err != nil {
		return nil, fmt.Errorf("open SQLite file %q: %w", path, err)
	}
	db := sql.OpenDB(&checkedConnector{Connector: c, settings: set})
	db.SetMaxOpenConns(maxConns)
	// Processes that start together race for the switch of a fresh file to WAL,
	// and the loser may get BUSY whatever its timeout (seen once in 50 files).
	if err := retryBusy(ctx, db.PingContext); err != nil {
		return nil, errors.Join(fmt.Errorf("open SQLite file %q: %w", path, err), db.Close())
	}
	return db, nil
}

// checkedConnector reads the settings back on every physical connection: the
// driver takes a misspelled value without a word and leaves the default.
type checkedConnector struct {
	driver.Connector
	settings settings
}

func (c *checkedConnector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	for _, p := range c.settings.pragmas() {
		got, err := readPragma(ctx, conn, p.name)
		if err == nil && got != p.read {
			err = fmt.Errorf("pragma %s is %q on a new connection, want %q", p.name, got, p.read)
		}
		if err != nil {
			return nil, errors.Join(err, conn.Close())
		}
	}
	return conn, nil
}

func readPragma(ctx context.Context, conn driver.Conn, name string) (value string, err error) {
	q, ok := conn.(driver.QueryerContext)
	if !ok {
		return "", errors.New("the driver's connection cannot be queried")
	}
	rows, err := q.QueryContext(ctx, "PRAGMA "+name, nil)
	if err != nil {
		return "", fmt.Errorf("read pragma %s: %w", name, err)
	}
	defer rows.Close()
	dest := make([]driver.Value, 1)
	if err := rows.Next(dest); err != nil {
		if errors.Is(err, io.EOF) {
			err = errors.New("no value")
		}
		return "", fmt.Errorf("read pragma %s: %w", name, err)
	}
	return fmt.Sprint(dest[0]), nil
}
