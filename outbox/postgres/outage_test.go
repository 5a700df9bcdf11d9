package postgres_test

import (
	"context"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
)

// refusing listens where the server was, and hangs up on everybody.
func refusing(t *testing.T, server string) (attempts *atomic.Int64, stop func()) {
	t.Helper()
	u, err := url.Parse(server)
	check(t, err)
	l, err := net.Listen("tcp", u.Host)
	check(t, err)
	attempts = new(atomic.Int64)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			attempts.Add(1)
			conn.Close()
		}
	})
	return attempts, func() { l.Close(); wg.Wait() }
}

// Catalog BR-18: while the database is away it is not hammered, and once it is
// back everything goes on within seconds.
func TestDatabaseThatIsAwayIsNotHammered(t *testing.T) {
	t.Parallel()
	cluster := pgtest.Start(t)
	server := cluster.URL(t)
	s := migrated(t, postgres.Config{URL: server})
	l := acquire(t, s, "a", time.Hour)
	add(t, s, 1, "k")
	cluster.Stop(t)
	attempts, stop := refusing(t, server)

	const away = 4 * time.Second
	ctx, cancel := context.WithTimeout(t.Context(), away)
	defer cancel()
	var wg sync.WaitGroup
	for _, call := range []func() error{
		func() error { _, err := s.Acquire(ctx, jetbox.Candidate{Owner: "a", Length: time.Hour}); return err },
		func() error { _, err := s.Claim(ctx, l, jetbox.Ask{Limit: 10}); return err },
		func() error { return s.Record(ctx, l, published(jetbox.Row{Pos: 1})) },
		func() error { _, err := s.Stats(ctx); return err },
		func() error { return s.Wait(ctx) },
		func() error { _, err := s.Prune(ctx, l, time.Now(), false); return err },
	} {
		wg.Go(func() {
			for ctx.Err() == nil {
				if err := call(); err == nil && ctx.Err() == nil {
					t.Error("a call without a database succeeded")
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
	wg.Wait()
	stop()
	// The calls that were made before the first failure was known come on top.
	if n := attempts.Load(); n > 2*int64(away/time.Second)+8 {
		t.Errorf("%d attempts to connect in %v", n, away)
	}
	cluster.Run(t)
	began := time.Now()
	for {
		rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 10})
		if err == nil && len(rows) == 1 {
			break
		}
		if time.Since(began) > 8*time.Second {
			t.Fatalf("%v after the database came back: %d rows, %v", time.Since(began), len(rows), err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// Sessions that became read-only by a failover are not kept.
func TestReadOnlyDatabaseIsAnErrorThatPasses(t *testing.T) {
	t.Parallel()
	s := migrated(t, postgres.Config{})
	l := acquire(t, s, "a", time.Hour)
	add(t, s, 1, "k")
	rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 10})
	check(t, err)
	admin := another(t, postgres.Config{URL: s.Pool().Config().ConnString()})
	db := value[string](t, s, `SELECT current_database()`)
	exec(t, admin, `ALTER DATABASE `+db+` SET default_transaction_read_only = on`)
	exec(t, admin, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1 AND pid <> pg_backend_pid()`, db)
	for range 3 {
		if err := s.Record(t.Context(), l, published(rows...)); err == nil {
			t.Fatal("Record in a read-only database succeeded")
		}
	}
	if err := s.Record(t.Context(), l, published(rows...)); err == nil || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("Record = %v, want an error that says read-only", err)
	}
	exec(t, admin, `SET default_transaction_read_only = off`)
	exec(t, admin, `ALTER DATABASE `+db+` RESET default_transaction_read_only`)
	began := time.Now()
	for s.Record(t.Context(), l, published(rows...)) != nil {
		if time.Since(began) > 8*time.Second {
			t.Fatal("the database can be written again, and Record still fails")
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// Backends that are ended at random cost an error each, and nothing else.
func TestTerminatedBackendsLoseNothing(t *testing.T) {
	t.Parallel()
	s := migrated(t, postgres.Config{})
	l := acquire(t, s, "a", time.Hour)
	add(t, s, 40, keys(10)...)
	admin := another(t, postgres.Config{URL: s.Pool().Config().ConnString()})
	seen := make(map[int64]bool)
	failed := 0
	for began := time.Now(); len(seen) < 400; {
		exec(t, admin, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND random() < 0.3`)
		rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 20})
		if err == nil {
			err = s.Record(t.Context(), l, published(rows...))
		}
		if err != nil {
			failed++
		} else {
			for _, r := range rows {
				if seen[r.Pos] {
					t.Fatalf("row %d came again after it was recorded", r.Pos)
				}
				seen[r.Pos] = true
			}
		}
		if time.Since(began) > 20*time.Second {
			t.Fatalf("%d of 400 rows recorded, %d calls failed", len(seen), failed)
		}
	}
}

// A role's own limits do not stop a relay, and rows that somebody else has locked
// stop it for a bounded time.
func TestTimeoutsAndLocksOfOthers(t *testing.T) {
	t.Parallel()
	s := migrated(t, postgres.Config{})
	ctx := t.Context()
	db := value[string](t, s, `SELECT current_database()`)
	exec(t, s, `ALTER DATABASE `+db+` SET statement_timeout = '100ms'`)
	exec(t, s, `ALTER DATABASE `+db+` SET idle_in_transaction_session_timeout = '1ms'`)
	exec(t, s, `INSERT INTO outbox (subject, payload) SELECT 's', '' FROM generate_series(1, 2000)`)
	s = another(t, postgres.Config{URL: s.Pool().Config().ConnString()})
	l := acquire(t, s, "a", time.Hour)
	if n := len(drain(t, s, l, 1000)); n != 2000 {
		t.Errorf("drained %d rows under a statement timeout of 100 ms, want 2000", n)
	}
	exec(t, s, `ALTER DATABASE `+db+` RESET ALL`)

	s = another(t, postgres.Config{URL: s.Pool().Config().ConnString()})
	add(t, s, 2, "k")
	rows, err := s.Claim(ctx, l, jetbox.Ask{Limit: 10})
	check(t, err)
	if len(rows) == 0 { // this store has not acquired
		l = acquire(t, s, "a", time.Hour)
		rows, err = s.Claim(ctx, l, jetbox.Ask{Limit: 10})
		check(t, err)
	}
	tx, err := s.Pool().Begin(ctx)
	check(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	_, err = tx.Exec(ctx, `SELECT FROM outbox WHERE id = $1 FOR UPDATE`, rows[0].Pos)
	check(t, err)
	began := time.Now()
	err = s.Record(ctx, l, published(rows...))
	if took := time.Since(began); err == nil || took > 5*time.Second {
		t.Errorf("Record of a locked row = %v after %v, want an error in time", err, took)
	}
	// Meanwhile the lease is renewed.
	if l := acquire(t, s, "a", time.Hour); !l.Held {
		t.Errorf("lease = %+v", l)
	}
	check(t, tx.Rollback(ctx))
	check(t, s.Record(ctx, l, published(rows...)))
}

// A server that hangs, without closing anything, holds nobody up for long.
func TestCloseDoesNotWaitForAServerThatHangs(t *testing.T) {
	t.Parallel()
	cluster := pgtest.Start(t)
	s := open(t, postgres.Config{URL: cluster.URL(t)})
	check(t, s.Migrate(t.Context()))
	l := acquire(t, s, "a", time.Hour)
	awaiting(t, s, l, 300*time.Millisecond) // it listens
	cluster.Pause(t)
	defer cluster.Resume(t)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := s.Claim(ctx, l, jetbox.Ask{Limit: 1}); err == nil {
		t.Error("a claim from a server that hangs succeeded")
	}
	began := time.Now()
	_ = s.Close() // may say so
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("Close took %v", took)
	}
}
