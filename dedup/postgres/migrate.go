package postgres

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/seed-5e04d8fb/jetbox/dedup"
)

// schemaVersion is what Migrate brings the tables to.
const schemaVersion = 1

const versionSQL = `CREATE TABLE IF NOT EXISTS {version} (version INTEGER PRIMARY KEY, applied_at TIMESTAMPTZ NOT NULL DEFAULT now())`

// migrations are the statements of each version. Texts compare by their bytes,
// as Go's do.
var migrations = [schemaVersion][]string{{
	`CREATE TABLE {ledger} (
	consumer   TEXT COLLATE "C" NOT NULL,
	key        TEXT COLLATE "C" NOT NULL,
	handled_at TIMESTAMPTZ NOT NULL,
	PRIMARY KEY (consumer, key)
)`,
	`CREATE INDEX {age} ON {ledger} (consumer, handled_at)`,
}}

const (
	// maxTable leaves room for the longest suffix within PostgreSQL's 63 bytes.
	maxTable = 63 - len("_schema")

	migrateTimeout = time.Minute
)

var identifier = regexp.MustCompile(`^[a-z_][a-z0-9_]*$`)

// newNames checks the ledger's name, which may have a schema in front.
func newNames(name string) (names, error) {
	schema, table, qualified := strings.Cut(name, ".")
	if !qualified {
		schema, table = "", name
	}
	switch {
	case !identifier.MatchString(table), qualified && !identifier.MatchString(schema):
		return names{}, fmt.Errorf("dedup/postgres: Table is %q, want TABLE or SCHEMA.TABLE, of lower-case letters, digits and _, not starting with a digit", name)
	case len(table) > maxTable, len(schema) > 63:
		return names{}, fmt.Errorf("dedup/postgres: Table is %q, longer than %d bytes", name, maxTable)
	}
	in := func(name string) string {
		if schema == "" {
			return `"` + name + `"`
		}
		return `"` + schema + `"."` + name + `"`
	}
	return names{schema, strings.NewReplacer("{schema}", `"`+schema+`"`, "{ledger}", in(table),
		"{version}", in(table+"_schema"), "{age}", `"`+table+`_age"`)}, nil
}

// MigrationSQL returns the SQL that creates a ledger from nothing, for people who
// run their migrations themselves. A table without a schema is made where the
// search path says.
func MigrationSQL(table string) (string, error) {
	n, err := newNames(Config{Table: table}.withDefaults().Table)
	if err != nil {
		return "", err
	}
	stmts := []string{"BEGIN"}
	if n.schema != "" && n.schema != "public" {
		stmts = append(stmts, `CREATE SCHEMA IF NOT EXISTS {schema}`)
	}
	stmts = append(stmts, versionSQL)
	for v, m := range migrations {
		stmts = append(append(stmts, m...), insertVersion(v+1))
	}
	return n.sql(strings.Join(append(stmts, "COMMIT", ""), ";\n")), nil
}

func insertVersion(v int) string {
	return fmt.Sprintf("INSERT INTO {version} (version) VALUES (%d)", v)
}

// Migrate creates the tables or upgrades them, in one transaction under an
// advisory lock: any number of processes may call it at once. Tables newer than
// this program are left alone: dedup.ErrSchemaTooNew. The schema is created when
// it is missing, which needs the right to.
func (l *Ledger[Tx]) Migrate(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, migrateTimeout)
	defer cancel()
	if err := retry(ctx, func() error { return l.migrate(ctx) }); err != nil {
		return fmt.Errorf("migrate ledger %q: %w", l.cfg.Table, err)
	}
	return nil
}

func (l *Ledger[Tx]) migrate(ctx context.Context) error {
	tx, err := l.access.begin(ctx)
	if err != nil {
		return err
	}
	defer l.access.rollback(tx) // after a commit it does nothing
	query := func(query string, args []any, dest any) error {
		return l.access.queryIn(ctx, tx, l.names.sql(query), args, dest)
	}
	// A statement after the lock must see what another migration did meanwhile.
	if err := l.access.exec(ctx, tx, `SET TRANSACTION ISOLATION LEVEL READ COMMITTED`); err != nil {
		return err
	}
	var locked string
	if err := query(`SELECT pg_advisory_xact_lock(hashtextextended($1::text, 0))::text`, []any{"jetbox " + l.cfg.Table}, &locked); err != nil {
		return err
	}
	version, err := l.version(query)
	if err != nil || version == schemaVersion {
		return err
	}
	var stmts []string
	if version == 0 {
		if l.names.schema != "" {
			var there bool
			if err := query(`SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1::text)`, []any{l.names.schema}, &there); err != nil {
				return err
			}
			if !there {
				stmts = append(stmts, `CREATE SCHEMA {schema}`)
			}
		}
		stmts = append(stmts, versionSQL)
	}
	for v := version; v < schemaVersion; v++ {
		stmts = append(append(stmts, migrations[v]...), insertVersion(v+1))
	}
	for _, s := range stmts {
		if err := l.access.exec(ctx, tx, l.names.sql(s)); err != nil {
			return err
		}
	}
	return l.access.commit(ctx, tx)
}

// Check returns dedup.ErrNoTables or dedup.ErrSchemaTooNew when the tables are
// not what this program works with. The first Do does the same.
func (l *Ledger[Tx]) Check(ctx context.Context) error {
	version, err := l.version(func(query string, args []any, dest any) error {
		return l.access.query(ctx, l.names.sql(query), args, dest)
	})
	switch {
	case err != nil:
	case version == 0:
		err = dedup.ErrNoTables
	case version < schemaVersion:
		err = fmt.Errorf("%w: they have version %d, this program needs %d", dedup.ErrNoTables, version, schemaVersion)
	}
	if err != nil {
		return fmt.Errorf("ledger %q: %w", l.cfg.Table, err)
	}
	return nil
}

// ready is Check, until it has succeeded once.
func (l *Ledger[Tx]) ready(ctx context.Context) error {
	if l.checked.Load() {
		return nil
	}
	err := l.Check(ctx)
	l.checked.Store(err == nil)
	return err
}

// version returns the tables' version, 0 when there are none.
func (l *Ledger[Tx]) version(query func(query string, args []any, dest any) error) (version int, err error) {
	// Asked for by name: inside a transaction, a missing table would end it. A name
	// that was looked up in vain before is remembered as missing until the session
	// hears of other transactions' changes, which it does when it opens a table:
	// that is what pg_class is for.
	var there bool
	if err := query(`SELECT to_regclass($1::text) IS NOT NULL FROM pg_class LIMIT 1`, []any{l.names.sql("{version}")}, &there); err != nil || !there {
		return 0, err
	}
	if err := query(`SELECT coalesce(max(version), 0) FROM {version}`, nil, &version); err != nil {
		return 0, fmt.Errorf("read schema version: %w", err)
	}
	if version > schemaVersion {
		return 0, fmt.Errorf("%w: the tables have version %d, this program knows %d", dedup.ErrSchemaTooNew, version, schemaVersion)
	}
	return version, nil
}
