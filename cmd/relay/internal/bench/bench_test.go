package bench

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/relay"
)

func TestMedian(t *testing.T) {
	for _, tt := range []struct {
		values []float64
		want   float64
	}{
		{[]float64{3}, 3},
		{[]float64{5, 1, 3}, 3},
		{[]float64{4, 1, 3, 2}, 2.5},
		{[]float64{1, 1, 100}, 1},
	} {
		before := append([]float64(nil), tt.values...)
		if got := median(tt.values); got != tt.want {
			t.Errorf("median(%v) = %v, want %v", tt.values, got, tt.want)
		}
		if !reflect.DeepEqual(tt.values, before) {
			t.Errorf("median changed %v to %v", before, tt.values)
		}
	}
	if got := median(nil); !math.IsNaN(got) {
		t.Errorf("median of nothing is %v, want NaN", got)
	}
}

func TestPercentile(t *testing.T) {
	var hundred []time.Duration
	for i := 100; i > 0; i-- {
		hundred = append(hundred, time.Duration(i))
	}
	for _, tt := range []struct {
		times []time.Duration
		p     float64
		want  time.Duration
	}{
		{hundred, 50, 50},
		{hundred, 99, 99},
		{hundred, 100, 100},
		{hundred, 0, 1},
		{hundred[:1], 50, 100},
		{[]time.Duration{1, 2}, 50, 1},
		{[]time.Duration{1, 2}, 51, 2},
		{[]time.Duration{3, 1, 2}, 99, 3},
		{nil, 99, 0},
	} {
		if got := percentile(tt.times, tt.p); got != tt.want {
			t.Errorf("p%v of %d times = %v, want %v", tt.p, len(tt.times), got, tt.want)
		}
	}
	if hundred[0] != 100 {
		t.Error("percentile changed the order of its times")
	}
}

func TestDigits(t *testing.T) {
	for x, want := range map[float64]string{
		0: "0.00", 0.0123: "0.012", 0.5: "0.50", 9.876: "9.88", 42.34: "42.3", 100: "100", 999.6: "1,000", 1234567.8: "1,234,568", -1234: "-1,234", -123456: "-123,456",
	} {
		if got := digits(x); got != want {
			t.Errorf("digits(%v) = %q, want %q", x, got, want)
		}
	}
}

func TestIDsOfASampleDiffer(t *testing.T) {
	const n = 10_000
	seen := make(map[string]bool)
	for _, id := range newSample(n, noKey, time.Now()).ids {
		if len(id) != 36 || seen[id] {
			t.Fatalf("ID %q is not 36 characters long or not the only one", id)
		}
		seen[id] = true
	}
}

// The ratio of a line is the median of the ratios, not the ratio of the medians: a
// slow round is slow on both sides.
func TestLinesOfSeveralRounds(t *testing.T) {
	var progress strings.Builder
	s := results{progress: &progress}
	for _, round := range [][2]float64{{10, 100}, {30, 60}, {50, 500}} {
		s.begin(part{name: "sqlite", about: "about"}, "round")
		s.compare("no keys", rowsPerSecond, round[0], besideRaw, round[1])
		s.figure("other", millis, 1)
	}
	if len(s.lines) != 2 {
		t.Fatalf("%d lines, want 2", len(s.lines))
	}
	l := s.lines[0]
	if l.ID != "sqlite/no keys" || l.Median != 30 || l.BesideMedian != 100 || l.Ratio != 0.1 {
		t.Errorf("line %+v, want median 30 beside 100 and ratio 0.1", l)
	}
	if got := strings.Count(progress.String(), "\n"); got != 6 {
		t.Errorf("%d lines of progress, want 6:\n%s", got, &progress)
	}
	var table strings.Builder
	if err := (&Report{Results: s.lines}).WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	want := "\nsqlite: about\n" +
		"  no keys                         30.0 rows/s         0.10 of 100 raw publish            [10.0 30.0 50.0]\n" +
		"  other                           1.00 ms                                                [1.00 1.00 1.00]\n"
	if !strings.HasSuffix(table.String(), want) {
		t.Errorf("table\n%s\nwant it to end with\n%s", &table, want)
	}
}

func TestGOGCIsReadAndNotChanged(t *testing.T) {
	if a, b := gogc(), gogc(); a != b || a == 0 {
		t.Errorf("GOGC is %d, then %d", a, b)
	}
}

// newRig returns a rig with a broker of its own.
func newRig(t *testing.T) *rig {
	t.Helper()
	r, err := openRig(t.Context(), Config{
		Rows: 50, Rounds: 1, Rate: 1000,
		Stream:   jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}},
		Progress: io.Discard,
		Logger:   slog.New(slog.DiscardHandler),
	}, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// stored returns the messages of the stream by their message IDs.
func stored(t *testing.T, r *rig, n int) map[string]*jetstream.RawStreamMsg {
	t.Helper()
	s, err := r.js.Stream(t.Context(), r.cfg.Stream.Name)
	if err != nil {
		t.Fatal(err)
	}
	out := make(map[string]*jetstream.RawStreamMsg)
	for seq := range n {
		m, err := s.GetMsg(t.Context(), uint64(seq+1))
		if err != nil {
			t.Fatal(err)
		}
		out[m.Header.Get(jetstream.MsgIDHeader)] = m
	}
	return out
}

// The yardstick is fair: what raw publish sends is what the relay sends.
func TestRawPublishSendsWhatTheRelaySends(t *testing.T) {
	r := newRig(t)
	for _, keys := range []int{noKey, oneKey, manyKeys} {
		s := r.sample(r.cfg.Rows, keys)
		if _, err := r.publishRaw(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		raw := stored(t, r, s.len())
		b, err := r.openSQLite(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := b.fill(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		if _, err := r.drain(t.Context(), b, s.len(), relay.Config{}); err != nil {
			t.Fatal(err)
		}
		if err := b.discard(); err != nil {
			t.Error(err)
		}
		relayed := stored(t, r, s.len())
		if len(raw) != s.len() || len(relayed) != s.len() {
			t.Fatalf("%d keys: %d and %d messages, want %d", keys, len(raw), len(relayed), s.len())
		}
		for id, m := range raw {
			other := relayed[id]
			if other == nil {
				t.Fatalf("%d keys: the relay did not publish %s", keys, id)
			}
			if m.Subject != other.Subject || string(m.Data) != string(other.Data) || !reflect.DeepEqual(m.Header, other.Header) {
				t.Errorf("%d keys: raw publish sent\n%s %v\nthe relay\n%s %v", keys, m.Subject, m.Header, other.Subject, other.Header)
			}
		}
	}
}

// A stream that has not what was measured makes the measurement an error.
func TestMissingMessagesAreAnError(t *testing.T) {
	r := newRig(t)
	s := r.sample(10, noKey)
	if _, err := r.publishRaw(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	err := r.expectStored(t.Context(), 11)
	if err == nil || !strings.Contains(err.Error(), "stream EVENTS has 10 messages, want 11") {
		t.Errorf("error %v, want one about a missing message", err)
	}
}

// What is waited for cannot come any more when its task has ended.
func TestTaskThatEndsTooSoonIsAnError(t *testing.T) {
	errGone := errors.New("gone")
	task := start(t.Context(), func(context.Context) error { return errGone })
	never := func(context.Context) (bool, error) { return false, nil }
	err := task.await(t.Context(), func() int64 { return 0 }, never)
	if !errors.Is(err, errEnded) || !errors.Is(err, errGone) {
		t.Errorf("error %v, want %v and %v", err, errEnded, errGone)
	}
	if err := task.stop(); !errors.Is(err, errGone) {
		t.Errorf("stop returned %v", err)
	}
}

func TestReportIsJSON(t *testing.T) {
	text, err := json.Marshal(Report{Results: []*Line{{Part: "sqlite", ID: "sqlite/one key", Unit: rowsPerSecond, Median: 1, Values: []float64{1}}}})
	if err != nil {
		t.Fatal(err)
	}
	if want := `"results":[{"part":"sqlite","id":"sqlite/one key","unit":"rows/s","median":1,"rounds":[1]}]`; !strings.Contains(string(text), want) {
		t.Errorf("JSON %s, want it to have %s", text, want)
	}
}
