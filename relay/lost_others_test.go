package relay_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// unled is a JetStream of which the streams with a prefix have no leader for a while.
type unled struct {
	jetstream.JetStream
	prefix string
	away   atomic.Bool
}

func (u *unled) Stream(ctx context.Context, name string) (jetstream.Stream, error) {
	if strings.HasPrefix(name, u.prefix) && u.away.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return u.JetStream.Stream(ctx, name)
}

// lostOther creates a stream beside the configured one that has lost rows 3 to 5 of five.
// Whoever else publishes there has sent more.
func (r *rig) lostOther(more int) jetstream.Stream {
	r.t.Helper()
	ctx := r.t.Context()
	st, err := r.admin.CreateStream(ctx, jetstream.StreamConfig{Name: "OTHER", Subjects: []string{"other.>"}})
	r.must(err)
	for i := 1; i <= 5; i++ {
		r.append(event("other.a", "k", fmt.Sprint(i)))
		e := r.show(int64(i)).Event
		if i <= 2 {
			_, err := r.admin.PublishMsg(ctx, message(e))
			r.must(err)
		}
		r.exec(`UPDATE outbox SET status = 'PUBLISHED', stream = 'OTHER', stream_seq = id, published_at = ? WHERE id = ?`, time.Now().UnixMilli(), i)
	}
	r.anchor(st.CachedInfo().Created, 5, r.show(5).Event.ID)
	time.Sleep(time.Minute)
	for range more {
		_, err := r.admin.Publish(ctx, "other.b", nil)
		r.must(err)
	}
	return st
}

// anchor is what the outbox remembers of the other stream.
func (r *rig) anchor(created time.Time, seq int, msgID string) {
	r.t.Helper()
	r.exec(`INSERT INTO outbox_stream (stream, created, seq, msg_id, pos, at) VALUES ('OTHER', ?, ?, ?, 5, ?)`,
		created.UTC().Format(time.RFC3339Nano), seq, msgID, time.Now().UnixMilli())
}

// copies is how many messages each row has on the other stream.
func (r *rig) copies(st jetstream.Stream) map[string]int {
	r.t.Helper()
	info, err := st.Info(r.t.Context())
	r.must(err)
	n := make(map[string]int)
	for seq := uint64(1); seq <= info.State.LastSeq; seq++ {
		m, err := st.GetMsg(r.t.Context(), seq)
		r.must(err)
		if m.Subject == "other.a" {
			n[string(m.Data)]++
		}
	}
	return n
}

// A stream that cannot be asked at first, and grows past what it has lost before it
// can: that is noticed all the same.
func TestLossOnOtherStreamThatCouldNotBeAskedIsNoticed(t *testing.T) {
	for name, others := range map[string]int{"it grows while it cannot be asked": 0, "it has grown before": 10} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				st := r.lostOther(others)
				js := &unled{JetStream: r.js, prefix: "OTHER"}
				js.away.Store(true)
				r.js = js
				o := new(observed)
				rel, stop := r.start(r.store, o.config())
				r.append(event("events.a", "k", "x"))
				time.Sleep(8 * time.Second)
				r.wantHealth(rel, true, "whether stream OTHER has lost messages cannot be told")
				r.wantPayloads("x")
				js.away.Store(false)
				for i := 7; i <= 12; i++ {
					r.append(event("other.a", "k", fmt.Sprint(i)))
					time.Sleep(300 * time.Millisecond)
				}
				time.Sleep(30 * time.Second)
				for i := 13; i <= 15; i++ {
					r.append(event("other.a", "k", fmt.Sprint(i)))
				}
				time.Sleep(2 * time.Minute)
				stop()
				got := r.copies(st)
				for i := 1; i <= 15; i++ {
					if n := got[fmt.Sprint(i)]; i != 6 && n != 1 {
						t.Errorf("row %d is %d times on its stream, want once", i, n)
					}
				}
				o.want(t, 3, 0)
			})
		})
	}
}

// between is a source that does something before a claim.
type between struct {
	*sqlite.Store
	armed atomic.Bool
	do    func()
}

func (b *between) Claim(ctx context.Context, l jetbox.Lease, ask jetbox.Ask) ([]jetbox.Row, error) {
	if b.armed.CompareAndSwap(true, false) {
		b.do()
	}
	return b.Store.Claim(ctx, l, ask)
}

// A broker that loses messages just before a claim, on a stream that others fill up
// again at once: what the claim sends does not hide that.
func TestLossJustBeforeAClaimIsNoticed(t *testing.T) {
	inBubble(t, func(r *rig) {
		o := new(observed)
		src := &between{Store: r.store}
		_, stop := r.start(src, o.config())
		r.fill(1, 5)
		time.Sleep(2 * time.Second)
		image := r.image()
		r.fill(6, 10)
		time.Sleep(2 * time.Second)
		src.do = func() {
			r.putBack(image, nil)
			r.others(10)
			r.fill(11, 12)
		}
		src.armed.Store(true)
		time.Sleep(20 * time.Second)
		r.wantEach(12, false)
		stop()
		o.want(t, 5, 0)
	})
}

// A batch that was on the wire while something was in doubt is what the stream should
// have as soon as that is cleared up.
func TestLossOfABatchSentInDoubtIsNoticed(t *testing.T) {
	inBubble(t, func(r *rig) {
		o := new(observed)
		src := &between{Store: r.store}
		_, stop := r.start(src, o.config())
		r.fill(1, 5)
		time.Sleep(2 * time.Second)
		image := r.image()
		src.do = func() {
			r.box.Cut(true)
			time.Sleep(time.Second)
			r.box.Cut(false)
			time.Sleep(5 * time.Second)
			r.fill(6, 10)
		}
		src.armed.Store(true)
		time.Sleep(20 * time.Second)
		stop()
		r.putBack(image, nil)
		r.others(20)
		_, stop = r.start(r.store, o.config())
		time.Sleep(20 * time.Second)
		r.wantEach(10, false)
		stop()
		o.want(t, 5, 0)
	})
}

// A recall of a stream that is deleted meanwhile holds up no other one.
func TestRecallOfADeletedStreamHoldsUpNothing(t *testing.T) {
	inBubble(t, func(r *rig) {
		st := r.lostOther(0)
		text, err := json.Marshal(jetbox.Recall{Number: 7, After: 2, Done: math.MinInt64})
		r.must(err)
		r.exec(`UPDATE outbox_stream SET seq = 2, msg_id = ?, pos = 2, recall = ?`, r.show(2).Event.ID, string(text))
		r.must(r.admin.DeleteStream(r.t.Context(), st.CachedInfo().Config.Name))
		o := new(observed)
		rel, stop := r.start(r.store, o.config())
		r.append(event("events.a", "k", "x"))
		time.Sleep(10 * time.Second)
		r.wantPayloads("x")
		r.wantHealth(rel, true, "stream OTHER has lost messages, and what is retained of them cannot be published again")
		stop()
		o.want(t, 0, 0)
	})
}

// A recall of a stream without a leader holds up no other one for long, and begins anew
// when it has one, also by another relay.
func TestRecallOfAStreamWithoutALeaderIsPutOff(t *testing.T) {
	inBubble(t, func(r *rig) {
		st := r.lostOther(0)
		text, err := json.Marshal(jetbox.Recall{Number: 7, After: 2, Done: math.MinInt64})
		r.must(err)
		r.exec(`UPDATE outbox_stream SET seq = 2, msg_id = ?, pos = 2, recall = ?`, r.show(2).Event.ID, string(text))
		js := &unled{JetStream: r.js, prefix: "OTHER"}
		js.away.Store(true)
		r.js = js
		o := new(observed)
		_, stop := r.start(r.store, o.config())
		r.append(event("events.a", "k", "x"))
		time.Sleep(time.Minute)
		r.wantPayloads("x")
		stop()
		_, stop = r.start(r.store, o.config())
		time.Sleep(time.Minute)
		js.away.Store(false)
		time.Sleep(2 * time.Minute)
		stop()
		if got := r.copies(st); len(got) != 5 {
			t.Errorf("the stream has rows %v, want five", got)
		}
		o.want(t, 3, 0)
	})
}

// What another stream has kept cannot be read: that it has lost something is told, and
// the others go on.
func TestLossOnOtherStreamThatMayNotBeReadHoldsUpNothing(t *testing.T) {
	inDenied(t, jetstream.StreamConfig{}, []string{"$JS.API.STREAM.MSG.GET.OTHER"}, func(r *rig, grant func()) {
		st := r.lostOther(0)
		rel, stop := r.start(r.store, relay.Config{})
		r.append(event("events.a", "k", "x"))
		time.Sleep(20 * time.Second)
		r.wantPayloads("x")
		r.wantHealth(rel, true, "stream OTHER has lost messages that it had acknowledged")
		grant()
		time.Sleep(2 * time.Minute)
		stop()
		if got := r.copies(st); len(got) != 5 {
			t.Errorf("the stream has rows %v, want five", got)
		}
	})
}

// Streams that are gone, or out of reach, cost what is published elsewhere little time.
func TestManyStreamsThatAreGoneHoldUpNothing(t *testing.T) {
	for _, away := range []bool{false, true} {
		t.Run(fmt.Sprintf("out of reach=%v", away), func(t *testing.T) {
			inBubble(t, func(r *rig) {
				for i := range 60 {
					r.exec(`INSERT INTO outbox_stream (stream, created, seq, msg_id, pos, at) VALUES (?, '2026-01-01T00:00:00Z', 7, 'x', 1, 1)`,
						fmt.Sprint("GONE", i))
				}
				js := &unled{JetStream: r.js, prefix: "GONE"}
				js.away.Store(away)
				r.js = js
				_, stop := r.start(r.store, relay.Config{})
				var want []string
				for i := range 6 {
					want = append(want, fmt.Sprint(i))
					r.append(event("events.a", "k", want[i]))
					time.Sleep(6 * time.Second)
					r.wantPayloads(want...)
				}
				stop()
			})
		})
	}
}
