package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// killedVariable makes this test binary the process that is killed.
const killedVariable = "JETBOX_TEST_PGTEST_KILLED"

func TestMain(m *testing.M) {
	if os.Getenv(killedVariable) != "" {
		os.Exit(m.Run())
	}
	os.Exit(Main(m))
}

// connect returns a connection that ends with the test.
func connect(t *testing.T, server string) *pgconn.PgConn {
	t.Helper()
	conn, err := pgconn.Connect(t.Context(), server)
	if err != nil {
		t.Fatalf("connect: %v", err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// query runs SQL with the simple protocol and returns the first value, if any.
func query(t *testing.T, conn *pgconn.PgConn, sql string) string {
	t.Helper()
	value, err := tryQuery(t.Context(), conn, sql)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return value
}

func tryQuery(ctx context.Context, conn *pgconn.PgConn, sql string) (string, error) {
	results, err := conn.Exec(ctx, sql).ReadAll()
	if err != nil || len(results) == 0 || len(results[0].Rows) == 0 {
		return "", err
	}
	return string(results[0].Rows[0][0]), nil
}

// eventually polls until f returns "", which is what is wrong so far.
func eventually(t *testing.T, f func() string) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		wrong := f()
		if wrong == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after 20s: %s", wrong)
		}
	}
}

func TestDatabasesAreFreshAndSeparate(t *testing.T) {
	t.Parallel()
	a, b := connect(t, URL(t)), connect(t, URL(t))
	query(t, a, "CREATE TABLE events (id int)")
	query(t, b, "CREATE TABLE events (id int)")
	if level := query(t, a, "SHOW wal_level"); level != "logical" {
		t.Errorf("wal_level = %q, want logical", level)
	}
	if encoding := query(t, a, "SHOW server_encoding"); encoding != "UTF8" {
		t.Errorf("server_encoding = %q, want UTF8", encoding)
	}
}

func TestServerOfTheEnvironmentIsUsed(t *testing.T) {
	c, err := sharedCluster()
	if err != nil {
		giveUp(t, err)
	}
	t.Setenv(serverVariable, c.url("postgres")+"&application_name=named")
	if name := query(t, connect(t, URL(t)), "SHOW application_name"); name != "named" {
		t.Errorf("application_name = %q, want named, from the URL in %s", name, serverVariable)
	}
}

func TestParallelTestsGetDatabasesOfTheirOwn(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	seen := map[string]bool{}
	t.Run("all", func(t *testing.T) {
		for i := range 8 {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				u := URL(t)
				mu.Lock()
				defer mu.Unlock()
				if seen[u] {
					t.Errorf("%s was given out twice", u)
				}
				seen[u] = true
			})
		}
	})
	for u := range seen {
		if conn, err := pgconn.Connect(t.Context(), u); err == nil {
			t.Errorf("%s outlived its test", u)
			_ = conn.Close(t.Context())
		}
	}
}

// WITH (FORCE) alone refuses while a logical replication slot is read.
func TestDatabaseIsDroppedUnderItsUsers(t *testing.T) {
	t.Parallel()
	var name string
	t.Run("test that forgets its connections", func(t *testing.T) {
		u := URL(t)
		idle, err := pgconn.Connect(t.Context(), u)
		if err != nil {
			t.Fatal(err)
		}
		name = query(t, idle, "SELECT current_database()")
		query(t, idle, "CREATE PUBLICATION p")
		reader, err := pgconn.Connect(t.Context(), u+"&replication=database")
		if err != nil {
			t.Fatal(err)
		}
		query(t, reader, "CREATE_REPLICATION_SLOT "+name+" LOGICAL pgoutput")
		go func() { // ends with the connection
			_, _ = tryQuery(context.Background(), reader, "START_REPLICATION SLOT "+name+" LOGICAL 0/0 (proto_version '1', publication_names 'p')")
		}()
		eventually(t, func() string {
			if query(t, idle, "SELECT active FROM pg_replication_slots WHERE slot_name = '"+name+"'") != "t" {
				return "the slot is not active"
			}
			return ""
		})
	})
	conn := connect(t, URL(t))
	for _, sql := range []string{
		"SELECT 1 FROM pg_database WHERE datname = '" + name + "'",
		"SELECT 1 FROM pg_replication_slots WHERE slot_name = '" + name + "'",
	} {
		if query(t, conn, sql) != "" {
			t.Errorf("%s finds something, want nothing left", sql)
		}
	}
}

// A test that looks for leaked goroutines must not find any of ours.
func TestNoGoroutineRunsBetweenCalls(t *testing.T) {
	// Not parallel: it counts.
	before := runtime.NumGoroutine()
	Bouncer(t, URL(t), "transaction")
	eventually(t, func() string {
		if n := runtime.NumGoroutine(); n > before {
			stacks := make([]byte, 1<<20)
			return fmt.Sprintf("%d goroutines, %d before:\n%s", n, before, stacks[:runtime.Stack(stacks, true)])
		}
		return ""
	})
}

// Main ends the cluster and removes its folder, and no test after it starts
// another. It is tried on a cluster put in place of the shared one.
func TestMainLeavesNoServer(t *testing.T) {
	// Not parallel: it swaps the shared cluster.
	c := Start(t)
	shared.mu.Lock()
	saved, savedErr := shared.cluster, shared.err
	shared.cluster, shared.err = c, nil
	shared.mu.Unlock()
	defer func() {
		shared.mu.Lock()
		defer shared.mu.Unlock()
		shared.cluster, shared.err = saved, savedErr
	}()
	if code := Main(runFunc(func() int { return 7 })); code != 7 {
		t.Errorf("Main = %d, want 7, the code of the tests", code)
	}
	if err := execute(c.url("postgres"), "SELECT 1"); err == nil {
		t.Error("the server still answers after Main")
	}
	if _, err := os.Stat(c.home.path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is still there after Main: %v", err)
	}
	if _, err := sharedCluster(); err == nil {
		t.Error("there is a cluster after Main, want an error")
	}
}

type runFunc func() int

func (f runFunc) Run() int { return f() }

// beKilled is what the process does that TestKilledProcessLeavesNothing kills.
func beKilled(t *testing.T) {
	c := Start(t)
	Bouncer(t, c.URL(t), "transaction")
	c.Pause(t) // a server that cannot act by itself goes too
	fmt.Println("at", c.home.path)
	time.Sleep(time.Hour)
}

func TestKilledProcessLeavesNothing(t *testing.T) {
	if os.Getenv(killedVariable) != "" {
		beKilled(t)
	}
	t.Parallel()
	if _, err := findServer(); err != nil {
		giveUp(t, err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledProcessLeavesNothing$", "-test.v")
	cmd.Env = append(os.Environ(), killedVariable+"=1", "CI=true")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var path, said string
	buf := make([]byte, 4096)
	for path == "" {
		n, err := out.Read(buf)
		said += string(buf[:n])
		if _, rest, ok := strings.Cut(said, "at "); ok && strings.Contains(rest, "\n") {
			path, _, _ = strings.Cut(rest, "\n")
		}
		if err != nil {
			t.Fatalf("%v after %q", err, said)
		}
	}
	users := processesIn(path)
	if len(users) == 0 {
		t.Fatalf("nobody works in %s: there is nothing to prove", path)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	eventually(t, func() string {
		if users := processesIn(path); len(users) > 0 {
			return fmt.Sprintf("processes %v still work in %s", users, path)
		}
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			return fmt.Sprintf("%s is still there: %v", path, err)
		}
		return ""
	})
}

// processesIn lists who has its working directory below a path.
func processesIn(path string) (pids []string) {
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, link := range links {
		// What is gone, or a zombie, has none.
		if cwd, err := os.Readlink(link); err == nil && strings.HasPrefix(cwd, path) {
			pids = append(pids, filepath.Base(filepath.Dir(link)))
		}
	}
	return pids
}

// One cluster for both, as each takes a while to create.
func TestClusterCanBeStoppedAndPaused(t *testing.T) {
	t.Parallel()
	c := Start(t, "max_prepared_transactions=10", "application_name=it's")
	u := c.URL(t)
	conn := connect(t, u)
	if got := query(t, conn, "SELECT concat_ws(' ', current_setting('max_prepared_transactions'), reset_val) FROM pg_settings WHERE name = 'application_name'"); got != "10 it's" {
		t.Errorf("settings = %q, want those of Start", got)
	}
	query(t, conn, "CREATE TABLE events AS SELECT 1 AS n")
	for name, stop := range map[string]func(testing.TB){"stop": c.Stop, "crash": c.Crash} {
		t.Run("restarts on its port and data after "+name, func(t *testing.T) {
			stop(t)
			if _, err := pgconn.Connect(t.Context(), u); err == nil {
				t.Fatal("the server still answers")
			}
			c.Run(t)
			if n := query(t, connect(t, u), "SELECT n FROM events"); n != "1" {
				t.Errorf("n = %q, want 1", n)
			}
		})
	}
	t.Run("accepts and stays silent in a pause", func(t *testing.T) {
		conn := connect(t, u)
		c.Pause(t)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if _, err := tryQuery(ctx, conn, "SELECT 1"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("query = %v, want no answer", err)
		}
		ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if _, err := pgconn.Connect(ctx, u); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("connect = %v, want no answer", err)
		}
		c.Resume(t)
		if n := query(t, connect(t, u), "SELECT n FROM events"); n != "1" {
			t.Errorf("after the pause n = %q, want 1", n)
		}
		c.Pause(t)
		c.Stop(t) // a pause does not keep it
	})
}

func TestBouncerPoolsByItsMode(t *testing.T) {
	t.Parallel()
	u := strings.Replace(URL(t), "postgres@", "postgres:it%27s@", 1) // the server asks for none
	for mode, want := range map[string]string{"transaction": "shared", "session": "mine"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			through := Bouncer(t, u, mode)
			console, err := withDatabase(through, "pgbouncer")
			if err != nil {
				t.Fatal(err)
			}
			if got := query(t, connect(t, console), "SHOW VERSION"); !strings.HasPrefix(got, "PgBouncer") {
				t.Errorf("version of the console = %q, want PgBouncer", got)
			}
			// Two clients take turns: in transaction mode on one connection
			// of the server, so what one sets the other sees.
			a, b := connect(t, through), connect(t, through)
			query(t, a, "SET jetbox.client = 'mine'")
			query(t, b, "SET jetbox.client = 'shared'")
			if got := query(t, a, "SHOW jetbox.client"); got != want {
				t.Errorf("jetbox.client = %q, want %q", got, want)
			}
		})
	}
}

func TestSkipRule(t *testing.T) {
	t.Parallel()
	missing := fmt.Errorf("initdb: %w", errMissing)
	broken := errors.New("initdb: exit status 1")
	tests := []struct {
		name     string
		err      error
		ci       string
		wantSkip bool
	}{
		{"missing here", missing, "", true},
		{"missing where CI is off", missing, "false", true},
		{"missing in CI", missing, "true", false},
		{"broken here", broken, "", false},
		{"broken in CI", broken, "true", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if skip := skippable(tt.err, tt.ci); skip != tt.wantSkip {
				t.Errorf("skippable(%v, %q) = %v, want %v", tt.err, tt.ci, skip, tt.wantSkip)
			}
		})
	}
}

func TestURLOfAnotherDatabase(t *testing.T) {
	t.Parallel()
	tests := []struct{ server, want string }{
		{"postgres://u:p@h:5433/a?sslmode=require", "postgres://u:p@h:5433/db?sslmode=require"},
		{"postgresql://h", "postgresql://h/db"},
		{"host=h dbname=a password=secret", ""},
		{"mysql://h/a", ""},
	}
	for _, tt := range tests {
		got, err := withDatabase(tt.server, "db")
		if got != tt.want || (err != nil) != (tt.want == "") {
			t.Errorf("withDatabase(%q) = %q, %v, want %q", tt.server, got, err, tt.want)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("withDatabase(%q) gives the password away: %v", tt.server, err)
		}
	}
}

func TestTailShowsTheEntriesOfOneDatabase(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "log")
	log := "1 db_a ERROR: a\n\tof a\n2 db_b ERROR: b\n\tof b\n3 db_a LOG: a\n"
	if err := os.WriteFile(path, []byte(log), 0o600); err != nil {
		t.Fatal(err)
	}
	want := []string{"1 db_a ERROR: a", "\tof a", "3 db_a LOG: a"}
	if got := strings.Split(strings.TrimSpace(tail(path, "db_a")), "\n"); !slices.Equal(got, want) {
		t.Errorf("tail = %q, want %q", got, want)
	}
	if got := tail(path, ""); got != log {
		t.Errorf("tail without a word = %q, want all of it", got)
	}
}
