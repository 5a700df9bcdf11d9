package postgres_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
)

func subjects(rows []jetbox.Row) (out []string) {
	for _, r := range rows {
		out = append(out, r.Event.Subject)
	}
	return out
}

func wantSubjects(t *testing.T, rows []jetbox.Row, want ...string) {
	t.Helper()
	if got := subjects(rows); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// Object mappers send NULL for every field that is not set.
func TestExplicitNullTakesTheDefault(t *testing.T) {
	t.Parallel()
	s := migrated(t, postgres.Config{})
	columns := []string{
		"event_id", "idempotency_key", "event_type", "aggregate_type", "aggregate_id", "aggregate_seq", "schema_version",
		"content_type", "headers", "status", "attempts", "last_error", "available_at", "created_at", "published_at", "stream", "stream_seq",
	}
	for _, c := range columns {
		exec(t, s, `INSERT INTO outbox (subject, payload, `+c+`) VALUES ('s', '', NULL)`)
	}
	exec(t, s, `INSERT INTO outbox (subject, payload, `+strings.Join(columns, ", ")+`) VALUES ('s', ''`+strings.Repeat(", NULL", len(columns))+`)`)
	rows := drain(t, s, acquire(t, s, "a", time.Minute), 100)
	if len(rows) != len(columns)+1 {
		t.Fatalf("%d rows came, want %d", len(rows), len(columns)+1)
	}
	for i, r := range rows {
		if r.Fault != nil || r.Event.ID == "" || r.Event.ContentType != jetbox.DefaultContentType || time.Since(r.Event.Time) > time.Minute {
			t.Errorf("row %d = %+v, want the defaults", i, r)
		}
	}
}

// However rows come in, the trigger sees them.
func TestRowsOfEveryWayToInsertAreSeen(t *testing.T) {
	t.Parallel()
	s := migrated(t, postgres.Config{})
	exec(t, s, `CREATE TABLE source (subject text, payload bytea)`)
	exec(t, s, `INSERT INTO source VALUES ('select', ''), ('select', '')`)
	exec(t, s, `INSERT INTO outbox (subject, payload) VALUES ('values', '')`)
	exec(t, s, `INSERT INTO outbox (subject, payload) SELECT * FROM source`)
	exec(t, s, `WITH x AS (INSERT INTO outbox (subject, payload) VALUES ('cte', '') RETURNING id) SELECT * FROM x`)
	exec(t, s, `INSERT INTO outbox (subject, payload, event_id) VALUES ('upsert', '', 'e')`)
	exec(t, s, `INSERT INTO outbox (subject, payload, event_id) VALUES ('upsert', '', 'e') ON CONFLICT DO NOTHING`)
	exec(t, s, `INSERT INTO outbox (subject, payload, event_id) VALUES ('upsert', '', 'e') ON CONFLICT (event_id) DO UPDATE SET event_type = 'changed'`)
	exec(t, s, `DO $$ BEGIN
		BEGIN INSERT INTO outbox (subject, payload) VALUES ('rolled back', ''); RAISE division_by_zero; EXCEPTION WHEN division_by_zero THEN NULL; END;
		INSERT INTO outbox (subject, payload) VALUES ('block', ''); END $$`)
	conn, err := s.Pool().Acquire(t.Context())
	check(t, err)
	defer conn.Release()
	_, err = conn.CopyFrom(t.Context(), pgx.Identifier{"outbox"}, []string{"subject", "payload"}, pgx.CopyFromRows([][]any{{"copy", []byte{}}, {"copy", []byte{}}}))
	check(t, err)
	// As replication does.
	for _, q := range []string{`SET session_replication_role = replica`, `INSERT INTO outbox (subject, payload) VALUES ('replica', '')`, `RESET session_replication_role`} {
		_, err := conn.Exec(t.Context(), q)
		check(t, err)
	}
	l := acquire(t, s, "a", time.Minute)
	wantSubjects(t, drain(t, s, l, 100), "values", "select", "select", "cte", "upsert", "block", "copy", "copy", "replica")
}

// What is done by hand in plain SQL takes effect, and strands nothing.
func TestRowsChangedByHand(t *testing.T) {
	t.Parallel()
	s := migrated(t, postgres.Config{})
	ctx := t.Context()
	l := acquire(t, s, "a", time.Hour)
	claim := func(want ...string) []jetbox.Row {
		t.Helper()
		rows, err := s.Claim(ctx, l, jetbox.Ask{Limit: 100})
		check(t, err)
		wantSubjects(t, rows, want...)
		return rows
	}
	// Published rows made pending are sent again; pending ones marked or deleted
	// are not sent.
	exec(t, s, `INSERT INTO outbox (subject, payload) VALUES ('again', ''), ('marked', ''), ('deleted', ''), ('kept', '')`)
	check(t, s.Record(ctx, l, published(claim("again", "marked", "deleted", "kept")[0])))
	exec(t, s, `UPDATE outbox SET status = 'PENDING' WHERE subject = 'again'`)
	exec(t, s, `UPDATE outbox SET status = 'PUBLISHED' WHERE subject = 'marked'`)
	exec(t, s, `DELETE FROM outbox WHERE subject = 'deleted'`)
	check(t, s.Record(ctx, l, published(claim("again", "kept")...)))
	claim()
	if n := value[int64](t, s, `SELECT count(*) FROM outbox_queue`); n != 0 {
		t.Errorf("%d rows are left in the queue", n)
	}
	// A scheduled row is due when its time is changed, also to NULL.
	for _, at := range []string{"NULL", "now() - interval '1 s'"} {
		exec(t, s, `INSERT INTO outbox (subject, payload, available_at) VALUES ('scheduled', '', now() + interval '1 hour')`)
		claim()
		exec(t, s, `UPDATE outbox SET available_at = `+at+` WHERE status = 'PENDING'`)
		check(t, s.Record(ctx, l, published(claim("scheduled")...)))
	}
	// The head of a key that waits for its retry is deleted: the rest goes on,
	// after the next sweep.
	exec(t, s, `INSERT INTO outbox (subject, payload, aggregate_id) SELECT 'k' || n, '', 'k' FROM generate_series(1, 3) n`)
	check(t, s.Record(ctx, l, []jetbox.Outcome{{Pos: claim("k1", "k2", "k3")[0].Pos, State: jetbox.Pending, Delay: time.Hour}}))
	claim()
	exec(t, s, `DELETE FROM outbox WHERE subject = 'k1'`)
	check(t, s.Release(ctx, l))
	s = another(t, postgres.Config{URL: s.Pool().Config().ConnString()})
	l = acquire(t, s, "b", time.Hour)
	wantSubjects(t, drain(t, s, l, 1), "k2", "k3")
}

// With the trigger disabled a row is not seen, until a prune finds it.
func TestRowsThatComeWhileTheTriggerIsDisabledAreFound(t *testing.T) {
	t.Parallel()
	s := migrated(t, postgres.Config{})
	ctx := t.Context()
	exec(t, s, `ALTER TABLE outbox DISABLE TRIGGER ALL`)
	exec(t, s, `INSERT INTO outbox (subject, payload, status) VALUES ('lost', '', 'PENDING'), ('published', '', 'PUBLISHED'), ('dead', '', 'DEAD_LETTER')`)
	exec(t, s, `ALTER TABLE outbox ENABLE TRIGGER ALL`)
	exec(t, s, `INSERT INTO outbox (subject, payload, available_at) VALUES ('seen', '', NULL), ('later', '', now() + interval '1 hour')`)
	l := acquire(t, s, "a", time.Hour)
	if n, err := s.Prune(ctx, l, time.Now().Add(-time.Hour), false); err != nil || n != 0 {
		t.Fatalf("Prune = %d, %v", n, err)
	}
	wantSubjects(t, drain(t, s, l, 100), "lost", "seen")
	if n := value[int64](t, s, `SELECT count(*) FROM outbox_wait`); n != 1 {
		t.Errorf("%d rows wait, want the scheduled one", n)
	}
}

// Catalog BR-01 in small: ids are handed out at insert and seen at commit.
func TestLateCommitBelowPublishedRowsIsClaimedNext(t *testing.T) {
	t.Parallel()
	s := migrated(t, postgres.Config{})
	l := acquire(t, s, "a", time.Hour)
	slow, err := s.Pool().Begin(t.Context())
	check(t, err)
	defer func() { _ = slow.Rollback(t.Context()) }()
	check(t, postgres.AppendPgx(t.Context(), slow, &jetbox.Event{Subject: "slow"}))
	exec(t, s, `INSERT INTO outbox (subject, payload) SELECT 'fast', '' FROM generate_series(1, 3)`)
	wantSubjects(t, drain(t, s, l, 2), "fast", "fast", "fast")
	exec(t, s, `INSERT INTO outbox (subject, payload) VALUES ('next', '')`)
	check(t, slow.Commit(t.Context()))
	wantSubjects(t, drain(t, s, l, 100), "slow", "next")
}

func TestAppendByEitherInterface(t *testing.T) {
	t.Parallel()
	s := migrated(t, postgres.Config{})
	ctx := t.Context()
	many := func(subject string) (events []*jetbox.Event) {
		for range 250 { // more than one statement takes
			events = append(events, &jetbox.Event{Subject: subject, AggregateID: "k", Headers: map[string][]string{"a": {"1", "2"}}})
		}
		return events
	}
	tx, err := s.Pool().Begin(ctx)
	check(t, err)
	check(t, postgres.AppendPgx(ctx, tx, many("pgx")...))
	check(t, postgres.AppendPgx(ctx, tx))
	check(t, tx.Commit(ctx))
	std, err := s.DB().BeginTx(ctx, nil)
	check(t, err)
	check(t, postgres.Append(ctx, std, many("sql")...))
	check(t, std.Commit())
	rows := drain(t, s, acquire(t, s, "a", time.Hour), 1000)
	if len(rows) != 500 || rows[0].Event.Subject != "pgx" || rows[249].Event.Subject != "pgx" || rows[499].Event.Subject != "sql" {
		t.Fatalf("%d rows came, want 250 of each in order", len(rows))
	}
	for i, r := range rows {
		if r.Fault != nil || fmt.Sprint(r.Event.Headers) != "map[a:[1 2]]" || (i > 0 && r.Pos <= rows[i-1].Pos) {
			t.Fatalf("row %d = %+v", i, r)
		}
	}

	tx, err = s.Pool().Begin(ctx)
	check(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	if err := postgres.AppendPgx(ctx, tx, &jetbox.Event{Subject: "s", ID: rows[0].Event.ID}); !errors.Is(err, outbox.ErrDuplicateKey) {
		t.Errorf("Append of a repeated ID = %v, want ErrDuplicateKey", err)
	}
	if err := (postgres.Writer{Table: "Bad"}).AppendPgx(ctx, tx, &jetbox.Event{Subject: "s"}); err == nil || !strings.Contains(err.Error(), `"Bad"`) {
		t.Errorf("Append to a bad name = %v, want an error that names it", err)
	}
}

func TestTableNames(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	for _, bad := range []string{"", ".", "a.", ".a", "a.b.c", "Outbox", "a b", `a"b`, "1a", "é", strings.Repeat("x", 52), strings.Repeat("x", 64) + ".a"} {
		s, err := postgres.Open(t.Context(), postgres.Config{URL: url, Table: bad})
		if bad == "" { // the default
			check(t, err)
			check(t, s.Close())
			continue
		}
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", bad)) {
			t.Errorf("Open of table %q = %v, want an error that names it", bad, err)
		}
	}
	// Several outboxes in one database do not see each other.
	for i, name := range []string{"outbox", "order", "billing.outbox", "billing.select", strings.Repeat("x", 51)} {
		s := migrated(t, postgres.Config{URL: url, Table: name, Shards: 1})
		tx, err := s.Pool().Begin(t.Context())
		check(t, err)
		check(t, s.Writer().AppendPgx(t.Context(), tx, &jetbox.Event{Subject: fmt.Sprint(i)}))
		check(t, tx.Commit(t.Context()))
		wantSubjects(t, drain(t, s, acquire(t, s, "a", time.Minute), 10), fmt.Sprint(i))
		if s.Table() != name {
			t.Errorf("Table() = %q, want %q", s.Table(), name)
		}
	}
}

// The SQL for people who migrate themselves makes what Migrate makes.
func TestMigrationSQLMakesTheSameTables(t *testing.T) {
	t.Parallel()
	schema := func(s *postgres.Store) string {
		return value[string](t, s, `SELECT string_agg(x, E'\n' ORDER BY x) FROM (
			SELECT format('%s.%s %s %s %s', table_name, column_name, data_type, is_nullable, column_default) FROM information_schema.columns WHERE table_schema = 'public'
			UNION ALL SELECT pg_get_indexdef(indexrelid) FROM pg_index JOIN pg_class c ON c.oid = indrelid WHERE relnamespace = 'public'::regnamespace
			UNION ALL SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'public'::regnamespace
			UNION ALL SELECT pg_get_triggerdef(oid) || tgenabled::text FROM pg_trigger WHERE NOT tgisinternal
			UNION ALL SELECT array_to_string(reloptions, ' ') FROM pg_class WHERE relnamespace = 'public'::regnamespace
			UNION ALL SELECT 'shards ' || count(*) FROM outbox_shard UNION ALL SELECT 'version ' || version FROM outbox_schema) x (x)`)
	}
	byHand := another(t, postgres.Config{URL: pgtest.URL(t)})
	text, err := postgres.MigrationSQL("", 7)
	check(t, err)
	exec(t, byHand, text, pgx.QueryExecModeSimpleProtocol)
	check(t, byHand.Check(t.Context()))
	if got, want := schema(byHand), schema(migrated(t, postgres.Config{Shards: 7})); got != want {
		t.Errorf("MigrationSQL makes\n%s\nMigrate makes\n%s", got, want)
	}
	check(t, byHand.Migrate(t.Context()))
}
