package dlq

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

const day = 24 * time.Hour

func TestClosedLettersExpireAndOpenOnesStay(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.letters.cfg.KeepClosed = time.Minute // days cost seconds, even on a fake clock
		event := func() jetbox.Failure { return w.event("billing", "events.a", "", []byte("x")) }
		open, discarded := w.park(event()), event()
		replayed := w.replay(w.park(event()).ID)
		if _, err := w.letters.Discard(t.Context(), w.park(discarded).ID); err != nil {
			t.Fatal(err)
		}
		// Failed again after it was closed: open, and the end of what it was is not its own.
		again := w.fail(w.replay(w.park(event()).ID), "boom")
		// Its replay was handled on the last delivery: the consumer closes it.
		handled := w.replay(w.park(event()).ID)
		f := w.failure("billing", handled.ReplaySeq)
		if err := w.letters.Intend(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		if err := w.letters.Withdraw(t.Context(), f); err != nil {
			t.Fatal(err)
		}

		time.Sleep(50 * time.Second)
		w.wantMsgs("DLQ", 5)
		// A late report of what was discarded still finds the mark.
		w.park(discarded)
		w.wantState(ownID(discarded), StateDiscarded)

		time.Sleep(20 * time.Second)
		w.wantMsgs("DLQ", 2)
		w.wantState(open.ID, StateOpen)
		w.wantState(again.ID, StateOpen)
		for _, id := range []string{replayed.ID, ownID(discarded), handled.ID} {
			if _, err := w.letters.Show(t.Context(), id); !errors.Is(err, jetbox.ErrLetterGone) {
				t.Errorf("Show(%s): err = %v, want %v", id, err, jetbox.ErrLetterGone)
			}
		}
		// What comes back after that is a letter again, of the same identity.
		if err := w.letters.Park(t.Context(), w.failure("billing", replayed.ReplaySeq)); err != nil {
			t.Fatal(err)
		}
		if l := w.wantState(replayed.ID, StateOpen); l.Replays != 1 || l.StreamSeq != replayed.StreamSeq {
			t.Errorf("letter = %+v, want that of the original, replayed once", l)
		}
	})
}

// A message that lives for 60 days can be reported until then, and an advisory
// about it a week longer.
func TestClosedLettersOutliveTheirMessagesAndAdvisories(t *testing.T) {
	for age, want := range map[time.Duration]string{
		0:               "720h0m0s",
		day:             "720h0m0s",
		60 * day:        "1608h0m0s",
		200 * 365 * day: "720h0m0s",
	} {
		inBubble(t, func(t *testing.T, w *world) {
			replayed := w.replay(w.park(w.event("billing", "events.a", "", []byte("x"))).ID)
			discarded := w.park(w.event("billing", "events.b", "", []byte("x")))
			if _, err := w.letters.Discard(t.Context(), discarded.ID); err != nil {
				t.Fatal(err)
			}
			handled := w.replay(w.park(w.event("billing", "events.a", "", []byte("x"))).ID)
			f := w.failure("billing", handled.ReplaySeq)
			if err := w.letters.Intend(t.Context(), f); err != nil {
				t.Fatal(err)
			}
			if got := w.ttl(handled.ID); got != "" {
				t.Errorf("an intent expires after %s", got)
			}
			if err := w.letters.Withdraw(t.Context(), f); err != nil {
				t.Fatal(err)
			}
			for _, id := range []string{replayed.ID, discarded.ID, handled.ID} {
				if got := w.ttl(id); got != want {
					t.Errorf("events live for %v: letter %s expires after %q, want %s", age, id, got, want)
				}
			}
		}, func(c *jetstream.StreamConfig) { c.MaxAge = age })
	}
}

// ttl is what the letter's last message tells the server about its end.
func (w *world) ttl(id string) string {
	w.t.Helper()
	m, err := w.letters.get(w.t.Context(), "DLQ", getRequest{LastFor: id})
	if err != nil {
		w.t.Fatal(err)
	}
	return nats.Header(m.header).Get("Nats-TTL")
}

func TestClosedLettersStayUntilPrunedWhereNothingExpires(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		if err := w.js.DeleteStream(t.Context(), "DLQ"); err != nil {
			t.Fatal(err)
		}
		cfg := w.letters.lettersConfig()
		cfg.AllowMsgTTL = false
		if _, err := w.js.CreateStream(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		open := w.park(w.event("billing", "events.a", "", []byte("x")))
		w.replay(w.park(w.event("billing", "events.a", "", []byte("x"))).ID)
		time.Sleep(time.Minute)
		if _, err := w.letters.Discard(t.Context(), w.park(w.event("billing", "events.b", "", []byte("x"))).ID); err != nil {
			t.Fatal(err)
		}
		w.wantMsgs("DLQ", 3)
		for _, want := range []int{1, 0} {
			if n, err := w.letters.Prune(t.Context(), time.Now().Add(-30*time.Second)); n != want || err != nil {
				t.Errorf("Prune = %d, %v, want %d", n, err, want)
			}
		}
		w.wantState(open.ID, StateOpen)
		w.wantSeqs(Filter{States: []State{StateDiscarded}}, 4)
	})
}

func TestLettersRefuseSettingsThatForgetTooEarly(t *testing.T) {
	t.Parallel()
	for want, cfg := range map[string]Config{
		"KeepClosed is 1h0m0s": {KeepClosed: time.Hour},
		"KeepClosed is -1ns":   {KeepClosed: -1},
		"MaxReplays is -1":     {MaxReplays: -1},
	} {
		if err := cfg.withDefaults().validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: err = %v, want %q", cfg, err, want)
		}
	}
}
