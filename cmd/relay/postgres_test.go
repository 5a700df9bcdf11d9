package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
)

// Scripts on a database of their own, among them one that runs on SQLite too.
func TestPostgresScripts(t *testing.T) {
	t.Parallel()
	testscript.Run(t, testscript.Params{
		Files: []string{"testdata/postgres/migrate.txtar", "testdata/script/outbox.txtar"},
		Setup: func(env *testscript.Env) error {
			env.Setenv("RELAY_DB", pgtest.URL(env.T().(testing.TB)))
			env.Setenv("RELAY_NATS", "nats://127.0.0.1:1") // whatever broker this machine has
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits,
			"sql": func(ts *testscript.TestScript, neg bool, args []string) {
				if neg || len(args) != 1 {
					ts.Fatalf("usage: sql FILE")
				}
				ts.Check(runSQL(context.Background(), ts.Getenv("RELAY_DB"), ts.ReadFile(args[0])))
			},
		},
	})
}

// runSQL runs statements as psql does.
func runSQL(ctx context.Context, url, statements string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, statements, pgx.QueryExecModeSimpleProtocol)
	return errors.Join(err, conn.Close(ctx))
}

func mustRunSQL(t *testing.T, url, statements string) {
	t.Helper()
	if err := runSQL(t.Context(), url, statements); err != nil {
		t.Fatalf("%s: %v", statements, err)
	}
}

// eventuallySQL asks until the answer is true.
func eventuallySQL(t *testing.T, url, question string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	eventually(t, question, func() (holds bool, state string) {
		err := conn.QueryRow(t.Context(), question).Scan(&holds)
		return holds, fmt.Sprint(holds, err)
	})
}

// The first steps with a PostgreSQL database, in a schema of its own: run, emit, a
// plain INSERT, consume; and what a person does with a row that cannot be sent.
func TestPostgresRunEmitConsumeAndPlainInsertArrive(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	db := []string{"--db", url, "--table", "billing.outbox"}
	relay := func(args ...string) string { t.Helper(); return once(t, t.TempDir(), append(args, db...)...) }
	r := startRun(t, db...)
	relay("emit", "events.hello", `{"x":1}`)
	mustRunSQL(t, url, `INSERT INTO billing.outbox (subject, payload) VALUES ('events.plain', 'hi'), ('events.*', 'stays')`)
	c := start(t, r.dir, "consume", "--durable", "d", "--print", "--nats", r.nats)
	c.stdout.line(t, `events.hello {"x":1}`)
	c.stdout.line(t, "events.plain hi")

	const dead = `SELECT EXISTS (SELECT FROM billing.outbox_dead_letter)`
	eventuallySQL(t, url, dead)
	if out := relay("outbox", "list", "--status", "DEAD_LETTER"); !strings.Contains(out, "3   DEAD_LETTER") || !strings.Contains(out, "wildcard") {
		t.Errorf("outbox list shows\n%s\nwant row 3 with its reason", out)
	}
	if out := relay("outbox", "show", "2"); !strings.Contains(out, "PUBLISHED") || !strings.Contains(out, "EVENTS sequence ") {
		t.Errorf("row 2 is\n%s\nwant it PUBLISHED with its place", out)
	}
	if out := relay("outbox", "retry", "3"); out != "1 row retried\n" {
		t.Errorf("outbox retry says %q", out)
	}
	eventuallySQL(t, url, dead) // again
	if out := relay("outbox", "discard", "--reason", "wildcard"); out != "1 row discarded\n" {
		t.Errorf("outbox discard says %q", out)
	}
	if status := relay("status", "--nats", r.nats); !strings.Contains(status, "16 of 16 shards") || !strings.Contains(status, "outbox        billing.outbox,") {
		t.Errorf("status shows\n%s\nwant all shards with one relay", status)
	}
	if _, body := get(t, r.http+"/metrics"); !strings.Contains(body, `jetbox_outbox_pending_rows{outbox="billing.outbox"} 0`) ||
		!strings.Contains(body, `jetbox_relay_shards{outbox="billing.outbox"} 16`) {
		t.Error("metrics do not have the outbox's backlog and its shards")
	}
	r.signal(t, syscall.SIGTERM)
	if code := r.wait(t); code != exitFine {
		t.Errorf("relay run ended with %d after SIGTERM, want %d", code, exitFine)
	}
	if status := relay("status", "--nats", "nats://127.0.0.1:1"); !strings.Contains(status, "relay         none\n") {
		t.Errorf("after a clean stop status shows\n%s", status)
	}
}

// Several relays divide the shards; those of one that is killed go to the others.
// One with a broker of its own among them is told what that means.
func TestPostgresRelaysShareTheShards(t *testing.T) {
	t.Parallel()
	url, dir := pgtest.URL(t), t.TempDir()
	broker := embedded.RunTest(t, func(c *embedded.Config) { c.Listen = "127.0.0.1:0" })
	shards := func(relays int, want ...string) {
		t.Helper()
		eventuallySQL(t, url, fmt.Sprintf(`SELECT count(*) = %d AND count(*) = (SELECT count(*) FROM outbox_relay)
			FROM (SELECT FROM outbox_shard GROUP BY owner HAVING count(*) = 16 / %[1]d AND owner IS NOT NULL) AS o`, relays))
		out := once(t, dir, "status", "--db", url, "--nats", broker.ClientURL())
		if got := regexp.MustCompile(`\d+ of \d+ shards`).FindAllString(out, -1); !slices.Equal(got, want) {
			t.Errorf("status shows\n%s\nwant %q", out, want)
		}
	}
	var procs [2]*proc
	for i := range procs {
		procs[i] = start(t, dir, "run", "--db", url, "--nats", broker.ClientURL(), "--http", "off", "--log-format", "json", "--lease", "2s")
		procs[i].stderr.line(t, `"msg":"lease acquired"`)
	}
	shards(2, "8 of 16 shards", "8 of 16 shards")

	refused := start(t, dir, "migrate", "--db", url, "--shards", "4")
	if code := refused.wait(t); code != exitFailed {
		t.Errorf("relay migrate --shards under relays ended with %d, want %d", code, exitFailed)
	}
	refused.stderr.line(t, "relays are working on the outbox", fmt.Sprintf("pid %d", procs[0].cmd.Process.Pid))
	refused.stderr.line(t, "relay: hint: relay status shows the relays")

	alone := start(t, dir, "run", "--db", url, "--listen", "127.0.0.1:0", "--http", "off", "--log-format", "json", "--lease", "2s")
	alone.stderr.line(t, `"level":"WARN"`, "a broker of its own", fmt.Sprintf("pid %d", procs[1].cmd.Process.Pid))
	alone.stderr.line(t, `"msg":"lease acquired"`)
	alone.signal(t, syscall.SIGTERM)
	if code := alone.wait(t); code != exitFine {
		t.Errorf("the third relay ended with %d", code)
	}

	procs[0].signal(t, syscall.SIGKILL)
	procs[0].wait(t)
	shards(1, "16 of 16 shards")
	procs[1].signal(t, syscall.SIGTERM)
	if code := procs[1].wait(t); code != exitFine {
		t.Errorf("the second relay ended with %d", code)
	}
	once(t, dir, "migrate", "--db", url, "--shards", "4")
	if out := once(t, dir, "status", "--db", url, "--nats", broker.ClientURL(), "--json"); !strings.Contains(out, `"shards":4,`) {
		t.Errorf("after relay migrate --shards 4 status shows %s", out)
	}
}

// A database that is away is waited for, at the start and later; what a person
// must put right ends relay at once, with a remedy. The password shows nowhere.
func TestPostgresOutagesAreWaitedForAndMistakesAreNot(t *testing.T) {
	t.Parallel()
	const password = "hunter22-of-app"
	cluster := pgtest.Start(t)
	super := cluster.URL(t)
	mustRunSQL(t, super, `CREATE ROLE app LOGIN PASSWORD '`+password+`'; DO $$ BEGIN
		EXECUTE format('GRANT ALL ON DATABASE %I TO app; GRANT ALL ON SCHEMA public TO app', current_database());
		EXECUTE format('COPY (VALUES (''host all app all scram-sha-256''), (''host all locked all reject''), (''host all all all trust''), (''local all all trust'')) TO %L',
			current_setting('hba_file'));
	END $$; SELECT pg_reload_conf()`)
	as := func(user string) string { return strings.Replace(super, "postgres@", user+"@", 1) }
	app := as("app:" + password)

	for _, tt := range []struct{ name, url, want, hint string }{
		{"wrong password", as("app:hunter22-wrong"), "28P01", "see the user and the password"},
		{"no password", as("app"), "28P01", "see the user and the password"},
		{"refused", as("locked"), "28000", "pg_hba.conf"},
		{"unknown role", as("nobody"), "28000", "see the role"},
		{"no TLS", strings.Replace(super, "sslmode=disable", "sslmode=require", 1), "refused TLS", "the server has no TLS"},
		{"unknown database", strings.Replace(super, "/jetbox_", "/other_", 1), "3D000", "create the database first"},
	} {
		for _, args := range [][]string{{"run", "--http", "off", "--listen", "off"}, {"status"}} {
			p := start(t, t.TempDir(), append(args, "--db", tt.url)...)
			if code := p.wait(t); code != exitFailed {
				t.Errorf("%s: relay %s ended with %d, want %d", tt.name, args[0], code, exitFailed)
			}
			p.stderr.line(t, "relay: open outbox", tt.want)
			p.stderr.line(t, "relay: hint: ", tt.hint)
			if strings.Contains(p.stderr.String(), "hunter22") {
				t.Errorf("%s: relay %s shows the password", tt.name, args[0])
			}
		}
	}

	cluster.Stop(t)
	p := start(t, t.TempDir(), "run", "--db", app, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-format", "json", "--log-level", "debug", "--drain-timeout", "1s")
	r := &relayRun{proc: p, http: "http://" + p.field(t, "serving HTTP", "address")}
	notReady := func(role, reason string) {
		t.Helper()
		eventually(t, "not ready: "+reason, func() (bool, string) {
			status, body := get(t, r.http+"/readyz")
			return status == http.StatusServiceUnavailable && strings.Contains(body, `"role":"`+role) && strings.Contains(body, reason), body
		})
	}
	notReady("starting", "waiting for the database: open outbox")
	if status, _ := get(t, r.http+"/livez"); status != http.StatusOK {
		t.Errorf("/livez: %d", status)
	}
	if status, body := get(t, r.http+"/metrics"); status != http.StatusOK || strings.Contains(body, metricPending) {
		t.Errorf("/metrics: %d, want it without the backlog, which nobody knows", status)
	}
	p.stderr.line(t, `"msg":"waiting","for":"database"`)
	cluster.Run(t)
	r.ready(t)
	c := start(t, p.dir, "consume", "--durable", "d", "--print", "--nats", p.field(t, "embedded broker started", "url"))
	once(t, p.dir, "emit", "--db", app, "events.a", "before")
	c.stdout.line(t, "events.a before")

	cluster.Crash(t)
	notReady("active", "database: ")
	cluster.Run(t)
	once(t, p.dir, "emit", "--db", app, "events.a", "after")
	c.stdout.line(t, "events.a after")
	r.ready(t)
	// One that does not answer holds nobody up who is asked to stop.
	cluster.Pause(t)
	defer cluster.Resume(t)
	asked := time.Now()
	p.signal(t, syscall.SIGTERM)
	if code := p.wait(t); code != exitFine {
		t.Errorf("ended with %d", code)
	}
	if took, most := time.Since(asked), 5*time.Second; took > most {
		t.Errorf("took %v to stop without its database, want at most %v", took, most)
	}
	if text := p.stderr.String(); strings.Contains(text, password) || !strings.Contains(text, `"db":"postgres://app:*****@`) {
		t.Errorf("the log shows the password, or not the database:\n%s", text)
	}
}

// A relay that is asked to stop while it waits for its database ends well.
func TestPostgresRunStopsWhileWaitingForDatabase(t *testing.T) {
	t.Parallel()
	p := start(t, t.TempDir(), "run", "--db", "postgres://u@127.0.0.1:1/x", "--http", "off", "--listen", "off", "--log-format", "json")
	p.stderr.line(t, `"for":"database"`)
	p.signal(t, syscall.SIGTERM)
	if code := p.wait(t); code != exitFine {
		t.Errorf("ended with %d, want %d", code, exitFine)
	}
}

func TestWhatIsAnOutageOfTheDatabase(t *testing.T) {
	t.Parallel()
	pg := database{url: "postgres://h/x"}
	code := func(code string) error { return fmt.Errorf("open: %w", &pgconn.PgError{Code: code}) }
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{code("57P03"), true}, // starting up
		{code("57P01"), true}, // shutting down
		{code("53300"), true}, // too many connections
		{code("08006"), true},
		{code("25006"), true}, // a standby, before it is promoted
		{code("55P03"), true}, // somebody else migrates
		{code("28P01"), false},
		{code("28000"), false},
		{code("3D000"), false},
		{code("42501"), false},
		{code("42601"), false},
		{fmt.Errorf("x: %w", io.ErrUnexpectedEOF), true},
		{fmt.Errorf("x: %w", context.DeadlineExceeded), true},
		{&net.DNSError{Err: "no such host"}, true},
		{errors.New("the server is PostgreSQL 12, this needs 13"), false},
	} {
		if got := pg.away(tt.err); got != tt.want {
			t.Errorf("away(%v) = %v, want %v", tt.err, got, tt.want)
		}
		if (database{file: "x.db"}).away(tt.err) {
			t.Errorf("a file is away after %v", tt.err)
		}
	}
}

// readmeSQL returns the SQL block of README.md that has the word.
func readmeSQL(t *testing.T, word string) string {
	t.Helper()
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, block := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		if strings.Contains(block[1], word) {
			return block[1]
		}
	}
	t.Fatalf("README.md has no SQL with %q", word)
	return ""
}

// The roles of README.md suffice, and are no more than what it says: who writes
// can do nothing but append, who relays reads nothing but the outbox.
func TestRolesOfTheReadmeSuffice(t *testing.T) {
	t.Parallel()
	cluster := pgtest.Start(t)
	super, dir := cluster.URL(t), t.TempDir()
	as := func(user string) string { return strings.Replace(super, "postgres@", user+"@", 1) }
	once(t, dir, "migrate", "--db", super, "--table", "billing.outbox")
	mustRunSQL(t, super, `CREATE TABLE secret (x int); `+readmeSQL(t, "CREATE ROLE"))

	writer := as("billing_app")
	mustRunSQL(t, writer, `INSERT INTO billing.outbox (subject, payload, available_at) VALUES ('events.a', 'x', NULL), ('events.a', 'y', now() + interval '1 s')`)
	conn, err := pgx.Connect(t.Context(), writer)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	w := postgres.Writer{Table: "billing.outbox"}
	err = pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
		return w.AppendPgx(t.Context(), tx, &jetbox.Event{Subject: "events.b", Payload: []byte("z")})
	})
	if err != nil {
		t.Errorf("AppendPgx as the writer: %v", err)
	}
	for _, no := range []string{`SELECT FROM billing.outbox`, `DELETE FROM billing.outbox`, `INSERT INTO billing.outbox_queue VALUES (99, 1)`} {
		if err := runSQL(t.Context(), writer, no); err == nil {
			t.Errorf("the writer may %s", no)
		}
	}

	db := []string{"--db", as("jetbox_relay"), "--table", "billing.outbox"}
	for _, retention := range []string{"24h", "0", "archive"} {
		r := startRun(t, append(db, "--retention", retention)...)
		mustRunSQL(t, writer, `INSERT INTO billing.outbox (subject, payload) VALUES ('events.c', ''), ('events.*', '')`)
		const settled = `SELECT EXISTS (SELECT FROM billing.outbox_dead_letter) AND NOT EXISTS (SELECT FROM billing.outbox WHERE status = 'PENDING')`
		eventuallySQL(t, super, settled)
		once(t, dir, append([]string{"outbox", "retry"}, db...)...)
		eventuallySQL(t, super, settled)
		if out := once(t, dir, append([]string{"outbox", "discard", "--all"}, db...)...); out != "1 row discarded\n" {
			t.Errorf("outbox discard says %q", out)
		}
		r.signal(t, syscall.SIGTERM)
		if code := r.wait(t); code != exitFine {
			t.Errorf("--retention %s: ended with %d", retention, code)
		}
		if text := r.stderr.String(); strings.Contains(text, "permission denied") {
			t.Errorf("--retention %s: the relay lacks a right:\n%s", retention, text)
		}
	}
	if err := runSQL(t.Context(), as("jetbox_relay"), `SELECT FROM secret`); err == nil {
		t.Error("the relay may read other tables")
	}
	p := start(t, dir, "emit", "events.x", "--db", writer, "--table", "billing.outbox")
	p.wait(t)
	p.stderr.line(t, "relay: hint: README.md lists what the role")
}

// What pgx says in several lines is one for people and logs.
func TestErrorsOfSeveralAddressesAreOneLine(t *testing.T) {
	t.Parallel()
	text := "failed to connect to `user=u`:\n\ta: refused\n\tb: refused\nand"
	if got, want := oneLine(text), "failed to connect to `user=u`: a: refused; b: refused; and"; got != want {
		t.Errorf("oneLine = %q, want %q", got, want)
	}
}

// Behind a pooler in transaction mode notifications do not arrive: the relay says
// so and polls. With --notify=false it does not even try.
func TestPostgresRelayWorksBehindPooler(t *testing.T) {
	t.Parallel()
	const deaf = "no notifications from the database, polling instead"
	through := func() string { return pgtest.Bouncer(t, pgtest.URL(t), "transaction") }
	urls := []string{through(), through()}
	runs := []*relayRun{ // the quiet one first: when the other has found out, it would have, too
		startRun(t, "--db", urls[0], "--notify=false"),
		startRun(t, "--db", urls[1]),
	}
	for i, r := range runs {
		once(t, r.dir, "emit", "--db", urls[i], "events.a", "through")
		c := start(t, r.dir, "consume", "--durable", "d", "--print", "--nats", r.nats)
		c.stdout.line(t, "events.a through")
	}
	runs[1].stderr.line(t, deaf)
	if text := runs[0].stderr.String(); strings.Contains(text, deaf) {
		t.Errorf("--notify=false listens:\n%s", text)
	}
	for i, r := range runs {
		r.signal(t, syscall.SIGTERM)
		if code := r.wait(t); code != exitFine {
			t.Errorf("relay %d ended with %d", i, code)
		}
	}
}
