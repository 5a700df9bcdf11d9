package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/dedup/sqlite"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// The test binary runs itself as a consumer that kills itself without warning.
const (
	envPoint  = "JETBOX_KILL_POINT"
	envURL    = "JETBOX_KILL_URL"
	envDB     = "JETBOX_KILL_DB"
	envStream = "JETBOX_KILL_STREAM"

	killDSN = "?_pragma=journal_mode(wal)&_pragma=busy_timeout(5000)"
)

func TestMain(m *testing.M) {
	if os.Getenv(envPoint) != "" {
		if err := killChild(); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// killChild consumes until its standard input ends, and dies at the point on
// the first delivery of every message.
func killChild() error {
	die := func(point string, d *consumer.Delivery) {
		if point == os.Getenv(envPoint) && d.NumDelivered == 1 {
			if p, err := os.FindProcess(os.Getpid()); err == nil {
				_ = p.Kill()
			}
			select {}
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	nc, err := nats.Connect(os.Getenv(envURL), nats.MaxReconnects(-1))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	db, err := sql.Open("sqlite", "file:"+os.Getenv(envDB)+killDSN)
	if err != nil {
		return err
	}
	defer db.Close()
	ledger, err := sqlite.New(ctx, db, sqlite.Config{})
	if err != nil {
		return err
	}
	once := consumer.Once(ledger, func(ctx context.Context, tx *sql.Tx, d *consumer.Delivery) error {
		die("after the entry", d)
		if _, err := tx.ExecContext(ctx, `INSERT INTO effects (key) VALUES (?)`, d.Key); err != nil {
			return err
		}
		die("after the effect", d)
		return nil
	})
	c, err := consumer.New(js, func(ctx context.Context, d *consumer.Delivery) error {
		if err := once(ctx, d); err != nil {
			return err
		}
		die("after the commit", d)
		return nil
	}, consumer.Config{
		Stream: os.Getenv(envStream), Durable: durable, AckWait: 300 * time.Millisecond,
		Logger:      slog.New(slog.DiscardHandler),
		HandledFunc: func(d *consumer.Delivery, _ consumer.Verdict, _ time.Duration) { die("after the ack", d) },
	})
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

// BR-62: a process killed anywhere around commit and ack leaves exactly one
// effect and one ledger entry of each event, never none and never two.
func TestKilledConsumerLeavesOneEffectOfEachEvent(t *testing.T) {
	t.Parallel() // its server starts when the bubbles of this package are over
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
	t.Run("points", func(t *testing.T) {
		for i, point := range []string{"after the entry", "after the effect", "after the commit", "after the ack"} {
			t.Run(point, func(t *testing.T) {
				t.Parallel()
				killAt(t, js, srv.ClientURL(), fmt.Sprintf("KILL%d", i), point)
			})
		}
	})
}

func killAt(t *testing.T, js jetstream.JetStream, url, stream, point string) {
	t.Helper()
	const kills = 5
	file := filepath.Join(t.TempDir(), "app.db")
	db, err := sql.Open("sqlite", "file:"+file+killDSN)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Exec(`CREATE TABLE effects (key TEXT NOT NULL)`); err != nil {
		t.Fatal(err)
	}
	subject := "kill." + stream
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: stream, Subjects: []string{subject}}); err != nil {
		t.Fatal(err)
	}
	for i := range kills {
		ev := jetbox.Event{Key: fmt.Sprint("k", i), Subject: subject}.WithDefaults(time.Now())
		if _, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: subject, Header: ev.Header("test")}); err != nil {
			t.Fatal(err)
		}
	}

	env := append(os.Environ(), envPoint+"="+point, envURL+"="+url, envDB+"="+file, envStream+"="+stream)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	deaths := 0
	for !runChild(ctx, t, js, stream, env) {
		deaths++
	}
	// After an ack the next message may be on its way to the dying process; it
	// comes back as a second delivery, on which nobody dies.
	if deaths > kills || deaths < kills && point != "after the ack" || deaths == 0 {
		t.Errorf("killed %d times, want %d", deaths, kills)
	}
	var effects, different, entries int
	if err := db.QueryRow(`SELECT count(*), count(DISTINCT key), (SELECT count(*) FROM jetbox_ledger) FROM effects`).
		Scan(&effects, &different, &entries); err != nil {
		t.Fatal(err)
	}
	if effects != kills || different != kills || entries != kills {
		t.Errorf("effects = %d of %d events with %d ledger entries, want %d of each", effects, different, entries, kills)
	}
}

// runChild runs one process until it dies or everything is settled.
func runChild(ctx context.Context, t *testing.T, js jetstream.JetStream, stream string, env []string) (settled bool) {
	t.Helper()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^$")
	cmd.Env = env
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case err := <-exited:
			var exit *exec.ExitError
			if ctx.Err() != nil || !errors.As(err, &exit) || exit.Exited() {
				t.Fatalf("child ended with %v (context: %v), want it killed", err, ctx.Err())
			}
			return false
		case <-tick.C:
		}
		c, err := js.Consumer(ctx, stream, durable)
		if err != nil {
			continue // not created yet
		}
		if i := c.CachedInfo(); i.NumPending == 0 && i.NumAckPending == 0 && i.Delivered.Stream > 0 {
			if err := stdin.Close(); err != nil {
				t.Fatal(err)
			}
			if err := <-exited; err != nil {
				// It may have died on its way: then all of it has settled.
				var exit *exec.ExitError
				if !errors.As(err, &exit) || exit.Exited() {
					t.Fatalf("child: %v", err)
				}
				return false
			}
			return true
		}
	}
}
