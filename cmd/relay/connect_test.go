package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// startServer starts a JetStream server that is not the embedded one: with
// logins, or TLS.
func startServer(t *testing.T, adjust func(*server.Options)) *server.Server {
	t.Helper()
	o := &server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(),
		NoSigs: true, NoLog: true, DisableJetStreamBanner: true,
	}
	adjust(o)
	s, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	if !s.ReadyForConnections(patience) {
		t.Fatal("the server is not ready")
	}
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	return s
}

// certificate makes a certificate for 127.0.0.1, signed by itself, and writes it
// with its key into dir.
func certificate(t *testing.T, until time.Time) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "jetbox test"},
		NotBefore:             until.Add(-48 * time.Hour),
		NotAfter:              until,
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{
		certFile: {Type: "CERTIFICATE", Bytes: der},
		keyFile:  {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile
}

func tlsServer(t *testing.T, certFile, keyFile string, verifyClients bool) *server.Server {
	t.Helper()
	cert, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	cfg := &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
	if verifyClients {
		pool := x509.NewCertPool()
		text, err := os.ReadFile(certFile)
		if err != nil || !pool.AppendCertsFromPEM(text) {
			t.Fatalf("read %s: %v", certFile, err)
		}
		cfg.ClientAuth, cfg.ClientCAs = tls.RequireAndVerifyClientCert, pool
	}
	return startServer(t, func(o *server.Options) { o.TLSConfig, o.TLSTimeout = cfg, 2 })
}

// BR-39: a mistake with TLS fails at once and clearly, also for relay run, which
// waits for everything else; and nothing is ever sent in clear text.
func TestTLSMistakesFailFast(t *testing.T) {
	t.Parallel()
	plain := embedded.RunTest(t, func(c *embedded.Config) { c.Listen = "127.0.0.1:0" })
	certFile, keyFile := certificate(t, time.Now().Add(time.Hour))
	otherCert, _ := certificate(t, time.Now().Add(time.Hour))
	oldCert, oldKey := certificate(t, time.Now().Add(-time.Hour))
	secure := tlsServer(t, certFile, keyFile, false)
	expired := tlsServer(t, oldCert, oldKey, false)
	strict := tlsServer(t, certFile, keyFile, true)

	tests := []struct {
		name string
		args []string
		want string
		hint string
	}{
		{"tls to a plain server", []string{"--nats", "tls" + strings.TrimPrefix(plain.ClientURL(), "nats")}, "secure connection not available", "the server has no TLS"},
		{"CA for a plain server", []string{"--nats", plain.ClientURL(), "--tls-ca", certFile}, "secure connection not available", "the server has no TLS"},
		{"unknown CA", []string{"--nats", secure.ClientURL()}, "certificate", "--tls-ca"},
		{"wrong CA", []string{"--nats", secure.ClientURL(), "--tls-ca", otherCert}, "certificate", "--tls-ca"},
		{"expired", []string{"--nats", expired.ClientURL(), "--tls-ca", oldCert}, "expired", "--tls-ca"},
		{"no client certificate", []string{"--nats", strict.ClientURL(), "--tls-ca", certFile}, "tls", "--tls-cert"},
		{"missing CA file", []string{"--nats", secure.ClientURL(), "--tls-ca", "no.pem"}, "no.pem", ""},
		{"missing credentials", []string{"--nats", plain.ClientURL(), "--nats-creds", "no.creds"}, "no.creds", ""},
		{"unknown context", []string{"--nats-context", "no-such-context"}, `unknown context "no-such-context"`, ""},
		{"bad URL", []string{"--nats", "nats://host:port"}, "invalid port", ""},
	}
	for _, tt := range tests {
		for _, cmd := range [][]string{{"run", "--http", "off"}, {"dlq", "list"}} {
			t.Run(tt.name+"/"+cmd[0], func(t *testing.T) {
				t.Parallel()
				p := start(t, t.TempDir(), append(cmd, tt.args...)...)
				if code := p.wait(t); code != exitFailed {
					t.Errorf("ended with %d, want %d", code, exitFailed)
				}
				p.stderr.line(t, "relay: connect to NATS", tt.want)
				if tt.hint != "" {
					p.stderr.line(t, "relay: hint: ", tt.hint)
				}
			})
		}
	}
	ok := start(t, t.TempDir(), "run", "--http", "off", "--nats", strict.ClientURL(), "--log-format", "json",
		"--tls-ca", certFile, "--tls-cert", certFile, "--tls-key", keyFile)
	ok.stderr.line(t, "lease acquired")
}

// switchboard is an address that stays the same while the servers behind it
// come and go.
type switchboard struct {
	net.Listener
	target atomic.Pointer[server.Server] // nil: nobody answers
	calls  atomic.Int64
}

func newSwitchboard(t *testing.T) *switchboard {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &switchboard{Listener: l}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b.calls.Add(1)
			go b.connect(c)
		}
	}()
	return b
}

func (b *switchboard) connect(c net.Conn) {
	defer c.Close()
	s := b.target.Load()
	if s == nil {
		return
	}
	out, err := net.Dial("tcp", s.Addr().String()) //nolint:noctx // ends with the server
	if err != nil {
		return
	}
	defer out.Close()
	go func() {
		_, _ = io.Copy(out, c)
		_ = out.Close()
	}()
	_, _ = io.Copy(c, out)
}

// BR-38: refused logins do not close the connection for ever. relay run says why
// it waits and recovers when it is let in.
func TestRefusedLoginsAreWaitedOut(t *testing.T) {
	t.Parallel()
	strict := startServer(t, func(o *server.Options) { o.Username, o.Password = "relay", "right-password" })
	open := startServer(t, func(*server.Options) {})
	board := newSwitchboard(t)
	board.target.Store(strict)
	p := start(t, t.TempDir(), "run", "--nats", fmt.Sprintf("nats://relay:wrong-password@%s", board.Addr()),
		"--http", "127.0.0.1:0", "--log-format", "json")
	r := &relayRun{proc: p, http: "http://" + p.field(t, "serving HTTP", "address")}
	attempts := func(n int64) {
		t.Helper()
		before := board.calls.Load()
		eventually(t, fmt.Sprintf("%d more attempts", n), func() (bool, string) {
			return board.calls.Load() >= before+n, fmt.Sprint(board.calls.Load() - before)
		})
	}
	attempts(3)
	if status, body := get(t, r.http+"/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(strings.ToLower(body), "authorization violation") {
		t.Errorf("/readyz: %d %s, want the reason", status, body)
	}
	board.target.Store(open)
	r.ready(t)

	// Once more on a connection that was up.
	board.target.Store(strict)
	for id := range uint64(100) {
		_ = open.DisconnectClientByID(id) // whichever it has
	}
	attempts(4)
	board.target.Store(open)
	r.ready(t)
	if text := p.stderr.String(); strings.Contains(text, "wrong-password") {
		t.Errorf("the password is in the log:\n%s", text)
	}
}

// A context of the nats CLI is used when it is named, and only then.
func TestContextOfNatsCLI(t *testing.T) {
	t.Parallel()
	srv := startServer(t, func(o *server.Options) { o.Username, o.Password = "ctx", "pw-of-context" })
	home := t.TempDir()
	dir := filepath.Join(home, "nats", "context")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf(`{"description":"test","url":%q,"user":"ctx","password":"pw-of-context"}`, srv.ClientURL())
	if err := os.WriteFile(filepath.Join(dir, "prod.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(home, "nats", "context.txt"), []byte("prod"), 0o600); err != nil {
		t.Fatal(err)
	}
	status := func(args ...string) string {
		cmd := relayCmd(t.Context(), home, append([]string{"status", "--json"}, args...)...)
		cmd.Env = append(cmd.Env, "XDG_CONFIG_HOME="+home)
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("relay status %q: %v", args, err)
		}
		return string(out)
	}
	once(t, home, "migrate")
	if out := status("--nats-context", "prod"); !strings.Contains(out, `"dlq_letters":0`) {
		t.Errorf("with the context: %s", out)
	}
	if out := status("--nats-context", filepath.Join(dir, "prod.json")); !strings.Contains(out, `"dlq_letters":0`) {
		t.Errorf("with the context's file: %s", out)
	}
	if out := status("--nats-context", "prod", "--nats", "nats://127.0.0.1:1"); !strings.Contains(out, `"dlq_letters":null`) {
		t.Errorf("a flag does not beat the context: %s", out)
	}
}
