package postgres_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/seed-5e04d8fb/jetbox/dedup"
	"github.com/seed-5e04d8fb/jetbox/dedup/postgres"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// pgxLedger returns a ledger with tables and a pool of some connections, and
// the pool.
func pgxLedger(t *testing.T, server string, conns int, cfg postgres.Config) (*postgres.Ledger[pgx.Tx], *pgxpool.Pool) {
	t.Helper()
	pool := newPool(t, with(t, server, "pool_max_conns", fmt.Sprint(conns)))
	l, err := postgres.NewPgx(pool, cfg)
	check(t, err)
	check(t, l.Migrate(t.Context()))
	return l, pool
}

func nothing[Tx any](context.Context, Tx) error { return nil }

// A handler that hangs in its transaction, as one that was stopped by a signal
// does, loses it: the next delivery goes on, and what the first one did is gone.
func TestHandlerThatHangsLosesItsTransaction(t *testing.T) {
	t.Parallel()
	server := pgtest.URL(t)
	cfg := postgres.Config{MaxHold: 300 * time.Millisecond}
	l, pool := pgxLedger(t, server, 4, cfg)
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	viaSQL, err := postgres.New(db, cfg)
	check(t, err)
	patient, err := postgres.NewPgx(pool, postgres.Config{})
	check(t, err)
	_, err = pool.Exec(t.Context(), `CREATE TABLE effects (name TEXT)`)
	check(t, err)

	// These two hang without looking at their contexts.
	hangs := func(end chan struct{}, inside chan struct{}) error {
		close(inside)
		<-end
		return nil
	}
	for name, first := range map[string]func(key string, inside, end chan struct{}) error{
		"pgx": func(key string, inside, end chan struct{}) error {
			_, err := l.Do(t.Context(), "c", key, func(ctx context.Context, tx pgx.Tx) error {
				return errors.Join(execPgx(ctx, tx, `INSERT INTO effects VALUES ('first')`), hangs(end, inside))
			})
			return err
		},
		"sql": func(key string, inside, end chan struct{}) error {
			_, err := viaSQL.Do(t.Context(), "c", key, func(ctx context.Context, tx *sql.Tx) error {
				return errors.Join(execSQL(ctx, tx, `INSERT INTO effects VALUES ('first')`), hangs(end, inside))
			})
			return err
		},
	} {
		inside, end := make(chan struct{}), make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := first(name, inside, end); !errors.Is(err, dedup.ErrHeldTooLong) {
				t.Errorf("%s: the first Do: %v, want ErrHeldTooLong", name, err)
			}
		})
		<-inside
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		seen, err := patient.Do(ctx, "c", name, func(ctx context.Context, tx pgx.Tx) error {
			return execPgx(ctx, tx, `INSERT INTO effects VALUES ('second')`)
		})
		cancel()
		if seen || err != nil {
			t.Errorf("%s: the second Do = %v, %v, want false, nil", name, seen, err)
		}
		close(end)
		wg.Wait()
	}
	var effects string
	check(t, pool.QueryRow(t.Context(), `SELECT string_agg(name, ' ') FROM effects`).Scan(&effects))
	if effects != "second second" {
		t.Errorf("effects: %s, want those of the second ones", effects)
	}
}

// The bounds the ledger sets hold for its own statement and for idling. A
// stricter one of the session stays, and none outlives the transaction.
func TestLedgerLeavesTheSessionsSettings(t *testing.T) {
	t.Parallel()
	server := pgtest.URL(t)
	for _, tt := range []struct{ lock, idle, wantIdle string }{
		{"0", "0", "1min"}, {"7s", "10s", "10s"}, {"7s", "1h", "1min"},
	} {
		url := with(t, with(t, server, "lock_timeout", tt.lock), "idle_in_transaction_session_timeout", tt.idle)
		l, pool := pgxLedger(t, url, 1, postgres.Config{MaxHold: time.Minute})
		const query = `SELECT current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout')`
		var lock, idle string
		_, err := l.Do(t.Context(), "c", tt.lock+tt.idle, func(ctx context.Context, tx pgx.Tx) error {
			return tx.QueryRow(ctx, query).Scan(&lock, &idle)
		})
		check(t, err)
		if lock != tt.lock || idle != tt.wantIdle {
			t.Errorf("session with %s and %s: in apply lock_timeout %s and idle bound %s, want %s and %s", tt.lock, tt.idle, lock, idle, tt.lock, tt.wantIdle)
		}
		check(t, pool.QueryRow(t.Context(), query).Scan(&lock, &idle))
		if lock != tt.lock || idle != tt.idle {
			t.Errorf("after it: %s and %s, want %s and %s", lock, idle, tt.lock, tt.idle)
		}
	}
}

// Waiting for another's fate leaves connections to those who can go on.
func TestWaitingDuplicatesLeaveThePoolToOthers(t *testing.T) {
	t.Parallel()
	server := pgtest.URL(t)
	l, _ := pgxLedger(t, server, 3, postgres.Config{})
	inside, end := make(chan struct{}), make(chan struct{})
	var seen atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := l.Do(t.Context(), "c", "k", func(context.Context, pgx.Tx) error {
			close(inside)
			<-end
			return nil
		})
		if err != nil {
			t.Errorf("the first Do: %v", err)
		}
	})
	<-inside
	const duplicates = 6
	for range duplicates {
		wg.Go(func() {
			ok, err := l.Do(t.Context(), "c", "k", nothing)
			if err != nil {
				t.Errorf("a duplicate: %v", err)
			}
			if ok {
				seen.Add(1)
			}
		})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for i := range 5 {
		if _, err := l.Do(ctx, "c", fmt.Sprint("other", i), nothing); err != nil {
			t.Errorf("another key: %v", err)
		}
	}
	close(end)
	wg.Wait()
	if n := seen.Load(); n != duplicates {
		t.Errorf("%d duplicates were told seen, want %d", n, duplicates)
	}
}

// The first one's connection dies in the middle: its transaction is gone, and the
// one that waits for it goes on.
func TestDeadConnectionLeavesTheKeyToTheNext(t *testing.T) {
	t.Parallel()
	server := pgtest.URL(t)
	l, pool := pgxLedger(t, server, 4, postgres.Config{})
	inside, end := make(chan int, 1), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := l.Do(t.Context(), "c", "k", func(ctx context.Context, tx pgx.Tx) error {
			var pid int
			err := tx.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&pid)
			inside <- pid
			<-end
			return err
		})
		if err == nil {
			t.Error("the first Do succeeded without its connection")
		}
	})
	pid := <-inside
	second := make(chan error, 1)
	wg.Go(func() {
		seen, err := l.Do(t.Context(), "c", "k", nothing)
		if seen {
			err = errors.New("seen")
		}
		second <- err
	})
	_, err := pool.Exec(t.Context(), `SELECT pg_terminate_backend($1)`, pid)
	check(t, err)
	if err := <-second; err != nil {
		t.Errorf("the second Do: %v", err)
	}
	close(end)
	wg.Wait()
}

// A deadlock of handlers, and a serialization failure that only the commit finds,
// are repeated in place.
func TestDeadlocksAndSerializationFailuresAreRepeated(t *testing.T) {
	t.Parallel()
	add := func(ctx context.Context, tx pgx.Tx, id int) error {
		return execPgx(ctx, tx, `UPDATE totals SET n = n + 1 WHERE id = $1`, id)
	}
	for _, tt := range []struct {
		name, isolation string
		first, second   func(ctx context.Context, tx pgx.Tx, id, other int) error
	}{
		{
			"deadlock", "read committed",
			func(ctx context.Context, tx pgx.Tx, id, _ int) error { return add(ctx, tx, id) },
			func(ctx context.Context, tx pgx.Tx, _, other int) error { return add(ctx, tx, other) },
		},
		{
			"write skew", "serializable",
			func(ctx context.Context, tx pgx.Tx, _, other int) error {
				return execPgx(ctx, tx, `SELECT n FROM totals WHERE id = $1`, other)
			},
			func(ctx context.Context, tx pgx.Tx, id, _ int) error {
				return errors.Join(add(ctx, tx, id), add(ctx, tx, id))
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			server := with(t, with(t, pgtest.URL(t), "default_transaction_isolation", tt.isolation), "deadlock_timeout", "20ms")
			l, pool := pgxLedger(t, server, 8, postgres.Config{})
			_, err := pool.Exec(t.Context(), `CREATE TABLE totals (id INT PRIMARY KEY, n INT)`)
			check(t, err)
			_, err = pool.Exec(t.Context(), `INSERT INTO totals VALUES (1, 0), (2, 0)`)
			check(t, err)
			var attempts atomic.Int64
			var both sync.WaitGroup // the first attempts have done the first half
			both.Add(2)
			var wg sync.WaitGroup
			for _, id := range []int{1, 2} {
				wg.Go(func() {
					first := true
					_, err := l.Do(t.Context(), "c", fmt.Sprint(id), func(ctx context.Context, tx pgx.Tx) error {
						attempts.Add(1)
						if err := tt.first(ctx, tx, id, 3-id); err != nil {
							return err
						}
						if first {
							first = false
							both.Done()
							both.Wait()
						}
						return tt.second(ctx, tx, id, 3-id)
					})
					if err != nil {
						t.Errorf("Do: %v", err)
					}
				})
			}
			wg.Wait()
			var sum int
			check(t, pool.QueryRow(t.Context(), `SELECT sum(n) FROM totals`).Scan(&sum))
			if n := attempts.Load(); sum != 4 || n < 3 {
				t.Errorf("sum = %d after %d attempts, want 4 after at least 3", sum, n)
			}
		})
	}
}

// A handler that hides a failed statement has a transaction that cannot commit.
func TestSwallowedErrorIsNoSuccess(t *testing.T) {
	t.Parallel()
	l, pool := pgxLedger(t, pgtest.URL(t), 2, postgres.Config{})
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	viaSQL, err := postgres.New(db, postgres.Config{})
	check(t, err)
	if _, err := l.Do(t.Context(), "c", "k", func(ctx context.Context, tx pgx.Tx) error {
		_ = execPgx(ctx, tx, `SELECT 1/0`)
		return nil
	}); err == nil {
		t.Error("pgx: Do succeeded")
	}
	if _, err := viaSQL.Do(t.Context(), "c", "k", func(ctx context.Context, tx *sql.Tx) error {
		_ = execSQL(ctx, tx, `SELECT 1/0`)
		return nil
	}); err == nil {
		t.Error("sql: Do succeeded")
	}
	if seen, err := l.Seen(t.Context(), "c", "k"); seen || err != nil {
		t.Errorf("Seen = %v, %v, want false, nil", seen, err)
	}
}
