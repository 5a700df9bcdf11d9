package pgtest

import (
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// Bouncer starts PgBouncer in front of the server of a URL, with pool_mode set
// to mode ("session", "transaction" or "statement"), and returns the URL of the
// same database through it. The user and password of the URL reach the server,
// its other parameters do not. The database "pgbouncer" is the console. It ends
// with the test.
func Bouncer(t testing.TB, server, mode string) string {
	t.Helper()
	config, err := pgconn.ParseConfig(server)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	exe, err := findBouncer()
	if err != nil {
		giveUp(t, err)
	}
	h, err := newHome()
	if err != nil {
		giveUp(t, err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("what PgBouncer logged:\n%s", tail(h.log(), ""))
		}
		h.remove()
	})
	var through string
	err = onFreePort(h, func(port int) error {
		ini := filepath.Join(h.path, "pgbouncer.ini")
		if err := os.WriteFile(ini, []byte(bouncerConfig(config, mode, port)), 0o600); err != nil {
			return err
		}
		if err := h.own(ini); err != nil {
			return err
		}
		if err := h.start(exe, ini); err != nil {
			return err
		}
		u := url.URL{
			Scheme: "postgres", User: url.User(config.User), Host: fmt.Sprintf("127.0.0.1:%d", port),
			Path: "/" + config.Database, RawQuery: "sslmode=disable",
		}
		through = u.String()
		return h.await(through)
	})
	if err != nil {
		t.Fatalf("pgtest: start PgBouncer: %v", err)
	}
	return through
}

// bouncerConfig lets everybody in and goes on to the server as the user of
// config. Each database has its own pool.
func bouncerConfig(config *pgconn.Config, mode string, port int) string {
	quote := func(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
	server := fmt.Sprintf("host=%s port=%d user=%s", quote(config.Host), config.Port, quote(config.User))
	if config.Password != "" { // empty is a syntax error
		server += " password=" + quote(config.Password)
	}
	return fmt.Sprintf(`[databases]
* = %s

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = %s
default_pool_size = 20
max_client_conn = 500
server_tls_sslmode = prefer
ignore_startup_parameters = extra_float_digits
`, server, port, mode)
}

// findBouncer looks where Debian puts it, too: not every user has that in the
// PATH.
func findBouncer() (exe string, err error) {
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer"} {
		if exe, err = exec.LookPath(name); err == nil {
			return exe, nil
		}
	}
	return "", fmt.Errorf("pgbouncer: %w: install PgBouncer", errMissing)
}
