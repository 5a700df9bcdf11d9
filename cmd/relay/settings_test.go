package main

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// The contract of section 4: every flag of it exists, with its default.
func TestFlagsOfTheContractExist(t *testing.T) {
	t.Parallel()
	want := map[string]map[string]string{
		"run": {
			"no-setup": "false", "replicas": "1", "batch": "500", "poll-interval": "500ms", "lease": "10s", "max-attempts": "10",
			"backoff": "1s", "max-backoff": "1m", "on-dead": "skip", "notify": "true", "sync": "1s", "retention": "24h",
			"http": "127.0.0.1:8090", "http-token": "", "drain-timeout": "10s", "data-dir": "jetbox-data", "listen": "127.0.0.1:4222",
			"db": "sqlite:jetbox.db", "nats": "", "nats-creds": "", "nats-context": "", "table": "outbox", "stream": "EVENTS",
			"subjects": "events.>", "source": "jetbox", "log-format": "text", "log-level": "info", "config": "",
		},
		"migrate": {"print": "false", "shards": ""},
		"emit": {
			"key": "", "type": "", "aggregate-type": "", "aggregate-id": "", "aggregate-seq": "", "header": "", "at": "",
			"count": "1", "lines": "false",
		},
		"consume": {
			"durable": "", "filter": "", "max-deliver": "5", "ack-wait": "30s", "workers": "1", "backoff": "1s", "max-backoff": "1m",
			"ledger": "", "ledger-retention": "168h", "timeout": "5m", "exec": "", "exec-lines": "", "webhook": "", "print": "false", "hmac-key-file": "",
			"metrics": "off",
		},
		"status":      {"json": "false", "check": "false"},
		"outbox list": {"status": "", "json": "false"},
		"dlq list":    {"consumer": "", "subject": "", "reason": "", "since": "", "id": "", "state": "", "limit": "", "json": "false", "summary": "false"},
		"dlq show":    {"payload": "auto", "json": "false"},
		"dlq replay":  {"dry-run": "false", "rate": "", "id": "", "consumer": "", "max-replays": "5"},
		"dlq prune":   {"older-than": "720h"},
		"dlq discard": {"id": ""},
	}
	for _, c := range commands() {
		fs := newFlagSet(c, &globals{})
		for name, def := range want[c.name] {
			switch f := fs.Lookup(name); {
			case f == nil:
				t.Errorf("relay %s has no --%s", c.name, name)
			case f.DefValue != def:
				t.Errorf("relay %s --%s has the default %q, want %q", c.name, name, f.DefValue, def)
			}
		}
		delete(want, c.name)
	}
	for name := range want {
		t.Errorf("there is no relay %s", name)
	}
}

func TestFlagsStandAnywhere(t *testing.T) {
	t.Parallel()
	for _, line := range []string{
		"emit --key k --count 2 events.a payload",
		"emit events.a --key k payload --count=2",
		"emit events.a payload -key k -count 2",
		"--key k emit events.a --count 2 payload",
		"emit --count 2 --key k -- events.a payload",
	} {
		cmd, rest, err := choose(commands(), strings.Fields(line))
		if err != nil || cmd.name != "emit" {
			t.Errorf("%q: command %v, %v", line, cmd, err)
			continue
		}
		fs := newFlagSet(cmd, &globals{})
		args, err := parseArgs(fs, rest)
		if err != nil || !slices.Equal(args, []string{"events.a", "payload"}) {
			t.Errorf("%q: arguments %q, %v", line, args, err)
		}
		set := map[string]bool{}
		fs.Visit(func(f *flag.Flag) { set[f.Name] = true })
		if len(set) != 2 || !set["key"] || !set["count"] {
			t.Errorf("%q: set %v, want key and count", line, set)
		}
	}
}

func TestFlagBeatsVariableBeatsFileBeatsDefault(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "relay.yaml")
	// With the mark that Windows' editor puts before UTF-8.
	err := os.WriteFile(file, []byte("\xef\xbb\xbf# settings\nlease: 3s\nbatch: 3\nlisten: off\nsubjects: [a.>, b.>]\nheader: [x=1, y=2]\n"), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	var f runFlags
	var g globals
	fs := newFlagSet(&command{name: "run", flags: f.define}, &g)
	if _, err := parseArgs(fs, []string{"--lease", "1s", "--config", file}); err != nil {
		t.Fatal(err)
	}
	environ := []string{"RELAY_LEASE=2s", "RELAY_BATCH=2", "RELAY_SYNC=", "PATH=/bin", "RELAYS=x"}
	if err := fillFlags(fs, environ, &g.config); err != nil {
		t.Fatal(err)
	}
	if f.lease != time.Second || f.batch != 2 || f.listen != "off" || f.sync.every != time.Second {
		t.Errorf("lease %v, batch %d, listen %s, sync %v; want 1s by flag, 2 by variable, off by file, 1s by default",
			f.lease, f.batch, f.listen, f.sync)
	}
	if !slices.Equal(g.subjects, []string{"a.>", "b.>"}) {
		t.Errorf("subjects %q, want those of the file only", g.subjects)
	}
}

// For --nats in all commands: flag, RELAY_NATS, file, NATS_URL, context, default.
func TestWhereTheBrokerIs(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name    string
		g       globals
		environ []string
		want    string
	}{
		{"flag", globals{nats: "nats://flag", natsContext: "ctx"}, []string{"NATS_URL=nats://env"}, "nats://flag"},
		{"NATS_URL", globals{natsContext: "ctx"}, []string{"NATS_URL=nats://env"}, "nats://env"},
		{"context", globals{natsContext: "ctx"}, nil, ""},
		{"default", globals{}, []string{"NATS_URL="}, "default"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if err := tt.g.finish(tt.environ); err != nil {
				t.Fatal(err)
			}
			if got := tt.g.natsURL("default"); got != tt.want {
				t.Errorf("natsURL = %q, want %q", got, tt.want)
			}
		})
	}
}

func TestConfigFileThatIsNoText(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"\xff\xfed\x00b\x00": "starts with a UTF-16 byte order mark",
		"\xfe\xff\x00d\x00b": "starts with a UTF-16 byte order mark",
		"db: x\x00":          "has a NUL byte at offset 5",
		"db: \xff":           "yaml",
	} {
		file := filepath.Join(t.TempDir(), "relay.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readConfig(file); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), file) {
			t.Errorf("%q: %v, want %q and the file's name", text, err, want)
		}
	}
}

func TestNearestFindsMisspellings(t *testing.T) {
	t.Parallel()
	names := flagNames()
	for word, want := range map[string]string{
		"leese": "lease", "lesae": "lease", "poll_interval": "poll-interval", "PollInterval": "poll-interval",
		"max-atempts": "max-attempts", "kee": "key", "frobnicate": "", "x": "",
	} {
		if got := nearest(word, names); got != want {
			t.Errorf("nearest(%q) = %q, want %q", word, got, want)
		}
	}
}

func TestOverlappingSubjects(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		a, b string
		want bool
	}{
		{">", "dlq.>", true},
		{"dlq.>", "dlq.>", true},
		{"*.x", "dlq.>", true},
		{"*", "dlq.>", false},
		{"dlq", "dlq.>", false},
		{"dlq.a.b", "dlq.>", true},
		{"events.>", "dlq.>", false},
		{"dlqs.>", "dlq.>", false},
		{"a.*.c", "a.b.*", true},
		{"a.*", "a.b.c", false},
	} {
		if got := overlap(tt.a, tt.b); got != tt.want {
			t.Errorf("overlap(%q, %q) = %v, want %v", tt.a, tt.b, got, tt.want)
		}
		if got := overlap(tt.b, tt.a); got != tt.want {
			t.Errorf("overlap(%q, %q) = %v, want %v", tt.b, tt.a, got, tt.want)
		}
	}
}

// Package relay and the program have one name; an error says it once.
func TestReportNamesTheProgramOnce(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	code := report(&b, usageError{errors.New("relay: Source has 300 bytes\nwant at most 256")})
	if want := "relay: Source has 300 bytes; want at most 256\n"; code != exitUsage || b.String() != want {
		t.Errorf("report wrote %q with status %d, want %q with %d", b.String(), code, want, exitUsage)
	}
}
