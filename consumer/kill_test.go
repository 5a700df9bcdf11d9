package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/dedup/kv"
	"github.com/seed-5e04d8fb/jetbox/dedup/postgres"
	"github.com/seed-5e04d8fb/jetbox/dedup/sqlite"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// kills is how often a consumer is killed at each point on each database:
//
//	go test ./consumer -run TestKilledConsumer -kill.n=50
var kills = flag.Int("kill.n", 3, "how often a consumer is killed at each point on each database")

// The test binary runs itself as a consumer that kills or stops itself without
// warning.
const (
	envPoint  = "JETBOX_KILL_POINT"
	envMarks  = "JETBOX_KILL_MARKS"
	envURL    = "JETBOX_KILL_URL"
	envDB     = "JETBOX_KILL_DB"
	envStream = "JETBOX_KILL_STREAM"

	killAckWait = 300 * time.Millisecond

	// markGoOn is the name of the file that a stopped process waits for.
	markGoOn = "go on"
)

const (
	afterEntry  = "after the entry"
	afterEffect = "after the effect"
	afterCommit = "after the commit"
	afterAck    = "after the ack"
	// stopAfterEffect stops the process where afterEffect kills it.
	stopAfterEffect = "stop after the effect"
)

// The ledgers of the databases satisfy the interfaces by shape.
var (
	_ consumer.BatchLedger[*sql.Tx] = (*sqlite.Ledger)(nil)
	_ consumer.BatchLedger[*sql.Tx] = (*postgres.Ledger[*sql.Tx])(nil)
	_ consumer.BatchLedger[pgx.Tx]  = (*postgres.Ledger[pgx.Tx])(nil)
	_ consumer.Ledger[*sql.Tx]      = (*postgres.Ledger[*sql.Tx])(nil)
	_ consumer.Ledger[pgx.Tx]       = (*postgres.Ledger[pgx.Tx])(nil)
	_ consumer.Ledger[struct{}]     = (*kv.Ledger)(nil)
)

func TestMain(m *testing.M) {
	if os.Getenv(envPoint) != "" {
		ctx, cancel := context.WithCancel(context.Background())
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			cancel()
		}()
		if err := killChild(ctx); err != nil && ctx.Err() == nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(pgtest.Main(m))
}

// killChild consumes until its standard input ends, and dies at the point, once
// for every event.
func killChild(ctx context.Context) error {
	nc, err := nats.Connect(os.Getenv(envURL), nats.MaxReconnects(-1))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	once, closeDB, err := killHandler(ctx, os.Getenv(envDB))
	if err != nil {
		return err
	}
	defer closeDB()
	c, err := consumer.New(js, func(ctx context.Context, d *consumer.Delivery) error {
		if err := once(ctx, d); err != nil {
			return err
		}
		die(afterCommit, d)
		return nil
	}, consumer.Config{
		Stream: os.Getenv(envStream), Durable: durable, AckWait: killAckWait, MaxDeliver: 1000,
		Logger: slog.New(slog.DiscardHandler),
		HandledFunc: func(d *consumer.Delivery, _ consumer.Verdict, _ time.Duration) {
			if err := nc.Flush(); err == nil { // so that the ack is out
				die(afterAck, d)
			}
		},
	})
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

// die ends this process without warning if it has come to its point for the
// first time with this event.
func die(point string, d *consumer.Delivery) {
	mine := os.Getenv(envPoint)
	if point != strings.TrimPrefix(mine, "stop ") {
		return
	}
	f, err := os.OpenFile(filepath.Join(os.Getenv(envMarks), d.Key), os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return // another process has died here
	}
	_ = f.Close()
	if mine == stopAfterEffect {
		stopSelf()
		// The signal may take effect a moment later.
		for !exists(filepath.Join(os.Getenv(envMarks), markGoOn)) {
			time.Sleep(time.Millisecond)
		}
		return
	}
	if p, err := os.FindProcess(os.Getpid()); err == nil {
		_ = p.Kill()
	}
	select {}
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// killHandler writes an effect in the transaction of the ledger. On PostgreSQL
// it does so by pgx.
func killHandler(ctx context.Context, dbURL string) (consumer.Handler, func(), error) {
	if !strings.HasPrefix(dbURL, "postgres") {
		db, err := sql.Open("sqlite", dbURL)
		if err != nil {
			return nil, nil, err
		}
		ledger, err := sqlite.New(ctx, db, sqlite.Config{})
		return consumer.Once(ledger, func(ctx context.Context, tx *sql.Tx, d *consumer.Delivery) error {
			die(afterEntry, d)
			_, err := tx.ExecContext(ctx, `INSERT INTO effects (key) VALUES (?)`, d.Key)
			die(afterEffect, d)
			return err
		}), func() { db.Close() }, err
	}
	pool, err := pgxpool.New(ctx, dbURL)
	if err != nil {
		return nil, nil, err
	}
	ledger, err := postgres.NewPgx(pool, postgres.Config{})
	return consumer.Once(ledger, func(ctx context.Context, tx pgx.Tx, d *consumer.Delivery) error {
		die(afterEntry, d)
		_, err := tx.Exec(ctx, `INSERT INTO effects (key) VALUES ($1)`, d.Key)
		die(afterEffect, d)
		return err
	}), pool.Close, err
}

// BR-62: a process killed anywhere around commit and ack leaves exactly one
// effect and one ledger entry of each event, never none and never two.
func TestKilledConsumerLeavesOneEffectOfEachEvent(t *testing.T) {
	t.Parallel() // its server starts when the bubbles of this package are over
	n := *kills
	if testing.Short() {
		n = 1
	}
	onEachDatabase(t, func(t *testing.T, b *killBroker, db *sql.DB, dbURL string) {
		for _, point := range []string{afterEntry, afterEffect, afterCommit, afterAck} {
			t.Run(point, func(t *testing.T) {
				w := b.world(t, db, dbURL, n)
				deaths := 0
				for !w.run(t, point) {
					deaths++
				}
				if deaths != n {
					t.Errorf("killed %d times, want %d", deaths, n)
				}
				w.wantOneEffectEach(t)
			})
		}
	})
}

type killBroker struct {
	js      jetstream.JetStream
	url     string
	streams chan int
}

// onEachDatabase runs f with an SQLite file and a PostgreSQL database.
func onEachDatabase(t *testing.T, f func(t *testing.T, b *killBroker, db *sql.DB, dbURL string)) {
	t.Helper()
	srv := embedded.RunTest(t, func(c *embedded.Config) { c.Listen = "127.0.0.1:0" })
	nc, err := srv.Connect()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	b := &killBroker{js: js, url: srv.ClientURL(), streams: make(chan int, 1)}
	b.streams <- 1
	t.Run("databases", func(t *testing.T) {
		t.Run("sqlite", func(t *testing.T) {
			t.Parallel()
			u := url.URL{
				Scheme: "file", Opaque: filepath.ToSlash(filepath.Join(t.TempDir(), "app.db")),
				RawQuery: "_pragma=journal_mode(wal)&_pragma=busy_timeout(5000)",
			}
			f(t, b, openEffects(t, "sqlite", u.String()), u.String())
		})
		t.Run("postgres", func(t *testing.T) {
			t.Parallel()
			u := pgtest.URL(t)
			db := openEffects(t, "pgx", u)
			ledger, err := postgres.New(db, postgres.Config{})
			if err == nil {
				err = ledger.Migrate(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			f(t, b, db, u)
		})
	})
}

func openEffects(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	if _, err := db.Exec(`CREATE TABLE effects (key TEXT NOT NULL)`); err != nil {
		t.Fatal(err)
	}
	return db
}

// killWorld is a stream with some events and the database of their effects.
type killWorld struct {
	*killBroker
	db     *sql.DB
	stream string
	events int
	marks  string // the folder of what has happened
	env    []string
}

func (b *killBroker) world(t *testing.T, db *sql.DB, dbURL string, events int) *killWorld {
	t.Helper()
	n := <-b.streams
	b.streams <- n + 1
	w := &killWorld{killBroker: b, db: db, stream: fmt.Sprint("KILL", n), events: events, marks: t.TempDir()}
	w.env = append(os.Environ(), envMarks+"="+w.marks, envURL+"="+b.url, envDB+"="+dbURL, envStream+"="+w.stream)
	subject := "kill." + w.stream
	if _, err := b.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: w.stream, Subjects: []string{subject}}); err != nil {
		t.Fatal(err)
	}
	for i := range events {
		ev := jetbox.Event{Key: fmt.Sprint(w.stream, "-", i), Subject: subject}.WithDefaults(time.Now())
		if _, err := b.js.PublishMsg(t.Context(), &nats.Msg{Subject: subject, Header: ev.Header("test")}); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

func (w *killWorld) wantOneEffectEach(t *testing.T) {
	t.Helper()
	var effects, different, entries int
	err := w.db.QueryRow(`SELECT count(*), count(DISTINCT key), (SELECT count(*) FROM jetbox_ledger WHERE consumer = $1)
		FROM effects WHERE key LIKE $2`, w.stream+"/"+durable, w.stream+"-%").Scan(&effects, &different, &entries)
	if err != nil {
		t.Fatal(err)
	}
	if effects != w.events || different != w.events || entries != w.events {
		t.Errorf("effects = %d of %d events with %d ledger entries, want %d of each", effects, different, entries, w.events)
	}
}

// child is a consumer in a process of its own.
type child struct {
	cmd    *exec.Cmd
	stdin  io.Closer
	exited chan error
}

func (w *killWorld) start(t *testing.T, point string) *child {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$")
	cmd.Env = append(w.env, envPoint+"="+point)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{cmd: cmd, stdin: stdin, exited: make(chan error, 1)}
	go func() { c.exited <- cmd.Wait() }()
	return c
}

// settled reports whether every event was delivered and acknowledged.
func (w *killWorld) settled(t *testing.T) (all bool) {
	t.Helper()
	c, err := w.js.Consumer(t.Context(), w.stream, durable)
	if err != nil {
		return false // not created yet
	}
	i := c.CachedInfo()
	return i.NumPending == 0 && i.NumAckPending == 0 && i.Delivered.Stream == uint64(w.events)
}

// run runs one process until it dies or everything is settled.
func (w *killWorld) run(t *testing.T, point string) (settled bool) {
	t.Helper()
	c := w.start(t, point)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(time.Minute)
	for {
		select {
		case err := <-c.exited:
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Exited() {
				t.Fatalf("child ended with %v, want it killed", err)
			}
			return false
		case <-tick.C:
		}
		if time.Now().After(deadline) {
			t.Fatal("the child neither dies nor settles everything")
		}
		if w.settled(t) {
			return c.end(t)
		}
	}
}

// end lets the process stop by itself. It reports false when it was killed on its
// way.
func (c *child) end(t *testing.T) (stopped bool) {
	t.Helper()
	if err := c.stdin.Close(); err != nil && !errors.Is(err, os.ErrClosed) { // the latter when it is dead
		t.Fatal(err)
	}
	err := <-c.exited
	var exit *exec.ExitError
	switch {
	case err == nil:
		return true
	case errors.As(err, &exit) && !exit.Exited():
		return false
	}
	t.Fatalf("child: %v", err)
	return false
}
