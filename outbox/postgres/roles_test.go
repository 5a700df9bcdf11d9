package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
)

// rolesSQL is what the README tells people to run.
func rolesSQL(t *testing.T) string {
	t.Helper()
	readme, err := os.ReadFile("../../README.md")
	check(t, err)
	for _, block := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(string(readme), -1) {
		if strings.Contains(block[1], "CREATE ROLE") {
			return block[1]
		}
	}
	t.Fatal("the README has no SQL that creates roles")
	return ""
}

// as returns the URL for another user.
func as(t *testing.T, server, user string) string {
	t.Helper()
	u, err := url.Parse(server)
	check(t, err)
	u.User = url.User(user)
	return u.String()
}

// The roles of the README: a writer that can only INSERT, and a relay that sees
// nothing but its tables. With these everything works.
func TestRolesOfTheReadmeAreEnoughAndNoMore(t *testing.T) {
	t.Parallel()
	server := pgtest.URL(t)
	ctx := t.Context()
	cfg := postgres.Config{URL: server, Table: "billing.outbox"}
	owner := migrated(t, cfg)
	suffix := fmt.Sprintf("_%x", rand.Uint64())
	writer, relay := "billing_app"+suffix, "jetbox_relay"+suffix
	exec(t, owner, strings.NewReplacer("billing_app", writer, "jetbox_relay", relay).Replace(rolesSQL(t)), pgx.QueryExecModeSimpleProtocol)
	t.Cleanup(func() {
		conn, err := pgx.Connect(t.Context(), server)
		if err == nil {
			_, err = conn.Exec(t.Context(), fmt.Sprintf("DROP OWNED BY %s, %s; DROP ROLE %[1]s, %[2]s", writer, relay))
		}
		if err != nil {
			t.Log(err)
		}
	})
	exec(t, owner, `CREATE TABLE orders (id int)`)
	exec(t, owner, `CREATE TABLE billing.invoices (id int)`)

	app, err := pgx.Connect(ctx, as(t, server, writer))
	check(t, err)
	defer app.Close(ctx)
	tx, err := app.Begin(ctx)
	check(t, err)
	check(t, postgres.Writer{Table: "billing.outbox"}.AppendPgx(ctx, tx,
		&jetbox.Event{Subject: "s", AggregateID: "k"}, &jetbox.Event{Subject: "s", NotBefore: time.Now().Add(time.Millisecond)}))
	check(t, tx.Commit(ctx))
	_, err = app.Exec(ctx, `INSERT INTO billing.outbox (subject, payload, event_id) VALUES ('s', 'plain SQL', NULL)`)
	check(t, err)
	refused := func(conn *pgx.Conn, queries ...string) {
		t.Helper()
		for _, q := range queries {
			var pg *pgconn.PgError
			if _, err := conn.Exec(ctx, q); !errors.As(err, &pg) || pg.Code != "42501" {
				t.Errorf("%s: %v, want permission denied", q, err)
			}
		}
	}
	refused(app, `SELECT * FROM billing.outbox`, `UPDATE billing.outbox SET status = 'PUBLISHED'`, `DELETE FROM billing.outbox`,
		`SELECT * FROM billing.outbox_queue`, `INSERT INTO billing.outbox_queue VALUES (1, 1)`, `DELETE FROM billing.outbox_wait`,
		`UPDATE billing.outbox_relay SET idle = true`, `SELECT * FROM billing.invoices`)

	cfg.URL = as(t, server, relay)
	s := another(t, cfg)
	check(t, s.Check(ctx))
	l := acquire(t, s, "a", time.Minute)
	time.Sleep(2 * time.Millisecond)
	rows, err := s.Claim(ctx, l, jetbox.Ask{Limit: 10})
	check(t, err)
	if len(rows) != 3 {
		t.Fatalf("claimed %d rows, want 3", len(rows))
	}
	outcomes := published(rows...)
	outcomes[0] = jetbox.Outcome{Pos: rows[0].Pos, State: jetbox.DeadLetter, Reason: "poison", Freeze: true}
	outcomes[1] = jetbox.Outcome{Pos: rows[1].Pos, State: jetbox.Pending, Reason: "later", Attempted: true}
	outcomes[2].Remove = jetbox.Archive
	check(t, s.Record(ctx, l, outcomes))
	if n, err := s.Retry(ctx, outbox.Filter{}); err != nil || n != 1 {
		t.Errorf("Retry = %d, %v, want 1", n, err)
	}
	if n := len(drain(t, s, l, 10)); n != 2 {
		t.Errorf("drained %d rows, want the one retried by hand and the one by itself", n)
	}
	_, err = s.Stats(ctx)
	check(t, err)
	if n, err := s.Prune(ctx, l, time.Now().Add(time.Hour), true); err != nil || n != 2 {
		t.Errorf("Prune = %d, %v, want 2", n, err)
	}
	waitCtx, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	for waitCtx.Err() == nil {
		if err := s.Wait(waitCtx); err != nil && waitCtx.Err() == nil {
			t.Fatalf("Wait: %v", err)
		}
	}
	check(t, s.Release(ctx, l))
	conn, err := s.Pool().Acquire(ctx)
	check(t, err)
	defer conn.Release()
	refused(conn.Conn(), `SELECT * FROM orders`, `SELECT * FROM billing.invoices`, `INSERT INTO orders VALUES (1)`,
		`DROP TABLE billing.outbox_queue`, `ALTER TABLE billing.outbox DISABLE TRIGGER ALL`)
}
