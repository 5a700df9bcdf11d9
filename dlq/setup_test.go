package dlq

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

func TestSubjectPatternsOverlapAndCover(t *testing.T) {
	t.Parallel()
	tests := []struct {
		a, b            string
		overlap, covers bool
	}{
		{"dlq.>", "events.>", false, false},
		{"dlq.>", ">", true, false},
		{">", "dlq.>", true, true},
		{"events.dlq.>", "events.>", true, false},
		{"events.>", "events.dlq.>", true, true},
		{"*.>", "dlq.>", true, true},
		{"dlq.>", "*.x", true, false},
		{"dlq.>", "dlq", false, false},
		{"a.*", "a.b", true, true},
		{"a.*", "a.>", true, false},
		{"a.*", "a.b.c", false, false},
		{"a.b", "a.b", true, true},
		{"a.*.c", "a.b.*", true, false},
	}
	for _, tt := range tests {
		if got := overlap(tt.a, tt.b); got != tt.overlap {
			t.Errorf("overlap(%q, %q) = %v, want %v", tt.a, tt.b, got, tt.overlap)
		}
		if got := overlap(tt.b, tt.a); got != tt.overlap {
			t.Errorf("overlap(%q, %q) = %v, want %v", tt.b, tt.a, got, tt.overlap)
		}
		if got := covers(tt.a, tt.b); got != tt.covers {
			t.Errorf("covers(%q, %q) = %v, want %v", tt.a, tt.b, got, tt.covers)
		}
	}
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	for _, c := range []Config{
		{Stream: "a.b"},
		{Prefix: "dlq."},
		{Prefix: "a..b"},
		{Prefix: "dlq.>"},
		{Prefix: "d q"},
		{Prefix: "$dlq"},
		{AdvisoryPrefix: "app."},
		{AdvisoryPrefix: "app.>"},
		{AdvisoryPrefix: "$JS"},
		{Replicas: -1},
		{Grace: -1},
		{Advisories: "*"},
		{Stream: "X", Advisories: "X"},
	} {
		if err := c.withDefaults().validate(); err == nil || !strings.HasPrefix(err.Error(), "dlq: ") {
			t.Errorf("validate(%+v) = %v, want an error", c, err)
		}
	}
	for _, c := range []RouterConfig{{}, {EventStream: "a.b"}, {EventStream: "S", Backoff: -1}, {EventStream: "S", Backoff: time.Hour}, {EventStream: "S", Durable: "a b"}, {EventStream: "S", SweepEvery: -1}} {
		if err := c.withDefaults("").validate(); err == nil {
			t.Errorf("validate(%+v) = nil, want an error", c)
		}
	}
	if _, err := New(nil, Config{}); err == nil {
		t.Error("New(nil) = nil, want an error")
	}
}

func TestSetupRefusesLettersInsideTheEventStream(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for prefix, want := range map[string]string{
			"events.dlq": "letters go to events.dlq.>, which is inside subject events.> of event stream EVENTS",
			"events":     "letters go to events.>, which is inside subject events.> of event stream EVENTS",
		} {
			s := w.newLetters(w.js, Config{Stream: "DLQ2", Prefix: prefix})
			if _, err := s.Setup(t.Context(), "EVENTS"); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("Setup with prefix %s: err = %v, want it to name both sides", prefix, err)
			}
			// Without being told, the server finds it, and we say whose it is.
			if _, err := s.Setup(t.Context()); err == nil || !strings.Contains(err.Error(), "overlaps with stream EVENTS") {
				t.Errorf("Setup with prefix %s: err = %v, want it to name the other stream", prefix, err)
			}
		}
		if _, err := w.letters.Setup(t.Context(), "MISSING"); !errors.Is(err, jetstream.ErrStreamNotFound) {
			t.Errorf("Setup for a missing stream: err = %v, want %v", err, jetstream.ErrStreamNotFound)
		}
		if _, err := w.letters.Setup(t.Context(), "DLQ"); err == nil {
			t.Error("Setup with the dead-letter stream as event stream: no error, want one")
		}
		if _, err := w.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "GREEDY", Subjects: []string{"other.>"}}); err != nil {
			t.Fatal(err)
		}
		// Only one stream of an account can capture advisories.
		s := w.newLetters(w.js, Config{Advisories: "MINE"})
		if _, err := s.Setup(t.Context(), "EVENTS"); err == nil || !strings.Contains(err.Error(), "overlaps with stream JETBOX_ADVISORIES") {
			t.Errorf("Setup beside a stream that captures advisories: err = %v, want it to name that one", err)
		}
		s = w.newLetters(w.js, Config{Stream: "GREEDY"})
		if _, err := s.Setup(t.Context()); err == nil || !strings.Contains(err.Error(), "none of which takes dlq.>") {
			t.Errorf("Setup on a stream that takes no letters: err = %v, want it to say so", err)
		}
	})
}

func TestSetupCreatesTheStreamsOfTheContractAndLeavesThemAlone(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		config := func(name string) jetstream.StreamConfig {
			st, err := w.js.Stream(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			return st.CachedInfo().Config
		}
		d := config("DLQ")
		if !slices.Equal(d.Subjects, []string{"dlq.>"}) || d.Storage != jetstream.FileStorage || d.Retention != jetstream.LimitsPolicy ||
			d.Discard != jetstream.DiscardNew || d.MaxAge != 0 || d.Duplicates != 2*time.Minute || d.Replicas != 1 || !d.AllowBatchPublish {
			t.Errorf("DLQ = %+v", d)
		}
		a := config("JETBOX_ADVISORIES")
		if a.Storage != jetstream.FileStorage || a.MaxAge != 7*24*time.Hour || a.Duplicates != 2*time.Minute || !a.AllowBatchPublish {
			t.Errorf("JETBOX_ADVISORIES = %+v", a)
		}
		d.MaxAge, d.Discard, d.MaxMsgsPerSubject = time.Hour, jetstream.DiscardOld, -1
		if _, err := w.js.UpdateStream(t.Context(), d); err != nil {
			t.Fatal(err)
		}
		diffs, err := w.letters.Setup(t.Context(), "EVENTS")
		want := []string{
			"stream DLQ: discard policy is DiscardOld, want DiscardNew",
			"stream DLQ: maximum age is 1h0m0s, want 0s",
			"stream DLQ: maximum messages per subject is -1, want 1: old versions of letters stay",
		}
		if err != nil || !slices.Equal(diffs, want) {
			t.Errorf("Setup = %q, %v\nwant %q", diffs, err, want)
		}
		if got := config("DLQ"); got.MaxAge != time.Hour {
			t.Errorf("maximum age = %v, want Setup to leave it at %v", got.MaxAge, time.Hour)
		}
	})
}

func TestManyProcessesSetUpAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for round := range 5 {
			errs := make(chan error)
			for range 8 {
				s := w.newLetters(w.connect(), Config{Stream: fmt.Sprintf("DLQ%d", round), Prefix: fmt.Sprintf("d%d", round)})
				go func() {
					diffs, err := s.Setup(t.Context(), "EVENTS")
					if len(diffs) > 0 {
						err = errors.Join(err, fmt.Errorf("differences: %q", diffs))
					}
					errs <- err
				}()
			}
			for range 8 {
				if err := <-errs; err != nil {
					t.Error(err)
				}
			}
		}
	})
}
