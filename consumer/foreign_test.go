package consumer_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
)

// BR-53: messages of other programs reach the handler as what they are. Those
// it cannot read end as dead letters with their bytes, none loops, and their
// neighbors are handled.
func TestForeignMessagesAreHandledOrParkedNeverLooped(t *testing.T) {
	inBubble(t, func(b *bus) {
		headers := func(kv ...string) nats.Header {
			h := nats.Header{}
			for i := 0; i < len(kv); i += 2 {
				h.Add(kv[i], kv[i+1])
			}
			return h
		}
		long := strings.Repeat("x", 10_000)
		b.publish("before")
		foreign := []struct {
			name   string
			msg    nats.Msg
			parked bool
		}{
			{"no headers", nats.Msg{Data: []byte(`{}`)}, false},
			{"bad JSON", nats.Msg{Data: []byte(`{"a":`)}, true},
			{"unknown schema version", nats.Msg{Header: headers("ce-schemaversion", "99"), Data: []byte(`{}`)}, true},
			{"ID of 10 KB", nats.Msg{Header: headers("Idempotency-Key", long), Data: []byte(`{}`)}, false},
			{"ID with NUL", nats.Msg{Header: headers("Idempotency-Key", "a\x00b"), Data: []byte(`{}`)}, false},
			{"two ID headers", nats.Msg{Header: headers("ce-id", "1", "ce-id", "2"), Data: []byte(`{}`)}, false},
			{"bad escape in an attribute", nats.Msg{Header: headers("ce-id", "%zz"), Data: []byte(`{}`)}, true},
			{"bad sequence", nats.Msg{Header: headers("ce-sequence", "many"), Data: []byte(`{}`)}, true},
			{"empty body", nats.Msg{}, true},
			{"not text", nats.Msg{Data: []byte{0, 0xff, 0xfe}}, true},
		}
		for i := range foreign {
			m := &foreign[i].msg
			m.Subject = "events.foreign"
			b.publishRaw(m)
		}
		b.publish("after")
		b.publishGarbageHeader("events.foreign", "{}")

		var seen record
		dlq := &letters{}
		_, js := b.connect(nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})) // hears of the garbage
		b.startOn(js, func(_ context.Context, d *consumer.Delivery) error {
			seen.add(d)
			if d.Malformed != nil {
				return jetbox.Permanent(d.Malformed)
			}
			if d.SchemaVersion != "" {
				return jetbox.Permanent(errors.New("unknown schema version " + d.SchemaVersion))
			}
			if !json.Valid(d.Payload) {
				return errors.New("payload is not JSON")
			}
			return nil
		}, consumer.Config{MaxDeliver: 3, DeadLetters: dlq})
		b.pass(10 * time.Minute)

		letterOf := map[uint64]jetbox.Failure{}
		for _, s := range dlq.named("park") {
			letterOf[s.f.Seq] = s.f
		}
		for i, tt := range foreign {
			seq := uint64(i + 2)
			f, parked := letterOf[seq]
			if parked != tt.parked {
				b.Errorf("%s: parked = %v, want %v", tt.name, parked, tt.parked)
			}
			if parked && !bytes.Equal(f.Payload, tt.msg.Data) {
				b.Errorf("%s: payload of the letter = %q, want the bytes %q", tt.name, f.Payload, tt.msg.Data)
			}
		}
		for _, s := range seen.all() {
			if s.delivered > 3 {
				b.Errorf("sequence %d was delivered %d times, want at most 3", s.seq, s.delivered)
			}
		}
		if len(seen.of("before")) != 1 || len(seen.of("after")) != 1 {
			b.Errorf("neighbors handled %d and %d times, want once each", len(seen.of("before")), len(seen.of("after")))
		}
		b.wantSettled()
	})
}

// publishGarbageHeader stores a message whose header block no client can read.
func (b *bus) publishGarbageHeader(subject, payload string) {
	b.Helper()
	conn, err := b.srv.InProcessConn()
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	const garbage = "GARBAGE"
	go func() {
		buf := make([]byte, 4096)
		for {
			if _, err := conn.Read(buf); err != nil {
				return
			}
		}
	}()
	text := "CONNECT {\"headers\":true,\"verbose\":false}\r\n" +
		"HPUB " + subject + " 7 9\r\n" + garbage + payload + "\r\nPING\r\n"
	if _, err := conn.Write([]byte(text)); err != nil {
		b.Fatal(err)
	}
	b.pass(time.Millisecond)
	s, err := b.js.Stream(b.Context(), streamName)
	if err != nil {
		b.Fatal(err)
	}
	if m, err := s.GetLastMsgForSubject(b.Context(), subject); !errors.Is(err, nats.ErrBadHeaderMsg) {
		b.Fatalf("last message of %s = %+v, %v, want one with an unreadable header", subject, m, err)
	}
}

// A replay is for the one consumer it names; others acknowledge it unseen. What
// fails again carries the letter's name, so that the same letter is opened.
func TestReplayReachesOnlyTheConsumerItIsFor(t *testing.T) {
	inBubble(t, func(b *bus) {
		replay := func(forConsumer string) {
			h := nats.Header{}
			h.Set(jetbox.HeaderIdempotencyKey, "k")
			h.Set(jetbox.HeaderReplayFor, forConsumer)
			h.Set(jetbox.HeaderLetter, "dlq.EVENTS.billing.7-123")
			b.publishRaw(&nats.Msg{Subject: "events.k", Header: h})
		}
		replay(streamName + "/mailer")
		replay(streamName + "/" + durable)
		dlq := &letters{}
		var got []*consumer.Delivery
		var verdicts []consumer.Verdict
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			got = append(got, d)
			return jetbox.Permanent(errHandler)
		}, consumer.Config{DeadLetters: dlq, HandledFunc: func(_ *consumer.Delivery, v consumer.Verdict, _ time.Duration) {
			verdicts = append(verdicts, v)
		}})
		b.pass(time.Minute)
		if len(got) != 1 || got[0].StreamSeq != 2 || got[0].Key != "k" || got[0].Letter != "dlq.EVENTS.billing.7-123" {
			b.Fatalf("handled %+v, want the second message", got)
		}
		if acks := b.answersLike(1, "+ACK"); len(acks) != 1 {
			b.Errorf("answers to the other's replay = %v, want one ack", acks)
		}
		parked := dlq.named("park")
		if len(parked) != 1 || parked[0].f.Header[jetbox.HeaderLetter][0] != got[0].Letter {
			b.Errorf("letters = %+v, want one that names the letter it came from", parked)
		}
		if want := []consumer.Verdict{consumer.Skip, consumer.Term}; !slices.Equal(verdicts, want) {
			b.Errorf("verdicts = %v, want %v", verdicts, want)
		}
	})
}

// Markers that the server leaves for expired messages are no events.
func TestServerMarkersAreSkipped(t *testing.T) {
	inBubble(t, func(b *bus) {
		// Only the server may set this header through JetStream's own means;
		// the stream does not mind, and the consumer cannot tell.
		b.publishRaw(&nats.Msg{Subject: "events.k", Header: nats.Header{"Nats-Marker-Reason": {"MaxAge"}}})
		b.publish("k")
		var seen record
		b.start(seen.ok, consumer.Config{})
		b.pass(time.Second)
		if got := seen.keys(); !slices.Equal(got, []string{"k"}) {
			b.Errorf("handled %v, want only the event", got)
		}
		b.wantSettled()
	})
}
