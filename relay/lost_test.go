package relay_test

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

var _ relay.Recaller = (*sqlite.Store)(nil)

const storeDir = "jetstream" // of the broker, below its own

// image copies the broker's store while it runs, as a crash would leave it.
func (r *rig) image() (dir string) {
	r.t.Helper()
	dir = filepath.Join(r.t.TempDir(), "image")
	r.must(os.CopyFS(dir, os.DirFS(filepath.Join(r.srv.Dir(), storeDir))))
	return dir
}

// putBack makes a copy the broker's store: what was stored after it is lost. What
// happens while the broker is down is up to away.
func (r *rig) putBack(image string, away func()) {
	r.t.Helper()
	r.must(r.srv.Close())
	r.must(os.RemoveAll(filepath.Join(r.srv.Dir(), storeDir)))
	r.must(os.CopyFS(filepath.Join(r.srv.Dir(), storeDir), os.DirFS(image)))
	if away != nil {
		away()
	}
	r.must(r.srv.Restart(r.t.Context()))
	time.Sleep(10 * time.Second)
}

// others stores messages of another publisher.
func (r *rig) others(n int) {
	r.t.Helper()
	for range n {
		_, err := r.admin.Publish(r.t.Context(), "events.other", nil)
		r.must(err)
	}
}

// fill appends rows with the given numbers as payloads, of two ordering keys and of
// none.
func (r *rig) fill(from, to int) {
	r.t.Helper()
	var events []*jetbox.Event
	for i := from; i <= to; i++ {
		events = append(events, event("events.a", []string{"k", "l", ""}[i%3], fmt.Sprint(i)))
	}
	r.append(events...)
}

// wantOnce fails unless the rows are on the stream once each, in order per key, at
// the sequences that the outbox tells.
func (r *rig) wantOnce(n int) {
	r.t.Helper()
	r.wantEach(n, true)
}

// wantEach is wantOnce, with the order only where that is asked for.
func (r *rig) wantEach(n int, ordered bool) {
	r.t.Helper()
	seen := make(map[int]bool)
	last := make(map[string]int)
	for _, m := range r.stored() {
		if m.Subject == "events.other" {
			continue
		}
		var i int
		_, err := fmt.Sscan(string(m.Data), &i)
		r.must(err)
		if seen[i] {
			r.t.Errorf("row %d is on the stream twice", i)
		}
		seen[i] = true
		if key := m.Header.Get(jetbox.HeaderCEPartitionKey); key != "" {
			if ordered && i < last[key] {
				r.t.Errorf("row %d of key %s is on the stream after %d", i, key, last[key])
			}
			last[key] = i
		}
		if e := r.show(int64(i)); e.State != jetbox.Published || e.StreamSeq != m.Sequence || e.Stream != "EVENTS" {
			r.t.Errorf("row %d is %s at %d of %q, and message %d of the stream", i, e.State, e.StreamSeq, e.Stream, m.Sequence)
		}
	}
	if len(seen) != n {
		r.t.Errorf("%d of %d rows are on the stream", len(seen), n)
	}
}

// message is an event as a relay publishes it.
func message(e jetbox.Event) *nats.Msg {
	return &nats.Msg{Subject: e.Subject, Header: e.Header("jetbox"), Data: e.Payload}
}

// observed is what a relay says and counts.
type observed struct {
	mu          sync.Mutex
	log         strings.Builder
	republished int
	unverified  int
	late        int
}

func (o *observed) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.log.Write(p)
}

func (o *observed) text() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.log.String()
}

func (o *observed) config() relay.Config {
	return relay.Config{
		Logger: slog.New(slog.NewTextHandler(o, nil)),
		Hooks: relay.Hooks{
			RepublishedFunc: func(rows int) { o.republished += rows },
			UnverifiedFunc:  func() { o.unverified++ },
			LateFunc:        func() { o.late++ },
		},
	}
}

// want fails unless so many rows were published again.
func (o *observed) want(t *testing.T, republished, unverified int) {
	t.Helper()
	if o.republished != republished || o.unverified != unverified || o.late != 0 {
		t.Errorf("%d rows were published again, %d unverified, %d late, want %d, %d, none; log:\n%s",
			o.republished, o.unverified, o.late, republished, unverified, o.text())
	}
}

const saysLost = "stream has lost messages that it had acknowledged"

// A crash image of the broker's store, taken in the middle of a run and put back:
// what came after it is published again, before what is new, by the relay that runs,
// or by the next one.
func TestMessagesTheBrokerLostArePublishedAgain(t *testing.T) {
	for _, down := range []bool{false, true} {
		t.Run(fmt.Sprintf("relay down=%v", down), func(t *testing.T) {
			inBubble(t, func(r *rig) {
				o := new(observed)
				rel, stop := r.start(r.store, o.config())
				r.fill(1, 50)
				time.Sleep(5 * time.Second)
				r.others(10)
				image := r.image()
				r.fill(51, 120)
				time.Sleep(5 * time.Second)
				r.others(10)
				r.fill(121, 130)
				time.Sleep(5 * time.Second)
				r.wantOnce(130)
				if down {
					stop()
				}
				r.putBack(image, func() { r.fill(131, 150) })
				if down {
					rel, stop = r.start(r.store, o.config())
				}
				time.Sleep(20 * time.Second)
				r.wantOnce(150)
				r.wantHealth(rel, true, "80 rows of stream EVENTS are published again")
				o.want(t, 80, 0)
				if n := strings.Count(o.text(), saysLost); n != 1 {
					t.Errorf("said %d times that messages were lost, want once:\n%s", n, o.text())
				}
				// What is remembered now is what is there.
				r.fill(151, 160)
				time.Sleep(90 * time.Second)
				stop()
				r.wantOnce(160)
				o.want(t, 80, 0)
			})
		})
	}
}
