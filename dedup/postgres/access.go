package postgres

import (
	"context"
	"database/sql"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// access is what a ledger does with one kind of transaction. All queries have
// one row, and parameters that are texts, which every driver and every mode of
// it hands on alike.
type access[Tx any] interface {
	begin(ctx context.Context) (Tx, error)
	commit(ctx context.Context, tx Tx) error
	rollback(tx Tx) // does nothing after a commit
	queryIn(ctx context.Context, tx Tx, query string, args []any, dest ...any) error
	exec(ctx context.Context, tx Tx, stmt string) error
	query(ctx context.Context, query string, args []any, dest ...any) error
}

type sqlAccess struct{ db *sql.DB }

func (a sqlAccess) begin(ctx context.Context) (*sql.Tx, error) { return a.db.BeginTx(ctx, nil) }
func (a sqlAccess) commit(_ context.Context, tx *sql.Tx) error { return tx.Commit() }
func (a sqlAccess) rollback(tx *sql.Tx)                        { _ = tx.Rollback() }
func (a sqlAccess) exec(ctx context.Context, tx *sql.Tx, s string) error {
	_, err := tx.ExecContext(ctx, s)
	return err
}

func (a sqlAccess) queryIn(ctx context.Context, tx *sql.Tx, query string, args []any, dest ...any) error {
	return tx.QueryRowContext(ctx, query, args...).Scan(dest...)
}

func (a sqlAccess) query(ctx context.Context, query string, args []any, dest ...any) error {
	return a.db.QueryRowContext(ctx, query, args...).Scan(dest...)
}

type pgxAccess struct{ pool *pgxpool.Pool }

// rollbackTimeout bounds a rollback: where the server does not answer, pgx closes
// the connection, which is as good.
const rollbackTimeout = 5 * time.Second

func (a pgxAccess) begin(ctx context.Context) (pgx.Tx, error) { return a.pool.Begin(ctx) }

// commit does not begin when ctx has ended, as that of database/sql.
func (a pgxAccess) commit(ctx context.Context, tx pgx.Tx) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

func (a pgxAccess) rollback(tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
	defer cancel()
	_ = tx.Rollback(ctx)
}

func (a pgxAccess) exec(ctx context.Context, tx pgx.Tx, s string) error {
	_, err := tx.Exec(ctx, s)
	return err
}

func (a pgxAccess) queryIn(ctx context.Context, tx pgx.Tx, query string, args []any, dest ...any) error {
	return tx.QueryRow(ctx, query, args...).Scan(dest...)
}

func (a pgxAccess) query(ctx context.Context, query string, args []any, dest ...any) error {
	return a.pool.QueryRow(ctx, query, args...).Scan(dest...)
}
