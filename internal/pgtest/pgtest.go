// Package pgtest gives tests a real PostgreSQL server and a real PgBouncer.
//
// [URL] is what most tests need: a fresh, empty database. It is on the server
// that JETBOX_TEST_POSTGRES names, the URL of a role that may create databases,
// or else on a cluster of this process's own, made from the locally installed
// binaries when the first test asks for it. [Start] makes a cluster for one
// test, which may break it, and [Bouncer] puts PgBouncer in front of a server.
//
// Nothing is left behind. The servers and their folders go with the test or
// with [Main], and at the latest with this process, however it ends: a guard
// outside it stops them even after a SIGKILL.
//
// A test that finds no server is skipped, and fails where CI=true. Started by
// root, the servers run as the user postgres, as they refuse to run as root.
//
// A cluster of ours forgives the death of a process, not that of the machine:
// fsync is off, and the data is in memory where /dev/shm has room, unless TMPDIR
// names another place. Nothing here works in a synctest bubble, where waiting for a
// socket stops the clock. Between the calls no goroutine is left running.
package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"net/url"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// serverVariable names the variable with the URL of a server to use instead of
// a cluster of our own.
const serverVariable = "JETBOX_TEST_POSTGRES"

// patience bounds every wait for a server. It is long because test machines
// are busy, and nobody waits for it but tests that fail.
const patience = 60 * time.Second

// errMissing is returned when a program or a user of this machine is missing,
// which a test may be skipped for.
var errMissing = errors.New("missing on this machine")

// shared is the cluster of this process, for all tests that do not need one of
// their own.
var shared struct {
	mu      sync.Mutex
	cluster *Cluster
	err     error // why there is none, for all tests after the first
}

// Main runs the tests and then stops this process's cluster, for TestMain:
//
//	func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }
//
// Without it the cluster stops a moment after the process.
//
// Tests beside a server wait more than they compute: unless -parallel says otherwise,
// twice as many go on at once as there are processors.
func Main(m interface{ Run() int }) (code int) {
	defer stopShared()
	flag.Parse()
	chosen := false
	flag.Visit(func(f *flag.Flag) { chosen = chosen || f.Name == "test.parallel" })
	if !chosen {
		_ = flag.Set("test.parallel", strconv.Itoa(2*runtime.GOMAXPROCS(0))) // no test binary is without it
	}
	return m.Run()
}

// URL returns the URL of a fresh, empty database, which is dropped when the test
// ends, along with the connections to it. It is safe for parallel tests.
func URL(t testing.TB) string {
	t.Helper()
	if server := os.Getenv(serverVariable); server != "" {
		return createDatabase(t, server, "")
	}
	c, err := sharedCluster()
	if err != nil {
		giveUp(t, err)
	}
	return createDatabase(t, c.url("postgres"), c.home.log())
}

func sharedCluster() (*Cluster, error) {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.cluster == nil && shared.err == nil {
		shared.cluster, shared.err = newCluster(nil)
	}
	return shared.cluster, shared.err
}

func stopShared() {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.cluster != nil {
		shared.cluster.home.remove()
	}
	shared.cluster, shared.err = nil, errors.New("pgtest: Main has stopped the cluster")
}

// createDatabase creates a database on the server and drops it when the test
// ends. If that failed, it shows what log says about the database.
func createDatabase(t testing.TB, server, log string) string {
	t.Helper()
	name := newName()
	u, err := withDatabase(server, name)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	if err := execute(server, "CREATE DATABASE "+name); err != nil {
		t.Fatalf("pgtest: create a database: %v", err)
	}
	t.Cleanup(func() {
		if t.Failed() && log != "" {
			t.Logf("what the server logged about %s:\n%s", name, tail(log, name))
		}
		if err := dropDatabase(server, name); err != nil {
			t.Errorf("pgtest: drop database %s: %v", name, err)
		}
	})
	return u
}

func dropDatabase(server, name string) error {
	drop := "DROP DATABASE IF EXISTS " + name + " WITH (FORCE)"
	if execute(server, drop) == nil {
		return nil
	}
	// FORCE does not end who reads a logical replication slot. Once that is
	// gone, the slot goes with the database.
	return execute(server, "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = '"+name+"'", drop)
}

// newName returns a name nobody uses, one that needs no quotes in SQL.
func newName() string {
	return "jetbox_" + strings.ToLower(rand.Text())
}

// withDatabase returns the URL of another database on the same server.
func withDatabase(server, name string) (string, error) {
	u, err := url.Parse(server)
	if err != nil || (u.Scheme != "postgres" && u.Scheme != "postgresql") {
		// The value is not repeated: it may hold a password.
		return "", fmt.Errorf("%s is not a URL like postgres://user@host:5432/database", serverVariable)
	}
	u.Path = "/" + name
	return u.String(), nil
}

// execute runs statements one by one on a connection of their own.
func execute(server string, statements ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := pgconn.Connect(ctx, server)
	if err != nil {
		return err
	}
	for _, sql := range statements {
		if _, err = conn.Exec(ctx, sql).ReadAll(); err != nil {
			break
		}
	}
	return errors.Join(err, conn.Close(ctx))
}

// giveUp ends a test that gets no server.
func giveUp(t testing.TB, err error) {
	t.Helper()
	if skippable(err, os.Getenv("CI")) {
		t.Skipf("pgtest: %v", err)
	}
	t.Fatalf("pgtest: %v", err)
}

// skippable says whether a test may be skipped for err: only where something is
// not installed, and never in CI, where nobody reads that a check did not run.
func skippable(err error, ci string) (skip bool) {
	return errors.Is(err, errMissing) && ci != "true"
}

// tail returns the last lines of a log. With a word, only the entries with that
// word; an entry goes on in the lines that begin with a tab.
func tail(path, word string) string {
	const most = 40
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	var lines []string
	with := false
	for line := range strings.Lines(string(text)) {
		with = strings.Contains(line, word) || (with && line[0] == '\t')
		if with {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-most):], "")
}
