package relay

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// anchored publishes a message to hold on to, and one behind it.
func (r *lookRig) anchored() anchor {
	r.t.Helper()
	r.others(5)
	a := anchor{Stream: "S", Created: r.now().Created, Seq: r.publish("a", "key-a"), MsgID: "key-a"}
	r.others(2)
	return a
}

func (r *lookRig) wantAnchor(a anchor, want verdict) {
	r.t.Helper()
	got, err := checkAnchor(r.t.Context(), r.js, a)
	r.must(err)
	if got != want {
		r.t.Fatalf("anchor is %s, want %s", got, want)
	}
}

// What a person, a limit or a consumer removed is not lost, however little is left.
func TestRemovedAnchorIsNotLost(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg    func(*jetstream.StreamConfig)
		change func(r *lookRig, a anchor)
		want   verdict
	}{
		"nothing happened": {want: anchorIntact},
		"purged": {
			change: func(r *lookRig, _ anchor) { r.must(r.stream().Purge(r.t.Context())) }, want: anchorRemoved,
		},
		"purged up to it": {change: func(r *lookRig, a anchor) {
			r.must(r.stream().Purge(r.t.Context(), jetstream.WithPurgeSequence(a.Seq)))
		}, want: anchorIntact},
		"purged by subject": {change: func(r *lookRig, _ anchor) {
			r.must(r.stream().Purge(r.t.Context(), jetstream.WithPurgeSubject("s.a")))
		}, want: anchorRemoved},
		"deleted": {change: func(r *lookRig, a anchor) {
			r.must(r.stream().DeleteMsg(r.t.Context(), a.Seq))
		}, want: anchorRemoved},
		"last one deleted": {change: func(r *lookRig, a anchor) {
			for seq := a.Seq; seq <= r.now().Seq; seq++ {
				r.must(r.stream().SecureDeleteMsg(r.t.Context(), seq))
			}
		}, want: anchorRemoved},
		"aged": {
			cfg:    func(c *jetstream.StreamConfig) { c.MaxAge = time.Hour },
			change: func(*lookRig, anchor) { time.Sleep(2 * time.Hour) }, want: anchorRemoved,
		},
		"above a limit": {
			cfg: func(c *jetstream.StreamConfig) { c.MaxMsgs = 1 }, want: anchorRemoved,
		},
		"handled": {
			cfg: func(c *jetstream.StreamConfig) { c.Retention = jetstream.WorkQueuePolicy },
			change: func(r *lookRig, _ anchor) {
				c, err := r.stream().CreateConsumer(r.t.Context(), jetstream.ConsumerConfig{Durable: "worker"})
				r.must(err)
				for range 8 {
					m, err := c.Next()
					r.must(err)
					r.must(m.DoubleAck(r.t.Context()))
				}
			}, want: anchorRemoved,
		},
		"nobody was interested": {
			cfg: func(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy }, want: anchorRemoved,
		},
		"recreated": {change: func(r *lookRig, _ anchor) {
			r.must(r.admin.DeleteStream(r.t.Context(), "S"))
			time.Sleep(time.Second)
			r.create(lookStream())
		}, want: anchorRecreated},
		"missing": {change: func(r *lookRig, _ anchor) {
			r.must(r.admin.DeleteStream(r.t.Context(), "S"))
		}, want: anchorMissing},
	} {
		t.Run(name, func(t *testing.T) {
			withLook(t, func(t *testing.T, r *lookRig) {
				a := r.anchored()
				if tt.change != nil {
					tt.change(r, a)
				}
				r.wantAnchor(a, tt.want)
				if tt.want == anchorMissing || tt.want == anchorRecreated {
					return
				}
				// What a server knows of its sequences it knows after a restart too.
				r.must(r.srv.Close())
				r.must(r.srv.Restart(t.Context()))
				time.Sleep(5 * time.Second)
				r.wantAnchor(a, tt.want)
			}, lookStream(func(c *jetstream.StreamConfig) {
				if tt.cfg != nil {
					tt.cfg(c)
				}
			}))
		})
	}
}

// A store brought back from an older copy is a broker that lost what it had
// acknowledged: before others have used the sequences again, and after.
func TestAnchorIsLostWithAnOlderCopyOfTheStore(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		r.others(5)
		r.must(r.srv.Close())
		backup := t.TempDir()
		r.must(os.CopyFS(backup, os.DirFS(r.srv.Dir())))
		r.must(r.srv.Restart(t.Context()))
		time.Sleep(5 * time.Second)
		a := anchor{Stream: "S", Created: r.now().Created, Seq: r.publish("a", "key-a"), MsgID: "key-a"}
		r.wantAnchor(a, anchorIntact)

		r.must(r.srv.Close())
		const store = "jetstream"
		r.must(os.RemoveAll(filepath.Join(r.srv.Dir(), store)))
		r.must(os.CopyFS(filepath.Join(r.srv.Dir(), store), os.DirFS(filepath.Join(backup, store))))
		r.must(r.srv.Restart(t.Context()))
		time.Sleep(5 * time.Second)
		if got := r.now(); got.Seq != 5 || !got.Created.Equal(a.Created) {
			t.Fatalf("the copy has %+v, want 5 messages of the same stream", got)
		}
		start := time.Now()
		r.wantAnchor(a, anchorLost)
		if time.Since(start) < anchorPause {
			t.Fatal("said after one look")
		}
		r.others(1)
		r.wantAnchor(a, anchorLost)
		r.others(10)
		r.wantAnchor(a, anchorLost)
		// Published again it has another sequence, which is the next anchor.
		a.Seq = r.publish("a", "key-a")
		r.wantAnchor(a, anchorIntact)
	}, lookStream())
}

// Bad news that is not there any more at the second look was none.
func TestAnchorMissedOnceIsNotLost(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		r.others(5)
		a := anchor{Stream: "S", Created: r.now().Created, Seq: 6, MsgID: "key-a"}
		time.AfterFunc(anchorPause/2, func() {
			_, _ = r.admin.PublishMsg(context.Background(), eventMsg("s.a", "a", "key-a"))
		})
		r.wantAnchor(a, anchorIntact)
	}, lookStream())
}

// Without an answer nothing is said.
func TestAnchorIsNotLostWhileTheBrokerIsAway(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		a := r.anchored()
		r.box.Cut(true)
		if v, err := checkAnchor(t.Context(), r.js, a); err == nil || classify(err) != classOutage {
			t.Fatalf("checkAnchor() = %s, %v, want an outage", v, err)
		}
	}, lookStream())
}
