package relay_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// faultySource is a store whose calls fail or hang on request.
type faultySource struct {
	*sqlite.Store

	// RecordFunc, when set, runs before Record, with its error instead if there
	// is one. HangFunc runs before Acquire, Claim and Record, RenewFunc before
	// Acquire alone.
	RecordFunc func() error
	HangFunc   func()
	RenewFunc  func()

	// ClaimedFunc runs after a Claim that found something.
	ClaimedFunc func()
}

func (f *faultySource) hang() {
	if f.HangFunc != nil {
		f.HangFunc()
	}
}

func (f *faultySource) Acquire(ctx context.Context, c jetbox.Candidate) (jetbox.Lease, error) {
	f.hang()
	if f.RenewFunc != nil {
		f.RenewFunc()
	}
	return f.Store.Acquire(ctx, c)
}

func (f *faultySource) Claim(ctx context.Context, l jetbox.Lease, ask jetbox.Ask) ([]jetbox.Row, error) {
	f.hang()
	rows, err := f.Store.Claim(ctx, l, ask)
	if f.ClaimedFunc != nil && len(rows) > 0 {
		f.ClaimedFunc()
	}
	return rows, err
}

func (f *faultySource) Record(ctx context.Context, l jetbox.Lease, outcomes []jetbox.Outcome) error {
	f.hang()
	if f.RecordFunc != nil {
		if err := f.RecordFunc(); err != nil {
			return err
		}
	}
	return f.Store.Record(ctx, l, outcomes)
}

// Crash table: after the PubAck, before the record. The next relay sends again
// under the same message ID, and the broker has one message.
func TestCrashAfterPubAckRepublishesAsDuplicate(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.append(event("events.a", "k", "1"), event("events.a", "k", "2"), event("events.a", "", "3"))
		src := &faultySource{Store: r.store, RecordFunc: func() error { return errors.New("crashed") }}
		_, stop := r.start(src, relay.Config{DrainTimeout: time.Second})
		time.Sleep(time.Second)
		stop()
		if n := len(r.stored()); n != 3 {
			r.t.Fatalf("stream has %d messages before the restart, want 3", n)
		}
		r.wantState(1, jetbox.Processing, "")
		duplicates := 0
		_, stop = r.start(r.store, relay.Config{Hooks: relay.Hooks{
			PublishedFunc: func(_, _ time.Duration, duplicate bool) {
				if duplicate {
					duplicates++
				}
			},
		}})
		time.Sleep(15 * time.Second)
		stop()
		if duplicates != 3 {
			r.t.Fatalf("%d duplicates, want 3", duplicates)
		}
		got := r.payloads()
		slices.Sort(got)
		if !slices.Equal(got, []string{"1", "2", "3"}) {
			r.t.Fatalf("stream has %q", got)
		}
		r.wantState(1, jetbox.Published, "")
	})
}

// A relay that slept past its lease and wakes up changes nothing and sends
// nothing: BR-10.
func TestSleeperThatLostItsLeaseChangesNothing(t *testing.T) {
	inBubble(t, func(r *rig) {
		for i := range 50 {
			subject := "events.a"
			if i%5 == 4 {
				subject = "nowhere.a" // parked after one attempt
			}
			r.append(event(subject, "", fmt.Sprint(i)))
		}
		var asleep atomic.Bool
		awake := make(chan struct{})
		src := &faultySource{Store: r.store}
		src.HangFunc = func() {
			if asleep.Load() {
				<-awake
			}
		}
		// The first relay has published everything, sleeps before it records, and
		// from then on in every call.
		src.RecordFunc = func() error { asleep.Store(true); <-awake; return nil }
		_, stopA := r.start(src, relay.Config{Lease: 5 * time.Second, MaxAttempts: 1})
		time.Sleep(time.Second)

		other := r.open()
		defer other.Close()
		_, stopB := r.start(other, relay.Config{Lease: 5 * time.Second, MaxAttempts: 1})
		time.Sleep(8 * time.Second)
		before := r.dump()
		if st, _ := r.store.Stats(r.t.Context()); st.Pending != 0 || st.DeadLetter != 10 {
			r.t.Fatalf("the second relay did not finish within lease and poll: %+v", st)
		}
		close(awake)
		time.Sleep(20 * time.Second)
		if after := r.dump(); after != before {
			r.t.Fatalf("the sleeper changed the outbox:\n%s\n%s", before, after)
		}
		stopA()
		stopB()
		if n := len(r.stored()); n != 40 {
			r.t.Fatalf("stream has %d messages, want 40", n)
		}
	})
}

// A batch of one key over a slow link took minutes, and all that time what had
// been acknowledged was not recorded: a crash then was beyond the stream's
// duplicate window.
func TestHotKeyOverASlowLinkIsRecordedOnTheWay(t *testing.T) {
	inBubble(t, func(r *rig) {
		const rows = 300
		for i := range rows {
			r.append(event("events.a", "k", fmt.Sprint(i)))
		}
		r.box.Delay(500 * time.Millisecond)
		const lease = 10 * time.Second
		_, stop := r.start(r.store, relay.Config{Lease: lease})
		for range 4 {
			time.Sleep(15 * time.Second)
			st, err := r.store.Stats(r.t.Context())
			r.must(err)
			stored, recorded := len(r.stored()), rows-int(st.Pending)
			if most := int(lease/(500*time.Millisecond)) + 2; stored-recorded > most {
				r.t.Fatalf("stream has %d messages, %d are recorded: want at most %d in between", stored, recorded, most)
			}
		}
		r.box.Delay(0)
		time.Sleep(15 * time.Second)
		stop()
		r.wantState(rows, jetbox.Published, "")
	})
}

// slowGrant is a store whose first lease is known to its relay only after a time.
type slowGrant struct {
	*faultySource
	wait time.Duration
}

func (s *slowGrant) Acquire(ctx context.Context, c jetbox.Candidate) (jetbox.Lease, error) {
	l, err := s.faultySource.Acquire(ctx, c)
	time.Sleep(s.wait)
	s.wait = 0
	return l, err
}

// A relay that heard late of its first lease took it for a whole one, and sent
// beside the relay that had taken over.
func TestLeaseHeardOfLateIsShorter(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.append(event("events.a", "", "1"))
		const lease = 5 * time.Second
		src := &slowGrant{&faultySource{Store: r.store}, lease - time.Second}
		src.ClaimedFunc = func() { time.Sleep(1300 * time.Millisecond) } // past the end, before the renewal
		sent := 0
		_, stopA := r.start(src, relay.Config{Lease: lease, Hooks: relay.Hooks{
			PublishedFunc: func(time.Duration, time.Duration, bool) { sent++ },
		}})
		other := r.open()
		defer other.Close()
		_, stopB := r.start(other, relay.Config{Lease: lease, PollInterval: 100 * time.Millisecond})
		time.Sleep(2 * lease)
		stopA()
		stopB()
		if sent != 0 {
			r.t.Fatalf("the relay without a lease sent %d messages", sent)
		}
		r.wantState(1, jetbox.Published, "")
	})
}

func (r *rig) dump() string {
	r.t.Helper()
	var s string
	for e, err := range r.store.List(r.t.Context(), outbox.Filter{}) {
		r.must(err)
		s += fmt.Sprintf("%+v\n", e)
	}
	return s
}

// A clean stop gives the lease back, a healthy standby is ready and takes over
// at once; after a crash it takes over within the lease and a poll.
func TestStandbyTakesOver(t *testing.T) {
	inBubble(t, func(r *rig) {
		_, stopA := r.start(r.store, relay.Config{})
		time.Sleep(time.Second)
		other := r.open()
		defer other.Close()
		b, stopB := r.start(other, relay.Config{})
		time.Sleep(time.Minute)
		if h := b.Health(); h.Role != relay.RoleStandby || !h.Ready || h.Reason == "" {
			r.t.Fatalf("standby: %+v", h)
		}
		stopA()
		time.Sleep(time.Second)
		if h := b.Health(); h.Role != relay.RoleActive || !h.Ready {
			r.t.Fatalf("a second after the clean stop of the other: %+v", h)
		}
		stopB()

		// A relay that died: somebody holds the lease and never renews it.
		l, err := r.store.Acquire(r.t.Context(), jetbox.Candidate{Owner: "dead", Length: 10 * time.Second})
		r.must(err)
		if !l.Held {
			r.t.Fatalf("lease after clean stops: %+v", l)
		}
		r.append(event("events.a", "", "x"))
		_, stop := r.start(r.store, relay.Config{})
		defer stop()
		time.Sleep(9 * time.Second)
		r.wantPayloads()
		time.Sleep(2 * time.Second)
		r.wantPayloads("x")
	})
}

// A relay whose renewals do not come back sends nothing past the end of its lease,
// although its claims would still succeed, and says that it is not ready.
func TestNothingIsSentPastTheLease(t *testing.T) {
	inBubble(t, func(r *rig) {
		var block atomic.Bool
		src := &faultySource{Store: r.store}
		src.RenewFunc = func() {
			for block.Load() {
				time.Sleep(time.Second)
			}
		}
		rel, stop := r.start(src, relay.Config{Lease: 3 * time.Second})
		time.Sleep(time.Second)
		block.Store(true)
		time.Sleep(5 * time.Second)
		r.append(event("events.a", "k", "late"))
		time.Sleep(10 * time.Second)
		r.wantPayloads()
		r.wantHealth(rel, false, "lease has ended")
		block.Store(false)
		time.Sleep(10 * time.Second)
		r.wantPayloads("late") // nobody took the lease: it was renewed
		r.wantHealth(rel, true, "")
		stop()
	})
}

// Another event under the same key is a collision,
// not a duplicate: it must not be lost without a word.
func TestKeyOfAnotherEventIsParkedNotLost(t *testing.T) {
	inBubble(t, func(r *rig) {
		_, err := r.admin.Publish(r.t.Context(), "events.a", []byte("theirs"), jetstream.WithMsgID("key-1"))
		r.must(err)
		other := &jetbox.Event{ID: "other", Key: "key-2", Subject: "events.a"}
		r.append(&jetbox.Event{Key: "key-1", Subject: "events.a", Payload: []byte("no ce-id there: cannot tell")}, other)
		_, stop := r.start(r.store, relay.Config{})
		time.Sleep(2 * time.Second)
		r.wantState(1, jetbox.Published, "") // a message without an event ID is taken for ours
		r.exec("DELETE FROM outbox")
		r.append(&jetbox.Event{ID: "mine", Key: "key-2", Subject: "events.a", Payload: []byte("mine")})
		time.Sleep(2 * time.Second)
		stop()
		r.wantState(3, jetbox.DeadLetter, `idempotency key "key-2" is taken: message 2 of stream EVENTS carries event other`)
	})
}
