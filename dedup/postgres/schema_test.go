package postgres_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seed-5e04d8fb/jetbox/dedup"
	"github.com/seed-5e04d8fb/jetbox/dedup/postgres"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

func TestTablesAreMadeOnceAndRefusedWhenNewer(t *testing.T) {
	t.Parallel()
	pool := newPool(t, with(t, with(t, pgtest.URL(t), "default_transaction_isolation", "serializable"), "pool_max_conns", "4"))
	l, err := postgres.NewPgx(pool, postgres.Config{Table: "billing.handled"})
	check(t, err)
	if _, err := l.Do(t.Context(), "c", "k", nothing); !errors.Is(err, dedup.ErrNoTables) {
		t.Errorf("Do without tables: %v, want ErrNoTables", err)
	}
	// All sessions know the tables as missing. One makes them, the others wait.
	for range 5 {
		_, err := pool.Exec(t.Context(), `DROP SCHEMA IF EXISTS billing CASCADE`)
		check(t, err)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if err := l.Check(t.Context()); !errors.Is(err, dedup.ErrNoTables) && err != nil {
					t.Error(err)
				}
				if err := l.Migrate(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	_, err = pool.Exec(t.Context(), `ALTER TABLE billing.handled RENAME TO away`)
	check(t, err)
	if _, err := l.Do(t.Context(), "c", "k", nothing); !errors.Is(err, dedup.ErrNoTables) {
		t.Errorf("Do without the table that was there: %v, want ErrNoTables", err)
	}
	_, err = pool.Exec(t.Context(), `ALTER TABLE billing.away RENAME TO handled`)
	check(t, err)
	for i, want := range []bool{false, true} {
		if seen, err := l.Do(t.Context(), "c", "k", nothing); seen != want || err != nil {
			t.Errorf("call %d: Do = %v, %v, want %v, nil", i+1, seen, err, want)
		}
	}
	// Tables that are missing to others are theirs.
	other := func(ctx context.Context) error {
		_, err := pool.Exec(ctx, `SELECT FROM invoices`)
		return err
	}
	asking, err := postgres.NewPgx(pool, postgres.Config{Table: "billing.handled", KeepFunc: func(ctx context.Context, _ string) (time.Time, error) {
		return time.Time{}, other(ctx)
	}})
	check(t, err)
	_, pruneErr := asking.Prune(t.Context())
	_, doErr := l.Do(t.Context(), "c", "k2", func(ctx context.Context, _ pgx.Tx) error { return other(ctx) })
	for name, err := range map[string]error{"Prune": pruneErr, "Do": doErr} {
		if err == nil || errors.Is(err, dedup.ErrNoTables) || !strings.Contains(err.Error(), "invoices") {
			t.Errorf("%s: %v, want the other table's error, and not ErrNoTables", name, err)
		}
	}
	_, err = pool.Exec(t.Context(), `INSERT INTO billing.handled_schema (version) VALUES (7)`)
	check(t, err)
	newer, err := postgres.NewPgx(pool, postgres.Config{Table: "billing.handled"})
	check(t, err)
	_, doErr = newer.Do(t.Context(), "c", "k", nothing)
	for name, err := range map[string]error{"Check": newer.Check(t.Context()), "Migrate": newer.Migrate(t.Context()), "Do": doErr} {
		if !errors.Is(err, dedup.ErrSchemaTooNew) || !strings.Contains(err.Error(), "version 7") || !strings.Contains(err.Error(), "knows 1") {
			t.Errorf("%s of newer tables: %v, want ErrSchemaTooNew with both versions", name, err)
		}
	}
}

func TestMigrationSQLMakesWhatMigrateMakes(t *testing.T) {
	t.Parallel()
	pool := newPool(t, pgtest.URL(t))
	for _, table := range []string{"", "billing.handled"} {
		script, err := postgres.MigrationSQL(table)
		check(t, err)
		_, err = pool.Exec(t.Context(), script, pgx.QueryExecModeSimpleProtocol)
		check(t, err)
		l, err := postgres.NewPgx(pool, postgres.Config{Table: table})
		check(t, err)
		check(t, l.Check(t.Context()))
		check(t, l.Migrate(t.Context()))
	}
}

func TestBadConfigIsRefusedByName(t *testing.T) {
	t.Parallel()
	db := &sql.DB{}
	for _, tt := range []struct {
		cfg  postgres.Config
		want string
	}{
		{postgres.Config{Table: `x"; DROP`}, "Table"},
		{postgres.Config{Table: "a.b.c"}, "Table"},
		{postgres.Config{Table: strings.Repeat("x", 60)}, "Table"},
		{postgres.Config{Retention: -1}, "Retention"},
		{postgres.Config{MaxHold: -1}, "MaxHold"},
	} {
		if _, err := postgres.New(db, tt.cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("New(%+v): %v, want an error naming %s", tt.cfg, err, tt.want)
		}
	}
	if _, err := postgres.New(nil, postgres.Config{}); err == nil {
		t.Error("New(nil) is accepted")
	}
	if _, err := postgres.NewPgx(nil, postgres.Config{}); err == nil {
		t.Error("NewPgx(nil) is accepted")
	}
}

func TestKeyThatFitsNoIndexIsRefused(t *testing.T) {
	t.Parallel()
	l, _ := pgxLedger(t, pgtest.URL(t), 2, postgres.Config{})
	long := strings.Repeat("\x00", 3000)
	for _, tt := range []struct{ consumer, key string }{{"c", long}, {long, "k"}} {
		if _, err := l.Do(t.Context(), tt.consumer, tt.key, nothing); err == nil || !strings.Contains(err.Error(), "1200") {
			t.Errorf("Do: %.200v, want an error with the limit", err)
		}
	}
	// What the limit allows fits, also when nothing can be compressed.
	random := func() string {
		var b strings.Builder
		for b.Len() < 1200 {
			b.WriteByte(byte('!' + rand.IntN(90)))
		}
		return b.String()
	}
	if _, err := l.Do(t.Context(), random(), random(), nothing); err != nil {
		t.Errorf("Do at the limit: %.200v", err)
	}
}

// grantsSQL is what the package comment tells people to run.
func grantsSQL(t *testing.T) string {
	t.Helper()
	doc, err := os.ReadFile("doc.go")
	check(t, err)
	lines := regexp.MustCompile(`(?m)^//\s+(GRANT .*;)$`).FindAllStringSubmatch(string(doc), -1)
	if len(lines) < 3 {
		t.Fatal("the package comment has no grants")
	}
	var b strings.Builder
	for _, l := range lines {
		b.WriteString(l[1] + "\n")
	}
	return b.String()
}

// With the rights of the package comment a consumer does everything but create,
// and each of them is needed.
func TestRightsOfTheDocAreEnoughAndNoMore(t *testing.T) {
	t.Parallel()
	server := pgtest.URL(t)
	owner := newPool(t, server)
	cfg := postgres.Config{Table: "billing.jetbox_ledger", Retention: time.Hour}
	mine, err := postgres.NewPgx(owner, cfg)
	check(t, err)
	check(t, mine.Migrate(t.Context()))
	role := fmt.Sprintf("consumer_%x", rand.Uint64())
	grants := strings.ReplaceAll(grantsSQL(t), "TO consumer", "TO "+role)
	_, err = owner.Exec(t.Context(), "CREATE ROLE "+role+" LOGIN; "+grants, pgx.QueryExecModeSimpleProtocol)
	check(t, err)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		conn, err := pgx.Connect(ctx, server)
		if err == nil {
			defer conn.Close(ctx)
			_, err = conn.Exec(ctx, fmt.Sprintf("DROP OWNED BY %s; DROP ROLE %[1]s", role))
		}
		if err != nil {
			t.Error(err)
		}
	})
	u, err := url.Parse(server)
	check(t, err)
	u.User = url.User(role)
	pool := newPool(t, u.String())
	l, err := postgres.NewPgx(pool, cfg)
	check(t, err)
	check(t, l.Check(t.Context()))
	check(t, l.Migrate(t.Context())) // finds it done
	for i, want := range []bool{false, true} {
		if seen, err := l.Do(t.Context(), "c", "k", nothing); seen != want || err != nil {
			t.Errorf("call %d: Do = %v, %v, want %v, nil", i+1, seen, err, want)
		}
	}
	_, err = owner.Exec(t.Context(), `UPDATE billing.jetbox_ledger SET handled_at = handled_at - interval '2 hours'`)
	check(t, err)
	if n, err := l.Prune(t.Context()); n != 1 || err != nil {
		t.Errorf("Prune = %d, %v, want 1, nil", n, err)
	}
	for _, q := range []string{
		`UPDATE billing.jetbox_ledger SET key = 'x'`, `TRUNCATE billing.jetbox_ledger`, `DROP TABLE billing.jetbox_ledger`,
		`DELETE FROM billing.jetbox_ledger_schema`, `CREATE TABLE billing.more (id int)`,
	} {
		var pg *pgconn.PgError
		if _, err := pool.Exec(t.Context(), q); !errors.As(err, &pg) || pg.Code != "42501" {
			t.Errorf("%s: %v, want permission denied", q, err)
		}
	}
}
