package main

import (
	"flag"
	"io"
	"log/slog"
	"net/url"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
)

const (
	embeddedNATS = "embedded"
	defaultNATS  = "nats://127.0.0.1:4222"
)

// globals are the flags every command has.
type globals struct {
	config      string
	db, table   string
	nats        string
	natsCreds   string
	natsContext string
	tlsCA       string
	tlsCert     string
	tlsKey      string
	stream      string
	subjects    []string
	source      string
	logFormat   string
	logLevel    slog.Level
}

func (g *globals) define(fs *flag.FlagSet) {
	define(fs, &g.config, "config", "", someText, "YAML `FILE` with flag names as keys")
	define(fs, &g.db, "db", "sqlite:jetbox.db", someText, "database `URL` of the outbox: sqlite:FILE or postgres://...")
	define(fs, &g.table, "table", sqlite.DefaultTable, someText, "`NAME` of the outbox table; on PostgreSQL also SCHEMA.TABLE")
	define(fs, &g.nats, "nats", "", someText, "NATS server `URL`s, separated by commas, or embedded (relay run only);\n"+
		"else NATS_URL, --nats-context, then embedded for relay run and\n"+defaultNATS+" for the others")
	define(fs, &g.natsCreds, "nats-creds", "", someText, "credentials `FILE` for NATS")
	define(fs, &g.natsContext, "nats-context", "", someText, "`NAME` of a context of the nats CLI, or the full path of its file")
	define(fs, &g.tlsCA, "tls-ca", "", someText, "`FILE` with the certificates that may sign the server's; implies TLS")
	define(fs, &g.tlsCert, "tls-cert", "", someText, "client certificate `FILE`, with --tls-key")
	define(fs, &g.tlsKey, "tls-key", "", someText, "`FILE` with the client certificate's key")
	define(fs, &g.stream, "stream", "EVENTS", streamName, "`NAME` of the event stream")
	defineList(fs, &g.subjects, "subjects", "events.>", streamSubject, "`SUBJECTS` of the event stream, separated by commas, when it is created")
	define(fs, &g.source, "source", "jetbox", someText, "`TEXT` for ce-source; differs per outbox when several publish to one stream")
	define(fs, &g.logFormat, "log-format", "text", oneOf("text", "json"), "`FORMAT` of the log on stderr: text or json")
	define(fs, &g.logLevel, "log-level", slog.LevelInfo, parseLevel, "least `LEVEL` logged: debug, info, warn or error")
}

// finish resolves what depends on more than one flag.
func (g *globals) finish(environ []string) error {
	if (g.tlsCert == "") != (g.tlsKey == "") {
		return usagef("--tls-cert and --tls-key are given together or not at all")
	}
	for _, s := range g.subjects {
		if overlap(s, dlqSubjects) {
			return withHint(usagef("--subjects %q overlaps %q, the dead letters: they would be relayed as events", s, dlqSubjects),
				"events belong under a prefix of their own, such as events.>")
		}
	}
	if g.nats == "" {
		g.nats = lookupEnv(environ, "NATS_URL")
	}
	return nil
}

// natsURL returns where the broker is: set explicitly, or otherwise. Empty
// means: as the context says.
func (g *globals) natsURL(otherwise string) string {
	switch {
	case g.nats != "":
		return g.nats
	case g.natsContext != "":
		return ""
	}
	return otherwise
}

// passwords returns the secrets among the values.
func (g *globals) passwords() []string {
	var out []string
	for _, text := range append(strings.Split(g.nats, ","), g.db) {
		u, err := url.Parse(strings.TrimSpace(text))
		switch {
		case err != nil:
			out = append(out, rawPassword(text)...)
		case u.User == nil:
		default:
			if p, ok := u.User.Password(); ok {
				out = append(out, p, url.QueryEscape(p), url.PathEscape(p))
			} else if text != g.db {
				out = append(out, u.User.Username()) // a token
			}
		}
	}
	out = append(out, namedSecrets(g.db)...)
	if isPostgres(g.db) {
		// Also those that pgx finds in the environment or in a file.
		if cfg, err := pgconn.ParseConfig(g.db); err == nil {
			out = append(out, cfg.Password)
		}
	}
	return out
}

// rawPassword returns the secret of what is no URL because of it, a password
// with a blank say: as it stands there, and as an error would quote it.
func rawPassword(text string) []string {
	_, rest, _ := strings.Cut(text, "://")
	at := strings.LastIndexByte(rest, '@')
	if at < 0 {
		return nil
	}
	secret := rest[:at]
	if _, password, ok := strings.Cut(secret, ":"); ok {
		secret = password
	}
	quoted := strconv.Quote(secret)
	return []string{secret, quoted[1 : len(quoted)-1]}
}

func (g *globals) logger(w io.Writer) *slog.Logger {
	opts := &slog.HandlerOptions{Level: g.logLevel}
	if g.logFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

func lookupEnv(environ []string, key string) string {
	for _, entry := range environ {
		if k, v, _ := strings.Cut(entry, "="); k == key {
			return v
		}
	}
	return ""
}
