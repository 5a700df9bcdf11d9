package relay_test

import (
	"context"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

var (
	_ relay.Source = (*sqlite.Store)(nil)
	_ relay.Pruner = (*sqlite.Store)(nil)
)

// rig is an outbox, a broker and a stream.
type rig struct {
	t     *testing.T
	path  string
	store *sqlite.Store
	srv   *embedded.Server
	nc    *nats.Conn
	js    jetstream.JetStream
}

// inBubble runs f with a real broker and a real outbox on a fake clock. Bubbles
// with file storage may not run in parallel in one process (package embedded).
func inBubble(t *testing.T, f func(r *rig)) {
	t.Helper()
	dir := t.TempDir() // outside the bubble: its cleanup runs after
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		r := &rig{t: t, path: filepath.Join(dir, "app.db")}
		srv, err := embedded.Start(ctx, embedded.Config{Dir: filepath.Join(dir, "broker")})
		r.must(err)
		defer srv.Close()
		r.srv = srv
		r.nc, err = srv.Connect(nats.MaxReconnects(-1), nats.ReconnectBufSize(-1))
		r.must(err)
		defer r.nc.Close()
		r.js, err = jetstream.New(r.nc)
		r.must(err)
		_, err = r.js.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}})
		r.must(err)
		r.store = r.open()
		defer r.store.Close()
		r.must(r.store.Migrate(ctx))
		f(r)
	})
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) open() *sqlite.Store {
	r.t.Helper()
	s, err := sqlite.Open(r.t.Context(), sqlite.Config{Path: r.path})
	r.must(err)
	return s
}

func (r *rig) append(events ...*jetbox.Event) {
	r.t.Helper()
	tx, err := r.store.DB().BeginTx(r.t.Context(), nil)
	r.must(err)
	r.must(r.store.Append(r.t.Context(), tx, events...))
	r.must(tx.Commit())
}

// start runs a relay until the returned stop is called, which waits for its end.
func (r *rig) start(src relay.Source, cfg relay.Config) (rel *relay.Relay, stop func()) {
	r.t.Helper()
	rel, err := relay.New(src, r.js, cfg)
	r.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- rel.Run(ctx) }()
	return rel, func() {
		r.t.Helper()
		cancel()
		r.must(<-done)
	}
}

func (r *rig) stored() uint64 {
	r.t.Helper()
	st, err := r.js.Stream(r.t.Context(), "EVENTS")
	r.must(err)
	return st.CachedInfo().State.Msgs
}

func TestCommittedRowsArriveInOrder(t *testing.T) {
	inBubble(t, func(r *rig) {
		for range 1000 {
			r.append(&jetbox.Event{Subject: "events.a", AggregateID: "k"}, &jetbox.Event{Subject: "events.b"})
		}
		_, stop := r.start(r.store, relay.Config{})
		time.Sleep(5 * time.Second)
		stop()
		if n := r.stored(); n != 2000 {
			r.t.Fatalf("stream has %d messages, want 2000", n)
		}
		st, err := r.store.Stats(r.t.Context())
		r.must(err)
		if st.Pending != 0 || st.Claimed != 0 {
			r.t.Fatalf("after drain: %+v", st)
		}
	})
}
