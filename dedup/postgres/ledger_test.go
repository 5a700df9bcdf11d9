package postgres_test

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/seed-5e04d8fb/jetbox/dedup/deduptest"
	"github.com/seed-5e04d8fb/jetbox/dedup/postgres"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// with returns the URL with one more setting.
func with(t testing.TB, server, name, value string) string {
	t.Helper()
	u, err := url.Parse(server)
	check(t, err)
	q := u.Query()
	q.Set(name, value)
	u.RawQuery = strings.ReplaceAll(q.Encode(), "+", "%20")
	return u.String()
}

func newPool(t testing.TB, url string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	check(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// world is a database with tables of their own for each ledger.
type world struct{ pool *pgxpool.Pool }

var tables atomic.Int64

// fixture fills in what does not depend on the kind of transaction.
func fixture[Tx any](t *testing.T, w *world, newLedger func(cfg postgres.Config) (*postgres.Ledger[Tx], error),
	exec func(ctx context.Context, tx Tx, query string, args ...any) error,
) deduptest.Fixture[Tx] {
	t.Helper()
	n := tables.Add(1)
	table, effects := fmt.Sprintf("ledger%d", n), fmt.Sprintf("effects%d", n)
	p := &deduptest.Pruning{Retention: time.Hour}
	l, err := newLedger(postgres.Config{Table: table, Retention: p.Retention, KeepFunc: func(_ context.Context, consumer string) (time.Time, error) {
		if p.Keep == nil {
			return time.Time{}, nil
		}
		return p.Keep(consumer)
	}})
	check(t, err)
	check(t, l.Migrate(t.Context()))
	_, err = w.pool.Exec(t.Context(), `CREATE TABLE `+effects+` (name BYTEA NOT NULL)`)
	check(t, err)
	p.Prune = l.Prune
	p.Age = func(ctx context.Context, d time.Duration) error {
		_, err := w.pool.Exec(ctx, `UPDATE `+table+` SET handled_at = handled_at - $1::interval`, d)
		return err
	}
	return deduptest.Fixture[Tx]{
		Ledger: l, Transactional: true, Pruning: p,
		Effect: func(ctx context.Context, tx Tx, name string) error {
			return exec(ctx, tx, `INSERT INTO `+effects+` VALUES ($1)`, []byte(name))
		},
		Count: func(ctx context.Context, name string) (n int, err error) {
			err = w.pool.QueryRow(ctx, `SELECT count(*) FROM `+effects+` WHERE name = $1`, []byte(name)).Scan(&n)
			return n, err
		},
	}
}

func execSQL(ctx context.Context, tx *sql.Tx, query string, args ...any) error {
	_, err := tx.ExecContext(ctx, query, args...)
	return err
}

func execPgx(ctx context.Context, tx pgx.Tx, query string, args ...any) error {
	_, err := tx.Exec(ctx, query, args...)
	return err
}

// The suite runs with both kinds of transaction, at the isolations applications
// have, behind a pooler, and on a pool smaller than the number of callers.
func TestLedgerKeepsThePromisesOfALedger(t *testing.T) {
	t.Parallel()
	server := pgtest.URL(t)
	bounced := pgtest.Bouncer(t, server, "transaction")
	server20, bounced20 := with(t, server, "pool_max_conns", "20"), with(t, bounced, "pool_max_conns", "20")
	settings := []struct {
		name, url string
		pgx, sql  bool
	}{
		{"direct", server20, true, true},
		{"pooler", with(t, bounced20, "default_query_exec_mode", "cache_describe"), true, true},
		{"serializable", with(t, server20, "default_transaction_isolation", "serializable"), true, false},
		{"three connections", with(t, server, "pool_max_conns", "3"), false, true},
	}
	if testing.Short() {
		settings = settings[:2]
	}
	for _, tt := range settings {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := &world{pool: newPool(t, tt.url)}
			db := stdlib.OpenDBFromPool(w.pool)
			t.Cleanup(func() { db.Close() })
			if tt.pgx {
				t.Run("pgx", func(t *testing.T) {
					t.Parallel()
					deduptest.Run(t, func(t *testing.T) deduptest.Fixture[pgx.Tx] {
						return fixture(t, w, func(cfg postgres.Config) (*postgres.Ledger[pgx.Tx], error) {
							return postgres.NewPgx(w.pool, cfg)
						}, execPgx)
					})
				})
			}
			if tt.sql {
				t.Run("sql", func(t *testing.T) {
					t.Parallel()
					deduptest.Run(t, func(t *testing.T) deduptest.Fixture[*sql.Tx] {
						return fixture(t, w, func(cfg postgres.Config) (*postgres.Ledger[*sql.Tx], error) {
							return postgres.New(db, cfg)
						}, execSQL)
					})
				})
			}
		})
	}
}
