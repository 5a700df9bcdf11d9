package idempotent

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/seed-5e04d8fb/jetbox/dedup"
)

// schemaVersion is what New brings the table to.
const schemaVersion = 1

// Times are Unix milliseconds of one clock: the server's, or that of the host that
// has the SQLite file. They only say when others may take over: who has been
// overtaken finds out by the owner.
const schemaSQL = `CREATE TABLE IF NOT EXISTS {t} (
	id          TEXT PRIMARY KEY,
	request     TEXT NOT NULL,
	fingerprint TEXT NOT NULL,
	owner       TEXT NOT NULL,
	until       {bigint} NOT NULL,
	changed_at  {bigint} NOT NULL,
	status      INTEGER,
	header      {blob},
	body        {blob}
);
CREATE INDEX IF NOT EXISTS {age} ON {t} (changed_at);
CREATE TABLE IF NOT EXISTS {version} (version INTEGER PRIMARY KEY, applied_at {bigint} NOT NULL);
INSERT INTO {version} VALUES (1, {now}) ON CONFLICT DO NOTHING`

// migrate looks first: where the table is there, no right to create is needed.
func (s *store) migrate(ctx context.Context) error {
	err := s.check(ctx)
	if err == nil || errors.Is(err, dedup.ErrSchemaTooNew) || ctx.Err() != nil {
		return err
	}
	createErr := s.retryBusy(ctx, func() error { return s.create(ctx) })
	// Processes that start together get into each other's way: one succeeds.
	if err := s.check(ctx); err != nil {
		return errors.Join(createErr, err)
	}
	return nil
}

func (s *store) create(ctx context.Context) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // after a commit it does nothing
	for stmt := range strings.SplitSeq(s.sql(schemaSQL), ";\n") {
		if _, err := tx.ExecContext(ctx, stmt); err != nil {
			return err
		}
	}
	return tx.Commit()
}

func (s *store) check(ctx context.Context) error {
	var version int
	err := s.retryBusy(ctx, func() error {
		return s.db.QueryRowContext(ctx, s.sql(`SELECT coalesce(max(version), 0) FROM {version}`)).Scan(&version)
	})
	switch {
	case err != nil:
		return err
	case version == 0:
		return dedup.ErrNoTables
	case version > schemaVersion:
		return fmt.Errorf("%w: the table has version %d, this program knows %d", dedup.ErrSchemaTooNew, version, schemaVersion)
	}
	return nil
}
