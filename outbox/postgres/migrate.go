package postgres

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// schemaVersion is what Migrate brings the tables to.
const schemaVersion = 2

// DefaultShards is into how many shards a new outbox is divided: the most relays
// that can be active on it at once.
const DefaultShards = 16

// maxShards is a limit of good sense: each costs a row in every claim.
const maxShards = 256

//go:embed schema.sql
var schemaSQL string

//go:embed schema_2.sql
var schema2SQL string

const (
	versionSQL = `CREATE TABLE IF NOT EXISTS {version} (version INTEGER PRIMARY KEY, applied_at TIMESTAMPTZ NOT NULL DEFAULT now());
`
	// shardSQL is where the number of shards is told to the database.
	shardSQL = `CREATE OR REPLACE FUNCTION {fn_shard}(aggregate_type TEXT, aggregate_id TEXT, id BIGINT) RETURNS SMALLINT
	LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
	SELECT (CASE WHEN aggregate_id <> '' THEN abs(hashtextextended(aggregate_id, hashtextextended(coalesce(aggregate_type, ''), 0)) % {shards})
		ELSE abs(id % {shards}) END)::smallint
$$;`
)

// migrations returns the SQL of each version: [i] brings version i to i+1.
func migrations(n names, shards int) []string {
	count := fmt.Sprint(shards)
	first := strings.ReplaceAll(schemaSQL, "{shard_of}", shardSQL)
	return []string{n.sql(strings.ReplaceAll(first, "{shards}", count)), n.sql(schema2SQL)}
}

func checkShards(shards int) error {
	if shards < 1 || shards > maxShards {
		return fmt.Errorf("shards: %d is not between 1 and %d", shards, maxShards)
	}
	return nil
}

// MigrationSQL returns the SQL that creates the outbox from nothing, for people
// who run their migrations themselves. A table without a schema is put into
// "public". shards is as in Config.
func MigrationSQL(table string, shards int) (string, error) {
	cfg := Config{Table: table, Shards: shards}.withDefaults()
	schema, name, err := splitTable(cfg.Table)
	if err == nil {
		err = checkShards(cfg.Shards)
	}
	if err != nil {
		return "", err
	}
	if schema == "" {
		schema = "public"
	}
	n := newNames(schema, name)
	var b strings.Builder
	b.WriteString("BEGIN;\n")
	if schema != "public" {
		b.WriteString(n.sql("CREATE SCHEMA IF NOT EXISTS {schema};\n"))
	}
	b.WriteString(n.sql(versionSQL))
	for i, m := range migrations(n, cfg.Shards) {
		b.WriteString(m)
		b.WriteString(n.sql(fmt.Sprintf("INSERT INTO {version} (version) VALUES (%d);\n", i+1)))
	}
	b.WriteString("COMMIT;\n")
	return b.String(), nil
}

// Migrate creates the tables or upgrades them, in one transaction under an
// advisory lock. Any number of processes may call it at once: one does the work,
// the others find it done. Tables newer than this program are left alone:
// outbox.ErrSchemaTooNew. The schema is created when it is missing, which needs
// the right to. The number of shards of an outbox that exists is changed by
// [Store.Reshard] alone.
func (s *Store) Migrate(ctx context.Context) error {
	err := s.inTx(ctx, migrateTimeout, func(ctx context.Context, tx pgx.Tx) error {
		version, err := s.lockSchema(ctx, tx)
		if err != nil || version == schemaVersion {
			return err
		}
		if version == 0 {
			if err := s.createSchema(ctx, tx); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, s.sql(versionSQL)); err != nil {
				return err
			}
		}
		for v, m := range migrations(s.names, s.cfg.Shards)[version:] {
			v += version + 1
			if _, err := tx.Exec(ctx, m, pgx.QueryExecModeSimpleProtocol); err != nil {
				return fmt.Errorf("to version %d: %w", v, err)
			}
			if _, err := tx.Exec(ctx, s.sql(`INSERT INTO {version} (version) VALUES ($1)`), v); err != nil {
				return fmt.Errorf("to version %d: %w", v, err)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("migrate outbox %q: %w", s.cfg.Table, err)
	}
	return nil
}

// lockSchema makes migrations take turns and returns the version reached.
func (s *Store) lockSchema(ctx context.Context, tx pgx.Tx) (version int, err error) {
	if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtextextended($1, 0))`, "jetbox "+s.schema+"."+s.table); err != nil {
		return 0, err
	}
	version, err = s.version(ctx, tx)
	if errors.Is(err, outbox.ErrNoTables) {
		return 0, nil
	}
	return version, err
}

func (s *Store) createSchema(ctx context.Context, tx pgx.Tx) error {
	var there bool
	if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`, s.schema).Scan(&there); err != nil || there {
		return err
	}
	_, err := tx.Exec(ctx, s.sql(`CREATE SCHEMA {schema}`))
	return err
}

// Check returns outbox.ErrNoTables or outbox.ErrSchemaTooNew when the tables
// are not what this program works with.
func (s *Store) Check(ctx context.Context) error {
	err := s.do(ctx, func(ctx context.Context) error {
		version, err := s.version(ctx, s.pool)
		if err == nil && version < schemaVersion {
			err = fmt.Errorf("%w: they have version %d, this program needs %d", outbox.ErrNoTables, version, schemaVersion)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("outbox %q: %w", s.cfg.Table, err)
	}
	return nil
}

type queryer interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// version returns the schema's version, or outbox.ErrNoTables.
func (s *Store) version(ctx context.Context, q queryer) (version int, err error) {
	// Asked for by name: inside a transaction, a missing table would end it.
	var there bool
	if err := q.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, s.sql("{version}")).Scan(&there); err != nil {
		return 0, fmt.Errorf("look for the tables: %w", err)
	}
	if !there {
		return 0, outbox.ErrNoTables
	}
	if err := q.QueryRow(ctx, s.sql(`SELECT coalesce(max(version), 0) FROM {version}`)).Scan(&version); err != nil {
		return 0, fmt.Errorf("read schema version: %w", err)
	}
	if version > schemaVersion {
		return 0, fmt.Errorf("%w: the tables have version %d, this program knows %d", outbox.ErrSchemaTooNew, version, schemaVersion)
	}
	if version == 0 {
		return 0, outbox.ErrNoTables
	}
	return version, nil
}
