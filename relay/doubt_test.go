package relay_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// loseAcks has a relay publish rows whose PubAcks it never gets, lets time pass,
// and meanwhile others publish as many messages of their own.
func (r *rig) loseAcks(cfg relay.Config, restart bool, outage time.Duration, others int, events ...*jetbox.Event) (stop func()) {
	r.t.Helper()
	_, stop = r.start(r.store, cfg)
	time.Sleep(time.Second)
	r.box.Mute(true)
	r.append(events...)
	time.Sleep(8 * time.Second)
	if n := len(r.stored()); n == 0 {
		r.t.Fatal("nothing was stored before the relay lost its connection")
	}
	if restart {
		stop()
	}
	for i := range others {
		_, err := r.admin.Publish(r.t.Context(), "events.other", fmt.Appendf(nil, "other %d", i))
		r.must(err)
	}
	time.Sleep(outage)
	r.box.Mute(false)
	r.box.Cut(false)
	if restart {
		_, stop = r.start(r.store, cfg)
	}
	time.Sleep(time.Minute)
	return stop
}

// ours are the payloads on the stream that are not others'.
func (r *rig) ours() (got []string) {
	r.t.Helper()
	for _, m := range r.stored() {
		if m.Subject != "events.other" {
			got = append(got, string(m.Data))
		}
	}
	return got
}

// Catalog BR-11, BR-35. The broker forgets message IDs after its window; what may have
// been stored is looked for before it is sent again.
func TestPubAcksLostForLongerThanTheWindowLeaveOneCopy(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart=%v", restart), func(t *testing.T) {
			inBubble(t, func(r *rig) {
				unverified := 0
				cfg := relay.Config{Hooks: relay.Hooks{UnverifiedFunc: func() { unverified++ }}}
				stop := r.loseAcks(cfg, restart, 10*time.Minute, 500,
					event("events.a", "k", "1"), event("events.a", "k", "2"), event("events.a", "", "3"), event("events.a", "l", "4"))
				stop()
				seen := make(map[string]int)
				for _, p := range r.ours() {
					seen[p]++
				}
				for _, p := range []string{"1", "2", "3", "4"} {
					if seen[p] != 1 {
						r.t.Errorf("payload %s is %d times on the stream: %q", p, seen[p], r.ours())
					}
				}
				for id := range int64(4) {
					r.wantState(id+1, jetbox.Published, "")
				}
				for _, m := range r.stored() {
					if m.Subject != "events.other" && r.show(int64(m.Data[0]-'0')).StreamSeq != m.Sequence {
						r.t.Errorf("row %s has sequence %d, the stream %d", m.Data, r.show(int64(m.Data[0]-'0')).StreamSeq, m.Sequence)
					}
				}
				if unverified > 0 {
					r.t.Errorf("%d rows were sent again unverified, on a stream that has everything", unverified)
				}
			})
		})
	}
}

// Where a stream removes messages, absence proves nothing: the rows are sent again,
// and counted.
func TestRowsThatMayHaveBeenRemovedAreSentAgainAndCounted(t *testing.T) {
	long(t)
	inBubble(t, func(r *rig) {
		unverified := 0
		cfg := relay.Config{Hooks: relay.Hooks{UnverifiedFunc: func() { unverified++ }}}
		_, stop := r.start(r.store, cfg)
		time.Sleep(time.Second)
		r.box.Mute(true)
		r.append(event("events.a", "", "1"), event("events.a", "", "2"))
		time.Sleep(8 * time.Second)
		st, err := r.admin.Stream(r.t.Context(), "EVENTS")
		r.must(err)
		r.must(st.Purge(r.t.Context()))
		time.Sleep(10 * time.Minute)
		r.box.Mute(false)
		r.box.Cut(false)
		time.Sleep(time.Minute)
		stop()
		if got := r.ours(); len(got) != 2 || unverified != 2 {
			r.t.Errorf("stream has %q, %d counted as unverified, want both rows, counted", got, unverified)
		}
	})
}

// Another event under our key that was stored while ours was in doubt is no copy of
// ours.
func TestKeyTakenBeyondTheWindowIsFoundByLooking(t *testing.T) {
	long(t)
	inBubble(t, func(r *rig) {
		_, stop := r.start(r.store, relay.Config{})
		time.Sleep(time.Second)
		r.box.Cut(true) // nothing gets there
		ev := event("events.a", "", "ours")
		ev.ID, ev.Key = "ours", "taken"
		r.append(ev, event("events.a", "", "other"))
		time.Sleep(10 * time.Second)
		theirs := jetbox.Event{ID: "theirs", Key: "taken", Subject: "events.a", Payload: []byte("theirs")}
		_, err := r.admin.PublishMsg(r.t.Context(), &nats.Msg{Subject: theirs.Subject, Header: theirs.Header("other"), Data: theirs.Payload})
		r.must(err)
		time.Sleep(10 * time.Minute)
		r.box.Cut(false)
		time.Sleep(2 * time.Minute)
		stop()
		r.wantState(1, jetbox.DeadLetter, "is taken")
		r.wantState(2, jetbox.Published, "")
	})
}
