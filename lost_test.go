package jetbox_test

import (
	"context"
	"errors"
	"log/slog"
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
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// dyingStore is an outbox whose relay dies in the middle of a recall: it carries out a
// part of the first step, and nothing after that.
type dyingStore struct {
	*postgres.Store
	steps atomic.Int32
}

var errDied = errors.New("died")

func (d *dyingStore) Recall(ctx context.Context, l jetbox.Lease, stream string, r jetbox.Recall, step jetbox.Recalled) (done bool, err error) {
	if d.steps.Add(1) > 1 {
		return false, errDied
	}
	_, err = d.Store.Recall(ctx, l, stream, r, jetbox.Recalled{Lost: step.Lost[:len(step.Lost)/2], Done: r.Done})
	return false, errors.Join(err, errDied)
}

func (d *dyingStore) Release(context.Context, jetbox.Lease) error { return nil }

// A crash image of the broker's store is put back under relays that share an outbox in
// PostgreSQL, and the first one that sees to it dies in the middle: each row is on the
// stream once, in the order of its key, and none that is new before those that were
// lost.
func TestRelaysThatShareAnOutboxHealABrokerThatLostData(t *testing.T) {
	t.Parallel()
	srv := embedded.RunTest(t, func(c *embedded.Config) { c.Listen = "127.0.0.1:0" })
	s := newSeveralAt(t, pgtest.URL(t), 500*time.Millisecond, jetstream.StreamConfig{AllowBatchPublish: true}, srv.ClientURL())
	s.start(2)
	s.insertKeyed("kept", 300, 20)
	s.awaitDrained()
	dir, image := filepath.Join(srv.Dir(), "jetstream"), filepath.Join(t.TempDir(), "image")
	s.must(os.CopyFS(image, os.DirFS(dir)))
	s.insertKeyed("lost", 900, 20)
	s.awaitDrained()
	for len(s.alive) > 0 {
		s.end(s.alive[0], os.Kill)
	}

	putBack := func(prefix string) {
		t.Helper()
		s.must(srv.Close())
		s.must(os.RemoveAll(dir))
		s.must(os.CopyFS(dir, os.DirFS(image)))
		s.insertKeyed(prefix, 300, 20) // what is pending goes behind what was lost
		s.must(srv.Restart(t.Context()))
	}
	putBack("new")
	if n := s.onStream(); n != 300 {
		t.Fatalf("%d messages on the stream, want the 300 of the image", n)
	}
	s.dieInARecall()
	if n := s.onStream(); n != 300 {
		t.Fatalf("%d messages on the stream before the recall has ended, want 300", n)
	}
	s.start(2)
	s.awaitDrained()
	s.verifyOurs(0)
	if said := s.said(); !strings.Contains(said, "published rows are published again") {
		t.Errorf("the relays have not said that they publish rows again:\n%s", said)
	}
	// And once more, under both of them.
	putBack("newer")
	s.awaitDrained()
	s.verifyOurs(0)
}

// dieInARecall runs a relay in this process that dies in the middle of a recall.
func (s *several) dieInARecall() {
	s.t.Helper()
	store, err := postgres.Open(s.t.Context(), postgres.Config{URL: s.child.Outbox})
	s.must(err)
	defer store.Close()
	nc, err := nats.Connect(s.child.Broker)
	s.must(err)
	defer nc.Close()
	js, err := jetstream.New(nc)
	s.must(err)
	src := &dyingStore{Store: store}
	r, err := relay.New(src, js, relay.Config{Lease: s.child.Lease, Logger: slog.New(slog.DiscardHandler)})
	s.must(err)
	ctx, cancel := context.WithCancel(s.t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	s.await("a step of a recall", patience, func() (string, bool) { return r.Health().Reason, src.steps.Load() > 0 })
	cancel()
	s.must(<-ended)
}
