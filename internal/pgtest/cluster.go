package pgtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// defaults are the settings of every cluster. The log has the database in each
// line, so that a test can be shown its own.
var defaults = []string{
	"listen_addresses=127.0.0.1",
	"max_connections=200",
	"shared_buffers=128MB",
	"wal_level=logical",
	"max_wal_senders=50",
	"max_replication_slots=50",
	"min_wal_size=32MB", // the folder may be in memory
	"max_wal_size=256MB",
	"fsync=off",
	"synchronous_commit=on",
	"full_page_writes=off",
	"logging_collector=off",
	"log_checkpoints=off",
	"log_line_prefix=%m [%p] %q%d ",
}

// Cluster is a PostgreSQL server of one test, with the superuser postgres and
// no passwords. Only URL is safe for concurrent use.
type Cluster struct {
	home *home
	bin  string // folder of the binaries
	port int
}

// Start starts a cluster for this test alone, with settings like
// "max_prepared_transactions=10", and removes it when the test ends. It does so
// too when JETBOX_TEST_POSTGRES is set, as nobody may break that server. It
// takes about a second; prefer [URL] to it.
func Start(t testing.TB, settings ...string) *Cluster {
	t.Helper()
	c, err := newCluster(settings)
	if err != nil {
		giveUp(t, err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("what the server on port %d logged:\n%s", c.port, tail(c.home.log(), ""))
		}
		c.home.remove()
	})
	return c
}

func newCluster(settings []string) (*Cluster, error) {
	bin, err := findServer()
	if err != nil {
		return nil, err
	}
	h, err := newHome()
	if err != nil {
		return nil, err
	}
	c := &Cluster{home: h, bin: bin}
	if err := c.create(settings); err != nil {
		err = fmt.Errorf("start a cluster: %w\n%s", err, tail(h.log(), ""))
		h.remove()
		return nil, err
	}
	return c, nil
}

// create makes the data folder and starts the server for the first time.
func (c *Cluster) create(settings []string) error {
	if err := c.home.run(filepath.Join(c.bin, "initdb"), "-D", c.data(), "-U", "postgres",
		"--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"); err != nil {
		return err
	}
	// In the file, not on the command line: there they would outdo ALTER SYSTEM.
	var conf strings.Builder
	for _, s := range slices.Concat([]string{"unix_socket_directories=" + c.home.path}, defaults, settings) {
		name, value, ok := strings.Cut(s, "=")
		if !ok {
			return fmt.Errorf("setting is %q, want name=value", s)
		}
		fmt.Fprintf(&conf, "%s = '%s'\n", name, strings.ReplaceAll(value, "'", "''"))
	}
	if err := appendTo(filepath.Join(c.data(), "postgresql.conf"), conf.String()); err != nil {
		return err
	}
	return onFreePort(c.home, func(port int) error {
		c.port = port
		return c.run()
	})
}

func (c *Cluster) data() string { return filepath.Join(c.home.path, "data") }

// run starts the server and returns once it answers.
func (c *Cluster) run() error {
	if err := c.home.start(filepath.Join(c.bin, "postgres"), "-D", c.data(), "-p", strconv.Itoa(c.port)); err != nil {
		return err
	}
	// Through the socket in our own folder: whoever answers there is this
	// server, which by then listens on its port too.
	q := url.Values{"host": {c.home.path}, "port": {strconv.Itoa(c.port)}, "user": {"postgres"}}
	return c.home.await("postgres:///postgres?" + q.Encode())
}

func (c *Cluster) url(database string) string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/%s?sslmode=disable", c.port, database)
}

// URL returns the URL of a fresh, empty database, which lives as long as the
// cluster.
func (c *Cluster) URL(t testing.TB) string {
	t.Helper()
	name := newName()
	if err := execute(c.url("postgres"), "CREATE DATABASE "+name); err != nil {
		t.Fatalf("pgtest: create a database: %v", err)
	}
	return c.url(name)
}

// Stop shuts the server down in order (fast): transactions are rolled back,
// clients are told.
func (c *Cluster) Stop(t testing.TB) {
	t.Helper()
	if err := c.home.stop(syscall.SIGINT); err != nil {
		t.Fatalf("pgtest: stop the server: %v", err)
	}
}

// Crash stops the server at once (immediate): the next Run recovers from the
// log. What was committed with synchronous_commit=off may be lost.
func (c *Cluster) Crash(t testing.TB) {
	t.Helper()
	if err := c.home.stop(syscall.SIGQUIT); err != nil {
		t.Fatalf("pgtest: crash the server: %v", err)
	}
}

// Run starts a stopped server again, with the same port and data.
func (c *Cluster) Run(t testing.TB) {
	t.Helper()
	if err := c.run(); err != nil {
		t.Fatalf("pgtest: run the server: %v", err)
	}
}

// Pause freezes every process of the server: connections stay open, new ones are
// accepted by the kernel, and nothing answers. It needs Linux.
func (c *Cluster) Pause(t testing.TB) {
	t.Helper()
	if err := c.home.pause(); err != nil {
		giveUp(t, fmt.Errorf("pause the server: %w", err))
	}
}

// Resume ends a pause.
func (c *Cluster) Resume(t testing.TB) {
	t.Helper()
	c.home.resume()
}

// findServer returns the folder of the server's binaries: one in the PATH, or the
// newest where Debian puts them, which is not in the PATH.
func findServer() (dir string, err error) {
	complete := func(dir string) bool {
		for _, name := range []string{"initdb", "postgres"} {
			if _, err := exec.LookPath(filepath.Join(dir, name)); err != nil {
				return false
			}
		}
		return true
	}
	for _, name := range []string{"initdb", "postgres"} {
		if path, err := exec.LookPath(name); err == nil {
			if path, err = filepath.EvalSymlinks(path); err == nil && complete(filepath.Dir(path)) {
				return filepath.Dir(path), nil
			}
		}
	}
	newest := -1
	dirs, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil {
		return "", err
	}
	for _, d := range dirs {
		version, err := strconv.Atoi(filepath.Base(filepath.Dir(d)))
		if err == nil && version > newest && complete(d) {
			dir, newest = d, version
		}
	}
	if dir == "" {
		return "", fmt.Errorf("initdb and postgres: %w: install PostgreSQL, or set %s to the URL of a server", errMissing, serverVariable)
	}
	return dir, nil
}

// errBusy is returned when a server ended because another has its port.
var errBusy = errors.New("port in use")

// onFreePort calls run with a port that is free, and again with another when
// somebody was faster.
func onFreePort(h *home, run func(port int) error) error {
	for range 100 {
		// Below the ports that Linux gives to outgoing connections: one of
		// those, even a client's try to reach the stopped server, could take
		// the port before a restart.
		port := 20000 + rand.IntN(12000)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		l.Close()
		if err := run(port); !errors.Is(err, errBusy) {
			return err
		}
	}
	return errors.New("find a free port: 100 tries failed")
}

// startingUp is the code of "the database system is starting up".
const startingUp = "57P03"

// await returns once the process in h answers at server.
func (h *home) await(server string) error {
	deadline := time.Now().Add(patience)
	for {
		ctx, cancel := context.WithDeadline(context.Background(), deadline)
		conn, err := pgconn.Connect(ctx, server)
		if err == nil {
			err = errors.Join(conn.Ping(ctx), conn.Close(ctx))
		}
		cancel()
		if err == nil {
			return nil
		}
		var answer *pgconn.PgError
		switch {
		case !h.running() && strings.Contains(tail(h.log(), ""), "Address already in use"):
			return errBusy
		case !h.running():
			return errors.New("it ended")
		case errors.As(err, &answer) && answer.Code != startingUp:
			return err
		case time.Now().After(deadline):
			return fmt.Errorf("it does not answer: %w", err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func appendTo(path, text string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}
