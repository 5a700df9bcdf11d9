package dlq

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// replayed returns the messages of the event stream that are replays.
func (w *world) replayed() []*jetstream.RawStreamMsg {
	w.t.Helper()
	st, err := w.js.Stream(w.t.Context(), "EVENTS")
	if err != nil {
		w.t.Fatal(err)
	}
	var out []*jetstream.RawStreamMsg
	for seq := uint64(1); seq <= st.CachedInfo().State.LastSeq; seq++ {
		m, err := st.GetMsg(w.t.Context(), seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue
		}
		if err != nil {
			w.t.Fatal(err)
		}
		if m.Header.Get(jetbox.HeaderLetter) != "" {
			out = append(out, m)
		}
	}
	return out
}

func (w *world) replay(id string) Letter {
	w.t.Helper()
	l, err := w.letters.Replay(w.t.Context(), id)
	if err != nil {
		w.t.Fatalf("Replay: %v", err)
	}
	return l
}

// BR-59: at once, inside the duplicate window.
func TestReplayInsideTheDuplicateWindowArrivesOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.order.1", "k1", []byte("x"), "X-App", "a", "traceparent", "00-1")
		l := w.replay(w.park(f).ID)
		got := w.replayed()
		if len(got) != 1 || got[0].Subject != "events.order.1" || string(got[0].Data) != "x" || l.ReplaySeq != got[0].Sequence {
			t.Fatalf("replays = %+v, letter %+v, want one message on its subject", got, l)
		}
		delete(got[0].Header, "Nats-Expected-Stream")
		want := nats.Header{
			"Nats-Msg-Id": {l.ID + "/replay/1"}, "Idempotency-Key": {"k1"}, "X-App": {"a"}, "traceparent": {"00-1"},
			"Jetbox-Letter": {l.ID}, "Jetbox-Replay-For": {"EVENTS/billing"},
		}
		if !reflect.DeepEqual(got[0].Header, want) {
			t.Errorf("headers = %v\nwant %v", got[0].Header, want)
		}
		if l.State != StateReplayed || l.Replays != 1 || string(l.Payload) != "x" {
			t.Errorf("letter = %+v, want it replayed once and its payload kept", l)
		}
		// Again is a no-op that says so.
		if _, err := w.letters.Replay(t.Context(), l.ID); !errors.Is(err, jetbox.ErrLetterGone) || !strings.Contains(err.Error(), "replayed already") {
			t.Errorf("second Replay: err = %v, want %v", err, jetbox.ErrLetterGone)
		}
		if n := len(w.replayed()); n != 1 {
			t.Errorf("replays on the stream = %d, want 1", n)
		}
	})
}

// Two consumers' letters of one message, replayed inside the window, both arrive.
func TestReplaysForTwoConsumersAreNoDuplicates(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.a", "k1", []byte("x"))
		g := f
		g.Consumer = "shipping"
		w.replay(w.park(f).ID)
		w.replay(w.park(g).ID)
		if n := len(w.replayed()); n != 2 {
			t.Errorf("replays on the stream = %d, want 2", n)
		}
	})
}

// BR-63 and BR-67.
func TestPayloadIsExactThroughLetterAndReplay(t *testing.T) {
	payloads := []string{
		"", " ", "null", "{}", "!nil!",
		"9007199254740993", "18446744073709551615", "-0", "1.0", "1e400", "0.10", strings.Repeat("7", 100),
		`{"a":1,"a":2}`, `{"z":1,"a":2}`, "  {\n}\t", `"<>&"`, "\"\u2028\"", `"\u00e9\ud800"`, "\x00\xff\xfe\r\n",
	}
	inBubble(t, func(t *testing.T, w *world) {
		for _, p := range payloads {
			w.replay(w.park(w.event("billing", "events.a", "", []byte(p))).ID)
		}
		got := w.replayed()
		if len(got) != len(payloads) {
			t.Fatalf("replays = %d, want %d", len(got), len(payloads))
		}
		for i, p := range payloads {
			if !bytes.Equal(got[i].Data, []byte(p)) {
				t.Errorf("payload = %q, want %q", got[i].Data, p)
			}
		}
		for i, l := range w.list(Filter{States: []State{StateReplayed}}) {
			if string(l.Payload) != payloads[i] || l.PayloadMissing {
				t.Errorf("letter's payload = %q, missing = %v, want %q", l.Payload, l.PayloadMissing, payloads[i])
			}
		}
	})
}

func TestReplayThatFailsAgainReopensTheSameLetter(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.a", "k1", []byte("x"))
		l := w.replay(w.park(f).ID)
		for n := 1; n <= 2; n++ {
			again := w.failure("billing", l.ReplaySeq)
			again.Err, again.Deliveries = fmt.Sprintf("boom %d", n), 5
			if err := w.letters.Intend(t.Context(), again); err != nil {
				t.Fatal(err)
			}
			w.wantState(l.ID, StateIntent)
			for range 2 { // the consumer, then an advisory
				if err := w.letters.Park(t.Context(), again); err != nil {
					t.Fatal(err)
				}
			}
			// A late report of the original, or of an earlier replay, changes nothing.
			if err := w.letters.Park(t.Context(), f); err != nil {
				t.Fatal(err)
			}
			got := w.wantState(l.ID, StateOpen)
			if got.StreamSeq != f.Seq || got.Deliveries != uint64(3+5*n) || got.Replays != n || got.Error != again.Err ||
				got.Subject != "events.a" || string(got.Payload) != "x" || !reflect.DeepEqual(got.Header, map[string][]string{"Idempotency-Key": {"k1"}}) {
				t.Errorf("after replay %d failed: letter = %+v", n, got)
			}
			l = w.replay(l.ID)
			if err := w.letters.Park(t.Context(), again); err != nil {
				t.Fatal(err)
			}
			w.wantState(l.ID, StateReplayed)
		}
		w.wantMsgs("DLQ", 1)
	})
}

func TestReplayHandledOnItsLastDeliveryIsReplayed(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		l := w.replay(w.park(w.event("billing", "events.a", "k1", []byte("x"))).ID)
		again := w.failure("billing", l.ReplaySeq)
		if err := w.letters.Intend(t.Context(), again); err != nil {
			t.Fatal(err)
		}
		if err := w.letters.Withdraw(t.Context(), again); err != nil {
			t.Fatal(err)
		}
		if got := w.wantState(l.ID, StateReplayed); string(got.Payload) != "x" {
			t.Errorf("payload = %q, want it kept", got.Payload)
		}
	})
}

// A consumer that does not skip others' replays gets a letter of its own.
func TestReplayThatFailsAtAnotherConsumerIsAnotherLetter(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		l := w.replay(w.park(w.event("billing", "events.a", "k1", []byte("x"))).ID)
		other := w.park(w.failure("shipping", l.ReplaySeq))
		if other.StreamSeq != l.ReplaySeq || other.Consumer != "shipping" {
			t.Errorf("letter = %+v, want one of the replayed message", other)
		}
		w.wantState(l.ID, StateReplayed)
		if m := w.replay(other.ID); m.Consumer != "shipping" {
			t.Errorf("replay is for %q, want shipping", m.Consumer)
		}
		last := w.replayed()[1]
		if got := last.Header.Values(jetbox.HeaderReplayFor); !reflect.DeepEqual(got, []string{"EVENTS/shipping"}) {
			t.Errorf("%s = %q, want the consumer that failed last", jetbox.HeaderReplayFor, got)
		}
	})
}

func TestLostAnswersAreSettledByReadingBack(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.a", "k1", []byte("x"))
		box := &deafBox{srv: w.srv}
		nc, err := nats.Connect("", nats.InProcessServer(box))
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		s := w.newLetters(js, Config{})
		// Each answer to a write is lost. The write is found, not repeated.
		box.deafFor(time.Second)
		if err := s.Intend(t.Context(), f); err != nil {
			t.Errorf("Intend after a lost answer: %v", err)
		}
		box.deafFor(time.Second)
		if err := s.Park(t.Context(), f); err != nil {
			t.Errorf("Park after a lost answer: %v", err)
		}
		l := w.wantState(ownID(f), StateOpen)
		l.State = StateDiscarded
		box.deafFor(time.Second)
		stored, err := s.put(t.Context(), l, l.Seq)
		if err != nil || stored.Seq != l.Seq+1 {
			t.Errorf("put after a lost answer = %d, %v, want sequence %d", stored.Seq, err, l.Seq+1)
		}
		w.wantState(ownID(f), StateDiscarded)
		w.wantMsgs("DLQ", 1)
	})
}

func TestReplayRefusedByTheStreamOpensTheLetterAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		id := w.park(w.event("billing", "events.a", "k1", []byte("x"))).ID
		cfg := w.events.CachedInfo().Config
		cfg.Subjects = []string{"other.>"}
		if _, err := w.js.UpdateStream(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		if _, err := w.letters.Replay(t.Context(), id); !errors.Is(err, jetstream.ErrNoStreamResponse) {
			t.Errorf("Replay to no stream: err = %v, want %v", err, jetstream.ErrNoStreamResponse)
		}
		w.wantState(id, StateOpen)
		// Another stream on that subject is not the one.
		if _, err := w.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OTHER", Subjects: []string{"events.>"}}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.letters.Replay(t.Context(), id); err == nil || !strings.Contains(err.Error(), "expected stream does not match") {
			t.Errorf("Replay to another stream: err = %v, want it refused", err)
		}
		if l := w.wantState(id, StateOpen); l.Error != "boom" || l.Replays != 2 {
			t.Errorf("letter = %+v, want the handler's error and two replays begun", l)
		}
		w.wantMsgs("OTHER", 0)
	})
}

func TestReplayIsRefusedWhereTheStreamTransformsSubjects(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		id := w.park(w.event("billing", "events.a", "k1", []byte("x"))).ID
		if _, err := w.letters.Replay(t.Context(), id); err == nil || !strings.Contains(err.Error(), "transforms subjects") {
			t.Errorf("Replay: err = %v, want a refusal that says why", err)
		}
		w.wantState(id, StateOpen)
	}, func(c *jetstream.StreamConfig) {
		c.SubjectTransform = &jetstream.SubjectTransformConfig{Source: "events.>", Destination: "stored.>"}
	})
}

func TestDiscardedLetterKeepsItsReasonAndDropsItsPayload(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.a", "k1", []byte("x"))
		id := w.park(f).ID
		if _, err := w.letters.Discard(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		l := w.wantState(id, StateDiscarded)
		if l.Payload != nil || len(l.Header) != 0 || l.Error != "boom" || l.Subject != "events.a" {
			t.Errorf("letter = %+v, want reason and subject only", l)
		}
		// A late report changes nothing, nor does a person.
		w.park(f)
		w.wantState(id, StateDiscarded)
		if _, err := w.letters.Discard(t.Context(), id); !errors.Is(err, jetbox.ErrLetterGone) {
			t.Errorf("second Discard: err = %v, want %v", err, jetbox.ErrLetterGone)
		}
		if _, err := w.letters.Replay(t.Context(), id); !errors.Is(err, jetbox.ErrLetterGone) {
			t.Errorf("Replay: err = %v, want %v", err, jetbox.ErrLetterGone)
		}
		if _, err := w.letters.Show(t.Context(), "dlq.EVENTS.billing.77-1"); !errors.Is(err, jetbox.ErrLetterGone) {
			t.Errorf("Show of no letter: err = %v, want %v", err, jetbox.ErrLetterGone)
		}
	})
}
