package relay_test

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// wantHealth fails unless readiness is as wanted, for the reason.
func (r *rig) wantHealth(rel *relay.Relay, ready bool, reason string) {
	r.t.Helper()
	if h := rel.Health(); h.Ready != ready || !strings.Contains(h.Reason, reason) {
		r.t.Fatalf("health %+v, want ready %v, reason %q", h, ready, reason)
	}
}

// An hour without a broker dead-letters nothing, counts against no row, shows
// within ten seconds and heals within ten more.
func TestHourWithoutBrokerDeadLettersNothing(t *testing.T) {
	long(t)
	inBubble(t, func(r *rig) {
		rel, stop := r.start(r.store, relay.Config{MaxAttempts: 2})
		time.Sleep(5 * time.Second)
		r.wantHealth(rel, true, "")
		r.must(r.srv.Close())
		time.Sleep(10 * time.Second)
		r.wantHealth(rel, false, "broker: nats: server is disconnected")
		var want []string
		for i := range 20 {
			r.append(event("events.a", "k", fmt.Sprint(i)))
			want = append(want, fmt.Sprint(i))
		}
		outage := time.Hour
		if testing.Short() {
			outage = 5 * time.Minute
		}
		time.Sleep(outage)
		r.wantHealth(rel, false, "")
		if e := r.show(1); e.Attempts != 0 || e.State == jetbox.DeadLetter {
			r.t.Fatalf("after the outage: %+v", e)
		}
		r.must(r.srv.Restart(r.t.Context()))
		time.Sleep(10 * time.Second)
		r.wantHealth(rel, true, "")
		r.wantPayloads(want...)
		stop()
	})
}

// Lost PubAcks: the messages are there, the relay cannot know, and the repeat is
// dropped. Nothing is marked without its own PubAck: BR-11, BR-33.
func TestLostPubAcksLeaveOneCopy(t *testing.T) {
	inBubble(t, func(r *rig) {
		rel, stop := r.start(r.store, relay.Config{})
		time.Sleep(time.Second)
		r.box.Mute(true)
		r.append(event("events.a", "k", "1"), event("events.a", "k", "2"), event("events.a", "", "3"))
		time.Sleep(8 * time.Second)
		r.wantHealth(rel, false, "")
		st, err := r.store.Stats(r.t.Context())
		r.must(err)
		if st.Pending != 3 || len(r.stored()) == 0 {
			r.t.Fatalf("while PubAcks are lost: %+v, %d stored", st, len(r.stored()))
		}
		r.box.Mute(false)
		r.box.Cut(false)
		time.Sleep(20 * time.Second)
		stop()
		if got := r.payloads(); len(got) != 3 {
			r.t.Fatalf("stream has %q", got)
		}
		r.wantState(2, jetbox.Published, "")
	})
}

func TestLinkCutTwentyTimesMarksOnlyWhatIsStored(t *testing.T) {
	inBubble(t, func(r *rig) {
		_, stop := r.start(r.store, relay.Config{Batch: 64})
		n := 0
		for range 20 {
			var batch []*jetbox.Event
			for range 100 {
				n++
				batch = append(batch, event("events.a", fmt.Sprint("k", n%7), fmt.Sprint(n)))
			}
			r.append(batch...)
			time.Sleep(time.Duration(n%13) * time.Millisecond)
			r.box.Cut(false)
			time.Sleep(time.Second)
		}
		time.Sleep(time.Minute)
		stop()
		last := make(map[string]int)
		seen := make(map[string]bool)
		for _, m := range r.stored() {
			var i int
			_, err := fmt.Sscan(string(m.Data), &i)
			r.must(err)
			key := m.Header.Get(jetbox.HeaderCEPartitionKey)
			if seen[string(m.Data)] || i < last[key] {
				r.t.Fatalf("%d of key %s after %d, or twice", i, key, last[key])
			}
			last[key], seen[string(m.Data)] = i, true
		}
		if len(seen) != n {
			r.t.Fatalf("%d of %d events are on the stream", len(seen), n)
		}
	})
}

// The configured stream is missing, and a plain subscriber on its subjects makes
// the publish look as if somebody had answered: BR-28.
func TestMissingStreamIsAnOutageWhateverAnswers(t *testing.T) {
	for name, answer := range map[string]string{
		"silent":     "",
		"ok":         "ok",
		"forged ack": `{"stream":"OTHER","seq":7}`,
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				ctx := r.t.Context()
				sub, err := r.admin.Conn().Subscribe("events.>", func(m *nats.Msg) {
					if answer != "" {
						_ = m.Respond([]byte(answer))
					}
				})
				r.must(err)
				rel, stop := r.start(r.store, relay.Config{})
				time.Sleep(time.Second)
				r.must(r.admin.DeleteStream(ctx, "EVENTS")) // known to the relay until now
				var want []string
				for i := range 10 {
					r.append(event("events.a", "k", fmt.Sprint(i)))
					want = append(want, fmt.Sprint(i))
				}
				time.Sleep(20 * time.Second)
				r.wantHealth(rel, false, "stream")
				if e := r.show(1); e.State == jetbox.Published || e.Attempts != 0 {
					r.t.Fatalf("without a stream: %+v", e)
				}
				r.must(sub.Unsubscribe())
				_, err = r.admin.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}})
				r.must(err)
				time.Sleep(20 * time.Second)
				stop()
				r.wantPayloads(want...)
			})
		})
	}
}

// A whole stream full is an outage of that stream: BR-34.
func TestFullStreamIsWaitedFor(t *testing.T) {
	inBubble(t, func(r *rig) {
		ctx := r.t.Context()
		st, err := r.admin.UpdateStream(ctx, jetstream.StreamConfig{
			Name: "EVENTS", Subjects: []string{"events.>"}, MaxMsgs: 30, Discard: jetstream.DiscardNew,
		})
		r.must(err)
		for i := range 60 {
			r.append(event("events.a", fmt.Sprint("k", i%3), fmt.Sprint(i)))
		}
		rel, stop := r.start(r.store, relay.Config{MaxAttempts: 1})
		time.Sleep(time.Minute)
		r.wantHealth(rel, false, "maximum messages exceeded")
		published := r.count("PUBLISHED")
		if n := len(r.stored()); n != 30 || published != 30 || r.count("DEAD_LETTER") != 0 {
			r.t.Fatalf("%d stored, %d marked, %d dead", n, published, r.count("DEAD_LETTER"))
		}
		r.must(st.Purge(ctx))
		time.Sleep(20 * time.Second)
		stop()
		if n := r.count("PUBLISHED"); n != 60 {
			r.t.Fatalf("%d marked after the purge, want 60", n)
		}
	})
}

func (r *rig) count(status string) (n int) {
	r.t.Helper()
	r.must(r.store.DB().QueryRowContext(r.t.Context(), "SELECT count(*) FROM outbox WHERE status = ?", status).Scan(&n))
	return n
}

// When outcomes cannot be recorded nothing more is published, and nothing again:
// BR-12.
func TestNothingIsPublishedWhileNothingCanBeRecorded(t *testing.T) {
	inBubble(t, func(r *rig) {
		var full atomic.Bool
		full.Store(true)
		src := &faultySource{Store: r.store, RecordFunc: func() error {
			if full.Load() {
				return errors.New("database or disk is full")
			}
			return nil
		}}
		for i := range 500 {
			r.append(event("events.a", "", fmt.Sprint(i)))
		}
		published := 0
		rel, stop := r.start(src, relay.Config{Batch: 100, Hooks: relay.Hooks{
			PublishedFunc: func(time.Duration, time.Duration, bool) { published++ },
		}})
		time.Sleep(3 * time.Minute)
		r.wantHealth(rel, false, "cannot record")
		if published != 200 {
			r.t.Fatalf("%d messages were published, want the first batch of 100, and the one that was on its way meanwhile", published)
		}
		full.Store(false)
		time.Sleep(20 * time.Second)
		r.wantHealth(rel, true, "")
		stop()
		if n := len(r.stored()); n != 500 || published != 500 {
			r.t.Fatalf("%d stored, %d published, want 500", n, published)
		}
	})
}

// A relay all of whose rows slept, because another stream was full or the
// permission was missing, said that it was ready.
func TestRelayWhoseRowsAllSleepInAnOutageIsNotReady(t *testing.T) {
	inBubble(t, func(r *rig) {
		ctx := r.t.Context()
		other, err := r.admin.CreateStream(ctx, jetstream.StreamConfig{
			Name: "OTHER", Subjects: []string{"other.>"}, MaxMsgs: 1, Discard: jetstream.DiscardNew,
		})
		r.must(err)
		_, err = r.admin.Publish(ctx, "other.full", nil)
		r.must(err)
		r.append(event("other.a", "", "1"), event("other.a", "k", "2"), event("other.a", "k", "3"))
		rel, stop := r.start(r.store, relay.Config{})
		time.Sleep(time.Second)
		for range 100 {
			time.Sleep(300 * time.Millisecond)
			r.wantHealth(rel, false, "maximum messages exceeded")
		}
		r.append(event("events.a", "", "4"))
		time.Sleep(100 * time.Millisecond)
		r.wantHealth(rel, true, "") // rows flow
		time.Sleep(25 * time.Second)
		r.wantHealth(rel, false, "maximum messages exceeded")
		r.must(other.Purge(ctx))
		r.append(event("events.a", "", "5"))
		_, err = r.admin.UpdateStream(ctx, jetstream.StreamConfig{Name: "OTHER", Subjects: []string{"other.>"}})
		r.must(err)
		time.Sleep(time.Minute)
		r.wantHealth(rel, true, "")
		stop()
		if n := r.count("PUBLISHED"); n != 5 {
			r.t.Fatalf("%d marked, want 5", n)
		}
	})
}
