package relay_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// What a person or a limit removed is not published again: not while the relay runs,
// not on a new connection, and not by the next relay.
func TestRemovedMessagesAreNotPublishedAgain(t *testing.T) {
	long(t)
	for name, tt := range map[string]struct {
		stream jetstream.StreamConfig
		remove func(r *rig, st jetstream.Stream)
		left   int // messages of the first ten
	}{
		"purged": {remove: func(r *rig, st jetstream.Stream) { r.must(st.Purge(r.t.Context())) }},
		"purged by subject": {remove: func(r *rig, st jetstream.Stream) {
			r.must(st.Purge(r.t.Context(), jetstream.WithPurgeSubject("events.a")))
		}},
		"one deleted":          {left: 9, remove: func(r *rig, st jetstream.Stream) { r.must(st.DeleteMsg(r.t.Context(), 5)) }},
		"the last one deleted": {left: 9, remove: func(r *rig, st jetstream.Stream) { r.must(st.DeleteMsg(r.t.Context(), 10)) }},
		"aged": {
			stream: jetstream.StreamConfig{MaxAge: 20 * time.Second, Duplicates: 20 * time.Second},
			remove: func(*rig, jetstream.Stream) { time.Sleep(30 * time.Second) },
		},
		"above a limit": {stream: jetstream.StreamConfig{MaxMsgs: 4}, left: 4, remove: func(*rig, jetstream.Stream) {}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				ctx := r.t.Context()
				tt.stream.Name, tt.stream.Subjects = "EVENTS", []string{"events.>"}
				st, err := r.admin.UpdateStream(ctx, tt.stream)
				r.must(err)
				o := new(observed)
				rel, stop := r.start(r.store, o.config())
				r.fill(1, 10)
				time.Sleep(2 * time.Second)
				tt.remove(r, st)
				time.Sleep(2 * time.Second)
				r.must(r.srv.Close())
				r.must(r.srv.Restart(ctx))
				time.Sleep(10 * time.Second)
				r.wantHealth(rel, true, "")
				if h := rel.Health(); h.Reason != "" {
					t.Errorf("health is %+v, want nothing to say", h)
				}
				stop()
				_, stop = r.start(r.store, o.config())
				time.Sleep(5 * time.Second)
				if got := len(r.payloads()); got != tt.left {
					t.Errorf("%d of the messages are on the stream, want %d", got, tt.left)
				}
				r.append(event("events.a", "k", "11"))
				time.Sleep(time.Second)
				stop()
				r.wantState(11, jetbox.Published, "")
				o.want(t, 0, 0)
				if strings.Contains(o.text(), saysLost) || strings.Contains(o.text(), "created anew") {
					t.Errorf("log:\n%s", o.text())
				}
			})
		})
	}
}

// A stream that a person has created anew gets its rows again only when asked for,
// also later; those it has are not sent twice.
func TestStreamCreatedAnewGetsItsRowsAgainWhenAskedFor(t *testing.T) {
	long(t)
	recreate := func(r *rig) {
		ctx := r.t.Context()
		r.must(r.admin.DeleteStream(ctx, "EVENTS"))
		time.Sleep(time.Second)
		_, err := r.admin.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}})
		r.must(err)
	}
	idle := func(r *rig, _ func()) {
		recreate(r)
		time.Sleep(10 * time.Second) // long enough to be seen without a publish
	}
	for name, tt := range map[string]struct {
		recreated func(r *rig, stop func()) // how it comes about
		asked     bool
	}{
		"while the relay is idle":       {recreated: idle},
		"while the relay publishes":     {recreated: func(r *rig, _ func()) { recreate(r) }},
		"while the relay is down":       {recreated: func(r *rig, stop func()) { stop(); recreate(r) }},
		"asked for, while it is idle":   {asked: true, recreated: idle},
		"asked for, while it publishes": {asked: true, recreated: func(r *rig, _ func()) { recreate(r) }},
		"asked for, while it is down":   {asked: true, recreated: func(r *rig, stop func()) { stop(); recreate(r) }},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				o := new(observed)
				cfg := o.config()
				if tt.asked {
					cfg.OnRecreated = relay.Republish
				}
				_, stop := r.start(r.store, cfg)
				r.fill(1, 20)
				time.Sleep(2 * time.Second)
				tt.recreated(r, stop)
				if strings.HasSuffix(name, "idle") && !strings.Contains(o.text(), "stream was created anew") {
					t.Errorf("an idle relay has not noticed the new stream:\n%s", o.text())
				}
				r.fill(21, 25)
				stop()
				_, stop = r.start(r.store, cfg)
				time.Sleep(10 * time.Second)
				r.fill(26, 30)
				time.Sleep(10 * time.Second)
				if tt.asked {
					r.wantEach(30, false)
					o.want(t, 20, 0)
				} else {
					r.wantPayloads("21", "22", "23", "24", "25", "26", "27", "28", "29", "30")
					o.want(t, 0, 0)
				}
				if n := strings.Count(o.text(), "stream was created anew"); n != 1 || strings.Contains(o.text(), saysLost) {
					t.Errorf("said %d times that the stream was created anew, want once:\n%s", n, o.text())
				}
				stop()
				if tt.asked {
					return
				}
				// A person makes up his mind.
				cfg.OnRecreated = relay.Republish
				for range 2 {
					rel, end := r.start(r.store, cfg)
					time.Sleep(20 * time.Second)
					r.wantHealth(rel, true, "")
					end()
				}
				r.wantEach(30, false)
				o.want(t, 20, 0)
			})
		})
	}
}

// A user who may not read the stream cannot find out whether it has lost something.
// That keeps no row from flowing, but it is told, until it is granted.
func TestRelayThatMayNotReadTheStreamSaysWhatItCannotTell(t *testing.T) {
	inDenied(t, jetstream.StreamConfig{}, []string{"$JS.API.STREAM.MSG.GET.>"}, func(r *rig, grant func()) {
		for i := range 3 {
			rel, stop := r.start(r.store, relay.Config{})
			r.append(event("events.a", "k", "x"))
			time.Sleep(10 * time.Second)
			r.wantHealth(rel, true, map[bool]string{true: "stream EVENTS has lost messages cannot be told"}[i > 0])
			if i == 2 {
				grant()
				time.Sleep(2 * time.Minute)
				if h := rel.Health(); !h.Ready || h.Reason != "" {
					t.Errorf("health is %+v after the user may read, want nothing to say", h)
				}
			}
			stop()
		}
		r.wantPayloads("x", "x", "x")
	})
}

// A stream beside the configured one that cannot be asked holds up no row of the
// others. It is told.
func TestOtherStreamThatCannotBeAskedHoldsUpNothing(t *testing.T) {
	inDenied(t, jetstream.StreamConfig{}, []string{"$JS.API.STREAM.INFO.OTHER"}, func(r *rig, _ func()) {
		r.exec(`INSERT INTO outbox_stream (stream, created, seq, msg_id, pos, at) VALUES ('OTHER', '2026-01-01T00:00:00Z', 7, 'x', 1, 1)`)
		rel, stop := r.start(r.store, relay.Config{})
		r.append(event("events.a", "k", "1"))
		time.Sleep(10 * time.Second)
		r.wantHealth(rel, true, "whether stream OTHER has lost messages cannot be told")
		r.wantPayloads("1")
		time.Sleep(3 * time.Minute)
		r.append(event("events.a", "k", "2"))
		time.Sleep(10 * time.Second)
		r.wantPayloads("1", "2")
		stop()
	})
}
