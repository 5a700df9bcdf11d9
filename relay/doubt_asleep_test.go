package relay_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// other creates a second stream, for the subjects other.>, that forgets soon and has one
// message of each subject.
func (r *rig) other() jetstream.Stream {
	r.t.Helper()
	st, err := r.admin.CreateStream(r.t.Context(), jetstream.StreamConfig{
		Name: "OTHER", Subjects: []string{"other.>"}, Duplicates: 2 * time.Second,
		Discard: jetstream.DiscardNew, MaxMsgsPerSubject: 1, DiscardNewPerSubject: true,
	})
	r.must(err)
	return st
}

// wantOnOther fails unless the second stream has so many messages, and has had no more.
func (r *rig) wantOnOther(n uint64) {
	r.t.Helper()
	st, err := r.admin.Stream(r.t.Context(), "OTHER")
	r.must(err)
	if state := st.CachedInfo().State; state.LastSeq != n {
		r.t.Errorf("the other stream has had %d messages, want %d", state.LastSeq, n)
	}
}

// A row that another stream takes than the configured one sleeps when its PubAck is lost.
// It was sent again without a look when it woke up, also by a new relay that took it for
// refused because it had been once, before.
func TestRowThatSleptWithItsOutcomeUnknownIsLookedFor(t *testing.T) {
	long(t)
	for name, refused := range map[string]bool{"never refused": false, "refused once": true} {
		for _, restarted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, restarted %v", name, restarted), func(t *testing.T) {
				inBubble(t, func(r *rig) { r.sleepUnknown(refused, restarted) })
			})
		}
	}
}

func (r *rig) sleepUnknown(refused, restarted bool) {
	ctx := r.t.Context()
	st := r.other()
	unverified := 0
	_, stop := r.start(r.store, counted(&unverified))
	// The relay knows which stream takes the subject of the second row.
	stored := uint64(1)
	r.append(event("other.2", "k", "1"))
	time.Sleep(time.Second)
	if refused {
		r.append(event("other.2", "k", "2"))
		time.Sleep(700 * time.Millisecond) // it is tried again after a second
	}
	r.must(st.DeleteMsg(ctx, stored))
	r.box.Mute(true)
	if !refused {
		r.append(event("other.2", "k", "2"))
	}
	time.Sleep(9 * time.Second)
	info, err := st.Info(ctx)
	r.must(err)
	if stored++; info.State.LastSeq != stored {
		r.t.Fatalf("the other stream has %d messages, want the row stored", info.State.LastSeq)
	}
	r.box.Mute(false)
	r.box.Cut(false)
	if restarted {
		stop()
		_, stop = r.start(r.store, counted(&unverified))
	}
	r.append(event("other.3", "k", "3"))
	time.Sleep(2 * time.Minute)
	stop()
	r.wantOnOther(stored + 1)
	r.wantState(2, jetbox.Published, "")
	r.wantState(3, jetbox.Published, "")
	if unverified > 0 {
		r.t.Errorf("%d rows were sent again unverified", unverified)
	}
}

// The look for a row that slept begins where its stream stood at the claim that it was sent
// under, not at its beginning.
func TestLookForARowThatSleptBeginsAtItsClaim(t *testing.T) {
	inBubble(t, func(r *rig) {
		ctx := r.t.Context()
		st := r.other()
		for i := range 100 {
			_, err := r.admin.Publish(ctx, fmt.Sprint("other.before.", i), nil)
			r.must(err)
		}
		log := &logBook{}
		_, stop := r.start(r.store, relay.Config{Logger: log.logger()})
		r.append(event("other.2", "k", "1")) // the relay knows which stream takes the subject
		time.Sleep(time.Second)
		r.must(st.DeleteMsg(ctx, 101))
		r.box.Mute(true)
		r.append(event("other.2", "k", "2"))
		time.Sleep(9 * time.Second)
		r.box.Mute(false)
		r.box.Cut(false)
		time.Sleep(2 * time.Minute)
		stop()
		r.wantOnOther(102)
		r.wantState(2, jetbox.Published, "")
		if lines := log.lines("looked on the stream"); len(lines) != 1 || !strings.Contains(lines[0], "messages=1 ") {
			t.Errorf("the relay looked like this: %q; want one message read", lines)
		}
	})
}

// A row in doubt fell asleep behind one of its key that was due later and refused. When it
// woke up, long after the window, nobody knew where to look for it.
func TestRowThatSleptBehindItsKeyIsLookedFor(t *testing.T) {
	long(t)
	for _, restarted := range []bool{false, true} {
		t.Run(fmt.Sprint("restarted ", restarted), func(t *testing.T) {
			inBubble(t, func(r *rig) { r.sleepBehind(restarted) })
		})
	}
}

func (r *rig) sleepBehind(restarted bool) {
	ctx := r.t.Context()
	_, err := r.admin.UpdateStream(ctx, jetstream.StreamConfig{
		Name: "EVENTS", Subjects: []string{"events.>"}, Discard: jetstream.DiscardNew, MaxMsgsPerSubject: 1, DiscardNewPerSubject: true,
	})
	r.must(err)
	_, err = r.admin.Publish(ctx, "events.full", nil)
	r.must(err)
	unverified := 0
	cfg := counted(&unverified)
	cfg.MaxAttempts = 8 // parked after two minutes, when the window is over
	_, stop := r.start(r.store, cfg)
	time.Sleep(time.Second)
	r.box.Mute(true)
	later := event("events.full", "k", "1")
	later.NotBefore = time.Now().Add(20 * time.Second)
	r.append(later, event("events.b", "k", "2"))
	time.Sleep(25 * time.Second)
	r.box.Mute(false)
	r.box.Cut(false)
	time.Sleep(30 * time.Second)
	r.wantState(1, jetbox.Pending, "maximum messages per subject exceeded")
	if restarted { // the new one has only the row to go by
		stop()
		_, stop = r.start(r.store, cfg)
	}
	time.Sleep(2*time.Minute + 30*time.Second)
	stop()
	r.wantState(1, jetbox.DeadLetter, "gave up")
	r.wantState(2, jetbox.Published, "")
	if got := r.payloads(); len(got) != 2 || got[1] != "2" || unverified > 0 {
		r.t.Errorf("stream has %q, %d counted as unverified", got, unverified)
	}
}

// leaderless is a connection to which nobody tells of the second stream.
type leaderless struct {
	jetstream.JetStream
	now *atomic.Bool
}

func (l leaderless) Stream(ctx context.Context, name string) (jetstream.Stream, error) {
	if name == "OTHER" && l.now.Load() {
		return nil, errors.New("no answer")
	}
	return l.JetStream.Stream(ctx, name)
}

// Rows in doubt wait while nobody can be asked what their own stream has, and their keys
// with them. Everything else goes on.
func TestRowsInDoubtOfAnotherStreamHoldUpTheirKeysOnly(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.other()
		r.append(event("other.1", "k", "1"), event("events.a", "k", "2"), event("other.3", "", "3"))
		r.crash()
		r.wantPayloads("2")
		time.Sleep(beyond)
		var away atomic.Bool
		away.Store(true)
		r.js = leaderless{r.js, &away}
		unverified := 0
		rel, stop := r.start(r.store, counted(&unverified))
		r.append(event("events.a", "k", "4"), event("events.a", "l", "5"), event("events.a", "", "6"))
		time.Sleep(15 * time.Second)
		r.wantPayloads("2", "5", "6")
		r.wantState(1, jetbox.Pending, "no answer")
		r.wantState(2, jetbox.Published, "")
		r.wantState(3, jetbox.Pending, "no answer")
		time.Sleep(time.Minute)
		r.wantPayloads("2", "5", "6")
		r.wantHealth(rel, false, "no answer") // nothing flows beside them
		away.Store(false)
		time.Sleep(2 * time.Minute)
		r.wantHealth(rel, true, "")
		stop()
		r.wantPayloads("2", "5", "6", "4")
		r.wantOnOther(2)
		r.wantState(1, jetbox.Published, "")
		if unverified > 0 {
			t.Errorf("%d rows were sent again unverified", unverified)
		}
	})
}
