package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"time"

	"github.com/seed-5e04d8fb/jetbox/relay"
)

// foreignSync is how long another broker may take to sync what it acknowledged:
// the server's own default (nats-server 2.15).
const foreignSync = 2 * time.Minute

// listenOff, as --listen or --http, opens no port.
const listenOff = "off"

// runFlags are the flags of relay run.
type runFlags struct {
	noSetup      bool
	replicas     int
	dataDir      string
	listen       string
	sync         syncPolicy
	batch        int
	pollInterval time.Duration
	lease        time.Duration
	maxAttempts  int
	backoff      time.Duration
	maxBackoff   time.Duration
	onDead       string
	onRecreated  string
	notify       bool
	retention    retention
	http         string
	httpToken    string
	drainTimeout time.Duration
}

// defaultBatch is what help says of --batch.
const defaultBatch = 500

func (f *runFlags) define(fs *flag.FlagSet) {
	fs.BoolVar(&f.noSetup, "no-setup", false, "do not create missing tables and streams")
	define(fs, &f.replicas, "replicas", 1, positiveInt, "`NUMBER` of servers that keep a stream created here")
	define(fs, &f.dataDir, "data-dir", "jetbox-data", someText, "`DIR` of the embedded broker's streams")
	define(fs, &f.listen, "listen", "127.0.0.1:4222", hostPort, "`HOST:PORT` the embedded broker listens on; port 0 takes a free one, off none")
	define(fs, &f.sync, "sync", syncPolicy{every: time.Second}, parseSync, "`TIME` after which the embedded broker has synced a message, or always")
	define(fs, &f.batch, "batch", defaultBatch, positiveInt, "most `ROWS` claimed at once; by default more while there is a backlog")
	define(fs, &f.pollInterval, "poll-interval", 500*time.Millisecond, atLeast(time.Millisecond), "longest `TIME` an idle relay takes to find a row")
	define(fs, &f.lease, "lease", 10*time.Second, atLeast(100*time.Millisecond), "`TIME` a silent relay keeps its rows")
	define(fs, &f.maxAttempts, "max-attempts", 10, positiveInt, "`NUMBER` of refusals after which a row is DEAD_LETTER; outages do not count")
	define(fs, &f.backoff, "backoff", time.Second, atLeast(time.Millisecond), "`TIME` to wait after the first failure; doubles up to --max-backoff")
	define(fs, &f.maxBackoff, "max-backoff", time.Minute, positiveDuration, "longest `TIME` to wait after a failure")
	define(fs, &f.onDead, "on-dead", string(relay.Skip), oneOf(string(relay.Skip), string(relay.Freeze)),
		"`ACTION` for the ordering key of a row that is DEAD_LETTER:\nskip goes on without the row, freeze waits for a person")
	define(fs, &f.onRecreated, "on-recreated", string(relay.Leave), oneOf(string(relay.Leave), string(relay.Republish)),
		"`ACTION` for published rows whose stream was deleted and created anew:\nleave says so and goes on, republish publishes the retained ones again")
	fs.BoolVar(&f.notify, "notify", true, "let the database wake the relay (PostgreSQL)")
	define(fs, &f.retention, "retention", retention{keep: 24 * time.Hour}, parseRetention,
		"`TIME` to keep published rows; 0 deletes them at once, archive moves them")
	define(fs, &f.http, "http", "127.0.0.1:8090", hostPort, "`HOST:PORT` of /livez, /readyz and /metrics, or off")
	define(fs, &f.httpToken, "http-token", "", someText, "`TOKEN` that requests which change something must bring")
	define(fs, &f.drainTimeout, "drain-timeout", 10*time.Second, atLeast(time.Millisecond), "longest `TIME` to wait for PubAcks when stopping")
}

// check refuses settings that cannot work together.
func (f *runFlags) check(embeddedBroker bool) error {
	switch {
	case f.maxBackoff < f.backoff:
		return usagef("--max-backoff %v is shorter than --backoff %v", shortDuration(f.maxBackoff), shortDuration(f.backoff))
	case f.replicas > 5:
		return usagef("--replicas %d: a stream has at most 5", f.replicas)
	case embeddedBroker && f.replicas > 1:
		return withHint(usagef("--replicas %d: the embedded broker is one server", f.replicas), "--nats URL connects to a cluster")
	}
	return checkRetention(f.retention, duplicateWindow, f.brokerSync(embeddedBroker))
}

func (f *runFlags) brokerSync(embeddedBroker bool) time.Duration {
	switch {
	case !embeddedBroker:
		return foreignSync
	case f.sync.always:
		return 0
	}
	return f.sync.every
}

func runCommand() *command {
	var f runFlags
	return &command{
		name:  "run",
		short: "relay until stopped; with an embedded broker unless --nats says otherwise",
		long: `
Creates missing tables and streams, runs a JetStream server inside the process
(its data in --data-dir, reachable at --listen), relays the outbox, routes dead
letters and serves HTTP. With --nats URL it uses that server instead, as several
relays of one PostgreSQL database have to: each would have a broker of its own.

What is away is waited for, not ready and with the reason: database and broker,
also at the start.

SIGINT or SIGTERM stops it: what was sent is waited for and recorded. A second
signal ends it at once, which loses nothing.`,
		flags: f.define,
		run: func(ctx context.Context, a *app, _ []string) error {
			a.secrets.add(f.httpToken)
			return serve(ctx, a, f)
		},
	}
}

// serve runs the parts until ctx is done, then stops them in the reverse order
// of what they need: the relay first, while it can still reach broker and
// database, the database last.
func serve(ctx context.Context, a *app, f runFlags) (err error) {
	url := a.global.natsURL(embeddedNATS)
	if err := f.check(url == embeddedNATS); err != nil {
		return err
	}
	db, err := a.global.database()
	if err != nil {
		return err
	}
	if f.retention == (retention{}) {
		a.log.LogAttrs(ctx, slog.LevelWarn, "--retention 0 deletes published rows at once: what the broker loses cannot be published again")
	}
	p := &parts{app: a, flags: f, url: url, db: db, health: &health{reason: "opening the database"}}
	stopHealth := context.AfterFunc(ctx, func() {
		p.health.stop()
		a.log.LogAttrs(context.WithoutCancel(ctx), slog.LevelInfo, "stopping; once more ends it at once",
			slog.String("cause", fmt.Sprint(context.Cause(ctx))))
	})
	defer stopHealth()
	defer func() { err = errors.Join(err, p.close()) }()
	if err := p.open(ctx); err != nil {
		if ctx.Err() != nil {
			return nil // asked to stop before there was anything to finish
		}
		return err
	}
	return p.run(ctx)
}
