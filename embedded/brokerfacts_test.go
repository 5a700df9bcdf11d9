package embedded_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// The tests of this file and of brokerfacts_consumer_test.go pin what other
// packages assume about the server and its client. One that fails after an
// upgrade names an assumption to look at, not a bug in this package.

// wantCode fails the test unless err is the API error with that code and, when
// words is not empty, that text.
func wantCode(t *testing.T, what string, err error, code jetstream.ErrorCode, words string) {
	t.Helper()
	var api *jetstream.APIError
	if !errors.As(err, &api) {
		t.Errorf("%s: err = %v, want an API error with code %d", what, err, code)
		return
	}
	if api.ErrorCode != code || !strings.Contains(api.Description, words) {
		t.Errorf("%s: code %d %q, want %d %q", what, api.ErrorCode, api.Description, code, words)
	}
}

// send publishes a message with headers given as pairs.
func send(t *testing.T, js jetstream.JetStream, subject string, size int, headers ...string) (*jetstream.PubAck, error) {
	t.Helper()
	msg := nats.NewMsg(subject)
	msg.Data = make([]byte, size)
	for i := 0; i < len(headers); i += 2 {
		msg.Header.Set(headers[i], headers[i+1])
	}
	return js.PublishMsg(t.Context(), msg)
}

// A duplicate is answered with the first copy's sequence, whatever its subject
// and body; the window is two minutes and is not extended by a duplicate.
func TestFactDuplicateAnswersWithTheOriginalSequence(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}})
		if w := streamInfo(t, js, "S").Config.Duplicates; w != 2*time.Minute {
			t.Errorf("duplicate window = %v, want 2m", w)
		}
		publish(t, js, "s.0", "other")
		publish(t, js, "s.1", "id")
		time.Sleep(100 * time.Second)
		if ack := publish(t, js, "s.2", "id"); !ack.Duplicate || ack.Sequence != 2 {
			t.Errorf("same ID, other subject = %+v, want a duplicate of sequence 2", ack)
		}
		time.Sleep(25 * time.Second)
		if ack := publish(t, js, "s.1", "id"); ack.Duplicate {
			t.Errorf("125s after the first copy = %+v, want no duplicate", ack)
		}
	})
}

// While the window lasts, an ID stays taken although its message was deleted:
// the publish is acknowledged and nothing is stored. A restart forgets it.
func TestFactDeletedMessagesKeepTheirIDUntilARestart(t *testing.T) {
	inBubble(t, func(t *testing.T, srv *embedded.Server, js jetstream.JetStream) {
		s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
		publish(t, js, "s", "id")
		if err := s.DeleteMsg(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		if ack := publish(t, js, "s", "id"); !ack.Duplicate {
			t.Errorf("after the delete = %+v, want a duplicate", ack)
		}
		if n := streamInfo(t, js, "S").State.Msgs; n != 0 {
			t.Errorf("messages stored = %d, want 0", n)
		}
		if err := srv.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		if ack := publish(t, connect(t, srv), "s", "id"); ack.Duplicate {
			t.Errorf("after the restart = %+v, want no duplicate", ack)
		}
	})
}

// Blanks around an ID are lost, and a header that is spelled in lower case is
// no ID at all: an ID has to be checked before it is sent.
func TestFactMessageIDsAreTrimmedAndCaseSensitive(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
		publish(t, js, "s", "id")
		publish(t, js, "s", "a b")
		for _, id := range []string{" id", "id ", "a\nb"} {
			if ack := publish(t, js, "s", id); !ack.Duplicate {
				t.Errorf("ID %q = %+v, want a duplicate", id, ack)
			}
		}
		msg := nats.NewMsg("s")
		msg.Header["nats-msg-id"] = []string{"id"}
		if ack, err := js.PublishMsg(t.Context(), msg); err != nil || ack.Duplicate {
			t.Errorf("lower-case header = %+v, %v, want no duplicate", ack, err)
		}
	})
}

// A window above the stream's MaxAge is refused; a short MaxAge shortens the
// default window without a word.
func TestFactDuplicateWindowIsAtMostMaxAge(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, MaxAge: time.Minute})
		if w := streamInfo(t, js, "S").Config.Duplicates; w != time.Minute {
			t.Errorf("window with MaxAge 1m = %v, want 1m", w)
		}
		_, err := js.CreateStream(t.Context(), jetstream.StreamConfig{
			Name: "T", Subjects: []string{"t"}, MaxAge: time.Minute, Duplicates: 2 * time.Minute,
		})
		wantCode(t, "window above MaxAge", err, 10052, "duplicates window can not be larger then max age")
	})
}

// Code 10077 is three different things, told apart by their words alone: the
// whole stream is full (twice), or one subject is.
func TestFactFullStreamAndFullSubjectDifferOnlyInWords(t *testing.T) {
	tests := []struct {
		name  string
		cfg   jetstream.StreamConfig
		words string
	}{
		{"messages", jetstream.StreamConfig{MaxMsgs: 1}, "maximum messages exceeded"},
		{"bytes", jetstream.StreamConfig{MaxBytes: 100}, "maximum bytes exceeded"},
		{
			"per subject",
			jetstream.StreamConfig{MaxMsgsPerSubject: 1, DiscardNewPerSubject: true},
			"maximum messages per subject exceeded",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
				cfg := tt.cfg
				cfg.Name, cfg.Subjects, cfg.Discard = "S", []string{"s"}, jetstream.DiscardNew
				createStream(t, js, cfg)
				publish(t, js, "s", "1")
				_, err := send(t, js, "s", 100)
				wantCode(t, "publish to the full stream", err, 10077, tt.words)
			})
		})
	}
}

// Every refusal that the classes of failures are built on, by its code.
func TestFactRefusalsByCode(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, MaxMsgSize: 70_000})
		publish(t, js, "s", "1")
		tests := []struct {
			name    string
			size    int
			headers []string
			code    jetstream.ErrorCode
			words   string
		}{
			{"message over MaxMsgSize", 70_001, nil, 10054, "message size exceeds maximum allowed"},
			{"headers over 64 KiB", 0, []string{"X", strings.Repeat("x", 65535)}, 10097, "header size exceeds maximum allowed of 64k"},
			{"subject already written", 0, []string{"Nats-Expected-Last-Subject-Sequence", "0"}, 10071, "wrong last sequence: 1"},
			{"other stream expected", 0, []string{"Nats-Expected-Stream", "T"}, 10060, "expected stream does not match"},
			{"TTL not allowed", 0, []string{"Nats-TTL", "1m"}, 10166, "per-message TTL is disabled"},
			{"rollup not allowed", 0, []string{"Nats-Rollup", "sub"}, 10111, "rollup not permitted"},
			{"atomic batch not allowed", 0, []string{"Nats-Batch-Id", "b", "Nats-Batch-Sequence", "1"}, 10174, "atomic publish is disabled"},
			{"schedule not allowed", 0, []string{"Nats-Schedule", "@at 2100-01-01T00:00:00Z"}, 10188, "message schedules is disabled"},
		}
		for _, tt := range tests {
			_, err := send(t, js, "s", tt.size, tt.headers...)
			wantCode(t, tt.name, err, tt.code, tt.words)
		}
		if n := streamInfo(t, js, "S").State.Msgs; n != 1 {
			t.Errorf("messages stored = %d, want 1", n)
		}
	})
}

// Creation by expected-last-subject-sequence 0 works once, and on one server it
// is checked before the duplicate: a repeat of the creation is a 10071.
func TestFactCreateOnceIsCheckedBeforeTheDuplicate(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}})
		create := []string{"Nats-Expected-Last-Subject-Sequence", "0", "Nats-Msg-Id", "id"}
		if _, err := send(t, js, "s.1", 0, create...); err != nil {
			t.Errorf("first creation: %v", err)
		}
		_, err := send(t, js, "s.1", 0, create...)
		wantCode(t, "second creation", err, 10071, "wrong last sequence: 1")
	})
}

// max_payload is 1 MiB and counts headers and body; the client refuses what is
// larger without sending it.
func TestFactMaxPayloadCountsTheHeaders(t *testing.T) {
	const limit = 1 << 20
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
		if got := js.Conn().MaxPayload(); got != limit {
			t.Errorf("max_payload = %d, want %d", got, limit)
		}
		if _, err := send(t, js, "s", limit); err != nil {
			t.Errorf("body of 1 MiB without headers: %v", err)
		}
		if _, err := send(t, js, "s", limit, "Nats-Msg-Id", "id"); !errors.Is(err, nats.ErrMaxPayload) {
			t.Errorf("body of 1 MiB with a header: err = %v, want ErrMaxPayload", err)
		}
	})
}

// A subject that no stream takes is indistinguishable from an illegal one, and
// a wildcard is stored as if it were a subject.
func TestFactSubjectsAreHardlyChecked(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}})
		for _, subject := range []string{"nobody", "s..x", "s.x."} {
			if _, err := send(t, js, subject, 0); !errors.Is(err, jetstream.ErrNoStreamResponse) {
				t.Errorf("publish to %q: err = %v, want ErrNoStreamResponse", subject, err)
			}
		}
		for _, subject := range []string{"s.*", "s.>"} {
			if _, err := send(t, js, subject, 0); err != nil {
				t.Errorf("publish to %q: err = %v, want it stored", subject, err)
			}
		}
		if _, err := send(t, js, "s.a b", 0); !errors.Is(err, nats.ErrBadSubject) {
			t.Errorf("publish to a subject with a blank: err = %v, want ErrBadSubject", err)
		}
	})
}

// A subject of more than 4 KiB makes the server close the connection, and the
// client does not come back: the length has to be checked before the send.
func TestFactLongSubjectClosesTheConnectionForGood(t *testing.T) {
	inBubble(t, func(t *testing.T, srv *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}})
		closed := make(chan struct{})
		long := connect(t, srv,
			nats.MaxReconnects(-1),
			nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}), // the default one prints
			nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
		if _, err := send(t, long, "s."+strings.Repeat("x", 5000), 0); err == nil {
			t.Error("publish to a subject of 5,000 bytes succeeded")
		}
		select {
		case <-closed:
		case <-time.NewTimer(time.Minute).C:
			t.Errorf("connection is %v a minute later, want closed", long.Conn().Status())
		}
		publish(t, js, "s.1", "id") // other connections live on
	})
}

// What is deleted, and what was never there, are the same error. A second
// delete is told apart by words alone: the client drops the code, 10057.
func TestFactMissingMessageIsNotFound(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
		publish(t, js, "s", "id")
		if err := s.DeleteMsg(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		for _, seq := range []uint64{1, 7} {
			if _, err := s.GetMsg(t.Context(), seq); !errors.Is(err, jetstream.ErrMsgNotFound) {
				t.Errorf("get sequence %d: err = %v, want ErrMsgNotFound", seq, err)
			}
		}
		err := s.DeleteMsg(t.Context(), 1)
		if !errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) || !strings.Contains(err.Error(), "no message found") {
			t.Errorf("second delete: err = %v, want ErrMsgDeleteUnsuccessful, no message found", err)
		}
	})
}
