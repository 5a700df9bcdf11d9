package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"
	_ "time/tzdata" // zones for the tests in other time zones

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
)

// childVariable makes this binary play another process.
const childVariable = "JETBOX_TEST_CHILD"

// children are what another process can do with a file.
var children = map[string]func(ctx context.Context, path string, stdout io.Writer) error{
	"claim and hang": claimAndHang,
	"work a while":   workAWhile,
}

func TestMain(m *testing.M) {
	child := children[os.Getenv(childVariable)]
	if child == nil {
		os.Exit(m.Run())
	}
	if err := child(context.Background(), os.Args[len(os.Args)-1], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// childProcess prepares this binary as another process on the file.
func childProcess(t *testing.T, name, path string, env ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe, path)
	cmd.Env = append(append(os.Environ(), childVariable+"="+name), env...)
	return cmd
}

// claimAndHang takes a short lease, claims, says so, and never records.
func claimAndHang(ctx context.Context, path string, stdout io.Writer) error {
	s, err := sqlite.Open(ctx, sqlite.Config{Path: path})
	if err != nil {
		return err
	}
	l, err := s.Acquire(ctx, jetbox.Candidate{Owner: "child", Length: killedLease})
	if err != nil {
		return err
	}
	rows, err := s.Claim(ctx, l, jetbox.Ask{Limit: 10})
	if err != nil {
		return err
	}
	fmt.Fprintf(stdout, "claimed %d\n", len(rows))
	select {}
}

// workAWhile is one life of a relay and a writer: it leaves rows in every state,
// whatever the zone it lives in.
func workAWhile(ctx context.Context, path string, _ io.Writer) error {
	s, err := sqlite.Open(ctx, sqlite.Config{Path: path})
	if err != nil {
		return err
	}
	if err := errors.Join(s.Migrate(ctx), appendAll(ctx, s)); err != nil {
		return err
	}
	l, err := s.Acquire(ctx, jetbox.Candidate{Owner: "child", Length: time.Hour})
	if err != nil || !l.Held {
		return fmt.Errorf("acquire %+v: %w", l, err)
	}
	rows, err := s.Claim(ctx, l, jetbox.Ask{Limit: 100})
	if err != nil {
		return err
	}
	var outcomes []jetbox.Outcome
	for i, row := range rows {
		if row.Fault != nil {
			return row.Fault
		}
		outcomes = append(outcomes, []jetbox.Outcome{
			{Pos: row.Pos, State: jetbox.Published, Stream: "EVENTS", StreamSeq: 1},
			{Pos: row.Pos, State: jetbox.Pending, Reason: "refused", Attempted: true, Delay: time.Millisecond},
			{Pos: row.Pos, State: jetbox.DeadLetter, Reason: "poison"},
			{Pos: row.Pos, State: jetbox.Published, Remove: jetbox.Archive},
		}[i%4])
	}
	return errors.Join(s.Record(ctx, l, outcomes), s.Release(ctx, l), s.Close())
}

func appendAll(ctx context.Context, s *sqlite.Store) error {
	tx, err := s.DB().BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	for i := range 8 {
		ev := &jetbox.Event{Subject: "s", Time: time.Now(), NotBefore: time.Now().Add(-time.Hour)}
		if i == 7 {
			ev.NotBefore = time.Now().Add(time.Hour)
		}
		if err := s.Append(ctx, tx, ev); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// migrated opens a fresh outbox in a folder of its own.
func migrated(t testing.TB) (s *sqlite.Store, path string) {
	t.Helper()
	path = t.TempDir() + "/outbox.db"
	s = open(t, path)
	t.Cleanup(func() { s.Close() })
	if err := s.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s, path
}

func mustExec(t testing.TB, db *sql.DB, query string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func queryString(t testing.TB, db *sql.DB, query string, args ...any) string {
	t.Helper()
	var s sql.NullString
	if err := db.QueryRowContext(t.Context(), query, args...).Scan(&s); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return s.String
}
