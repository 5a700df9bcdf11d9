package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/seed-5e04d8fb/jetbox/dedup"
)

// schemaVersion is what New brings the table to.
const schemaVersion = 1

// The table may be there without a version, from before there were any, with
// another index.
const schemaSQL = `CREATE TABLE IF NOT EXISTS "{t}" (
	consumer   TEXT    NOT NULL,
	key        TEXT    NOT NULL,
	handled_at INTEGER NOT NULL, -- unix ms
	PRIMARY KEY (consumer, key)
) WITHOUT ROWID;
DROP INDEX IF EXISTS "{t}_handled_at";
CREATE INDEX IF NOT EXISTS "{t}_age" ON "{t}" (consumer, handled_at);
CREATE TABLE IF NOT EXISTS "{t}_schema" (version INTEGER PRIMARY KEY, applied_at INTEGER NOT NULL);
INSERT OR IGNORE INTO "{t}_schema" VALUES (1, {now});`

// migrate creates the tables or finds them as they should be.
func migrate(ctx context.Context, db *sql.DB, table string) error {
	return retryBusy(ctx, func() error {
		version, err := readVersion(ctx, db, table)
		switch {
		case err != nil || version == schemaVersion:
			return err
		case version > schemaVersion:
			return fmt.Errorf("%w: the table has version %d, this program knows %d", dedup.ErrSchemaTooNew, version, schemaVersion)
		}
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		now := fmt.Sprint(time.Now().UnixMilli())
		if _, err := tx.ExecContext(ctx, strings.NewReplacer("{t}", table, "{now}", now).Replace(schemaSQL)); err != nil {
			return errors.Join(err, tx.Rollback())
		}
		return tx.Commit()
	})
}

func readVersion(ctx context.Context, db *sql.DB, table string) (int, error) {
	var there bool
	err := db.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?)`, table+"_schema").Scan(&there)
	if err != nil || !there {
		return 0, err
	}
	var version int
	err = db.QueryRowContext(ctx, `SELECT coalesce(max(version), 0) FROM "`+table+`_schema"`).Scan(&version)
	return version, err
}
