package jetbox_test

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// BenchmarkDrain drains a backlog of 100,000 rows of 512 bytes, inserted by plain
// SQL, and publishes the same messages, with all their headers, by raw
// asynchronous publish to the same broker before and after. Durability: the
// relay's claims and records with synchronous=FULL, the broker's file store
// synced once a minute. It reports rows/s of both and their ratio.
func BenchmarkDrain(b *testing.B) {
	const rows = 100_000
	for _, keys := range []int{0, 1000} {
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			var raw, drain float64
			for b.Loop() {
				r, d := drainOnce(b, rows, keys)
				raw, drain = raw+r, drain+d
			}
			b.ReportMetric(drain/float64(b.N), "rows/s")
			b.ReportMetric(raw/float64(b.N), "raw-msgs/s")
			b.ReportMetric(drain/raw, "ratio")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// drainOnce returns messages per second of raw publish and rows per second of the
// relay.
func drainOnce(b *testing.B, rows, keys int) (raw, drain float64) {
	ctx := b.Context()
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
		if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}}); err != nil {
			b.Fatal(err)
		}
	}
	store, err := sqlite.Open(ctx, sqlite.Config{Path: filepath.Join(b.TempDir(), "bench.db")})
	if err != nil {
		b.Fatal(err)
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		b.Fatal(err)
	}
	insertPlain(ctx, b, store, rows, keys)
	var events []jetbox.Event
	for e, err := range store.List(ctx, outbox.Filter{}) {
		if err != nil {
			b.Fatal(err)
		}
		events = append(events, e.Event)
	}

	before := rawPublish(ctx, b, js, "BEFORE", events)
	var published atomic.Int64
	r, err := relay.New(store, js, relay.Config{Stream: "EVENTS", Batch: 1000, Hooks: relay.Hooks{
		PublishedFunc: func(time.Duration, time.Duration, bool) { published.Add(1) },
	}})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	begin := time.Now()
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	for published.Load() < int64(rows) || pending(ctx, b, store) > 0 {
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

func pending(ctx context.Context, b *testing.B, store *sqlite.Store) int64 {
	b.Helper()
	st, err := store.Stats(ctx)
	if err != nil {
		b.Fatal(err)
	}
	return st.Pending
}

func insertPlain(ctx context.Context, b *testing.B, store *sqlite.Store, rows, keys int) {
	b.Helper()
	payload := bytes.Repeat([]byte("x"), 512)
	tx, err := store.DB().BeginTx(ctx, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer tx.Rollback()
	stmt, err := tx.PrepareContext(ctx, `INSERT INTO outbox (subject, aggregate_type, aggregate_id, payload)
		VALUES ('EVENTS.order.placed', 'order', ?, ?)`)
	if err != nil {
		b.Fatal(err)
	}
	defer stmt.Close()
	for i := range rows {
		var key any
		if keys > 0 {
			key = fmt.Sprint("o-", i%keys)
		}
		if _, err := stmt.Exec(key, payload); err != nil {
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
