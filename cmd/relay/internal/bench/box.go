package bench

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// store is an outbox, whatever its database.
type store interface {
	relay.Source
	Append(ctx context.Context, tx *sql.Tx, events ...*jetbox.Event) error
	DB() *sql.DB
	Migrate(ctx context.Context) error
	Stats(ctx context.Context) (outbox.Stats, error)
	Close() error
}

// box is a fresh outbox with an application's table beside it.
type box struct {
	store

	insertOrder string
	writers     int    // that are needed for a thousand commits a second
	settle      string // SQL to run when a backlog is there; may be empty
	remove      func() error
}

// database makes boxes.
type database struct {
	name string
	open func(ctx context.Context) (*box, error)
}

// databases are those to measure.
func (r *rig) databases() []database {
	out := []database{{"sqlite", r.openSQLite}}
	if r.cfg.Postgres != "" {
		out = append(out, database{"postgres", r.openPostgres})
	}
	return out
}

// checkpoint moves a backlog from the log into the file, where it would be by the
// time anybody drains it.
const checkpoint = `PRAGMA wal_checkpoint(TRUNCATE)`

func (r *rig) openSQLite(ctx context.Context) (*box, error) {
	path := filepath.Join(r.dir, "outbox-"+rand.Text()+".db")
	s, err := sqlite.Open(ctx, sqlite.Config{Path: path})
	if err != nil {
		return nil, err
	}
	b := &box{
		store:       s,
		insertOrder: `INSERT INTO orders (customer, cents) VALUES (?, ?)`,
		writers:     1,
		settle:      checkpoint,
		remove:      func() error { return removeFiles(path) },
	}
	return b.create(ctx, `CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT NOT NULL, cents INTEGER NOT NULL)`)
}

// openPostgres makes a schema of its own for the box.
func (r *rig) openPostgres(ctx context.Context) (*box, error) {
	var random [6]byte
	_, _ = rand.Read(random[:]) // it never fails
	schema := fmt.Sprintf("jetbox_bench_%x", random)
	s, err := postgres.Open(ctx, postgres.Config{URL: r.cfg.Postgres, Table: schema + ".outbox", Logger: r.cfg.Logger})
	if err != nil {
		return nil, err
	}
	b := &box{
		store:       s,
		insertOrder: `INSERT INTO ` + schema + `.orders (customer, cents) VALUES ($1, $2)`,
		writers:     4, // one alone waits for the disk
		remove:      func() error { return dropSchema(ctx, r.cfg.Postgres, schema) },
	}
	return b.create(ctx, `CREATE TABLE `+schema+`.orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL, cents bigint NOT NULL)`)
}

// dropTime bounds how long a canceled run takes to leave a database as it was.
const dropTime = 30 * time.Second

func dropSchema(ctx context.Context, url, schema string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropTime)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return fmt.Errorf("drop schema %s: %w", schema, err)
	}
	if _, err = conn.Exec(ctx, `DROP SCHEMA IF EXISTS `+schema+` CASCADE`); err != nil {
		err = fmt.Errorf("drop schema %s: %w", schema, err)
	}
	return errors.Join(err, conn.Close(ctx))
}

func (b *box) create(ctx context.Context, orders string) (*box, error) {
	err := b.Migrate(ctx)
	if err == nil {
		_, err = b.DB().ExecContext(ctx, orders)
	}
	if err != nil {
		return nil, errors.Join(err, b.discard())
	}
	return b, nil
}

// discard closes the outbox and leaves nothing of it.
func (b *box) discard() error { return errors.Join(b.Close(), b.remove()) }

// fill appends a backlog, which no writer could do faster.
func (b *box) fill(ctx context.Context, s sample) error {
	const each = 1000
	for first := 0; first < s.len(); first += each {
		var events []*jetbox.Event
		for i := first; i < min(first+each, s.len()); i++ {
			events = append(events, new(s.event(i)))
		}
		if err := b.commit(ctx, func(tx *sql.Tx) error { return b.Append(ctx, tx, events...) }); err != nil {
			return fmt.Errorf("append a backlog: %w", err)
		}
	}
	if b.settle == "" {
		return nil
	}
	_, err := b.DB().ExecContext(ctx, b.settle)
	return err
}

// order is the application's transaction: an order, and its event unless nil.
func (b *box) order(ctx context.Context, i int, ev *jetbox.Event) error {
	return b.commit(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, b.insertOrder, "customer", i); err != nil {
			return err
		}
		if ev == nil {
			return nil
		}
		return b.Append(ctx, tx, ev)
	})
}

func (b *box) commit(ctx context.Context, f func(*sql.Tx) error) error {
	tx, err := b.DB().BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit()
}
