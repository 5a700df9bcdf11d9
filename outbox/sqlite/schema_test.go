package sqlite_test

import (
	"database/sql"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
)

// schemaOf is what the file says of itself.
func schemaOf(t *testing.T, db *sql.DB) string {
	t.Helper()
	return queryString(t, db, `SELECT group_concat(type || ' ' || name || ' ' || tbl_name || char(10) || coalesce(sql, ''), char(10))
		FROM (SELECT * FROM sqlite_schema ORDER BY type, name)`)
}

func TestMigrationSQLMakesWhatMigrateMakes(t *testing.T) {
	t.Parallel()
	s, _ := migrated(t)
	want := schemaOf(t, s.DB())

	script, err := sqlite.MigrationSQL(sqlite.DefaultTable)
	if err != nil {
		t.Fatal(err)
	}
	byHand := t.TempDir() + "/hand.db"
	db, err := sqlite.OpenDB(t.Context(), byHand)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	mustExec(t, db, script)
	if got := schemaOf(t, db); got != want {
		t.Errorf("schema by hand:\n%s\nwant:\n%s", got, want)
	}
	hand := open(t, byHand)
	defer hand.Close()
	if err := hand.Check(t.Context()); err != nil {
		t.Errorf("Check after the script: %v", err)
	}
	if err := hand.Migrate(t.Context()); err != nil {
		t.Errorf("Migrate after the script: %v", err)
	}
	if got := schemaOf(t, db); got != want {
		t.Errorf("Migrate changed what the script made:\n%s\nwant:\n%s", got, want)
	}

	other, err := sqlite.MigrationSQL("billing_outbox")
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, db, other) // two outboxes in one file
	second, err := sqlite.Open(t.Context(), sqlite.Config{Path: byHand, Table: "billing_outbox"})
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if err := second.Check(t.Context()); err != nil {
		t.Errorf("Check of a second outbox: %v", err)
	}
}

// shell runs the system's sqlite3, the writer that is not ours.
func shell(t *testing.T, path, script string) string {
	t.Helper()
	exe, err := exec.LookPath("sqlite3")
	if err == nil {
		var out []byte
		if out, err = exec.CommandContext(t.Context(), exe, "-version").Output(); err == nil {
			var major, minor int
			if _, err = fmt.Sscanf(string(out), "%d.%d", &major, &minor); err == nil && (major < 3 || (major == 3 && minor < 31)) {
				err = fmt.Errorf("version %s is below 3.31", out)
			}
		}
	}
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("no usable sqlite3 shell in CI: %v", err)
		}
		t.Skipf("no usable sqlite3 shell: %v", err)
	}
	cmd := exec.CommandContext(t.Context(), exe, "-batch", "-bail", path)
	cmd.Stdin = strings.NewReader(script)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("sqlite3: %v\n%s", err, out)
	}
	return string(out)
}

func TestTheShellMakesAndFillsAnOutbox(t *testing.T) {
	t.Parallel()
	path := t.TempDir() + "/shell.db"
	script, err := sqlite.MigrationSQL(sqlite.DefaultTable)
	if err != nil {
		t.Fatal(err)
	}
	before := time.Now().UnixMilli()
	shell(t, path, script)
	shell(t, path, `INSERT INTO outbox (subject, payload) VALUES ('events.hello', '{"x":1}');
		INSERT INTO outbox (subject, payload, event_id, created_at, status, attempts, headers, content_type, available_at)
			VALUES ('events.nulls', x'00ff', NULL, NULL, NULL, NULL, NULL, NULL, NULL);
		INSERT INTO outbox (subject, payload, available_at) VALUES ('events.later', '', 9999999999999);
		BEGIN; INSERT INTO outbox (subject, payload) VALUES ('events.gone', ''); ROLLBACK;`)
	after := time.Now().UnixMilli()

	s := open(t, path)
	defer s.Close()
	l, err := s.Acquire(t.Context(), jetbox.Candidate{Owner: "a", Length: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 10})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range rows {
		got = append(got, fmt.Sprintf("%s %q %v", r.Event.Subject, r.Event.Payload, r.Fault))
		if at := r.Event.Time.UnixMilli(); at < before-1 || at > after+1 {
			t.Errorf("%s was recorded at %v, want a time of this test", r.Event.Subject, r.Event.Time)
		}
		if !eventID.MatchString(r.Event.ID) {
			t.Errorf("event ID %q is no UUID", r.Event.ID)
		}
	}
	if want := `events.hello "{\"x\":1}" <nil>, events.nulls "\x00\xff" <nil>`; strings.Join(got, ", ") != want {
		t.Errorf("claimed %s, want %s", strings.Join(got, ", "), want)
	}
	if got := shell(t, path, `SELECT subject, status FROM outbox_status ORDER BY id;`); got != "events.hello|PROCESSING\nevents.nulls|PROCESSING\nevents.later|PENDING\n" {
		t.Errorf("the shell sees %q", got)
	}
}

var eventID = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)

func TestDefaultEventIDsAreDistinctUUIDs(t *testing.T) {
	t.Parallel()
	s, _ := migrated(t)
	mustExec(t, s.DB(), `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000)
		INSERT INTO outbox (subject, payload) SELECT 's', '' FROM n`)
	rows, err := s.DB().QueryContext(t.Context(), `SELECT event_id FROM outbox`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	seen, variants := make(map[string]bool), make(map[byte]bool)
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			t.Fatal(err)
		}
		if !eventID.MatchString(id) {
			t.Fatalf("event ID %q is no UUID of version 4", id)
		}
		seen[id], variants[id[19]] = true, true
	}
	if err := rows.Err(); err != nil || len(seen) != 10000 || len(variants) != 4 {
		t.Errorf("%d distinct IDs with %d variants, %v, want 10000 with 4", len(seen), len(variants), err)
	}
}

// The database keeps out what would not scan, sort or be found, whoever writes.
func TestTableRefusesWhatIsNoRow(t *testing.T) {
	t.Parallel()
	s, _ := migrated(t)
	for _, column := range []string{"available_at", "created_at", "published_at", "aggregate_seq", "stream_seq", "attempts"} {
		for _, value := range []string{"'2026-11-29 14:01:57.49 +0000 UTC m=+0.03'", "'2026-11-29T14:01:57Z'", "1.5", "x'01'"} {
			q := fmt.Sprintf(`INSERT INTO outbox (subject, payload, %s) VALUES ('s', '', %s)`, column, value)
			if _, err := s.DB().ExecContext(t.Context(), q); err == nil {
				t.Errorf("taken: %s", q)
			}
		}
	}
	for _, q := range []string{
		`INSERT INTO outbox (subject, payload, status) VALUES ('s', '', 'PROCESSING')`,
		`INSERT INTO outbox (subject, payload, status) VALUES ('s', '', 'pending')`,
		`INSERT INTO outbox (subject, payload) VALUES ('s', 1)`,
		`INSERT INTO outbox (subject, payload) VALUES ('s', NULL)`,
		`INSERT INTO outbox (subject, payload) VALUES (NULL, '')`,
		`INSERT INTO outbox (subject) VALUES ('s')`,
		`INSERT INTO outbox (payload) VALUES ('')`,
	} {
		if _, err := s.DB().ExecContext(t.Context(), q); err == nil {
			t.Errorf("taken: %s", q)
		}
	}
	if got := queryString(t, s.DB(), `SELECT count(*) FROM outbox`); got != "0" {
		t.Errorf("%s rows, want none", got)
	}
}

// Mappers name every field. An explicit NULL takes the default.
func TestExplicitNullTakesTheDefault(t *testing.T) {
	t.Parallel()
	s, _ := migrated(t)
	mustExec(t, s.DB(), `INSERT INTO outbox (subject, payload, event_id, content_type, headers, status, attempts, created_at)
		VALUES ('s', '', NULL, NULL, NULL, NULL, NULL, NULL)`)
	got := queryString(t, s.DB(), `SELECT content_type || ' ' || headers || ' ' || status || ' ' || attempts || ' ' ||
		(abs(created_at - (julianday('now') - 2440587.5) * 86400000) < 5000) || ' ' || length(event_id) FROM outbox`)
	if want := "application/json {} PENDING 0 1 36"; got != want {
		t.Errorf("row of NULLs = %s, want %s", got, want)
	}
}

// SQLite reuses row ids without AUTOINCREMENT: a new row would come before old
// ones of its key, or under the id of one that is recorded just now.
// An empty event ID is not NULL and no default replaces it: the row is parked,
// and whoever looks at it sees what is there and not an ID made up on the way.
func TestEmptyEventIDIsShownAsItIs(t *testing.T) {
	t.Parallel()
	s, _ := migrated(t)
	mustExec(t, s.DB(), `INSERT INTO outbox (subject, payload, event_id, idempotency_key)
		VALUES ('events.a', '1', '', NULL)`)
	e, err := s.Show(t.Context(), 1)
	if err != nil || e.Event.ID != "" || e.Event.Key != "" {
		t.Errorf("Show: event ID %q, key %q, err %v, want neither ID nor key", e.Event.ID, e.Event.Key, err)
	}
}

func TestIDsAreNeverUsedAgain(t *testing.T) {
	t.Parallel()
	s, _ := migrated(t)
	mustExec(t, s.DB(), `INSERT INTO outbox (subject, payload) VALUES ('s', ''), ('s', ''), ('s', '')`)
	mustExec(t, s.DB(), `DELETE FROM outbox`)
	mustExec(t, s.DB(), `INSERT INTO outbox (subject, payload) VALUES ('s', '')`)
	if got := queryString(t, s.DB(), `SELECT id FROM outbox`); got != "4" {
		t.Errorf("id after a delete of 1 to 3 = %s, want 4", got)
	}
}

func TestVersionIsRecordedOnce(t *testing.T) {
	t.Parallel()
	_, path := migrated(t)
	errs := make(chan error)
	for range 8 {
		go func() {
			s, err := sqlite.Open(t.Context(), sqlite.Config{Path: path})
			if err == nil {
				defer s.Close()
				err = s.Migrate(t.Context())
			}
			errs <- err
		}()
	}
	for range 8 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	s := open(t, path)
	defer s.Close()
	if got := queryString(t, s.DB(), `SELECT group_concat(version) FROM outbox_schema`); got != "1,2,3" {
		t.Errorf("versions = %s, want 1, 2 and 3, once", got)
	}
}
