package jetbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// envRelay makes the test binary a relay of its own process: "FILE URL".
const envRelay = "JETBOX_TEST_RELAY"

func TestMain(m *testing.M) {
	if args := os.Getenv(envRelay); args != "" {
		path, url, _ := strings.Cut(args, " ")
		if err := runRelay(path, url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func runRelay(path, url string) error {
	ctx := context.Background()
	store, err := sqlite.Open(ctx, sqlite.Config{Path: path})
	if err != nil {
		return err
	}
	defer store.Close()
	nc, err := nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectBufSize(-1))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	r, err := relay.New(store, js, relay.Config{Lease: 500 * time.Millisecond})
	if err != nil {
		return err
	}
	return r.Run(ctx)
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
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}}); err != nil {
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
			}
		})
	}
	var child *exec.Cmd
	for range kills {
		child = startRelay(t, path, srv.ClientURL())
		pause := time.Duration(200+rand.IntN(900)) * time.Millisecond
		time.Sleep(pause) // outside a bubble: how long it lives is the point
		if err := child.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = child.Wait()
	}
	stopWriting()
	wg.Wait()
	child = startRelay(t, path, srv.ClientURL())
	defer func() { _ = child.Process.Kill(); _ = child.Wait() }()

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

func startRelay(t *testing.T, path, url string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), envRelay+"="+path+" "+url)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd
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
