package jetbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// away is a relay in this process, on a PostgreSQL that will fail.
type away struct {
	t     *testing.T
	pool  *pgxpool.Pool // the writers'
	relay *relay.Relay
	js    jetstream.JetStream
	sent  func() uint64 // messages that the broker has stored or dropped as duplicates
}

func newAway(t *testing.T, url string) *away {
	t.Helper()
	ctx := t.Context()
	srv := embedded.RunTest(t)
	nc, err := srv.Connect()
	a := &away{t: t}
	a.must(err)
	t.Cleanup(nc.Close)
	a.js, err = jetstream.New(nc)
	a.must(err)
	_, err = a.js.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}, AllowBatchPublish: true})
	a.must(err)
	store, err := postgres.Open(ctx, postgres.Config{URL: url})
	a.must(err)
	t.Cleanup(func() { a.must(store.Close()) })
	a.must(store.Migrate(ctx))
	a.pool, err = pgxpool.New(ctx, url)
	a.must(err)
	t.Cleanup(a.pool.Close)
	var mu sync.Mutex
	var sent uint64
	a.sent = func() uint64 {
		mu.Lock()
		defer mu.Unlock()
		return sent
	}
	a.relay, err = relay.New(store, a.js, relay.Config{
		Logger: slog.New(slog.DiscardHandler),
		Hooks: relay.Hooks{PublishedFunc: func(time.Duration, time.Duration, bool) {
			mu.Lock()
			defer mu.Unlock()
			sent++
		}},
	})
	a.must(err)
	runCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() { done <- a.relay.Run(runCtx) }()
	t.Cleanup(func() {
		cancel()
		a.must(<-done)
	})
	return a
}

func (a *away) must(err error) {
	a.t.Helper()
	if err != nil {
		a.t.Fatal(err)
	}
}

// write inserts a row, if the database takes it.
func (a *away) write(id string) error {
	ctx, cancel := context.WithTimeout(a.t.Context(), 2*time.Second)
	defer cancel()
	_, err := a.pool.Exec(ctx, `INSERT INTO outbox (subject, payload, event_id, aggregate_id) VALUES ('events.x', '', $1, 'k')`, id)
	return err
}

// await waits for a state and returns how long that took.
func (a *away) await(what string, limit time.Duration, ok func() (done bool, state string)) time.Duration {
	a.t.Helper()
	began := time.Now()
	for {
		done, state := ok()
		if done {
			return time.Since(began)
		}
		if time.Since(began) > limit {
			a.t.Fatalf("%s: not within %v: %s", what, limit, state)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (a *away) awaitReady(want bool, limit time.Duration) {
	a.t.Helper()
	a.await(fmt.Sprintf("ready = %v", want), limit, func() (bool, string) {
		h := a.relay.Health()
		return h.Ready == want, fmt.Sprintf("%+v", h)
	})
}

func (a *away) awaitStored(n int, limit time.Duration) {
	a.t.Helper()
	a.await(fmt.Sprintf("%d messages on the stream", n), limit, func() (bool, string) {
		s, err := a.js.Stream(a.t.Context(), "EVENTS")
		a.must(err)
		msgs := s.CachedInfo().State.Msgs
		return msgs == uint64(n), fmt.Sprintf("%d are, health %+v", msgs, a.relay.Health())
	})
}

// Catalog BR-18. The database stops, restarts, ends sessions and becomes
// read-only: the relay says so and goes on by itself within seconds.
func TestRelayOutlivesFailuresOfPostgreSQL(t *testing.T) {
	t.Parallel()
	cluster := pgtest.Start(t)
	a := newAway(t, cluster.URL(t))
	n := 0
	write := func() {
		t.Helper()
		a.await("a write", 15*time.Second, func() (bool, string) {
			err := a.write(fmt.Sprint("e", n))
			return err == nil, fmt.Sprint(err)
		})
		n++
	}
	const soon = 10 * time.Second
	write()
	a.awaitStored(n, soon)

	cluster.Crash(t)
	a.awaitReady(false, soon)
	cluster.Run(t)
	a.awaitReady(true, soon)
	write()
	a.awaitStored(n, soon)

	for range 5 {
		_, err := a.pool.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`)
		a.must(err)
		write()
	}
	a.awaitStored(n, soon)

	for _, query := range []string{
		`ALTER SYSTEM SET default_transaction_read_only = on`, `SELECT pg_reload_conf()`,
	} {
		_, err := a.pool.Exec(t.Context(), query)
		a.must(err)
	}
	a.await("writes refused", soon, func() (bool, string) {
		err := a.write(fmt.Sprint("e", n))
		if err == nil {
			n++
		}
		return err != nil && strings.Contains(err.Error(), "read-only"), fmt.Sprint(err)
	})
	a.awaitReady(false, soon)
	conn, err := a.pool.Acquire(t.Context())
	a.must(err)
	for _, query := range []string{
		`SET default_transaction_read_only = off`, `ALTER SYSTEM RESET default_transaction_read_only`, `SELECT pg_reload_conf()`,
		`RESET default_transaction_read_only`,
	} {
		_, err := conn.Exec(t.Context(), query)
		a.must(err)
	}
	conn.Release()
	a.awaitReady(true, soon)
	write()
	a.awaitStored(n, soon)
	if sent := a.sent(); sent > 2*uint64(n) {
		t.Errorf("%d PubAcks for %d rows", sent, n)
	}
}

// Catalog BR-12: what cannot be recorded is not published again and again.
func TestRelayThatCannotRecordInPostgreSQLStopsPublishing(t *testing.T) {
	t.Parallel()
	a := newAway(t, pgtest.URL(t))
	ctx := t.Context()
	// As the server says it when its disk is full.
	for _, query := range []string{
		`CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$`,
		`CREATE TRIGGER full_disk BEFORE UPDATE ON outbox FOR EACH STATEMENT EXECUTE FUNCTION full_disk()`,
	} {
		_, err := a.pool.Exec(ctx, query)
		a.must(err)
	}
	const rows = 50
	for i := range rows {
		a.must(a.write(fmt.Sprint("e", i)))
	}
	a.awaitReady(false, 10*time.Second)
	time.Sleep(2 * time.Second) // for as long as that, it may do harm
	h := a.relay.Health()
	if h.Ready || !strings.Contains(h.Reason, "cannot record") || !strings.Contains(h.Reason, "No space left") {
		t.Errorf("health = %+v, want not ready because it cannot record", h)
	}
	if sent := a.sent(); sent > 2*rows {
		t.Errorf("%d PubAcks for %d rows that cannot be recorded", sent, rows)
	}
	_, err := a.pool.Exec(ctx, `DROP TRIGGER full_disk ON outbox`)
	a.must(err)
	a.awaitReady(true, 10*time.Second)
	a.awaitStored(rows, 10*time.Second)
	a.await("all rows recorded", 10*time.Second, func() (bool, string) {
		var left int
		err := a.pool.QueryRow(ctx, `SELECT count(*) FROM outbox WHERE status <> 'PUBLISHED' OR stream_seq IS NULL`).Scan(&left)
		return err == nil && left == 0, fmt.Sprint(left, errors.Join(err))
	})
}
