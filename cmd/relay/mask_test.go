package main

import (
	"bytes"
	"fmt"
	"net/url"
	"strings"
	"testing"
)

func TestMaskHidesPasswordsAndTokens(t *testing.T) {
	t.Parallel()
	tests := []struct{ name, text, want string }{
		{"password", "nats://user:hunter2@host:4222", "nats://user:*****@host:4222"},
		{"token", "nats://s3cr3t@host:4222", "nats://*****@host:4222"},
		{"list", "nats://a:b@h1,nats://c:d@h2:1", "nats://a:*****@h1,nats://c:*****@h2:1"},
		{"list without scheme", "nats://a:b@h1,c:d@h2", "nats://a:*****@h2"},
		{"at sign in it", "nats://user:p@ss@host", "nats://user:*****@host"},
		{"slash in it", `parse "nats://user:p/ss@host": invalid port`, `parse "nats://user:*****@host": invalid port`},
		{"in a sentence", "dial nats://u:p@h: refused, see https://example.com/x", "dial nats://u:*****@h: refused, see https://example.com/x"},
		{"path with at sign over-masked", "https://host/a@b", "https://*****@b"},
		{"postgres", "postgres://app:pw@db/app?sslmode=disable", "postgres://app:*****@db/app?sslmode=disable"},
		{"postgres parameter", "postgres://db/app?user=a&password=pw&x=1", "postgres://db/app?user=a&password=*****&x=1"},
		{"postgres role", "postgres://app@db/app and nats://token@h", "postgres://app@db/app and nats://*****@h"},
		{"connection string", "host=db password=pw user=a", "host=db password=***** user=a"},
		{"quoted", "host=db password='p w' user=a", "host=db password=***** user=a"},
		{"quote in it", `host=db password='p\' w' user=a`, "host=db password=***** user=a"},
		{"blanks around", "host=db password = pw user=a", "host=db password = ***** user=a"},
		{"nothing to hide", "sqlite:jetbox.db at http://127.0.0.1:8090/livez", "sqlite:jetbox.db at http://127.0.0.1:8090/livez"},
		{"empty password", "nats://user:@host", "nats://user:*****@host"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if got := mask(tt.text); got != tt.want {
				t.Errorf("mask(%q) = %q, want %q", tt.text, got, tt.want)
			}
		})
	}
}

func FuzzMaskHidesPassword(f *testing.F) {
	f.Add("user", "hunter22", "see ", " and more")
	f.Add("", "p@ss://word", "nats://a@b,", "")
	f.Fuzz(func(t *testing.T, user, password, before, after string) {
		if len(password) < 4 {
			t.Skip()
		}
		u := url.URL{Scheme: "nats", User: url.UserPassword(user, "Zq9"+password), Host: "host:1"}
		if strings.ContainsAny(u.String(), "'") {
			t.Skip() // a quote ends a URL in a text
		}
		secret, _, _ := strings.Cut(strings.SplitN(u.User.String(), ":", 2)[1], "@")
		if got := mask(before + " " + u.String() + " " + after); strings.Contains(got, secret) && !strings.Contains(before+after, secret) {
			t.Errorf("mask left %q in %q", secret, got)
		}
	})
}

// A password with a blank or a quote makes the URL none: the error that says so
// must not have it either.
func TestPasswordThatBreaksItsURLIsHidden(t *testing.T) {
	t.Parallel()
	for _, password := range []string{"hunter 22", `hun"ter22`, "hunter\t22", "hunter%zz22"} {
		for _, user := range []string{"", "app:"} {
			var stdout, stderr bytes.Buffer
			args := []string{"dlq", "list", "--nats", "nats://" + user + password + "@127.0.0.1:1"}
			if code := run(t.Context(), args, nil, strings.NewReader(""), &stdout, &stderr); code != exitFailed {
				t.Errorf("%q: exit status %d, want %d", args, code, exitFailed)
			}
			if text := stdout.String() + stderr.String(); strings.Contains(text, "22") || !strings.Contains(text, masked) {
				t.Errorf("%q: printed %s", args, text)
			}
		}
	}
}

func TestRedactorHidesSecretsEverywhere(t *testing.T) {
	t.Parallel()
	var r redactor
	r.add("s3cret", "s3cret-longer", "abc")
	var out bytes.Buffer
	n, err := fmt.Fprintf(r.writer(&out), "token s3cret-longer, s3cret and abc at nats://u:p@h\n")
	if err != nil || n != 52 {
		t.Errorf("Write = %d, %v", n, err)
	}
	if want := "token *****, ***** and abc at nats://u:*****@h\n"; out.String() != want {
		t.Errorf("wrote %q, want %q", out.String(), want)
	}
}

// Nothing that a relay says has what it was given to keep.
func TestSecretsStayOutOfOutput(t *testing.T) {
	t.Parallel()
	const password, token = "hunter22", "t0ken-of-this-relay"
	for _, args := range [][]string{
		{"run", "--nats", "nats://u:" + password + "@127.0.0.1:1", "--http-token", token, "--http", "nonsense", "--log-level", "debug"},
		{"run", "--nats", "nats://u:" + password + "@bad host", "--http", "off"},
		{"run", "--nats", "nats://u:" + password + "@h:port", "--http", "off"},
		{"status", "--db", "postgres://u:" + password + "@127.0.0.1:1/db"},
		{"status", "--db", "postgres://127.0.0.1:1/db?user=u&password=" + password},
		{"status", "--db", "postgres://u:" + password + "@h:port/db"},
		{"status", "--db", "postgres://u:" + password + "/" + password + "@h/db"},
		{"status", "--db", "host=127.0.0.1 port=1 password = " + password},
		{"status", "--db", "host=127.0.0.1 port=1 password='it\\'s " + password + "'"},
		{"consume", "--durable", "d", "--exec", "true", "--ledger", "postgres://u:" + password + "@h/db"},
		{"run", "--db", "mysql://u:" + password + "@h/db"},
		{"migrate", "--db", "sqlite:x?password=" + password},
		{"status", "--nats", "nats://" + token + "@127.0.0.1:1"},
		{"consume", "--durable", "d", "--webhook", "ftp://u:" + password + "@h"},
		{"run", "--http-token", ""},
	} {
		p := start(t, t.TempDir(), args...)
		if code := p.wait(t); code == exitFine {
			t.Errorf("relay %q ended with %d", args, code)
		}
		for _, secret := range []string{password, token} {
			if text := p.stdout.String() + p.stderr.String(); strings.Contains(text, secret) {
				t.Errorf("relay %q shows %s:\n%s", args, secret, text)
			}
		}
	}
}
