package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// DefaultTable is the outbox's name unless configured.
const DefaultTable = "outbox"

// schemaVersion is what migrate brings the tables to.
const schemaVersion = 3

// Columns of the outbox that say something about the event or its fate, in the
// order they are listed everywhere: outbox, its dead letters and its archive
// share them. hold comes last and is the store's own.
const columns = `id, event_id, idempotency_key, subject, event_type, aggregate_type, aggregate_id,
	aggregate_seq, schema_version, content_type, headers, status, attempts, last_error, available_at,
	created_at, published_at, stream, stream_seq, hold, payload`

// eventColumns are those of them that a claim needs: a relay reads them for every
// row it publishes. Most rows have the default in two of them, which is spared its
// way into a string of its own: empty means the same.
const eventColumns = `o.id, o.event_id, o.idempotency_key, o.subject, o.event_type, o.aggregate_type, o.aggregate_id,
	o.aggregate_seq, o.schema_version, CASE o.content_type WHEN 'application/json' THEN '' ELSE o.content_type END,
	CASE o.headers WHEN '{}' THEN '' ELSE o.headers END, o.attempts, o.available_at, o.created_at, o.payload`

// Values of the column hold: why a pending row is out of the index of rows that
// may go now. Rows that wait cost a fetch nothing.
const (
	holdNone   = 0 // may go
	holdLater  = 1 // scheduled: until available_at, holds nobody
	holdRetry  = 2 // waits until available_at, and its key waits with it; or dead, its key frozen
	holdBehind = 3 // behind an earlier row of its key
)

// migrations[i] brings version i to i+1. {t} is the table's name. They run in
// the writer's SQLite too (defaults, checks), so nothing newer than 3.31.
//
// NOT NULL ON CONFLICT REPLACE: an explicit NULL, as some mappers send for every
// field, takes the default instead of making a row that no relay sees.
//
// A sleeping row whose available_at somebody has set to NULL is due at once, as
// NULL says everywhere: hence the coalesce in the indexes.
//
// The checks of types: a BLOB and a TEXT of the same bytes are one value to the
// relay and two to an index, so one of two events would be taken for a repeat of
// the other; and a time in text never comes.
//
// The payload is last, so that reading a row's state never walks the overflow
// pages of a long one.
var migrations = []string{`
CREATE TABLE "{t}" (
	id INTEGER PRIMARY KEY AUTOINCREMENT,
	event_id TEXT NOT NULL ON CONFLICT REPLACE UNIQUE DEFAULT (
		lower(hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-' ||
		substr('89AB', 1 + (random() & 3), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6)))) CHECK (typeof(event_id) = 'text'),
	idempotency_key TEXT CHECK (typeof(idempotency_key) IN ('text', 'null')),
	subject TEXT NOT NULL CHECK (typeof(subject) = 'text'),
	event_type TEXT,
	aggregate_type TEXT CHECK (typeof(aggregate_type) IN ('text', 'null')),
	aggregate_id TEXT CHECK (typeof(aggregate_id) IN ('text', 'null')),
	aggregate_seq INTEGER CHECK (typeof(aggregate_seq) IN ('integer', 'null')),
	schema_version TEXT,
	content_type TEXT NOT NULL ON CONFLICT REPLACE DEFAULT 'application/json',
	headers TEXT NOT NULL ON CONFLICT REPLACE DEFAULT '{}',
	status TEXT NOT NULL ON CONFLICT REPLACE DEFAULT 'PENDING'
		CHECK (status IN ('PENDING', 'PUBLISHED', 'DEAD_LETTER')),
	attempts INTEGER NOT NULL ON CONFLICT REPLACE DEFAULT 0 CHECK (typeof(attempts) = 'integer'),
	last_error TEXT,
	available_at INTEGER CHECK (typeof(available_at) IN ('integer', 'null')),
	created_at INTEGER NOT NULL ON CONFLICT REPLACE DEFAULT (cast((julianday('now') - 2440587.5) * 86400000 AS INTEGER))
		CHECK (typeof(created_at) = 'integer'),
	published_at INTEGER CHECK (typeof(published_at) IN ('integer', 'null')),
	stream TEXT,
	stream_seq INTEGER CHECK (typeof(stream_seq) IN ('integer', 'null')),
	hold INTEGER NOT NULL ON CONFLICT REPLACE DEFAULT 0 CHECK (hold IN (0, 1, 2, 3)),
	payload BLOB NOT NULL CHECK (typeof(payload) IN ('blob', 'text'))
);
CREATE UNIQUE INDEX "{t}_key" ON "{t}" (coalesce(idempotency_key, event_id));
CREATE INDEX "{t}_ready" ON "{t}" (id) WHERE status = 'PENDING' AND hold = 0;
CREATE INDEX "{t}_due" ON "{t}" (coalesce(available_at, 0)) WHERE status = 'PENDING' AND hold IN (1, 2);
CREATE INDEX "{t}_later" ON "{t}" (aggregate_id, coalesce(aggregate_type, ''), coalesce(available_at, 0))
	WHERE hold = 1 AND aggregate_id <> '';
CREATE INDEX "{t}_retry" ON "{t}" (aggregate_id, coalesce(aggregate_type, ''), id) WHERE hold = 2;
CREATE INDEX "{t}_behind" ON "{t}" (aggregate_id, coalesce(aggregate_type, ''), id) WHERE hold = 3;
CREATE INDEX "{t}_dead" ON "{t}" (id) WHERE status = 'DEAD_LETTER';

CREATE TABLE "{t}_dead_letter" (
	id INTEGER PRIMARY KEY,
	{shared},
	dead_at INTEGER NOT NULL
);
CREATE TABLE "{t}_archive" (
	id INTEGER PRIMARY KEY,
	{shared},
	archived_at INTEGER NOT NULL
);

CREATE TABLE "{t}_lease" (
	shard INTEGER PRIMARY KEY,
	owner TEXT,
	holder TEXT,
	epoch INTEGER NOT NULL DEFAULT 0,
	expires_at INTEGER NOT NULL DEFAULT 0,
	length INTEGER NOT NULL DEFAULT 0,
	claimed_from INTEGER,
	claimed_to INTEGER,
	claimed_at INTEGER
);
INSERT INTO "{t}_lease" (shard) VALUES (0);

CREATE VIEW "{t}_status" AS
SELECT o.id, o.event_id, o.subject,
	CASE WHEN o.status = 'PENDING' AND o.hold = 0 AND EXISTS (
		SELECT 1 FROM "{t}_lease" l WHERE o.id BETWEEN l.claimed_from AND l.claimed_to
	) THEN 'PROCESSING' ELSE o.status END AS status,
	o.attempts, o.last_error, o.available_at
FROM "{t}" o;
`, `
-- A claim for each batch, instead of one range in the lease: the age of a row of
-- unknown outcome is then its own, and so is where the streams stood before it.
CREATE TABLE "{t}_claim" (
	id INTEGER PRIMARY KEY,
	first INTEGER NOT NULL,
	last INTEGER NOT NULL,
	claimed_at INTEGER NOT NULL,
	before TEXT NOT NULL
);
INSERT INTO "{t}_claim" (first, last, claimed_at, before)
	SELECT claimed_from, claimed_to, coalesce(claimed_at, 0), '[]' FROM "{t}_lease" WHERE claimed_from IS NOT NULL;
DROP VIEW "{t}_status";
CREATE TABLE "{t}_lease_2" (
	shard INTEGER PRIMARY KEY,
	owner TEXT,
	holder TEXT,
	epoch INTEGER NOT NULL DEFAULT 0,
	expires_at INTEGER NOT NULL DEFAULT 0,
	length INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "{t}_lease_2" SELECT shard, owner, holder, epoch, expires_at, length FROM "{t}_lease";
DROP TABLE "{t}_lease";
ALTER TABLE "{t}_lease_2" RENAME TO "{t}_lease";
CREATE VIEW "{t}_status" AS
SELECT o.id, o.event_id, o.subject,
	CASE WHEN o.status = 'PENDING' AND o.hold = 0 AND EXISTS (
		SELECT 1 FROM "{t}_claim" c WHERE o.id BETWEEN c.first AND c.last
	) THEN 'PROCESSING' ELSE o.status END AS status,
	o.attempts, o.last_error, o.available_at
FROM "{t}" o;
`, `
-- What is known of each stream: its creation, and the last message that it
-- acknowledged. A stream that has not got it has lost it.
CREATE TABLE "{t}_stream" (
	stream TEXT PRIMARY KEY,
	created TEXT NOT NULL,
	seq INTEGER NOT NULL,
	msg_id TEXT NOT NULL,
	pos INTEGER NOT NULL,
	at INTEGER NOT NULL,
	since INTEGER, -- rows recorded by then were published to older streams of the name
	older INTEGER NOT NULL DEFAULT 0, -- such rows may be retained
	recall TEXT -- of rows that are to be published again, as JSON
);
`}

const sharedColumns = `event_id TEXT NOT NULL, idempotency_key TEXT, subject TEXT NOT NULL, event_type TEXT,
	aggregate_type TEXT, aggregate_id TEXT, aggregate_seq INTEGER, schema_version TEXT, content_type TEXT,
	headers TEXT, status TEXT NOT NULL, attempts INTEGER NOT NULL, last_error TEXT, available_at INTEGER,
	created_at INTEGER NOT NULL, published_at INTEGER, stream TEXT, stream_seq INTEGER, hold INTEGER NOT NULL,
	payload BLOB NOT NULL`

const versionTable = `CREATE TABLE IF NOT EXISTS "{t}_schema" (version INTEGER PRIMARY KEY, applied_at INTEGER NOT NULL);
`

var identifier = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

func checkTable(table string) error {
	if !identifier.MatchString(table) || strings.HasPrefix(strings.ToLower(table), "sqlite_") || len(table) > 100 {
		return fmt.Errorf("table name %q: want letters, digits and _, not starting with a digit or sqlite_", table)
	}
	return nil
}

// expand fills the table's name into SQL. The name was checked: it needs no
// further quoting.
func expand(table, query string) string {
	return strings.NewReplacer("{t}", table, "{shared}", sharedColumns, "{columns}", columns).Replace(query)
}

// MigrationSQL returns the SQL that creates the outbox from nothing, for people
// who run their migrations themselves.
func MigrationSQL(table string) (string, error) {
	if err := checkTable(table); err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString("BEGIN IMMEDIATE;\n" + versionTable)
	for i, m := range migrations {
		b.WriteString(m)
		fmt.Fprintf(&b, "INSERT INTO \"{t}_schema\" VALUES (%d, cast((julianday('now') - 2440587.5) * 86400000 AS INTEGER));\n", i+1)
	}
	b.WriteString("COMMIT;\n")
	return expand(table, b.String()), nil
}

// Migrate creates the tables or upgrades them, in one transaction. Any number
// of processes may call it at once: one does the work, the others find it done.
// Tables newer than this program are left alone: outbox.ErrSchemaTooNew.
func (s *Store) Migrate(ctx context.Context) error {
	err := inTx(ctx, s.db, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, s.sql(versionTable)); err != nil {
			return err
		}
		version, err := s.version(ctx, tx)
		if err != nil {
			return err
		}
		for v := version; v < schemaVersion; v++ {
			if _, err := tx.ExecContext(ctx, s.sql(migrations[v])); err != nil {
				return fmt.Errorf("to version %d: %w", v+1, err)
			}
			if _, err := tx.ExecContext(ctx, s.sql(`INSERT INTO "{t}_schema" VALUES (?, ?)`), v+1, time.Now().UnixMilli()); err != nil {
				return fmt.Errorf("to version %d: %w", v+1, err)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("migrate outbox %q: %w", s.table, err)
	}
	return nil
}

// Check returns outbox.ErrNoTables or outbox.ErrSchemaTooNew when the tables
// are not what this program works with.
func (s *Store) Check(ctx context.Context) error {
	version, err := s.version(ctx, s.db)
	if err == nil && version < schemaVersion {
		err = fmt.Errorf("%w: they have version %d, this program needs %d", outbox.ErrNoTables, version, schemaVersion)
	}
	if err != nil {
		return fmt.Errorf("outbox %q: %w", s.table, err)
	}
	return nil
}

type queryer interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// version returns the schema's version, 0 when there is none.
func (s *Store) version(ctx context.Context, q queryer) (int, error) {
	var version sql.Null[int]
	err := q.QueryRowContext(ctx, s.sql(`SELECT max(version) FROM "{t}_schema"`)).Scan(&version)
	switch {
	case isNoTable(err):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("read schema version: %w", err)
	case version.V > schemaVersion:
		return 0, fmt.Errorf("%w: the tables have version %d, this program knows %d",
			outbox.ErrSchemaTooNew, version.V, schemaVersion)
	}
	return version.V, nil
}

func isNoTable(err error) (missing bool) {
	// SQLite has no code of its own for it.
	return err != nil && strings.Contains(err.Error(), "no such table")
}

// noTables tells the usual first mistake from other errors.
func noTables(err error) error {
	if isNoTable(err) {
		return fmt.Errorf("%w: %w", outbox.ErrNoTables, err)
	}
	return err
}

// inTx runs f in a transaction of db and commits.
func inTx(ctx context.Context, db *sql.DB, f func(tx *sql.Tx) error) error {
	return retryBusy(ctx, func(ctx context.Context) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		if err := f(tx); err != nil {
			return errors.Join(err, ignoreDone(tx.Rollback()))
		}
		return tx.Commit()
	})
}

func ignoreDone(err error) error {
	if errors.Is(err, sql.ErrTxDone) {
		return nil
	}
	return err
}
