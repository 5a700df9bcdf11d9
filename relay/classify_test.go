package relay

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func TestFailuresAreTheRowsOwnOnlyWhenKnownToBe(t *testing.T) {
	t.Parallel()
	api := func(status int, code jetstream.ErrorCode, words string) error {
		return &jetstream.APIError{Code: status, ErrorCode: code, Description: words}
	}
	for _, tt := range []struct {
		err  error
		want string
	}{
		{nats.ErrMaxPayload, classPermanent},
		{nats.ErrBadSubject, classPermanent},
		{nats.ErrBadHeaderMsg, classPermanent},
		{api(400, 10054, "message size exceeds maximum allowed"), classPermanent},
		{api(400, 10097, "header size exceeds maximum allowed of 64k"), classPermanent},
		{api(503, 10077, "maximum messages per subject exceeded"), classRow},
		{fmt.Errorf("%w: a.b", errNoStream), classRow},
		{api(503, 10077, "maximum messages exceeded"), classOutage},
		{api(503, 10077, "maximum bytes exceeded"), classOutage},
		{api(503, 10077, "words of a later server"), classOutage},
		{api(409, 10158, "duplicate message id is in process"), classOutage},
		{api(429, 10167, "too many requests"), classOutage},
		{api(503, 10008, "JetStream system temporarily unavailable"), classOutage},
		{api(400, 19999, "unheard of"), classOutage},
		{jetstream.ErrNoStreamResponse, classOutage},
		{jetstream.ErrAsyncPublishTimeout, classOutage},
		{nats.ErrDisconnected, classOutage},
		{nats.ErrReconnectBufExceeded, classOutage},
		{nats.ErrConnectionClosed, classOutage},
		{context.DeadlineExceeded, classOutage},
		{errWrongAck, classOutage},
		{errNoAck, classOutage},
		{errors.New("anything else"), classOutage},
	} {
		if got := classify(fmt.Errorf("publish: %w", tt.err)); got != tt.want {
			t.Errorf("classify(%v) = %s, want %s", tt.err, got, tt.want)
		}
	}
}

func TestFiltersMatchAsTheServerDoes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		filter, subject string
		want            bool
	}{
		{"events.>", "events.a", true},
		{"events.>", "events.a.b", true},
		{"events.>", "events", false},
		{"events.>", "event.a", false},
		{"events.*", "events.a", true},
		{"events.*", "events.a.b", false},
		{"events.*.b", "events.a.b", true},
		{"events.*.b", "events.a.c", false},
		{">", "a", true},
		{"*", "a", true},
		{"*", "a.b", false},
		{"a.b", "a.b", true},
		{"a.b", "a", false},
		{"a", "a.b", false},
	} {
		if got := matches(tt.filter, tt.subject); got != tt.want {
			t.Errorf("matches(%q, %q) = %v, want %v", tt.filter, tt.subject, got, tt.want)
		}
	}
}

func TestBadConfigNamesFieldAndValue(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		cfg  Config
		want string
	}{
		{Config{Batch: -1}, "Batch is -1"},
		{Config{MaxAttempts: -5}, "MaxAttempts is -5"},
		{Config{Lease: time.Millisecond}, "Lease is 1ms"},
		{Config{PollInterval: -time.Second}, "PollInterval is -1s"},
		{Config{Backoff: time.Minute, MaxBackoff: time.Second}, "MaxBackoff is 1s, want at least 1m0s"},
		{Config{OnDead: "stop"}, `OnDead is "stop"`},
		{Config{OnRecreated: "ask"}, `OnRecreated is "ask"`},
		{Config{Retention: -time.Hour}, "Retention is -1h0m0s"},
		{Config{Retention: time.Second}, "Retention 1s is shorter than BrokerSync 2m0s"},
		{Config{DrainTimeout: -1}, "DrainTimeout is -1ns"},
		{Config{Source: strings.Repeat("x", 300)}, "Source has 300 bytes"},
	} {
		err := tt.cfg.withDefaults().validate()
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: error %v, want %q", tt.cfg, err, tt.want)
		}
	}
	if err := (Config{}).withDefaults().validate(); err != nil {
		t.Errorf("the zero Config: %v", err)
	}
}

// The first round has what may be on the wire together; a key goes on only behind
// a stored message.
func TestOneMessageOfAKeyIsOnTheWireAtATime(t *testing.T) {
	t.Parallel()
	batch := make([]message, 6)
	for i, key := range []string{"", "a", "a", "b", "", "a"} {
		batch[i].key = key
	}
	results := make([]result, len(batch))
	round, q := newQueue(batch)
	if fmt.Sprint(round) != "[0 1 3 4]" {
		t.Fatalf("first round %v", round)
	}
	results[1].ack = &jetstream.PubAck{}
	results[3].err = errNoAck
	if round = q.next(round, batch, results); fmt.Sprint(round) != "[2]" {
		t.Fatalf("second round %v", round)
	}
	if round = q.next(round, batch, results); len(round) != 0 {
		t.Fatalf("third round %v: message 2 is not stored", round)
	}
}
