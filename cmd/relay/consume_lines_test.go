package main

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

const linesServer = `while read -r line; do
	case "$line" in
	*'"payload":"bad"'*) echo permanent no such thing ;;
	*'"payload":"busy"'*) echo retry later ;;
	*'"payload":"die"'*) echo last words >&2; exit 3 ;;
	*'"payload":"hang"'*) sleep 60 ;;
	*'"payload":"noise"'*) echo what ;;
	*'"payload":"long"'*) head -c 70000 /dev/zero | tr '\0' x; echo ;;
	*) echo ok ;;
	esac
done; touch "$ENDED"`

func TestExecLinesAnswersEventByEvent(t *testing.T) {
	t.Parallel()
	needShell(t)
	ended := filepath.Join(t.TempDir(), "ended")
	h := newLinesHandler(linesServer, append(os.Environ(), "ENDED="+ended), io.Discard, slog.New(slog.DiscardHandler))
	for _, tt := range []struct{ payload, want, wantText string }{
		{"a", "ack", ""},
		{"bad", "permanent", "no such thing"},
		{"busy", "retry", "later"},
		{"die", "retry", "the command has ended without an answer: last words"},
		{"after a restart", "ack", ""},
		{"noise", "retry", `the command answered "what"`},
		{"long", "retry", "the command's answer has more than 65536 bytes"},
		{"hang", "retry", "command killed"},
		{"again", "ack", ""},
		{"text\nin two lines", "ack", ""},
		{"\xff\xfe", "ack", ""},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		err := h.handle(ctx, delivery(tt.payload))
		cancel()
		if got := verdictOf(err); got != tt.want {
			t.Errorf("%q: verdict %s (%v), want %s", tt.payload, got, err, tt.want)
		} else if err != nil && !strings.Contains(err.Error(), tt.wantText) {
			t.Errorf("%q: error %q, want %q in it", tt.payload, err, tt.wantText)
		}
	}
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			want, payload := "ack", "x"
			if i%2 == 1 {
				want, payload = "permanent", "bad"
			}
			if got := verdictOf(h.handle(t.Context(), delivery(payload))); got != want {
				t.Errorf("at the same time: %q got %s, want %s", payload, got, want)
			}
		})
	}
	wg.Wait()
	if err := h.close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(ended); err != nil {
		t.Errorf("the command did not see the end of its stdin: %v", err)
	}
}

// The line protocol is a contract with other people's programs.
func TestEventLineIsOneJSONObject(t *testing.T) {
	t.Parallel()
	d := delivery(`{"n": 9007199254740993}`)
	d.RawHeader = map[string][]string{"a": {"1", "2"}}
	b, err := json.Marshal(deliveryJSON(d))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"subject":"events.a","stream":"EVENTS","sequence":7,"delivered":2,"id":"e1","key":"k1","type":"a.done",` +
		`"headers":{"a":["1","2"]},"payload":"{\"n\": 9007199254740993}"}`
	if string(b) != want {
		t.Errorf("got  %s\nwant %s", b, want)
	}
	d.Payload = []byte{0xff, 0}
	if b, err = json.Marshal(deliveryJSON(d)); err != nil || !strings.HasSuffix(string(b), `"payload_base64":"/wA="}`) {
		t.Errorf("bytes that are no text: %s, %v", b, err)
	}
}

// What left the command's process group cannot be killed with it, and may keep its
// stdout for ever. Nobody waits for it: neither when time is up, nor at the end.
func TestExecLinesDoesNotWaitForWhatTheCommandLeavesBehind(t *testing.T) {
	t.Parallel()
	needShell(t)
	const left, soon = "20", 10 * time.Second
	for name, command := range map[string]string{
		"its stdout only": `setsid sleep ` + left + ` 2>/dev/null & read -r line; `,
		"all its streams": `setsid sleep ` + left + ` & read -r line; `,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newLinesHandler(command+"exec sleep 60", os.Environ(), io.Discard, slog.New(slog.DiscardHandler))
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			began := time.Now()
			if err := h.handle(ctx, delivery("x")); verdictOf(err) != "retry" {
				t.Errorf("a command that hangs: %v, want a retry", err)
			}
			if took := time.Since(began); took > soon {
				t.Errorf("handle took %v", took)
			}
			h = newLinesHandler(command+`echo ok; read -r line`, os.Environ(), io.Discard, slog.New(slog.DiscardHandler))
			if err := h.handle(t.Context(), delivery("x")); err != nil {
				t.Error(err)
			}
			began = time.Now()
			// It ends with 1: there is no other line.
			if err := h.close(); err == nil {
				t.Error("close says nothing of the command's exit status")
			}
			if took := time.Since(began); took > soon {
				t.Errorf("close took %v", took)
			}
		})
	}
}

// A command may end, or speak out of turn, after any answer: that is no failure of
// the event that comes next. An event on which a new one ends is.
func TestExecLinesCommandThatEndedFailsNoEvent(t *testing.T) {
	t.Parallel()
	needShell(t)
	for _, tt := range []struct {
		name, command string
		events        int
	}{
		{"ends at once", `read -r line; echo ok`, 6},
		{"ends a little later", `read -r line; echo ok; sleep 0.02`, 6},
		{"answers more than once", `while read -r line; do echo ok; echo ok; done`, 6},
		{"ends without an answer", `read -r line; echo ok; read -r line; exit 1`, 6},
		{"leaves its streams open", `read -r line; sleep 60 & echo ok`, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := newLinesHandler(tt.command, os.Environ(), io.Discard, slog.New(slog.DiscardHandler))
			for i := range tt.events {
				if err := h.handle(t.Context(), delivery("x")); err != nil {
					t.Errorf("event %d: %v", i, err)
				}
				if i > 2 { // also when its end has been seen
					time.Sleep(50 * time.Millisecond)
				}
			}
			_ = h.close()
		})
	}
	runs := filepath.Join(t.TempDir(), "runs")
	h := newLinesHandler(`while read -r line; do case "$line" in *'"payload":"die"'*) echo x >> `+runs+`; exit 3 ;; esac; echo ok; done`,
		os.Environ(), io.Discard, slog.New(slog.DiscardHandler))
	for _, tt := range []struct {
		payload, want string
		runs          int // so far, of what it ends on
	}{{"die", "retry", 1}, {"a", "ack", 1}, {"die", "retry", 3}, {"die", "retry", 4}} {
		err := h.handle(t.Context(), delivery(tt.payload))
		if got := verdictOf(err); got != tt.want {
			t.Errorf("%q: verdict %s (%v), want %s", tt.payload, got, err, tt.want)
		}
		b, _ := os.ReadFile(runs)
		if n := strings.Count(string(b), "x"); n != tt.runs {
			t.Errorf("%q: %d runs so far, want %d", tt.payload, n, tt.runs)
		}
	}
}
