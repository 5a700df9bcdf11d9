package relay_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// A stop waits for the PubAcks of what is on the wire and records them; nothing
// new is claimed: BR-70.
func TestStopWaitsForPubAcksAndRecordsThem(t *testing.T) {
	inBubble(t, func(r *rig) {
		for i := range 300 {
			r.append(event("events.a", "", fmt.Sprint(i)))
		}
		first := make(chan struct{})
		src := &faultySource{Store: r.store}
		src.ClaimedFunc = sync.OnceFunc(func() {
			r.box.Hold(true)
			close(first)
		})
		rel, err := relay.New(src, r.js, relay.Config{Batch: 100, Logger: slog.New(slog.DiscardHandler)})
		r.must(err)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- rel.Run(ctx) }()
		<-first
		time.Sleep(time.Second)
		cancel() // 100 messages are on the stream, no PubAck has arrived
		time.Sleep(2 * time.Second)
		if n := r.count("PUBLISHED"); n != 0 {
			r.t.Fatalf("%d marked without a PubAck", n)
		}
		r.box.Hold(false)
		r.must(<-done)
		if n, marked := len(r.stored()), r.count("PUBLISHED"); n != 100 || marked != 100 {
			r.t.Fatalf("%d stored and %d marked, want the first batch of 100", n, marked)
		}
		st, err := r.store.Stats(r.t.Context())
		r.must(err)
		if st.Claimed != 0 || len(st.Leases) != 0 {
			r.t.Fatalf("after the stop: %+v", st)
		}
		if h := rel.Health(); h.Ready {
			r.t.Fatalf("after the stop: %+v", h)
		}
	})
}

// When PubAcks do not come the stop is bounded, and the next relay sends the same
// messages again.
func TestStopIsBounded(t *testing.T) {
	inBubble(t, func(r *rig) {
		_, stop := r.start(r.store, relay.Config{DrainTimeout: 3 * time.Second})
		time.Sleep(time.Second)
		r.box.Mute(true)
		r.append(event("events.a", "", "x"))
		time.Sleep(500 * time.Millisecond)
		begin := time.Now()
		stop()
		if took := time.Since(begin); took > 4*time.Second {
			r.t.Fatalf("the stop took %v with a drain timeout of 3s", took)
		}
		r.box.Mute(false)
		r.box.Cut(false)
		_, stop = r.start(r.store, relay.Config{})
		time.Sleep(20 * time.Second)
		stop()
		r.wantPayloads("x")
		if n := r.count("PUBLISHED"); n != 1 {
			r.t.Fatalf("%d rows marked", n)
		}
	})
}

func TestPublishedRowsLeaveByRetention(t *testing.T) {
	for _, tt := range []struct {
		name               string
		cfg                relay.Config
		soon, late, archiv int // rows left after 10 s and 12 min, and in the archive
	}{
		{"kept for ten minutes", relay.Config{Retention: 10 * time.Minute}, 50, 0, 0},
		{"deleted at once", relay.Config{Retention: relay.DeleteAtOnce}, 0, 0, 0},
		{"archived", relay.Config{Archive: true}, 0, 0, 50},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				for i := range 50 {
					r.append(event("events.a", fmt.Sprint("k", i%3), "x"))
				}
				r.exec("INSERT INTO outbox (subject, payload) VALUES ('events.*', 'dead')")
				tt.cfg.PollInterval = 10 * time.Second
				_, stop := r.start(r.store, tt.cfg)
				time.Sleep(10 * time.Second)
				if n := r.count("PUBLISHED"); n != tt.soon {
					r.t.Fatalf("%d published rows after 10 s, want %d", n, tt.soon)
				}
				time.Sleep(12 * time.Minute)
				stop()
				var archived int
				r.must(r.store.DB().QueryRow("SELECT count(*) FROM outbox_archive").Scan(&archived))
				if n, dead := r.count("PUBLISHED"), r.count("DEAD_LETTER"); n != tt.late || dead != 1 || archived != tt.archiv {
					r.t.Fatalf("after 12 min: %d published, %d dead, %d archived", n, dead, archived)
				}
				if n := len(r.stored()); n != 50 {
					r.t.Fatalf("%d stored", n)
				}
			})
		})
	}
}

// A retention that the broker's own windows outlive is refused with both numbers.
func TestRetentionBelowTheWindowIsRefused(t *testing.T) {
	inBubble(t, func(r *rig) {
		_, err := r.admin.UpdateStream(r.t.Context(), jetstream.StreamConfig{
			Name: "EVENTS", Subjects: []string{"events.>"}, Duplicates: 10 * time.Minute,
		})
		r.must(err)
		rel, err := relay.New(r.store, r.js, relay.Config{Retention: 5 * time.Minute})
		r.must(err)
		err = rel.Run(r.t.Context())
		if err == nil || !strings.Contains(err.Error(), "5m0s") || !strings.Contains(err.Error(), "10m0s") {
			r.t.Fatalf("Run: %v", err)
		}
		_, err = relay.New(r.store, r.js, relay.Config{Retention: time.Minute})
		if err == nil || !strings.Contains(err.Error(), "1m0s") || !strings.Contains(err.Error(), "2m0s") {
			r.t.Fatalf("New: %v", err)
		}
	})
}

// pruneCounter counts how often its relay looks for what to prune.
type pruneCounter struct {
	*sqlite.Store
	calls int
}

func (p *pruneCounter) Prune(ctx context.Context, l jetbox.Lease, before time.Time, archive bool) (int, error) {
	p.calls++
	return p.Store.Prune(ctx, l, before, archive)
}

// With rows removed as they are recorded, an idle relay went through the whole
// table each second: a third of a core with a million scheduled rows.
func TestRelayThatDeletesAtOnceSeldomLooksForOldRows(t *testing.T) {
	long(t)
	for name, cfg := range map[string]relay.Config{
		"delete":  {Retention: relay.DeleteAtOnce},
		"archive": {Archive: true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				src := &pruneCounter{Store: r.store}
				_, stop := r.start(src, cfg)
				time.Sleep(10*time.Minute + time.Second)
				stop()
				if src.calls < 5 || src.calls > 11 {
					r.t.Fatalf("looked %d times in ten minutes, want about one a minute", src.calls)
				}
			})
		})
	}
}
