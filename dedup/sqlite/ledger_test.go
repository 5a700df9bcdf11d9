package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	_ "modernc.org/sqlite"

	"github.com/seed-5e04d8fb/jetbox/dedup/deduptest"
	"github.com/seed-5e04d8fb/jetbox/dedup/sqlite"
)

const walDSN = "?_pragma=journal_mode(wal)&_pragma=busy_timeout(5000)"

func openDB(t testing.TB, file, params string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+file+params)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Errorf("close %s: %v", file, err)
		}
	})
	return db
}

func newLedger(t testing.TB, db *sql.DB, cfg sqlite.Config) *sqlite.Ledger {
	t.Helper()
	l, err := sqlite.New(t.Context(), db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func createEffects(t testing.TB, db *sql.DB) {
	t.Helper()
	if _, err := db.Exec(`CREATE TABLE IF NOT EXISTS effects (name TEXT NOT NULL)`); err != nil {
		t.Fatal(err)
	}
}

func insertEffect(ctx context.Context, tx *sql.Tx, name string) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO effects (name) VALUES (?)`, name)
	return err
}

func count(t testing.TB, db *sql.DB, query string, args ...any) int {
	t.Helper()
	var n int
	if err := db.QueryRowContext(t.Context(), query, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

// The suite runs with the settings applications really have: the ledger does
// not own the database.
func TestLedgerKeepsThePromisesOfALedger(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, params string
		conns        int
	}{
		{"wal", walDSN, 0},
		{"rollback journal", "?_pragma=busy_timeout(5000)", 0},
		{"wal immediate", walDSN + "&_txlock=immediate", 0},
		{"wal without busy timeout", "?_pragma=journal_mode(wal)", 0},
		{"one connection", walDSN, 1},
	}
	if testing.Short() {
		tests = tests[:2]
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			deduptest.Run(t, func(t *testing.T) deduptest.Fixture[*sql.Tx] {
				db := openDB(t, filepath.Join(t.TempDir(), "app.db"), tt.params)
				db.SetMaxOpenConns(tt.conns)
				createEffects(t, db)
				p := &deduptest.Pruning{Retention: time.Hour}
				l := newLedger(t, db, sqlite.Config{Retention: p.Retention, KeepFunc: func(_ context.Context, consumer string) (time.Time, error) {
					if p.Keep == nil {
						return time.Time{}, nil
					}
					return p.Keep(consumer)
				}})
				p.Prune = l.Prune
				p.Age = func(ctx context.Context, d time.Duration) error {
					_, err := db.ExecContext(ctx, `UPDATE jetbox_ledger SET handled_at = handled_at - ?`, d.Milliseconds())
					return err
				}
				return deduptest.Fixture[*sql.Tx]{
					Ledger:        l,
					Effect:        insertEffect,
					Transactional: true,
					Pruning:       p,
					Count: func(ctx context.Context, name string) (n int, err error) {
						err = db.QueryRowContext(ctx, `SELECT count(*) FROM effects WHERE name = ?`, name).Scan(&n)
						return n, err
					},
				}
			})
		})
	}
}

// BR-20: starting together on an empty database is no reason to fail.
func TestLedgersStartTogetherOnAnEmptyDatabase(t *testing.T) {
	t.Parallel()
	for round := range 5 {
		file := filepath.Join(t.TempDir(), fmt.Sprintf("app%d.db", round))
		var wg sync.WaitGroup
		start := make(chan struct{})
		for range 8 {
			db := openDB(t, file, "?_pragma=busy_timeout(5000)")
			wg.Go(func() {
				<-start
				if _, err := sqlite.New(t.Context(), db, sqlite.Config{}); err != nil {
					t.Errorf("New: %v", err)
				}
			})
		}
		close(start)
		wg.Wait()
	}
}

// BR-21: a transaction of the application that reads first, then writes, gets
// BUSY at once when somebody wrote in between. The ledger's writes first.
func TestBusyDatabaseIsWaitedFor(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "app.db")
	db := openDB(t, file, "?_pragma=journal_mode(wal)&_pragma=busy_timeout(1)")
	createEffects(t, db)
	l := newLedger(t, db, sqlite.Config{})

	const writers, each = 4, 50
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				key := fmt.Sprintf("%d-%d", w, i)
				_, err := l.Do(t.Context(), "c", key, func(ctx context.Context, tx *sql.Tx) error {
					var n int
					if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM effects`).Scan(&n); err != nil {
						return err
					}
					return insertEffect(ctx, tx, key)
				})
				if err != nil {
					t.Errorf("Do(%s): %v", key, err)
				}
			}
		})
	}
	wg.Wait()
	if n := count(t, db, `SELECT count(*) FROM effects`); n != writers*each {
		t.Errorf("effects = %d, want %d", n, writers*each)
	}
}

// BR-23: each connection of the pool would have a ledger of its own.
func TestInMemoryDatabaseBehindAPoolIsRefused(t *testing.T) {
	t.Parallel()
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := sqlite.New(t.Context(), db, sqlite.Config{}); !errors.Is(err, sqlite.ErrMemoryPool) {
		t.Errorf("New with a pool: %v, want ErrMemoryPool", err)
	}
	db.SetMaxOpenConns(1)
	l := newLedger(t, db, sqlite.Config{})
	for i, want := range []bool{false, true} {
		seen, err := l.Do(t.Context(), "c", "k", func(context.Context, *sql.Tx) error { return nil })
		if seen != want || err != nil {
			t.Errorf("call %d: Do = %v, %v, want %v, nil", i+1, seen, err, want)
		}
	}
}

func TestBadConfigIsRefusedByName(t *testing.T) {
	t.Parallel()
	db := openDB(t, filepath.Join(t.TempDir(), "app.db"), walDSN)
	for _, tt := range []struct {
		cfg  sqlite.Config
		want string
	}{
		{sqlite.Config{Table: `x"; DROP TABLE y; --`}, "Table"},
		{sqlite.Config{Table: "1st"}, "Table"},
		{sqlite.Config{Retention: -time.Hour}, "Retention"},
		{sqlite.Config{MaxHold: -1}, "MaxHold"},
	} {
		if _, err := sqlite.New(t.Context(), db, tt.cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("New(%+v): %v, want an error naming %s", tt.cfg, err, tt.want)
		}
	}
}

// BR-61: the table is what arrives in one retention, whatever reads it.
func TestTableShrinksWhileEventsArrive(t *testing.T) {
	t.Parallel()
	db := openDB(t, filepath.Join(t.TempDir(), "app.db"), walDSN+"&_pragma=synchronous(off)")
	l := newLedger(t, db, sqlite.Config{Retention: time.Hour, Table: "handled"})
	old := time.Now().Add(-2 * time.Hour).UnixMilli()
	_, err := db.Exec(`WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i < 1000)
		INSERT INTO handled (consumer, key, handled_at) SELECT 'c', 'old' || i, ? FROM n`, old)
	if err != nil {
		t.Fatal(err)
	}
	const fresh = 3 * 256
	for i := range fresh {
		if _, err := l.Do(t.Context(), "c", fmt.Sprint(i), func(context.Context, *sql.Tx) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if n := count(t, db, `SELECT count(*) FROM handled`); n != fresh {
		t.Errorf("entries = %d, want the %d fresh ones", n, fresh)
	}
}

func TestPruneRemovesOnlyWhatIsOldEnough(t *testing.T) {
	t.Parallel()
	db := openDB(t, filepath.Join(t.TempDir(), "app.db"), walDSN)
	l := newLedger(t, db, sqlite.Config{Retention: time.Hour})
	now := time.Now()
	for age, n := range map[time.Duration]int{0: 3, 59 * time.Minute: 5, 61 * time.Minute: 1200} {
		_, err := db.Exec(`WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i < ?)
			INSERT INTO jetbox_ledger SELECT 'c', ? || i, ? FROM n`, n, age.String()+"-", now.Add(-age).UnixMilli())
		if err != nil {
			t.Fatal(err)
		}
	}
	removed, err := l.Prune(t.Context())
	if removed != 1200 || err != nil {
		t.Errorf("Prune = %d, %v, want 1200, nil", removed, err)
	}
	if n := count(t, db, `SELECT count(*) FROM jetbox_ledger`); n != 8 {
		t.Errorf("entries left = %d, want 8", n)
	}
}

// Without WAL a reader holds up a commit, which then rolls back. The whole
// transaction is made again, in place: entry and effect once.
func TestCommitHeldUpByAReaderIsMadeAgain(t *testing.T) {
	t.Parallel()
	db := openDB(t, filepath.Join(t.TempDir(), "app.db"), "?_pragma=journal_mode(delete)&_pragma=busy_timeout(1)")
	createEffects(t, db)
	if _, err := db.Exec(`INSERT INTO effects VALUES ('before')`); err != nil {
		t.Fatal(err)
	}
	l := newLedger(t, db, sqlite.Config{})
	reader, err := db.QueryContext(t.Context(), `SELECT name FROM effects UNION ALL SELECT name FROM effects`)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	if !reader.Next() { // holds the read lock until closed
		t.Fatal(reader.Err())
	}
	applied := 0
	seen, err := l.Do(t.Context(), "c", "k", func(ctx context.Context, tx *sql.Tx) error {
		if applied++; applied == 3 { // two commits were held up
			if err := reader.Close(); err != nil {
				return err
			}
		}
		return insertEffect(ctx, tx, "e")
	})
	if seen || err != nil || applied != 3 {
		t.Errorf("Do = %v, %v after %d attempts, want false, nil after 3", seen, err, applied)
	}
	if n, m := count(t, db, `SELECT count(*) FROM effects WHERE name = 'e'`), count(t, db, `SELECT count(*) FROM jetbox_ledger`); n != 1 || m != 1 {
		t.Errorf("effects = %d, entries = %d, want 1 and 1", n, m)
	}
}

// A commit that cannot succeed ends with the context and leaves nothing, not
// even an open transaction in the pool.
func TestCommitHeldUpForEverEndsWithTheContext(t *testing.T) {
	t.Parallel()
	db := openDB(t, filepath.Join(t.TempDir(), "app.db"), "?_pragma=journal_mode(delete)&_pragma=busy_timeout(1)")
	createEffects(t, db)
	if _, err := db.Exec(`INSERT INTO effects VALUES ('before')`); err != nil {
		t.Fatal(err)
	}
	l := newLedger(t, db, sqlite.Config{})
	reader, err := db.QueryContext(t.Context(), `SELECT name FROM effects UNION ALL SELECT name FROM effects`)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	if !reader.Next() {
		t.Fatal(reader.Err())
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = l.Do(ctx, "c", "k", func(ctx context.Context, tx *sql.Tx) error { return insertEffect(ctx, tx, "e") })
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Do: %v, want deadline exceeded", err)
	}
	if err := reader.Close(); err != nil {
		t.Fatal(err)
	}
	seen, err := l.Do(t.Context(), "c", "k", func(ctx context.Context, tx *sql.Tx) error { return insertEffect(ctx, tx, "e") })
	if seen || err != nil {
		t.Errorf("Do afterwards = %v, %v, want false, nil", seen, err)
	}
	if n := count(t, db, `SELECT count(*) FROM effects WHERE name = 'e'`); n != 1 {
		t.Errorf("effects = %d, want 1", n)
	}
}

func Example() {
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		panic(err)
	}
	defer db.Close()
	db.SetMaxOpenConns(1) // in memory, each connection is a database of its own
	if _, err := db.Exec(`CREATE TABLE totals (customer TEXT PRIMARY KEY, cents INTEGER)`); err != nil {
		panic(err)
	}
	ledger, err := sqlite.New(context.Background(), db, sqlite.Config{})
	if err != nil {
		panic(err)
	}
	for range 2 { // delivered twice
		seen, err := ledger.Do(context.Background(), "EVENTS/totals", "order-1", func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `INSERT INTO totals VALUES ('ann', 500)
				ON CONFLICT (customer) DO UPDATE SET cents = cents + excluded.cents`)
			return err
		})
		fmt.Println("seen:", seen, "err:", err)
	}
	var cents int
	if err := db.QueryRow(`SELECT cents FROM totals WHERE customer = 'ann'`).Scan(&cents); err != nil {
		panic(err)
	}
	fmt.Println("cents:", cents)
	// Output:
	// seen: false err: <nil>
	// seen: true err: <nil>
	// cents: 500
}
