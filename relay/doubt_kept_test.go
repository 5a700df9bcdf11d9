package relay_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// beyond is longer than the broker remembers message IDs.
const beyond = 10 * time.Minute

// counted counts what a relay sends again without proof.
func counted(unverified *int) relay.Config {
	return relay.Config{Batch: 5, Hooks: relay.Hooks{UnverifiedFunc: func() { *unverified++ }}}
}

// crash has a relay store two batches and die before it records one of them.
func (r *rig) crash() {
	r.t.Helper()
	src := &faultySource{Store: r.store, RecordFunc: func() error { return errors.New("crashed") }}
	_, stop := r.start(src, relay.Config{Batch: 5, DrainTimeout: time.Second})
	time.Sleep(2 * time.Second)
	stop()
}

// numbers appends so many rows to a subject, and returns their payloads.
func (r *rig) numbers(subject, key string, n int) (payloads []string) {
	r.t.Helper()
	for i := range n {
		p := fmt.Sprint(subject, " ", i)
		r.append(event(subject, key, p))
		payloads = append(payloads, p)
	}
	return payloads
}

// Rows of unknown outcome that a relay claims and does not come to were given back as
// if nobody had ever sent them: the next one sent them without a look, and those that
// the broker had forgotten a second time.
func TestRowsOfUnknownOutcomeAreNotForgottenByWhoDoesNotSendThem(t *testing.T) {
	for name, idle := range map[string]func(r *rig){
		"the broker is away": func(r *rig) {
			r.box.Cut(true)
			_, stop := r.start(r.store, relay.Config{Batch: 5})
			time.Sleep(30 * time.Second)
			stop()
			r.box.Cut(false)
		},
		"it is stopped while it looks": func(r *rig) {
			r.box.Hold(true)
			_, stop := r.start(r.store, relay.Config{Batch: 5, DrainTimeout: time.Second})
			time.Sleep(15 * time.Second)
			stop()
			r.box.Hold(false)
			time.Sleep(5 * time.Second)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				want := r.numbers("events.a", "k", 10)
				r.crash()
				r.wantPayloads(want...)
				time.Sleep(beyond)
				idle(r)
				unverified := 0
				_, stop := r.start(r.store, counted(&unverified))
				time.Sleep(time.Minute)
				stop()
				r.wantPayloads(want...)
				r.wantState(10, jetbox.Published, "")
				if unverified > 0 {
					t.Errorf("%d rows were sent again unverified", unverified)
				}
			})
		})
	}
}

// A row that another stream takes than the configured one is looked for there, also
// when that stream was not known at the time of the claim.
func TestRowsOfAnotherStreamAreLookedForThere(t *testing.T) {
	inBubble(t, func(r *rig) {
		st, err := r.admin.CreateStream(r.t.Context(), jetstream.StreamConfig{Name: "OTHER", Subjects: []string{"other.>"}})
		r.must(err)
		for range 300 {
			_, err := r.admin.Publish(r.t.Context(), "other.before", nil)
			r.must(err)
		}
		time.Sleep(beyond)
		r.numbers("other.a", "k", 5)
		r.numbers("events.a", "k", 5)
		r.crash()
		time.Sleep(beyond)
		for range 300 {
			_, err := r.admin.Publish(r.t.Context(), "other.after", nil)
			r.must(err)
		}
		unverified := 0
		_, stop := r.start(r.store, counted(&unverified))
		time.Sleep(time.Minute)
		stop()
		info, err := st.Info(r.t.Context())
		r.must(err)
		if n := info.State.LastSeq; n != 605 || unverified > 0 {
			t.Errorf("the other stream has %d messages, want 605; %d rows were sent again unverified", n, unverified)
		}
		for id := range int64(10) {
			r.wantState(id+1, jetbox.Published, "")
		}
		if e := r.show(1); e.Stream != "OTHER" || e.StreamSeq != 301 {
			t.Errorf("the first row is at %d of stream %s, want 301 of OTHER", e.StreamSeq, e.Stream)
		}
	})
}

// What was stored after the stream had been created anew is found on it, although the
// claim tells of the old one. What the old one had is gone with it.
func TestRowsStoredOnAStreamThatWasCreatedAnewAreFound(t *testing.T) {
	inBubble(t, func(r *rig) {
		want := r.numbers("events.a", "k", 10)
		time.Sleep(time.Second) // two streams of one moment look the same
		src := &faultySource{Store: r.store, RecordFunc: func() error { return errors.New("crashed") }}
		recreated := false
		src.ClaimedFunc = func() {
			if !recreated { // between the claim and the first message
				recreated = true
				r.must(r.admin.DeleteStream(r.t.Context(), "EVENTS"))
				_, err := r.admin.CreateStream(r.t.Context(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}})
				r.must(err)
			}
		}
		_, stop := r.start(src, relay.Config{Batch: 5, DrainTimeout: time.Second})
		time.Sleep(2 * time.Second)
		stop()
		r.wantPayloads(want...)
		time.Sleep(beyond)
		_, stop = r.start(r.store, relay.Config{Batch: 5})
		time.Sleep(time.Minute)
		stop()
		r.wantPayloads(want...)
	})
}

// slowLook is a connection on which nothing is heard for a while from the moment on
// in which a look begins to read.
type slowLook struct {
	jetstream.JetStream
	begun func()
}

func (s slowLook) CreateConsumer(ctx context.Context, stream string, cfg jetstream.ConsumerConfig) (jetstream.Consumer, error) {
	c, err := s.JetStream.CreateConsumer(ctx, stream, cfg)
	s.begun()
	return c, err
}

// What was left to the broker because its window was not over has to be looked for
// when the look for other rows has taken until after it.
func TestWindowThatEndsDuringALookIsNoticed(t *testing.T) {
	inBubble(t, func(r *rig) {
		_, err := r.admin.UpdateStream(r.t.Context(), jetstream.StreamConfig{
			Name: "EVENTS", Subjects: []string{"events.>"}, Duplicates: 10 * time.Second,
		})
		r.must(err)
		want := r.numbers("events.a", "k", 10)
		r.crash()
		time.Sleep(beyond)
		want = append(want, r.numbers("events.b", "l", 10)...)
		src := &faultySource{Store: r.store, RecordFunc: func() error { return errors.New("crashed") }}
		_, stop := r.start(src, relay.Config{Batch: 30, Lease: 300 * time.Millisecond, DrainTimeout: 100 * time.Millisecond})
		time.Sleep(1500 * time.Millisecond)
		stop()
		r.wantPayloads(want...)

		r.js = slowLook{r.js, sync.OnceFunc(func() {
			r.box.Hold(true)
			time.AfterFunc(9*time.Second, func() { r.box.Hold(false) })
		})}
		_, stop = r.start(r.store, relay.Config{Batch: 30, Lease: time.Second})
		time.Sleep(time.Minute)
		stop()
		r.wantPayloads(want...)
	})
}

// A row that was proved not to be on the stream and then cannot go, because its key
// waits, is neither forgotten nor counted as sent without proof.
func TestRowsProvedAbsentAreNotCounted(t *testing.T) {
	inBubble(t, func(r *rig) {
		ctx := r.t.Context()
		limited := jetstream.StreamConfig{
			Name: "EVENTS", Subjects: []string{"events.>"}, Discard: jetstream.DiscardNew, MaxMsgsPerSubject: 1, DiscardNewPerSubject: true,
		}
		st, err := r.admin.UpdateStream(ctx, limited)
		r.must(err)
		_, err = r.admin.Publish(ctx, "events.full", nil)
		r.must(err)
		r.append(event("events.full", "k", "1"), event("events.b", "k", "2"), event("events.c", "k", "3"))
		r.crash()
		time.Sleep(beyond)
		unverified := 0
		_, stop := r.start(r.store, counted(&unverified))
		time.Sleep(time.Minute)
		r.must(st.DeleteMsg(ctx, 1))
		time.Sleep(2 * time.Minute)
		stop()
		if got := r.payloads(); !slices.Equal(got, []string{"1", "2", "3"}) || unverified > 0 {
			t.Errorf("stream has %q, %d counted as unverified", got, unverified)
		}
	})
}
