package relay_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/internal/faultbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
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
	box   *faultbox.Box // between the relay and the broker
	nc    *nats.Conn
	js    jetstream.JetStream // the relay's, through the box
	admin jetstream.JetStream // the test's own, always working
}

// inBubble runs f with a real broker and a real outbox on a fake clock. Bubbles
// with file storage may not run in parallel in one process (package embedded).
func inBubble(t *testing.T, f func(r *rig)) {
	t.Helper()
	dir := t.TempDir() // outside the bubble: its cleanup runs after
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		r := &rig{t: t, path: filepath.Join(dir, "app.db")}
		srv := embedded.RunTest(t)
		r.srv = srv
		var err error
		r.box = &faultbox.Box{Server: srv}
		r.nc, err = nats.Connect("", nats.InProcessServer(r.box), nats.MaxReconnects(-1), nats.ReconnectBufSize(-1),
			nats.ReconnectWait(time.Second), nats.PingInterval(5*time.Second))
		r.must(err)
		defer r.nc.Close()
		r.js, err = jetstream.New(r.nc)
		r.must(err)
		admin, err := srv.Connect(nats.MaxReconnects(-1))
		r.must(err)
		defer admin.Close()
		r.admin, err = jetstream.New(admin)
		r.must(err)
		_, err = r.admin.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}})
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
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	rel, err := relay.New(src, r.js, cfg)
	r.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- rel.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		r.t.Helper()
		cancel()
		if err := <-done; err != nil {
			r.t.Errorf("Run: %v", err)
		}
	})
	r.t.Cleanup(stop) // a failed test must not leave the bubble with goroutines
	return rel, stop
}

// stored returns what is on the stream, in its order.
func (r *rig) stored() []*jetstream.RawStreamMsg {
	r.t.Helper()
	st, err := r.admin.Stream(r.t.Context(), "EVENTS")
	r.must(err)
	state := st.CachedInfo().State
	var msgs []*jetstream.RawStreamMsg
	for seq := max(1, state.FirstSeq); seq <= state.LastSeq; seq++ {
		m, err := st.GetMsg(r.t.Context(), seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue
		}
		r.must(err)
		msgs = append(msgs, m)
	}
	return msgs
}

// payloads returns the payloads on the stream, in its order.
func (r *rig) payloads() []string {
	r.t.Helper()
	var got []string
	for _, m := range r.stored() {
		got = append(got, string(m.Data))
	}
	return got
}

// wantPayloads fails unless the stream holds exactly these payloads in this order.
func (r *rig) wantPayloads(want ...string) {
	r.t.Helper()
	if got := r.payloads(); !slices.Equal(got, want) {
		r.t.Fatalf("stream has %q, want %q", got, want)
	}
}

func (r *rig) exec(query string, args ...any) {
	r.t.Helper()
	_, err := r.store.DB().ExecContext(r.t.Context(), query, args...)
	r.must(err)
}

func (r *rig) show(id int64) outbox.Entry {
	r.t.Helper()
	e, err := r.store.Show(r.t.Context(), id)
	r.must(err)
	return e
}

// wantState fails unless the row is in the state, for the reason.
func (r *rig) wantState(id int64, state jetbox.State, reason string) {
	r.t.Helper()
	if e := r.show(id); e.State != state || !strings.Contains(e.LastError, reason) {
		r.t.Fatalf("row %d is %s, last error %q; want %s, %q", id, e.State, e.LastError, state, reason)
	}
}

func event(subject, key, payload string) *jetbox.Event {
	return &jetbox.Event{Subject: subject, AggregateID: key, Payload: []byte(payload)}
}

func TestCommittedRowsArriveOnceInOrder(t *testing.T) {
	inBubble(t, func(r *rig) {
		var want []string
		for i := range 1200 {
			p := fmt.Sprint(i)
			r.append(event("events.a", "k", p))
			want = append(want, p)
		}
		_, stop := r.start(r.store, relay.Config{})
		time.Sleep(5 * time.Second)
		stop()
		r.wantPayloads(want...)
		st, err := r.store.Stats(r.t.Context())
		r.must(err)
		if st.Pending != 0 || st.Claimed != 0 || len(st.Leases) != 0 {
			r.t.Fatalf("after the drain and a clean stop: %+v", st)
		}
		e := r.show(7)
		if e.State != jetbox.Published || e.Stream != "EVENTS" || e.StreamSeq != 7 || e.PublishedAt.IsZero() {
			r.t.Fatalf("row 7: %+v", e)
		}
	})
}

func TestRolledBackRowsAreNeverSeen(t *testing.T) {
	inBubble(t, func(r *rig) {
		rel, stop := r.start(r.store, relay.Config{})
		ctx := r.t.Context()
		tx, err := r.store.DB().BeginTx(ctx, nil)
		r.must(err)
		r.must(r.store.Append(ctx, tx, event("events.a", "", "a")))
		_, err = tx.ExecContext(ctx, "SAVEPOINT s")
		r.must(err)
		r.must(r.store.Append(ctx, tx, event("events.a", "", "b")))
		_, err = tx.ExecContext(ctx, "ROLLBACK TO s")
		r.must(err)
		r.must(r.store.Append(ctx, tx, event("events.a", "", "c")))
		rel.Wake()
		time.Sleep(2 * time.Second)
		r.wantPayloads() // not before the commit
		r.must(tx.Commit())
		tx, err = r.store.DB().BeginTx(ctx, nil)
		r.must(err)
		r.must(r.store.Append(ctx, tx, event("events.a", "", "d")))
		r.must(tx.Rollback())
		rel.Wake()
		time.Sleep(2 * time.Second)
		stop()
		r.wantPayloads("a", "c")
	})
}

// An idle relay finds a row within the poll interval at the latest, whoever
// wrote it, and at once when it is woken or sees the file change.
func TestRowsAreFoundFast(t *testing.T) {
	inBubble(t, func(r *rig) {
		_, stop := r.start(r.store, relay.Config{PollInterval: time.Minute})
		defer stop()
		time.Sleep(2 * time.Minute) // long idle: the slowest look
		other := r.open()
		defer other.Close()
		_, err := other.DB().ExecContext(r.t.Context(), "INSERT INTO outbox (subject, payload) VALUES ('events.a', 'x')")
		r.must(err)
		time.Sleep(200 * time.Millisecond)
		r.wantPayloads("x")
	})
}

func TestScheduledRowGoesAtItsTimeAndHoldsNobody(t *testing.T) {
	inBubble(t, func(r *rig) {
		later := event("events.a", "k", "later")
		later.NotBefore = time.Now().Add(10 * time.Second)
		r.append(later, event("events.a", "k", "now"))
		_, stop := r.start(r.store, relay.Config{})
		defer stop()
		time.Sleep(9 * time.Second)
		r.wantPayloads("now")
		time.Sleep(2 * time.Second)
		r.wantPayloads("now", "later")
	})
}

// long leaves a test out of short runs: under the race detector SQLite takes ten times
// as long, and others go the same ways.
func long(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("takes long under the race detector")
	}
}
