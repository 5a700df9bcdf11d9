package jetbox_test

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// envRelay makes the test binary a relay of its own process: a child, in JSON.
const envRelay = "JETBOX_TEST_RELAY"

// child is what such a process is told.
type child struct {
	Outbox  string // the URL of a PostgreSQL database, or a SQLite file
	Broker  string
	Lease   time.Duration
	Backoff time.Duration // default 100ms
	Batch   int           // default childBatch
	OnDead  relay.OnDead
}

// resent is what such a process says of each row that it sent again without proof that
// the first copy is not stored.
const resent = "sent again unverified"

// childBatch is how many rows a relay process claims at once. When it is killed it
// has twice as many in hand: on the wire, and not recorded yet.
const childBatch = 500

func TestMain(m *testing.M) {
	if args := os.Getenv(envRelay); args != "" {
		var c child
		err := json.Unmarshal([]byte(args), &c)
		if err == nil {
			err = c.run()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(pgtest.Main(m))
}

// source is an outbox to relay from, whichever database it is in.
type source interface {
	relay.Source
	Close() error
}

func (c child) open(ctx context.Context) (source, error) {
	if strings.HasPrefix(c.Outbox, "postgres") {
		return postgres.Open(ctx, postgres.Config{URL: c.Outbox})
	}
	return sqlite.Open(ctx, sqlite.Config{Path: c.Outbox})
}

// run relays until SIGTERM, or until the parent is gone, which leaves the pipe it
// holds.
func (c child) run() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	store, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer store.Close()
	nc, err := nats.Connect(c.Broker, nats.MaxReconnects(-1), nats.ReconnectBufSize(-1))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	r, err := relay.New(store, js, relay.Config{
		Batch: cmp.Or(c.Batch, childBatch), Lease: c.Lease, MaxAttempts: 2, Backoff: cmp.Or(c.Backoff, 100*time.Millisecond), OnDead: c.OnDead,
		Hooks: relay.Hooks{UnverifiedFunc: func() { fmt.Fprintln(os.Stderr, resent) }},
	})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

// start starts the process. The caller ends it.
func (c child) start(t *testing.T, stderr io.Writer) *exec.Cmd {
	t.Helper()
	args, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), envRelay+"="+string(args))
	cmd.Stderr = stderr
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd
}

// TestChaosKilledRelay kills the relay's process with SIGKILL again and again,
// while writers commit and roll back by plain SQL and the broker stays up. Every
// committed row is on the stream once, and each key in its order.
func TestChaosKilledRelay(t *testing.T) {
	kills, backlog := 4, 3_000
	if *chaosFor > 0 {
		kills, backlog = 20, 100_000
	}
	ctx := t.Context()
	srv := embedded.RunTest(t, func(c *embedded.Config) { c.Listen = "127.0.0.1:0" })
	nc, err := srv.Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	// A short sync interval only costs time here; the window is the server's own.
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}, AllowBatchPublish: true}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "orders.db")
	store, err := sqlite.Open(ctx, sqlite.Config{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		t.Fatal(err)
	}

	w := &plainWriter{db: store.DB(), committed: make(map[string][]int), rolledBack: make(map[string]bool)}
	for done := 0; done < backlog; done += 1000 {
		if err := w.write(ctx, rand.IntN(50), min(1000, backlog-done), false); err != nil {
			t.Fatal(err)
		}
	}
	writing, stopWriting := context.WithCancel(ctx)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for writing.Err() == nil {
				if err := w.write(writing, rand.IntN(50), 1+rand.IntN(20), rand.IntN(4) == 0); err != nil && writing.Err() == nil {
					t.Errorf("write: %v", err)
					return
				}
				// SQLite's lock is unfair: of writers that never pause one can
				// wait for longer than its patience.
				time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
			}
		})
	}
	c := child{Outbox: path, Broker: srv.ClientURL(), Lease: 500 * time.Millisecond}
	for range kills {
		cmd := c.start(t, os.Stderr)
		pause := time.Duration(200+rand.IntN(900)) * time.Millisecond
		time.Sleep(pause) // outside a bubble: how long it lives is the point
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
	}
	stopWriting()
	wg.Wait()
	cmd := c.start(t, os.Stderr)
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()

	deadline := time.Now().Add(2 * time.Minute)
	for {
		st, err := store.Stats(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if st.Pending == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("not drained: %+v", st)
		}
		time.Sleep(50 * time.Millisecond)
	}
	h := history{committed: w.committed, rolledBack: w.rolledBack}
	h.stored = storedPayloads(t, js)
	h.effects = h.stored // no consumer here: what is stored counts as handled
	if v := h.check(); len(v) > 0 {
		t.Fatalf("%d violations:\n%s", len(v), strings.Join(v[:min(len(v), 20)], "\n"))
	}
	t.Logf("%d kills, %d rows committed, %d rolled back, %d on the stream", kills, w.rows, len(w.rolledBack), len(h.stored))
}

// plainWriter inserts rows by SQL that knows nothing of this library.
type plainWriter struct {
	db *sql.DB

	mu         sync.Mutex // guards what follows; held over a commit, for its order
	committed  map[string][]int
	rolledBack map[string]bool
	rows       int
}

func (w *plainWriter) write(ctx context.Context, key, rows int, rollback bool) error {
	tx, err := w.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	w.mu.Lock()
	defer w.mu.Unlock()
	k := fmt.Sprint("k", key)
	next := len(w.committed[k])
	for i := range rows {
		n := next + i
		if rollback {
			n = 1_000_000_000 + len(w.rolledBack)
		}
		payload := fmt.Sprintf("%s:%d", k, n)
		if rollback {
			w.rolledBack[payload] = true
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO outbox (subject, aggregate_id, payload) VALUES ('events.a', ?, ?)`,
			k, payload); err != nil {
			return err
		}
	}
	if rollback {
		return tx.Rollback()
	}
	// Without ctx: a commit that is interrupted may have happened.
	if err := tx.Commit(); err != nil {
		return err
	}
	for i := range rows {
		w.committed[k] = append(w.committed[k], next+i)
	}
	w.rows += rows
	return nil
}

func storedPayloads(t *testing.T, js jetstream.JetStream) []string {
	t.Helper()
	ctx := t.Context()
	st, err := js.Stream(ctx, "EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	c, err := js.OrderedConsumer(ctx, "EVENTS", jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	msgs, err := c.Messages()
	if err != nil {
		t.Fatal(err)
	}
	defer msgs.Stop()
	var stored []string
	for range st.CachedInfo().State.Msgs {
		m, err := msgs.Next()
		if err != nil {
			t.Fatal(err)
		}
		stored = append(stored, string(m.Data()))
	}
	return stored
}
