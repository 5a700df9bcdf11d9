package dlq

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// Bubbles do not run in parallel: servers with file storage share a goroutine
// of the process.

// world is a broker with an event stream and the two streams of dead letters.
type world struct {
	t       *testing.T
	srv     *embedded.Server
	js      jetstream.JetStream
	events  jetstream.Stream
	letters *Letters
}

// inBubble runs f in a synctest bubble with a real server. The event stream is
// EVENTS, adjusted by the functions given.
func inBubble(t *testing.T, f func(t *testing.T, w *world), adjust ...func(*jetstream.StreamConfig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, srv: embedded.RunTest(t)}
		w.js = w.connect()
		w.events = w.createEvents(adjust...)
		w.letters = w.newLetters(w.js, Config{})
		if diffs, err := w.letters.Setup(t.Context(), "EVENTS"); err != nil || len(diffs) > 0 {
			t.Fatalf("Setup() = %q, %v, want no differences and no error", diffs, err)
		}
		f(t, w)
	})
}

func (w *world) connect(opts ...nats.Option) jetstream.JetStream {
	w.t.Helper()
	quiet := nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}) // it would print
	nc, err := w.srv.Connect(append([]nats.Option{quiet, nats.MaxReconnects(-1)}, opts...)...)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		w.t.Fatal(err)
	}
	return js
}

func (w *world) newLetters(js jetstream.JetStream, cfg Config) *Letters {
	w.t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s, err := New(js, cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

func (w *world) createEvents(adjust ...func(*jetstream.StreamConfig)) jetstream.Stream {
	w.t.Helper()
	cfg := jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}, AllowRollup: true, AllowMsgTTL: true}
	for _, f := range adjust {
		f(&cfg)
	}
	st, err := w.js.CreateStream(w.t.Context(), cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	return st
}

// event publishes a message as a relay does and returns its failure at the
// consumer, as that consumer would report it.
func (w *world) event(consumer, subject, id string, payload []byte, headers ...string) jetbox.Failure {
	w.t.Helper()
	m := nats.NewMsg(subject)
	m.Data = payload
	if id != "" {
		m.Header.Set(jetbox.HeaderMsgID, id)
		m.Header.Set(jetbox.HeaderIdempotencyKey, id)
	}
	for i := 0; i < len(headers); i += 2 {
		m.Header.Add(headers[i], headers[i+1])
	}
	ack, err := w.js.PublishMsg(w.t.Context(), m)
	if err != nil {
		w.t.Fatalf("publish %s: %v", id, err)
	}
	return w.failure(consumer, ack.Sequence)
}

// failure is what a consumer reports of a message of the event stream.
func (w *world) failure(consumer string, seq uint64) jetbox.Failure {
	w.t.Helper()
	m, err := w.events.GetMsg(w.t.Context(), seq)
	if err != nil {
		w.t.Fatalf("get message %d: %v", seq, err)
	}
	return jetbox.Failure{
		Stream: "EVENTS", Consumer: consumer, Seq: seq, Stored: m.Time,
		Subject: m.Subject, Header: m.Header, Payload: m.Data,
		Deliveries: 3, Reason: jetbox.ReasonMaxDeliveries, Err: "boom",
	}
}

func (w *world) park(f jetbox.Failure) Letter {
	w.t.Helper()
	if err := w.letters.Park(w.t.Context(), f); err != nil {
		w.t.Fatalf("Park: %v", err)
	}
	return w.show(ownID(f))
}

func (w *world) show(id string) Letter {
	w.t.Helper()
	l, err := w.letters.Show(w.t.Context(), id)
	if err != nil {
		w.t.Fatalf("Show: %v", err)
	}
	return l
}

func ownID(f jetbox.Failure) string {
	return identity{f.Stream, f.Consumer, f.Seq, f.Stored}.subject("dlq")
}

// list collects the selected letters.
func (w *world) list(f Filter) []Letter {
	w.t.Helper()
	var out []Letter
	for l, err := range w.letters.List(w.t.Context(), f) {
		if err != nil {
			w.t.Fatalf("List: %v", err)
		}
		out = append(out, l)
	}
	return out
}

// want fails the test unless the selected letters have these original
// sequences, in order of change.
func (w *world) wantSeqs(f Filter, want ...uint64) {
	w.t.Helper()
	var got []uint64
	for _, l := range w.list(f) {
		got = append(got, l.StreamSeq)
	}
	if !slices.Equal(got, want) {
		w.t.Errorf("List(%+v) has messages %v, want %v", f, got, want)
	}
}

func (w *world) wantState(id string, want State) Letter {
	w.t.Helper()
	l := w.show(id)
	if l.State != want {
		w.t.Errorf("letter %s is %q, want %q", id, l.State, want)
	}
	return l
}

// wantMsgs fails the test unless the stream has so many messages.
func (w *world) wantMsgs(stream string, want uint64) {
	w.t.Helper()
	st, err := w.js.Stream(w.t.Context(), stream)
	if err != nil {
		w.t.Fatal(err)
	}
	if got := st.CachedInfo().State.Msgs; got != want {
		w.t.Errorf("stream %s has %d messages, want %d", stream, got, want)
	}
}

func (w *world) newConsumer(cfg jetstream.ConsumerConfig) jetstream.Consumer {
	w.t.Helper()
	cfg.AckPolicy = jetstream.AckExplicitPolicy
	c, err := w.js.CreateConsumer(w.t.Context(), "EVENTS", cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

// next pulls one message, nil when none comes within a second.
func (w *world) next(c jetstream.Consumer) jetstream.Msg {
	w.t.Helper()
	m, err := c.Next(jetstream.FetchMaxWait(time.Second))
	if errors.Is(err, nats.ErrTimeout) {
		return nil
	}
	if err != nil {
		w.t.Fatalf("next: %v", err)
	}
	return m
}

// exhaust naks every delivery until nothing comes any more.
func (w *world) exhaust(c jetstream.Consumer) {
	w.t.Helper()
	for m := w.next(c); m != nil; m = w.next(c) {
		if err := m.Nak(); err != nil {
			w.t.Fatal(err)
		}
	}
}

// runRouter starts a router and returns how to stop it and wait for it.
func (w *world) runRouter(s *Letters, cfg RouterConfig) (stop func()) {
	w.t.Helper()
	if cfg.EventStream == "" {
		cfg.EventStream = "EVENTS"
	}
	r, err := NewRouter(s, cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	stopped := false
	stop = func() {
		w.t.Helper()
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("Run() = %v, want nil after a stop", err)
		}
	}
	w.t.Cleanup(stop)
	return stop
}

// advise publishes an advisory as the server would, or as a forger.
func (w *world) advise(subject, json string) {
	w.t.Helper()
	if _, err := w.js.Publish(w.t.Context(), subject, []byte(json)); err != nil {
		w.t.Fatalf("publish advisory: %v", err)
	}
}

// wantRouted waits until the router has nothing left to do.
func (w *world) wantRouted(durable string) {
	w.t.Helper()
	var info *jetstream.ConsumerInfo
	for range 600 {
		time.Sleep(time.Second)
		c, err := w.js.Consumer(w.t.Context(), "JETBOX_ADVISORIES", durable)
		if err != nil {
			continue
		}
		if info = c.CachedInfo(); info.NumPending == 0 && info.NumAckPending == 0 {
			return
		}
	}
	w.t.Fatalf("after 10 minutes the router still has work: %+v", info)
}
