package dlq

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// fail reports that the letter's last replay failed, first as the intent of its
// last delivery.
func (w *world) fail(l Letter, text string) Letter {
	w.t.Helper()
	f := w.failure(l.Consumer, l.ReplaySeq)
	if err := w.letters.Intend(w.t.Context(), f); err != nil {
		w.t.Fatalf("Intend: %v", err)
	}
	f.Err = text
	if err := w.letters.Park(w.t.Context(), f); err != nil {
		w.t.Fatalf("Park: %v", err)
	}
	return w.wantState(l.ID, StateOpen)
}

func TestEachFailureOfALetterStaysInItsHistory(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.letters.cfg.MaxReplays = 100
		f := w.event("billing", "events.a", "k1", []byte("x"))
		f.Err = "boom 0"
		l := w.park(f)
		if len(l.History) != 0 {
			t.Errorf("history of a first failure = %+v, want none", l.History)
		}
		first := Past{Time: l.Time, Deliveries: 3, Reason: jetbox.ReasonMaxDeliveries, Error: "boom 0"}
		for n := 1; n <= maxHistory+2; n++ {
			time.Sleep(time.Minute)
			l = w.fail(w.replay(l.ID), fmt.Sprintf("boom %d é\n", n))
			if want := min(n, maxHistory); l.Error != fmt.Sprintf("boom %d é", n) || len(l.History) != want {
				t.Fatalf("after failure %d: error %q, history %+v, want %d failures", n, l.Error, l.History, want)
			}
			if n == 1 && !reflect.DeepEqual(l.History, []Past{first}) {
				t.Errorf("history = %+v, want %+v", l.History, first)
			}
		}
		for i, p := range l.History {
			if want := fmt.Sprintf("boom %d é", i+2); p.Error != want || p.Deliveries != uint64(3*(i+3)) || i > 0 && !p.Time.After(l.History[i-1].Time) {
				t.Errorf("history[%d] = %+v, want %q, each later and with more deliveries", i, p, want)
			}
		}
	})
}

// The last delivery of a replay that goes well is no failure.
func TestWithdrawnIntentOfAReplayLeavesTheHistoryAlone(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		before := w.fail(w.replay(w.park(w.event("billing", "events.a", "k1", []byte("x"))).ID), "again")
		f := w.failure("billing", w.replay(before.ID).ReplaySeq)
		f.Err = ""
		if err := w.letters.Intend(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		if l := w.wantState(before.ID, StateIntent); len(l.History) != 2 {
			t.Errorf("history of the intent = %+v, want both failures", l.History)
		}
		if err := w.letters.Withdraw(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		l := w.wantState(before.ID, StateReplayed)
		if l.Error != "again" || !l.Time.Equal(before.Time) || !reflect.DeepEqual(l.History, before.History) {
			t.Errorf("letter = %+v, want error and history as before the replay: %+v", l, before)
		}
	})
}

// A letter that hardly fits keeps its payload rather than its history.
func TestHistoryMakesRoomForThePayload(t *testing.T) {
	t.Parallel()
	l := Letter{ID: "dlq.EVENTS.c.7-1", State: StateOpen, Error: "boom", Payload: make([]byte, 2000)}
	for range maxHistory {
		l.remember()
	}
	if got := fit(l, limits{message: 1 << 20, header: maxHeader}); len(got.History) != maxHistory {
		t.Errorf("history kept = %d failures where there is room, want %d", len(got.History), maxHistory)
	}
	if got := fit(l, limits{message: 3000, header: maxHeader}); len(got.History) != 0 || len(got.Payload) != 2000 || got.PayloadMissing {
		t.Errorf("letter = %d failures, %d bytes, want the payload alone", len(got.History), len(got.Payload))
	}
}

func TestUnreadableHistoryIsLeftOut(t *testing.T) {
	t.Parallel()
	good := Past{Time: time.Unix(7, 0).UTC(), Deliveries: 3, Reason: "terminated", Error: strings.Repeat("é", 9)}
	values := append([]string{"", "{", "7"}, historyValues([]Past{good})...)
	if got := parseHistory(values); !reflect.DeepEqual(got, []Past{good}) {
		t.Errorf("history = %+v, want %+v", got, good)
	}
}

// The guard against replaying for ever.
func TestLetterReplayedTooOftenIsRefusedByName(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		l := w.park(w.event("billing", "events.a", "k1", []byte("x")))
		for range 5 {
			l = w.fail(w.replay(l.ID), "boom")
		}
		_, err := w.letters.Replay(t.Context(), l.ID)
		if !errors.Is(err, ErrReplayedTooOften) || !strings.Contains(err.Error(), l.ID) || !strings.Contains(err.Error(), "after 5 replays") {
			t.Errorf("sixth Replay: err = %v, want %v, the letter and the number", err, ErrReplayedTooOften)
		}
		w.wantState(l.ID, StateOpen)
		if n := len(w.replayed()); n != 5 {
			t.Errorf("replays on the stream = %d, want 5", n)
		}
		// The override, killed on its way; whoever finishes it needs none.
		more := w.newLetters(w.js, Config{MaxReplays: 6})
		more.testOnlyCrash = func(string) error { return errKilled }
		if _, err := more.Replay(t.Context(), l.ID); !errors.Is(err, errKilled) {
			t.Fatalf("Replay with a higher limit = %v, want it killed on its way", err)
		}
		if got := w.replay(l.ID); got.State != StateReplayed || got.Replays != 6 {
			t.Errorf("letter = %+v, want the sixth replay finished", got)
		}
	})
}
