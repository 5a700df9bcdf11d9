package relay_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// A row of unknown outcome whose subject no stream takes for a while is in doubt when one
// takes it again, also after a restart, and when it was parked meanwhile.
func TestRowWhoseSubjectNoStreamTookForAWhileIsLookedFor(t *testing.T) {
	long(t)
	for name, meanwhile := range map[string]struct {
		attempts int
		f        func(r *rig, restart func())
	}{
		"one relay": {100, func(*rig, func()) {}},
		"restarted": {100, func(_ *rig, restart func()) { restart() }},
		"parked, and retried": {2, func(r *rig, restart func()) {
			r.wantState(1, jetbox.DeadLetter, "gave up")
			restart()
			_, err := r.store.Retry(r.t.Context(), outbox.Filter{})
			r.must(err)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				ctx := r.t.Context()
				cfg := jetstream.StreamConfig{Name: "OTHER", Subjects: []string{"other.>"}}
				st, err := r.admin.CreateStream(ctx, cfg)
				r.must(err)
				r.append(event("other.1", "k", "1"))
				r.crash()
				cfg.Subjects = []string{"elsewhere"}
				_, err = r.admin.UpdateStream(ctx, cfg)
				r.must(err)
				unverified := 0
				c := counted(&unverified)
				c.MaxAttempts, c.MaxBackoff = meanwhile.attempts, 10*time.Second
				_, stop := r.start(r.store, c)
				time.Sleep(beyond)
				cfg.Subjects = []string{"other.>"}
				_, err = r.admin.UpdateStream(ctx, cfg)
				r.must(err)
				meanwhile.f(r, func() {
					stop()
					_, stop = r.start(r.store, c)
				})
				time.Sleep(time.Minute)
				stop()
				r.wantState(1, jetbox.Published, "")
				info, err := st.Info(ctx)
				r.must(err)
				if n := info.State.LastSeq; n != 1 || unverified > 0 {
					t.Errorf("the stream has had %d messages, want 1; %d rows were sent again unverified", n, unverified)
				}
			})
		})
	}
}

// What a relay knew of a row that it could not send says nothing after another relay has
// had it.
func TestRowThatAnotherRelaySentMeanwhileIsLookedFor(t *testing.T) {
	inBubble(t, func(r *rig) {
		ctx := r.t.Context()
		cfg := jetstream.StreamConfig{
			Name: "OTHER", Subjects: []string{"other.>"}, Duplicates: 2 * time.Second, Discard: jetstream.DiscardNew, MaxMsgs: 1,
		}
		st, err := r.admin.CreateStream(ctx, cfg)
		r.must(err)
		_, err = r.admin.Publish(ctx, "other.full", nil)
		r.must(err)
		src := newSharedSource(r, 1)
		_, stop := r.start(src, relay.Config{Lease: 3 * time.Second})
		defer stop()
		r.append(event("other.1", "k", "1"))
		time.Sleep(2 * time.Second)
		r.wantState(1, jetbox.Pending, "maximum messages exceeded")
		src.take(jetbox.Lease{Owner: "other", Holder: "the other", Epoch: 9})

		other := r.open()
		defer other.Close()
		_, stopOther := r.start(other, relay.Config{Lease: 3 * time.Second})
		time.Sleep(20 * time.Second)
		time.Sleep(time.Until(r.show(1).Event.NotBefore) - 100*time.Millisecond)
		cfg.MaxMsgs = -1
		_, err = r.admin.UpdateStream(ctx, cfg)
		r.must(err)
		r.box.Mute(true)
		time.Sleep(9 * time.Second)
		r.box.Mute(false)
		r.box.Cut(false)
		stopOther()
		info, err := st.Info(ctx)
		r.must(err)
		if n := info.State.LastSeq; n != 2 {
			t.Fatalf("the stream has had %d messages, want the row stored", n)
		}
		r.wantState(1, jetbox.Pending, "")
		src.give(1)
		time.Sleep(2 * time.Minute)
		r.wantState(1, jetbox.Published, "")
		if info, err = st.Info(ctx); err != nil || info.State.LastSeq != 2 {
			t.Errorf("the stream has had %d messages, want no second copy (%v)", info.State.LastSeq, err)
		}
	})
}
