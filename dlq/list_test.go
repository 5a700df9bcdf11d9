package dlq

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

func TestListFiltersLetters(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		park := func(consumer, subject, reason string) Letter {
			f := w.event(consumer, subject, "", []byte("x"))
			f.Reason = reason
			defer time.Sleep(time.Minute)
			return w.park(f)
		}
		park("billing", "events.order.1", jetbox.ReasonMaxDeliveries)                                        // 1
		park("shipping", "events.order.2", jetbox.ReasonTerminated)                                          // 2
		third := park("billing", "events.user.1", jetbox.ReasonTerminated)                                   // 3
		w.replay(park("billing", "events.order.3", jetbox.ReasonMaxDeliveries).ID)                           // 4, its replay is 5
		if err := w.letters.Intend(t.Context(), w.event("billing", "events.order.9", "", nil)); err != nil { // 6
			t.Fatal(err)
		}
		tests := []struct {
			name   string
			filter Filter
			want   []uint64
		}{
			{"default", Filter{}, []uint64{1, 2, 3}},
			{"stream", Filter{Stream: "EVENTS"}, []uint64{1, 2, 3}},
			{"other stream", Filter{Stream: "OTHER"}, nil},
			{"consumer", Filter{Consumer: "billing"}, []uint64{1, 3}},
			{"subject", Filter{Subject: "events.order.2"}, []uint64{2}},
			{"subject pattern", Filter{Subject: "events.*.1"}, []uint64{1, 3}},
			{"subject wildcard", Filter{Subject: "events.order.>"}, []uint64{1, 2}},
			{"reason", Filter{Reason: jetbox.ReasonTerminated}, []uint64{2, 3}},
			{"since", Filter{Since: third.Time}, []uint64{3}},
			{"ID", Filter{ID: third.ID}, []uint64{3}},
			{"ID and more", Filter{ID: third.ID, Reason: jetbox.ReasonMaxDeliveries}, nil},
			{"limit", Filter{Limit: 2}, []uint64{1, 2}},
			{"all at once", Filter{Stream: "EVENTS", Consumer: "billing", Subject: "events.>", Reason: jetbox.ReasonTerminated, Since: third.Time, Limit: 5}, []uint64{3}},
			{"replayed", Filter{States: []State{StateReplayed}}, []uint64{4}},
			{"open and intent", Filter{States: []State{StateOpen, StateIntent}}, []uint64{1, 2, 3, 6}},
			{"headers only", Filter{HeadersOnly: true}, []uint64{1, 2, 3}},
		}
		for _, tt := range tests {
			t.Log(tt.name)
			w.wantSeqs(tt.filter, tt.want...)
			if n, err := w.letters.Count(t.Context(), tt.filter); err != nil || n != len(tt.want) {
				t.Errorf("Count(%s) = %d, %v, want %d", tt.name, n, err, len(tt.want))
			}
		}
		for _, l := range w.list(Filter{HeadersOnly: true}) {
			if len(l.Payload) > 0 {
				t.Errorf("payload = %q, want none with HeadersOnly", l.Payload)
			}
		}
		for _, f := range []Filter{{Consumer: "a.b"}, {Stream: "*"}, {ID: "dlq.x"}, {Limit: -1}, {States: []State{"opened"}}} {
			if _, err := w.letters.Count(t.Context(), f); err == nil {
				t.Errorf("List(%+v): no error, want one", f)
			}
		}
	})
}

func TestGroupsCountLettersOfEachConsumerAndReason(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		began := time.Now().UTC()
		for i := range 12 {
			f := w.event([]string{"shipping", "billing"}[i%2], "events.a", "", []byte("x"))
			f.Reason = []string{jetbox.ReasonMaxDeliveries, jetbox.ReasonTerminated}[i/6]
			l := w.park(f)
			if i == 1 {
				w.replay(l.ID)
			}
			time.Sleep(time.Minute)
		}
		got, err := w.letters.Groups(t.Context(), Filter{Stream: "EVENTS", States: []State{StateOpen, StateReplayed}})
		group := func(consumer, reason string, state State, letters int, after time.Duration) Group {
			return Group{Stream: "EVENTS", Consumer: consumer, Reason: reason, State: state, Letters: letters, Oldest: began.Add(after)}
		}
		want := []Group{
			group("billing", jetbox.ReasonMaxDeliveries, StateOpen, 2, 3*time.Minute),
			group("billing", jetbox.ReasonMaxDeliveries, StateReplayed, 1, time.Minute),
			group("billing", jetbox.ReasonTerminated, StateOpen, 3, 7*time.Minute),
			group("shipping", jetbox.ReasonMaxDeliveries, StateOpen, 3, 0),
			group("shipping", jetbox.ReasonTerminated, StateOpen, 3, 6*time.Minute),
		}
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("Groups = %+v, %v, want %+v", got, err, want)
		}
		if got, err := w.letters.Groups(t.Context(), Filter{Consumer: "nobody"}); len(got) != 0 || err != nil {
			t.Errorf("Groups of nothing = %+v, %v", got, err)
		}
	})
}

// A listing ends at what was there when it began, also when letters come, go
// and change under it, and leaves no consumer behind.
func TestListEndsWhileLettersChange(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		const n = 200
		var withdrawn []jetbox.Failure
		for i := range n {
			f := w.event("billing", "events.a", "", []byte("x"))
			if i >= n-20 {
				withdrawn = append(withdrawn, f)
				if err := w.letters.Intend(t.Context(), f); err != nil {
					t.Fatal(err)
				}
				continue
			}
			w.park(f)
		}
		seen := map[string]int{}
		for l, err := range w.letters.List(t.Context(), Filter{}) {
			if err != nil {
				t.Fatal(err)
			}
			seen[l.ID]++
			// Each replay fails at once: an open listing would never end.
			w.replay(l.ID)
			if err := w.letters.Park(t.Context(), w.failure("billing", w.show(l.ID).ReplaySeq)); err != nil {
				t.Fatal(err)
			}
			for _, f := range withdrawn {
				if err := w.letters.Withdraw(t.Context(), f); err != nil {
					t.Fatal(err)
				}
			}
			withdrawn = nil
		}
		for id, times := range seen {
			if times != 1 {
				t.Errorf("letter %s was listed %d times", id, times)
			}
		}
		if len(seen) != n-20 {
			t.Errorf("letters listed = %d, want %d", len(seen), n-20)
		}
		for _, err := range w.letters.List(t.Context(), Filter{}) {
			if err != nil {
				t.Error(err)
			}
			break
		}
		time.Sleep(5 * time.Second)
		st, err := w.js.Stream(t.Context(), "DLQ")
		if err != nil {
			t.Fatal(err)
		}
		if got := st.CachedInfo().State.Consumers; got != 0 {
			t.Errorf("consumers left on the dead-letter stream = %d, want 0", got)
		}
	})
}

func TestListSurvivesARestartOfTheBroker(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for range 500 {
			w.park(w.event("billing", "events.a", "", []byte("x")))
		}
		n := 0
		for _, err := range w.letters.List(t.Context(), Filter{}) {
			if err != nil {
				t.Fatal(err)
			}
			if n++; n == 100 {
				if err := w.srv.Restart(t.Context()); err != nil {
					t.Fatal(err)
				}
				time.Sleep(3 * time.Second)
			}
		}
		if n != 500 {
			t.Errorf("letters = %d, want 500", n)
		}
	})
}

// Messages lost between broker and client are noticed and read again, some of a
// batch as well as a whole batch.
func TestListReadsAgainWhatWasLostOnTheWay(t *testing.T) {
	const letters = 200
	for name, lose := range map[string]func(w *world, box *deafBox, n int){
		"a whole batch": func(_ *world, box *deafBox, n int) {
			if n == 100 {
				box.deafFor(500 * time.Millisecond)
			}
		},
		"some of a batch": func(w *world, _ *deafBox, n int) {
			if n != 100 {
				return
			}
			// Somebody else gets them: for the reader that is the same.
			st, err := w.js.Stream(w.t.Context(), "DLQ")
			if err != nil {
				w.t.Fatal(err)
			}
			for name := range st.ConsumerNames(w.t.Context()).Name() {
				c, err := st.Consumer(w.t.Context(), name)
				if err != nil {
					w.t.Fatal(err)
				}
				if m := w.next(c); m == nil {
					w.t.Fatal("nothing to steal: the test proves nothing")
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				for range letters {
					w.park(w.event("billing", "events.a", "", []byte("x")))
				}
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
				n := 0
				for l, err := range w.newLetters(js, Config{}).List(t.Context(), Filter{}) {
					if err != nil {
						t.Fatal(err)
					}
					if n++; l.StreamSeq != uint64(n) {
						t.Fatalf("letter %d is of message %d", n, l.StreamSeq)
					}
					lose(w, box, n)
				}
				if n != letters {
					t.Errorf("letters = %d, want %d", n, letters)
				}
			})
		})
	}
}

// A dead-letter stream that somebody else made may keep every version.
func TestListShowsOnlyTheLastVersionOfALetter(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		cfg := w.letters.lettersConfig()
		cfg.MaxMsgsPerSubject = -1
		if _, err := w.js.UpdateStream(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		f := w.event("billing", "events.a", "k1", []byte("x"))
		if err := w.letters.Intend(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		w.replay(w.park(f).ID)
		w.wantMsgs("DLQ", 4)
		w.wantSeqs(Filter{States: []State{StateIntent, StateOpen, StateReplaying}})
		w.wantSeqs(Filter{States: []State{StateReplayed}}, 1)
	})
}

func TestListWithoutStreamOrLetters(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.wantSeqs(Filter{})
		if err := w.js.DeleteStream(t.Context(), "DLQ"); err != nil {
			t.Fatal(err)
		}
		if _, err := w.letters.Count(t.Context(), Filter{}); !errors.Is(err, jetstream.ErrStreamNotFound) {
			t.Errorf("List without a stream: err = %v, want %v", err, jetstream.ErrStreamNotFound)
		}
	})
}

func TestLetterAsJSONHasTheKeysOfTheContract(t *testing.T) {
	t.Parallel()
	l := Letter{
		ID: "dlq.EVENTS.c.7-1", State: StateOpen, Stream: "EVENTS", Consumer: "c", StreamSeq: 7, Subject: "events.a",
		Header: map[string][]string{"X": {"y"}}, Payload: []byte("x"), Deliveries: 3, Reason: "terminated", Error: "boom",
		Time: time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC), Replays: 2,
	}
	got, err := json.Marshal(l)
	want := `{"id":"dlq.EVENTS.c.7-1","state":"open","stream":"EVENTS","consumer":"c","stream_seq":7,"subject":"events.a",` +
		`"deliveries":3,"reason":"terminated","error":"boom","time":"2026-01-02T03:04:05.006Z","replays":2}`
	if err != nil || string(got) != want {
		t.Errorf("JSON = %s, %v\nwant   %s", got, err, want)
	}
}

func TestIDsAreReadBackExactly(t *testing.T) {
	t.Parallel()
	good := identity{"EVENTS", "billing", 7, time.Unix(12, 34).UTC()}
	got, err := parseID("a.dlq", good.subject("a.dlq"))
	if err != nil || got != good {
		t.Errorf("parseID(%q) = %+v, %v, want %+v", good.subject("a.dlq"), got, err, good)
	}
	for _, bad := range []string{
		"", "dlq", "dlq.EVENTS.c", "dlq.EVENTS.c.7", "dlq.EVENTS.c.7-", "dlq.EVENTS.c.-1", "dlq.EVENTS.c.07-1", "dlq.EVENTS.c.7-01",
		"dlq.EVENTS.c.0-1", "dlq.*.c.7-1", "dlq.EVENTS.>.7-1", "dlq.EVENTS.c.7-1.x", "dlq.EVENTS..7-1", "dlqx.EVENTS.c.7-1", "dlq.EVENTS.c.+7-1",
	} {
		if id, err := parseID("dlq", bad); err == nil {
			t.Errorf("parseID(%q) = %+v, want an error", bad, id)
		}
	}
}

func FuzzErrorText(f *testing.F) {
	f.Add("boom\r\nNats-Rollup: all", 20)
	f.Add(strings.Repeat("\u00e9", 30), 21)
	f.Fuzz(func(t *testing.T, s string, limit int) {
		limit = 8 + min(max(limit, 0), 4096)
		got := errorText(s, limit)
		if len(got) > limit || strings.ContainsAny(got, "\r\n\x00") || strings.TrimSpace(got) != got || got != wireValue(got) {
			t.Errorf("errorText(%q, %d) = %q", s, limit, got)
		}
	})
}

func FuzzParseID(f *testing.F) {
	f.Add("dlq.EVENTS.billing.7-1")
	f.Fuzz(func(t *testing.T, s string) {
		id, err := parseID("dlq", s)
		if err == nil && id.subject("dlq") != s {
			t.Errorf("parseID(%q) = %+v, which is %q", s, id, id.subject("dlq"))
		}
	})
}
