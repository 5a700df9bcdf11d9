package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"modernc.org/sqlite"

	"github.com/seed-5e04d8fb/jetbox"
)

// Catalog BR-22: what is documented holds on every connection, not on the one
// a PRAGMA happened to reach.
func TestEveryConnectionHasItsSettings(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	tests := []struct {
		name  string
		db    *sql.DB
		conns int
		want  string
	}{
		{"writers", s.db, 6, "busy_timeout=5000 journal_mode=wal foreign_keys=1 synchronous=1"},
		{"relay", s.relay, 1, "busy_timeout=0 journal_mode=wal foreign_keys=1 synchronous=2"},
	}
	for _, tt := range tests {
		for i := range tt.conns { // all open at once: physical connections
			c, err := tt.db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			var got []string
			for _, name := range []string{"busy_timeout", "journal_mode", "foreign_keys", "synchronous"} {
				var v string
				if err := c.QueryRowContext(t.Context(), "PRAGMA "+name).Scan(&v); err != nil {
					t.Fatal(err)
				}
				got = append(got, name+"="+v)
			}
			if g := strings.Join(got, " "); g != tt.want {
				t.Errorf("%s, connection %d: %s, want %s", tt.name, i, g, tt.want)
			}
		}
		if n := tt.db.Stats().OpenConnections; n != tt.conns {
			t.Errorf("%s: %d connections, want %d", tt.name, n, tt.conns)
		}
	}
	if n := s.relay.Stats().MaxOpenConnections; n != 1 {
		t.Errorf("the relay has %d connections, want 1: its transactions take turns", n)
	}
}

// The driver takes a misspelled value without a word.
func TestConnectionWithoutItsSettingsIsNotUsed(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "outbox.db")
	good := driverDSN(path, writerSettings)
	for _, change := range [][2]string{
		{"synchronous%28NORMAL%29", "synchronous%28fulll%29"},
		{"synchronous%28NORMAL%29", "synchronous%28OFF%29"},
		{"busy_timeout%285000%29", "busy_timout%285000%29"},
		{"journal_mode%28WAL%29", "journal_mode%28wall%29"},
		{"foreign_keys%281%29", "foreign_keys%28yess%29"},
	} {
		dsn := strings.Replace(good, change[0], change[1], 1)
		if dsn == good {
			t.Fatalf("%s is not in %s", change[0], good)
		}
		c, err := sqlite.NewConnector(strings.Replace(dsn, "outbox.db", change[1]+".db", 1))
		if err != nil {
			t.Fatal(err)
		}
		set := writerSettings
		if strings.HasSuffix(change[1], "fulll%29") {
			set = relaySettings
			set.busyTimeout = writerSettings.busyTimeout
		}
		conn, err := (&checkedConnector{c, set}).Connect(t.Context())
		if err == nil {
			conn.Close()
			t.Errorf("a connection with %s was used", change[1])
		} else if name, _, _ := strings.Cut(change[0], "%"); !strings.Contains(err.Error(), name) {
			t.Errorf("with %s: %v, want the pragma named", change[1], err)
		}
	}
}

// Catalog BR-21: a deferred transaction that reads first and writes later is
// refused at once when anybody has committed in between.
func TestTransactionsTakeTheLockWhenTheyBegin(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	tx, err := s.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	c, err := s.relay.Conn(t.Context()) // which does not wait
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.ExecContext(t.Context(), "BEGIN IMMEDIATE"); !isBusy(err) {
		t.Errorf("BEGIN IMMEDIATE beside an open transaction = %v, want BUSY", err)
	}
}

// Catalog BR-21: a foreign lock is waited for, by 32 producers and by the relay.
func TestNobodyIsRefusedWhileAnotherProcessHoldsTheLock(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	foreign, err := sql.Open("sqlite", s.file(t))
	if err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	lock, err := foreign.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if _, err := lock.ExecContext(t.Context(), "BEGIN IMMEDIATE; UPDATE outbox_lease SET epoch = epoch"); err != nil {
		t.Fatal(err)
	}
	const producers, hold = 32, 600 * time.Millisecond
	began := time.Now()
	var wg sync.WaitGroup
	for i := range producers {
		wg.Go(func() {
			err := inTxOnce(t.Context(), s.db, func(tx *sql.Tx) error {
				var n int // reads first: the upgrade that a deferred transaction would not survive
				if err := tx.QueryRow("SELECT count(*) FROM outbox").Scan(&n); err != nil {
					return err
				}
				return s.Append(t.Context(), tx, &jetbox.Event{Subject: "s"})
			})
			if err != nil {
				t.Errorf("producer %d after %v: %v", i, time.Since(began), err)
			}
		})
	}
	wg.Go(func() {
		l, err := s.Acquire(t.Context(), jetbox.Candidate{Owner: "a", Length: time.Minute})
		if err == nil {
			_, err = s.Claim(t.Context(), l, jetbox.Ask{Limit: 10})
		}
		if err != nil {
			t.Errorf("relay after %v: %v", time.Since(began), err)
		}
	})
	time.Sleep(hold)
	if _, err := lock.ExecContext(t.Context(), "COMMIT"); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if n := count(t, s, "SELECT count(*) FROM outbox"); n != producers {
		t.Errorf("%d rows, want %d", n, producers)
	}
}

// inTxOnce is what an application does: no retry of ours around it.
func inTxOnce(ctx context.Context, db *sql.DB, f func(tx *sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// Catalog BR-22 and BR-23: what cannot be meant is refused by name.
func TestPathsThatCannotBeMeantAreRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, tt := range []struct{ path, want string }{
		{"", "no file"},
		{":memory:", "memory"},
		{"file::memory:", "memory"},
		{"file::memory:?cache=shared", "cache"},
		{"file:" + dir + "/x.db", "file:"},
		{dir + "/x.db?_pragma=busy_timout(5000)", "_pragma"},
		{dir + "/x.db?_txlok=immediate", "_txlok"},
		{dir + "/x.db?_journal_mode=DELETE", "_journal_mode"},
		{dir + "/x.db?mode=ro", "mode"},
		{dir + "/x.db?", "unknown key"},
		{dir + "/x\x00.db", "NUL"},
	} {
		_, openErr := OpenDB(t.Context(), tt.path)
		_, urlErr := ParseURL("sqlite:" + tt.path)
		for _, err := range []error{openErr, urlErr} {
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("path %q: %v, want an error that says %q", tt.path, err, tt.want)
			}
		}
	}
	for _, u := range []string{"", "x.db", "postgres://h/d", "SQLITE:x.db", "sqlite3:x.db"} {
		if p, err := ParseURL(u); err == nil {
			t.Errorf("ParseURL(%q) = %q, want an error", u, p)
		}
	}
	if _, err := OpenDB(t.Context(), filepath.Join(dir, "no", "folder.db")); err == nil {
		t.Error("OpenDB in a folder that is not there succeeded")
	}
	if _, err := OpenDB(t.Context(), dir); err == nil {
		t.Error("OpenDB of a folder succeeded")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("refusals left %v, %v", left, err)
	}
	for _, table := range []string{"1x", "a b", `a"b`, "sqlite_x", "a;b", "é", "a.b", strings.Repeat("t", 101)} {
		if _, err := Open(t.Context(), Config{Path: filepath.Join(dir, "t.db"), Table: table}); err == nil {
			t.Errorf("table %q was taken", table)
		}
		if err := (Writer{Table: table}).Append(t.Context(), nil); err == nil {
			t.Errorf("Writer for table %q was taken", table)
		}
	}
}

func TestPathsAreTakenAsTheyStand(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"a#b.db", "100%.db", "%41.db", "a b.db", "é.db", "a&b=c.db", "a;b.db", "a+b.db", "a:b.db", "a\\b.db", "'q\".db", " .db",
	} {
		dir := t.TempDir()
		path, err := ParseURL("sqlite:" + filepath.Join(dir, name))
		if err != nil {
			t.Errorf("%q: %v", name, err)
			continue
		}
		db, err := OpenDB(t.Context(), path)
		if err != nil {
			t.Errorf("OpenDB(%q): %v", name, err)
			continue
		}
		if _, err := db.ExecContext(t.Context(), "CREATE TABLE t (x)"); err != nil {
			t.Errorf("%q: %v", name, err)
		}
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Errorf("%q: %v", name, err)
		}
		db.Close()
	}
}

// One SQLITE_BUSY in 50 fresh files was seen without the retry.
func TestFreshFileIsOpenedByManyAtOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for i := range 10 {
		path := filepath.Join(dir, fmt.Sprint(i))
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				s, err := Open(t.Context(), Config{Path: path})
				if err == nil {
					err = s.Close()
				}
				if err != nil {
					t.Errorf("open fresh file: %v", err)
				}
			})
		}
		wg.Wait()
	}
}

// newStore opens a fresh outbox with its tables.
func newStore(t testing.TB) *Store {
	t.Helper()
	s, err := Open(t.Context(), Config{Path: filepath.Join(t.TempDir(), "outbox.db")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	if err := s.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

// file is where the store is.
func (s *Store) file(t testing.TB) string {
	t.Helper()
	var seq int
	var name, file string
	if err := s.db.QueryRowContext(t.Context(), "PRAGMA database_list").Scan(&seq, &name, &file); err != nil {
		t.Fatal(err)
	}
	return file
}

func count(t testing.TB, s *Store, query string, args ...any) int64 {
	t.Helper()
	var n int64
	if err := s.db.QueryRowContext(t.Context(), s.sql(query), args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

func exec(t testing.TB, s *Store, query string, args ...any) {
	t.Helper()
	if _, err := s.db.ExecContext(t.Context(), s.sql(query), args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}
