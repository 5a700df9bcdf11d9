package postgres_test

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
)

// logs collects what a store says.
type logs struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// awaiting waits for rows as a relay does: each hint is followed by a claim.
func awaiting(t *testing.T, s *postgres.Store, l jetbox.Lease, bound time.Duration) (rows []jetbox.Row, took time.Duration) {
	t.Helper()
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	for {
		rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 100})
		if err == nil && len(rows) > 0 {
			err = s.Record(t.Context(), l, published(rows...))
		}
		if err != nil {
			t.Error(err)
			return nil, time.Since(began)
		}
		if len(rows) > 0 || s.Wait(ctx) != nil {
			return rows, time.Since(began)
		}
	}
}

// quiet waits until the relay has said that it is idle.
func quiet(t *testing.T, s *postgres.Store, l jetbox.Lease) {
	t.Helper()
	if rows, _ := awaiting(t, s, l, 500*time.Millisecond); len(rows) > 0 {
		t.Fatalf("%d rows came from nowhere", len(rows))
	}
	if !value[bool](t, s, `SELECT idle FROM outbox_relay WHERE owner = $1`, l.Owner) {
		t.Fatal("the relay does not say that it is idle")
	}
}

func TestIdleRelayIsNotifiedOfACommit(t *testing.T) {
	t.Parallel()
	s := migrated(t, postgres.Config{})
	l := acquire(t, s, "a", time.Hour)
	for range 3 {
		quiet(t, s, l)
		inserted := make(chan error, 1)
		go func() {
			_, err := s.Pool().Exec(t.Context(), `INSERT INTO outbox (subject, payload) SELECT 's', '' FROM pg_sleep(0.05)`)
			inserted <- err
		}()
		rows, took := awaiting(t, s, l, 10*time.Second)
		if len(rows) != 1 {
			t.Fatalf("%d rows came within %v, want 1", len(rows), took)
		}
		check(t, <-inserted)
		// From here on, for a moment, writers need not notify.
		if value[bool](t, s, `SELECT idle FROM outbox_relay`) {
			t.Error("the relay that has just found a row says that it is idle")
		}
	}
}

// Notifications cost the writers: a relay that finds rows without one, because it
// looked at the right moment, must not have them go on notifying.
func TestBusyRelayIsNotNotified(t *testing.T) {
	t.Parallel()
	s := migrated(t, postgres.Config{})
	l := acquire(t, s, "a", time.Hour)
	quiet(t, s, l)
	exec(t, s, `INSERT INTO outbox (subject, payload) VALUES ('s', '')`)
	rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 10})
	check(t, err)
	check(t, s.Record(t.Context(), l, published(rows...)))
	check(t, s.Wait(t.Context()))
	if value[bool](t, s, `SELECT idle FROM outbox_relay`) {
		t.Error("the relay that has just found a row says that it is idle")
	}
}

// Catalog BR-19: what is sent while the listener's connection is gone is lost.
func TestRowsCommittedWhileTheListenerIsGoneAreFound(t *testing.T) {
	t.Parallel()
	s := migrated(t, postgres.Config{})
	l := acquire(t, s, "a", time.Hour)
	for range 3 {
		quiet(t, s, l) // it listens again, each time
		exec(t, s, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'jetbox listener'`)
		found := make(chan int, 1)
		go func() {
			rows, _ := awaiting(t, s, l, 10*time.Second)
			found <- len(rows)
		}()
		exec(t, s, `INSERT INTO outbox (subject, payload) VALUES ('s', '')`)
		if n := <-found; n != 1 {
			t.Fatalf("%d rows came, want 1", n)
		}
	}
}

// Catalog BR-19: behind a pooler in transaction mode no notification arrives, and
// named statements are another session's.
func TestBehindAPoolerInTransactionModeItPolls(t *testing.T) {
	t.Parallel()
	log := new(logs)
	server := pgtest.URL(t)
	migrated(t, postgres.Config{URL: server})
	s := another(t, postgres.Config{URL: pgtest.Bouncer(t, server, "transaction"), Logger: slog.New(slog.NewTextHandler(log, nil))})
	l := acquire(t, s, "a", time.Hour)
	if rows, _ := awaiting(t, s, l, 4*time.Second); len(rows) > 0 {
		t.Fatal("rows came from nowhere")
	}
	if n := strings.Count(log.String(), "polling instead"); n != 1 {
		t.Errorf("the log says %d times that it polls, want once: %s", n, log)
	}
	for range 20 {
		exec(t, s, `INSERT INTO outbox (subject, payload) VALUES ('s', '')`)
		if rows, took := awaiting(t, s, l, time.Second); len(rows) != 1 {
			t.Fatalf("%d rows came within %v, want 1", len(rows), took)
		}
	}
}

// A transaction that has notified cannot be prepared: on a server that can
// prepare any, writers must not notify.
func TestWritersThatPrepareTransactionsAreNotMadeToNotify(t *testing.T) {
	t.Parallel()
	cluster := pgtest.Start(t, "max_prepared_transactions=5")
	s := migrated(t, postgres.Config{URL: cluster.URL(t)})
	l := acquire(t, s, "a", time.Hour)
	awaiting(t, s, l, 500*time.Millisecond)
	conn, err := s.Pool().Acquire(t.Context())
	check(t, err)
	defer conn.Release()
	for _, q := range []string{`BEGIN`, `INSERT INTO outbox (subject, payload) VALUES ('prepared', '')`, `PREPARE TRANSACTION 'x'`} {
		if _, err := conn.Exec(t.Context(), q); err != nil {
			t.Fatalf("%s: %v", q, err)
		}
	}
	exec(t, s, `INSERT INTO outbox (subject, payload) VALUES ('plain', '')`)
	rows, _ := awaiting(t, s, l, time.Second)
	wantSubjects(t, rows, "plain")
	exec(t, s, `COMMIT PREPARED 'x'`)
	rows, _ = awaiting(t, s, l, time.Second)
	wantSubjects(t, rows, "prepared")
}

func TestWithoutNotificationsItPolls(t *testing.T) {
	t.Parallel()
	s := migrated(t, postgres.Config{NoNotify: true})
	l := acquire(t, s, "a", time.Hour)
	awaiting(t, s, l, 300*time.Millisecond)
	if value[bool](t, s, `SELECT idle FROM outbox_relay`) {
		t.Error("the relay says that it is idle: writers notify for nothing")
	}
	exec(t, s, `INSERT INTO outbox (subject, payload) VALUES ('s', '')`)
	if rows, took := awaiting(t, s, l, time.Second); len(rows) != 1 {
		t.Fatalf("%d rows came within %v, want 1", len(rows), took)
	}
}
