package relay_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// dying is a source whose relay dies in the middle of a recall, without a word: it
// carries out a part of the first step and nothing after that.
type dying struct {
	*sqlite.Store
	part  int
	steps atomic.Int32
}

var errDied = errors.New("died")

func (d *dying) Recall(ctx context.Context, l jetbox.Lease, stream string, r jetbox.Recall, step jetbox.Recalled) (done bool, err error) {
	if d.steps.Add(1) > 1 {
		return false, errDied
	}
	_, err = d.Store.Recall(ctx, l, stream, r, jetbox.Recalled{Lost: step.Lost[:d.part], Done: r.Done})
	return false, errors.Join(err, errDied)
}

func (d *dying) Release(context.Context, jetbox.Lease) error { return nil }

// A relay that dies in the middle leaves a recall that the next one finishes: no row
// is forgotten, none goes twice, and new ones wait.
func TestRelayThatDiesWhileItPublishesAgainIsSucceeded(t *testing.T) {
	inBubble(t, func(r *rig) {
		o := new(observed)
		_, stop := r.start(r.store, o.config())
		r.fill(1, 10)
		time.Sleep(2 * time.Second)
		image := r.image()
		r.fill(11, 40)
		time.Sleep(2 * time.Second)
		stop()
		r.putBack(image, nil)
		r.fill(41, 45)
		src := &dying{Store: r.store, part: 12}
		rel, stop := r.start(src, o.config())
		time.Sleep(5 * time.Second)
		r.wantHealth(rel, false, "stream: EVENTS has lost messages")
		stop()
		if n := r.count("PENDING"); n != 12+5 || len(r.payloads()) != 10 {
			t.Fatalf("%d rows are pending, the stream has %d messages, want 17, and nothing sent again yet", n, len(r.payloads()))
		}
		rel, stop = r.start(r.store, o.config())
		time.Sleep(20 * time.Second)
		r.wantHealth(rel, true, "30 rows of stream EVENTS are published again")
		stop()
		r.wantOnce(45)
		o.want(t, 18, 0) // the others were counted by who died
	})
}

// More rows than are looked for at once, on a stream that was used by others since,
// and where some of them are again.
func TestManyLostRowsArePublishedAgainInSteps(t *testing.T) {
	if testing.Short() {
		t.Skip("more rows than a step takes are many for the race detector")
	}
	const rows = 20_400
	inBubble(t, func(r *rig) {
		ctx := r.t.Context()
		o := new(observed)
		_, stop := r.start(r.store, o.config())
		r.fill(1, 10)
		time.Sleep(2 * time.Second)
		stop()
		r.exec(`INSERT INTO outbox (subject, payload, aggregate_id, status, stream, stream_seq, published_at)
			WITH RECURSIVE n (i) AS (SELECT 11 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
			SELECT 'events.a', cast(i AS TEXT), CASE WHEN i % 3 = 2 THEN NULL ELSE 'k' || (i % 50) END, 'PUBLISHED', 'EVENTS', i, ? FROM n`,
			rows, time.Now().UnixMilli())
		r.exec(`UPDATE outbox_stream SET (seq, pos, msg_id) = (SELECT id, id, event_id FROM outbox WHERE id = ?)`, rows)
		r.others(30)
		for _, id := range []int64{20, 1234, rows - 3} {
			// Again on the stream, by whoever.
			e := r.show(id).Event
			_, err := r.admin.PublishMsg(ctx, message(e))
			r.must(err)
		}
		rel, stop := r.start(r.store, o.config())
		for range 200 {
			if time.Sleep(time.Second); strings.Contains(rel.Health().Reason, "are published again") && r.count("PENDING") == 0 {
				break
			}
		}
		r.wantHealth(rel, true, fmt.Sprintf("%d rows of stream EVENTS are published again", rows-13))
		stop()
		o.want(t, rows-13, 0)
		// As many messages as rows, each row at one of its own: one copy of each.
		var published, places int
		r.must(r.store.DB().QueryRowContext(ctx, `SELECT count(*), count(DISTINCT stream_seq) FROM outbox WHERE status = 'PUBLISHED'`).
			Scan(&published, &places))
		st, err := r.admin.Stream(ctx, "EVENTS")
		r.must(err)
		if msgs := st.CachedInfo().State.Msgs; published != rows || places != rows || int(msgs) != rows+30 {
			t.Errorf("%d rows are published at %d places, the stream has %d messages; want %d rows and 30 messages of others",
				published, places, msgs, rows)
		}
	})
}

// Rows whose sequence is not known are published again when they were recorded after
// the last one that is there, and counted.
func TestLostRowsWithoutASequenceArePublishedAgain(t *testing.T) {
	inBubble(t, func(r *rig) {
		o := new(observed)
		_, stop := r.start(r.store, o.config())
		r.fill(1, 10)
		time.Sleep(2 * time.Second)
		image := r.image()
		r.fill(11, 20)
		time.Sleep(2 * time.Second)
		stop()
		r.exec(`UPDATE outbox SET stream_seq = NULL WHERE id IN (3, 13, 19)`)
		r.exec(`UPDATE outbox SET stream = NULL, stream_seq = NULL WHERE id = 15`) // nobody knows where that went
		r.putBack(image, nil)
		_, stop = r.start(r.store, o.config())
		time.Sleep(20 * time.Second)
		stop()
		o.want(t, 9, 0)
		seen := make(map[string]int)
		for _, p := range r.payloads() {
			seen[p]++
		}
		for i := range 20 {
			p, want := fmt.Sprint(i+1), 1
			if i+1 == 15 {
				want = 0
			}
			if seen[p] != want {
				t.Errorf("row %s is %d times on the stream, want %d", p, seen[p], want)
			}
		}
	})
}

// What is not retained any more cannot be published again, and that is said.
func TestLostRowsThatAreNotRetainedAreTold(t *testing.T) {
	for name, change := range map[string]func(*relay.Config){
		"deleted at once": func(c *relay.Config) { c.Retention = relay.DeleteAtOnce },
		"archived":        func(c *relay.Config) { c.Archive = true },
		"pruned":          func(c *relay.Config) { c.Retention = 2 * time.Minute },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				o := new(observed)
				cfg := o.config()
				change(&cfg)
				_, stop := r.start(r.store, cfg)
				r.fill(1, 5)
				time.Sleep(2 * time.Second)
				image := r.image()
				r.fill(6, 10)
				time.Sleep(2 * time.Second)
				kept := 0
				if cfg.Retention > 0 {
					time.Sleep(150 * time.Second)
					if n := r.count("PUBLISHED"); n != 0 {
						t.Fatalf("%d rows are not pruned", n)
					}
					r.fill(11, 13)
					kept = 3
					time.Sleep(2 * time.Second)
				}
				stop() // the anchor outlives the relay also where no row does
				r.putBack(image, nil)
				rel, stop := r.start(r.store, cfg)
				time.Sleep(20 * time.Second)
				r.wantHealth(rel, true, fmt.Sprintf("%d rows of stream EVENTS are published again", kept))
				r.wantHealth(rel, true, "may be lost")
				stop()
				if got := len(r.payloads()); got != 5+kept {
					t.Errorf("%d messages are on the stream, want %d", got, 5+kept)
				}
				o.want(t, kept, 0)
				if !strings.Contains(o.text(), "rows that are not retained any more may be lost") {
					t.Errorf("log:\n%s", o.text())
				}
			})
		})
	}
}

// Only the rows of this outbox, and only those of the stream that has lost them, are
// published again.
func TestRowsOfOthersAreLeftAlone(t *testing.T) {
	inBubble(t, func(r *rig) {
		ctx := r.t.Context()
		_, err := r.admin.CreateStream(ctx, jetstream.StreamConfig{Name: "OTHER", Subjects: []string{"other.>"}})
		r.must(err)
		second, err := sqlite.Open(ctx, sqlite.Config{Path: filepath.Join(t.TempDir(), "second.db")})
		r.must(err)
		defer second.Close()
		r.must(second.Migrate(ctx))
		o := new(observed)
		cfg := o.config()
		_, stop := r.start(r.store, cfg)
		_, stopSecond := r.start(second, relay.Config{Source: "second"})
		for range 20 {
			r.append(event("other.a", "k", "x"))
		}
		r.append(event("events.a", "k", "21"))
		time.Sleep(2 * time.Second)
		image := r.image()
		r.fill(22, 26)
		for i := range 5 {
			_, err := second.DB().ExecContext(ctx, `INSERT INTO outbox (subject, payload) VALUES ('events.b', ?)`, fmt.Sprint("second ", i))
			r.must(err)
		}
		time.Sleep(2 * time.Second)
		stopSecond()
		r.putBack(image, nil)
		time.Sleep(20 * time.Second)
		stop()
		if got := r.payloads(); len(got) != 6 {
			t.Errorf("stream has %q, want the six rows of its own outbox, once", got)
		}
		for id := range int64(6) {
			r.wantState(21+id, jetbox.Published, "")
		}
		o.want(t, 5, 0)
		st, err := r.admin.Stream(ctx, "OTHER")
		r.must(err)
		if n := st.CachedInfo().State.Msgs; n != 20 {
			t.Errorf("the other stream has %d messages, want 20", n)
		}
	})
}

// A work queue gives no proof of what was not stored: what it has lost is sent again
// all the same, and counted.
func TestLostRowsOfAWorkQueueArePublishedAgainAndCounted(t *testing.T) {
	inBubble(t, func(r *rig) {
		ctx := r.t.Context()
		r.must(r.admin.DeleteStream(ctx, "EVENTS"))
		st, err := r.admin.CreateStream(ctx, jetstream.StreamConfig{
			Name: "EVENTS", Subjects: []string{"events.>"}, Retention: jetstream.WorkQueuePolicy,
		})
		r.must(err)
		c, err := st.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "worker"})
		r.must(err)
		o := new(observed)
		_, stop := r.start(r.store, o.config())
		r.fill(1, 6)
		time.Sleep(2 * time.Second)
		for range 4 {
			m, err := c.Next()
			r.must(err)
			r.must(m.DoubleAck(ctx))
		}
		time.Sleep(time.Second)
		image := r.image()
		r.fill(7, 10)
		time.Sleep(2 * time.Second)
		r.putBack(image, nil)
		time.Sleep(10 * time.Second)
		stop()
		got := r.payloads()
		if slices.Sort(got[2:]); len(got) != 6 || !slices.Equal(got[2:], []string{"10", "7", "8", "9"}) {
			t.Errorf("stream has %q, want what was not handled and what was lost, once", got)
		}
		o.want(t, 4, 4)
	})
}

// Lost a second time, before anything new and after, rows are published a third.
func TestBrokerThatLosesAgainIsHealedAgain(t *testing.T) {
	inBubble(t, func(r *rig) {
		o := new(observed)
		_, stop := r.start(r.store, o.config())
		r.fill(1, 5)
		time.Sleep(2 * time.Second)
		image := r.image()
		r.fill(6, 20)
		time.Sleep(2 * time.Second)
		r.putBack(image, nil)
		r.wantOnce(20)
		r.putBack(image, nil)
		r.fill(21, 25)
		time.Sleep(2 * time.Second)
		r.putBack(image, nil)
		time.Sleep(5 * time.Second)
		stop()
		r.wantOnce(25)
		o.want(t, 15+15+20, 0)
	})
}

// A broker that loses still more while what it has lost is published again.
func TestBrokerThatLosesMoreMeanwhileIsHealed(t *testing.T) {
	inBubble(t, func(r *rig) {
		o := new(observed)
		_, stop := r.start(r.store, o.config())
		r.fill(1, 5)
		time.Sleep(2 * time.Second)
		older := r.image()
		r.fill(6, 10)
		time.Sleep(2 * time.Second)
		newer := r.image()
		r.fill(11, 20)
		time.Sleep(2 * time.Second)
		stop()
		r.putBack(newer, nil)
		_, stop = r.start(&dying{Store: r.store, part: 4}, o.config())
		time.Sleep(5 * time.Second)
		stop()
		r.putBack(older, nil)
		_, stop = r.start(r.store, o.config())
		time.Sleep(30 * time.Second)
		stop()
		r.wantOnce(20)
		o.want(t, 11, 0)
	})
}

// reading is a JetStream that says when a look has begun to read a stream.
type reading struct {
	jetstream.JetStream
	once  sync.Once
	begun func()
}

func (h *reading) CreateConsumer(ctx context.Context, stream string, cfg jetstream.ConsumerConfig) (jetstream.Consumer, error) {
	c, err := h.JetStream.CreateConsumer(ctx, stream, cfg)
	if err == nil {
		h.once.Do(h.begun)
	}
	return c, err
}

// A broker that loses, while rows are looked for, some of what was read already, but
// nothing that the look began after: the rows are looked for again.
func TestBrokerThatLosesWhatWasReadMeanwhileIsHealed(t *testing.T) {
	for _, recreated := range []bool{false, true} {
		t.Run(fmt.Sprintf("recreated=%v", recreated), func(t *testing.T) {
			inBubble(t, func(r *rig) {
				ctx := r.t.Context()
				o := new(observed)
				cfg := o.config()
				cfg.OnRecreated = relay.Republish
				_, stop := r.start(r.store, cfg)
				r.fill(1, 5)
				time.Sleep(2 * time.Second)
				image := r.image()
				r.fill(6, 20)
				time.Sleep(2 * time.Second)
				stop()
				lost := 15
				if recreated {
					lost = 20
					r.must(r.admin.DeleteStream(ctx, "EVENTS"))
					time.Sleep(time.Second) // its files are removed
					_, err := r.admin.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}})
					r.must(err)
				} else {
					r.putBack(image, nil)
				}
				r.others(50)
				image = r.image()
				r.others(3000)
				done := make(chan struct{})
				r.js = &reading{JetStream: r.js, begun: func() {
					r.box.Delay(time.Millisecond)
					go func() {
						defer close(done)
						time.Sleep(100 * time.Millisecond)
						r.putBack(image, nil)
						r.box.Delay(0)
					}()
				}}
				_, stop = r.start(r.store, cfg)
				<-done
				time.Sleep(time.Minute)
				stop()
				r.wantOnce(20)
				o.want(t, lost, 0)
			})
		})
	}
}

// What is told of the stream to later claims is of the stream as it is now: rows whose
// PubAcks are lost after that are looked for where they are.
func TestLostPubAcksAfterLostMessagesLeaveOneCopy(t *testing.T) {
	inBubble(t, func(r *rig) {
		o := new(observed)
		_, stop := r.start(r.store, o.config())
		r.fill(1, 5)
		time.Sleep(2 * time.Second)
		image := r.image()
		r.others(50)
		r.fill(6, 10)
		time.Sleep(2 * time.Second)
		r.putBack(image, nil)
		time.Sleep(5 * time.Second)
		r.wantOnce(10)
		r.box.Mute(true)
		r.fill(11, 13)
		time.Sleep(3 * time.Minute)
		r.box.Mute(false)
		r.box.Cut(false)
		time.Sleep(time.Minute)
		stop()
		r.wantOnce(13)
		o.want(t, 5, 0)
	})
}
