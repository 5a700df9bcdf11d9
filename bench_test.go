package jetbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// BenchmarkDrain drains a backlog of 100,000 rows of 512 bytes, inserted by plain
// SQL, and publishes the same messages, with all their headers, by raw
// asynchronous publish to the same broker before and after. Durability: the
// relay's claims and records are synced to disk (SQLite: synchronous=FULL;
// PostgreSQL: fsync and synchronous_commit on), the broker's file store once a
// minute. It reports rows/s of both and their ratio.
func BenchmarkDrain(b *testing.B) {
	const rows = 100_000
	for _, bb := range []struct {
		name    string
		keys    int
		open    func(b *testing.B) drainStore
		cfg     relay.Config
		crowded bool // see crowd
	}{
		{"sqlite/keys=0", 0, openSQLite, relay.Config{}, false},
		{"sqlite/keys=1000", 1000, openSQLite, relay.Config{}, false},
		{"postgres/keys=0", 0, openPostgres, relay.Config{}, false},
		{"postgres/keys=1000", 1000, openPostgres, relay.Config{}, false},
		{"postgres/keys=1000,retention=0", 1000, openPostgres, relay.Config{Retention: relay.DeleteAtOnce}, false},
		{"postgres/keys=1000,crowded", 1000, openPostgres, relay.Config{}, true},
	} {
		b.Run(bb.name, func(b *testing.B) {
			var raw, drain float64
			for b.Loop() {
				store := bb.open(b)
				if err := store.Migrate(b.Context()); err != nil {
					b.Fatal(err)
				}
				if bb.crowded {
					crowd(b, store)
				}
				r, d := drainOnce(b, store, rows, bb.keys, bb.cfg)
				raw, drain = raw+r, drain+d
			}
			b.ReportMetric(drain/float64(b.N), "rows/s")
			b.ReportMetric(raw/float64(b.N), "raw-msgs/s")
			b.ReportMetric(drain/raw, "ratio")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// drainStore is what a benchmark needs of a store.
type drainStore interface {
	relay.Source
	DB() *sql.DB
	Migrate(ctx context.Context) error
	List(ctx context.Context, f outbox.Filter) iter.Seq2[outbox.Entry, error]
	Stats(ctx context.Context) (outbox.Stats, error)
	Close() error
}

func openSQLite(b *testing.B) drainStore {
	b.Helper()
	store, err := sqlite.Open(b.Context(), sqlite.Config{Path: filepath.Join(b.TempDir(), "bench.db")})
	if err != nil {
		b.Fatal(err)
	}
	return store
}

func openPostgres(b *testing.B) drainStore {
	b.Helper()
	b.Setenv("TMPDIR", os.TempDir()) // on disk, not in memory
	cluster := pgtest.Start(b, "fsync=on", "full_page_writes=on", "shared_buffers=512MB", "max_wal_size=2GB")
	store, err := postgres.Open(b.Context(), postgres.Config{URL: cluster.URL(b)})
	if err != nil {
		b.Fatal(err)
	}
	return store
}

// drainOnce returns messages per second of raw publish and rows per second of the
// relay.
func drainOnce(b *testing.B, store drainStore, rows, keys int, cfg relay.Config) (raw, drain float64) {
	ctx := b.Context()
	defer store.Close()
	srv := embedded.RunTest(b)
	nc, err := srv.Connect(nats.ReconnectBufSize(-1))
	if err != nil {
		b.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(8192))
	if err != nil {
		b.Fatal(err)
	}
	for _, name := range []string{"EVENTS", "BEFORE", "AFTER"} {
		if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}, AllowBatchPublish: true}); err != nil {
			b.Fatal(err)
		}
	}
	insertPlain(ctx, b, store, rows, keys)
	var events []jetbox.Event
	for e, err := range store.List(ctx, outbox.Filter{Subject: "EVENTS.order.placed"}) {
		if err != nil {
			b.Fatal(err)
		}
		events = append(events, e.Event)
	}

	before := rawPublish(ctx, b, js, "BEFORE", events)
	var published atomic.Int64
	cfg.Stream, cfg.Batch = "EVENTS", 1000
	cfg.Hooks.PublishedFunc = func(time.Duration, time.Duration, bool) { published.Add(1) }
	r, err := relay.New(store, js, cfg)
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	waiting := pending(ctx, b, store) - int64(rows)
	begin := time.Now()
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	for published.Load() < int64(rows) || pending(ctx, b, store) > waiting {
		time.Sleep(time.Millisecond)
	}
	took := time.Since(begin)
	cancel()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
	after := rawPublish(b.Context(), b, js, "AFTER", events)
	return (before + after) / 2, float64(rows) / took.Seconds()
}

func pending(ctx context.Context, b *testing.B, store drainStore) int64 {
	b.Helper()
	st, err := store.Stats(ctx)
	if err != nil {
		b.Fatal(err)
	}
	return st.Pending
}

// crowd puts 300,000 rows of a frozen key and a million due tomorrow in front of
// those that may go.
func crowd(b *testing.B, store drainStore) {
	b.Helper()
	ctx := b.Context()
	exec := func(query string) {
		b.Helper()
		if _, err := store.DB().ExecContext(ctx, query); err != nil {
			b.Fatal(err)
		}
	}
	must := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	exec(`INSERT INTO outbox (subject, aggregate_id, payload) VALUES ('EVENTS.poison', 'frozen', '')`)
	l, err := store.Acquire(ctx, jetbox.Candidate{Owner: "crowd", Length: time.Hour})
	must(err)
	rows, err := store.Claim(ctx, l, jetbox.Ask{Limit: 1})
	must(err)
	must(store.Record(ctx, l, []jetbox.Outcome{{Pos: rows[0].Pos, State: jetbox.DeadLetter, Reason: "poison", Freeze: true}}))
	exec(`INSERT INTO outbox (subject, aggregate_id, payload) SELECT 'EVENTS.behind', 'frozen', '' FROM generate_series(1, 300000)`)
	exec(`INSERT INTO outbox (subject, payload, available_at) SELECT 'EVENTS.later', '', now() + interval '1 day' FROM generate_series(1, 1000000)`)
	begin := time.Now()
	rows, err = store.Claim(ctx, l, jetbox.Ask{Limit: 1}) // the first to meet them puts them to sleep
	must(err)
	if len(rows) > 0 {
		b.Fatalf("%d rows may go, want none", len(rows))
	}
	b.ReportMetric(time.Since(begin).Seconds(), "s-to-sleep")
	must(store.Release(ctx, l))
}

// insertPlain inserts a hundred rows with each statement, as either database
// understands it.
func insertPlain(ctx context.Context, b *testing.B, store drainStore, rows, keys int) {
	b.Helper()
	const each = 100
	payload := strings.Repeat("x", 512)
	tx, err := store.DB().BeginTx(ctx, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer tx.Rollback()
	for first := 0; first < rows; first += each {
		var query strings.Builder
		query.WriteString("INSERT INTO outbox (subject, aggregate_type, aggregate_id, payload) VALUES ")
		for i := first; i < first+each; i++ {
			key := "NULL"
			if keys > 0 {
				key = fmt.Sprintf("'o-%d'", i%keys)
			}
			if i > first {
				query.WriteByte(',')
			}
			fmt.Fprintf(&query, "('EVENTS.order.placed', 'order', %s, '%s')", key, payload)
		}
		if _, err := tx.ExecContext(ctx, query.String()); err != nil {
			b.Fatal(err)
		}
	}
	if err := tx.Commit(); err != nil {
		b.Fatal(err)
	}
}

// rawPublish publishes the messages the relay would, and waits for every PubAck.
func rawPublish(ctx context.Context, b *testing.B, js jetstream.JetStream, stream string, events []jetbox.Event) float64 {
	b.Helper()
	begin := time.Now()
	for _, ev := range events {
		m := &nats.Msg{Subject: stream + ".order.placed", Header: ev.Header("jetbox"), Data: ev.Payload}
		if _, err := js.PublishMsgAsync(m, jetstream.WithStallWait(time.Minute)); err != nil {
			b.Fatal(err)
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-time.After(time.Minute): //nolint:forbidigo // once per run
		b.Fatal("raw publish did not complete")
	case <-ctx.Done():
		b.Fatal(ctx.Err())
	}
	return float64(len(events)) / time.Since(begin).Seconds()
}
