package embedded_test

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// captureAdvisories creates the stream that keeps the advisories of failure.
func captureAdvisories(t *testing.T, js jetstream.JetStream) jetstream.Stream {
	t.Helper()
	return createStream(t, js, jetstream.StreamConfig{Name: "ADV", Subjects: []string{
		"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>",
		"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.>",
	}})
}

// consumerOf creates a stream with one message and a consumer of it.
func consumerOf(t *testing.T, js jetstream.JetStream, r jetstream.RetentionPolicy, cfg jetstream.ConsumerConfig) jetstream.Consumer {
	t.Helper()
	s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, Retention: r})
	publish(t, js, "s", "id")
	cfg.Durable, cfg.AckPolicy = "c", jetstream.AckExplicitPolicy
	cons, err := s.CreateConsumer(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return cons
}

// fetch returns the next message, or nil when none comes within a second.
func fetch(t *testing.T, cons jetstream.Consumer) jetstream.Msg {
	t.Helper()
	batch, err := cons.Fetch(1, jetstream.FetchMaxWait(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	var got jetstream.Msg
	for msg := range batch.Messages() {
		got = msg
	}
	return got
}

func mustFetch(t *testing.T, cons jetstream.Consumer) jetstream.Msg {
	t.Helper()
	msg := fetch(t, cons)
	if msg == nil {
		t.Fatal("no message within a second")
	}
	return msg
}

// jsonField returns a string field of a JSON object.
func jsonField(t *testing.T, data []byte, name string) string {
	t.Helper()
	var fields map[string]any
	if err := json.Unmarshal(data, &fields); err != nil {
		t.Fatalf("parse %s: %v", data, err)
	}
	text, _ := fields[name].(string)
	return text
}

// With MaxDeliver above 1 nobody hears of the last failed delivery until
// somebody pulls: a crash-looping worker sends no advisory.
func TestFactMaxDeliveriesAdvisoryWaitsForAPull(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		captureAdvisories(t, js)
		cons := consumerOf(t, js, jetstream.WorkQueuePolicy, jetstream.ConsumerConfig{AckWait: time.Second, MaxDeliver: 2})
		for range 2 {
			mustFetch(t, cons)
			time.Sleep(2 * time.Second)
		}
		time.Sleep(time.Hour)
		if n := streamInfo(t, js, "ADV").State.Msgs; n != 0 {
			t.Errorf("advisories without a pull = %d, want 0", n)
		}
		if msg := fetch(t, cons); msg != nil {
			t.Errorf("third delivery of %s", msg.Subject())
		}
		if n := streamInfo(t, js, "ADV").State.Msgs; n != 1 {
			t.Errorf("advisories after a pull = %d, want 1", n)
		}
		if n := streamInfo(t, js, "S").State.Msgs; n != 1 {
			t.Errorf("messages on the work queue = %d, want the exhausted one", n)
		}
	})
}

// An advisory that no stream captures is gone.
func TestFactUncapturedAdvisoryIsLost(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		cons := consumerOf(t, js, jetstream.LimitsPolicy, jetstream.ConsumerConfig{AckWait: time.Second, MaxDeliver: 1})
		mustFetch(t, cons)
		time.Sleep(5 * time.Second)
		captureAdvisories(t, js)
		fetch(t, cons)
		time.Sleep(time.Minute)
		if n := streamInfo(t, js, "ADV").State.Msgs; n != 0 {
			t.Errorf("advisories = %d, want 0: it was sent before the stream was there", n)
		}
	})
}

// A term removes the message from a work queue at once: a copy has to be stored
// before it. Its advisory carries the reason.
func TestFactTermDeletesFromAWorkQueue(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		adv := captureAdvisories(t, js)
		cons := consumerOf(t, js, jetstream.WorkQueuePolicy, jetstream.ConsumerConfig{})
		if err := mustFetch(t, cons).TermWithReason("poison"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if n := streamInfo(t, js, "S").State.Msgs; n != 0 {
			t.Errorf("messages on the work queue = %d, want 0", n)
		}
		msg, err := adv.GetLastMsgForSubject(t.Context(), "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.S.c")
		if err != nil {
			t.Fatal(err)
		}
		if got := jsonField(t, msg.Data, "reason"); got != "poison" {
			t.Errorf("reason = %q, want poison", got)
		}
	})
}

// BackOff is for ack timeouts: it replaces AckWait, and a nak ignores it.
func TestFactBackOffReplacesAckWaitAndIsIgnoredByNak(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		cons := consumerOf(t, js, jetstream.LimitsPolicy, jetstream.ConsumerConfig{
			AckWait: time.Hour, MaxDeliver: 5, BackOff: []time.Duration{time.Minute, 2 * time.Minute},
		})
		if got := cons.CachedInfo().Config.AckWait; got != time.Minute {
			t.Errorf("AckWait = %v, want BackOff[0], 1m", got)
		}
		if err := mustFetch(t, cons).Nak(); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		mustFetch(t, cons)
		if d := time.Since(start); d > 100*time.Millisecond {
			t.Errorf("redelivery %v after a nak, want at once", d)
		}
	})
}

// NakWithDelay is exact when the consumer has no BackOff.
func TestFactNakWithDelayIsExactWithoutBackOff(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		cons := consumerOf(t, js, jetstream.LimitsPolicy, jetstream.ConsumerConfig{AckWait: time.Hour})
		start := time.Now()
		if err := mustFetch(t, cons).NakWithDelay(10 * time.Minute); err != nil {
			t.Fatal(err)
		}
		for fetch(t, cons) == nil && time.Since(start) < time.Hour {
		}
		if d := time.Since(start); d < 10*time.Minute || d > 10*time.Minute+2*time.Second {
			t.Errorf("redelivery after %v, want 10m", d)
		}
	})
}

// Acks are not fenced: that of a delivery which has timed out settles the later
// one as well.
func TestFactLateAckSettlesTheRedelivery(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		cons := consumerOf(t, js, jetstream.LimitsPolicy, jetstream.ConsumerConfig{AckWait: time.Second})
		first := mustFetch(t, cons)
		time.Sleep(2 * time.Second)
		mustFetch(t, cons)
		if err := first.DoubleAck(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if msg := fetch(t, cons); msg != nil {
			t.Error("third delivery after the late ack, want none")
		}
	})
}

// Creating a consumer that exists with other settings is refused; only
// CreateOrUpdateConsumer overwrites.
func TestFactCreateConsumerRefusesOtherSettings(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		cons := consumerOf(t, js, jetstream.LimitsPolicy, jetstream.ConsumerConfig{MaxDeliver: 5})
		cfg := cons.CachedInfo().Config
		if _, err := js.CreateConsumer(t.Context(), "S", cfg); err != nil {
			t.Errorf("create again with the same settings: %v", err)
		}
		cfg.MaxDeliver = 6
		_, err := js.CreateConsumer(t.Context(), "S", cfg)
		wantCode(t, "create with other settings", err, 10148, "")
		if !errors.Is(err, jetstream.ErrConsumerExists) {
			t.Errorf("err = %v, want ErrConsumerExists", err)
		}
	})
}
