package main

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/dlq"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// Deleted while relay run is running, the streams of dead letters were gone until
// its next start, and with them what the server said meanwhile.
func TestDeletedStreamsOfDeadLettersComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := embedded.RunTest(t)
		nc, err := srv.Connect()
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		letters, err := dlq.New(js, dlq.Config{})
		if err != nil {
			t.Fatal(err)
		}
		setup := func(ctx context.Context) error {
			_, err := letters.Setup(ctx)
			return err
		}
		if err := setup(t.Context()); err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { watchLetters(ctx, js, setup, slog.New(slog.DiscardHandler)) })
		for _, name := range []string{dlqStream, advisoryStream} {
			if err := js.DeleteStream(t.Context(), name); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(2 * watchEvery)
		if err := missing(t.Context(), js, dlqStream, advisoryStream); err != nil {
			t.Errorf("after %v: %v", 2*watchEvery, err)
		}
		stop()
		wg.Wait()
	})
}

// A replay that was interrupted and forgotten: dlq list does not show its letter,
// alerts must.
func TestInterruptedReplaysAreCountedAsWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := embedded.RunTest(t)
		nc, err := srv.Connect()
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		letters, err := dlq.New(js, dlq.Config{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := letters.Setup(t.Context()); err != nil {
			t.Fatal(err)
		}
		f := jetbox.Failure{
			Stream: "EVENTS", Consumer: "billing", Seq: 7, Stored: time.Now(), Subject: "events.a", Payload: []byte("x"),
			Deliveries: 5, Reason: jetbox.ReasonMaxDeliveries, Err: "boom",
		}
		if err := letters.Park(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		failed := time.Now()
		st, err := js.Stream(t.Context(), dlqStream)
		if err != nil {
			t.Fatal(err)
		}
		m, err := st.GetMsg(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		// As an operator leaves it who dies on the way.
		time.Sleep(time.Hour)
		m.Header.Set(jetbox.HeaderDLQState, string(dlq.StateReplaying))
		m.Header.Del("Nats-Expected-Stream")
		m.Header.Del("Nats-Expected-Last-Subject-Sequence")
		if _, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: m.Subject, Header: m.Header, Data: m.Data}); err != nil {
			t.Fatal(err)
		}
		for wait, want := range []waiting{{}, {letters: 1, interrupted: 1, since: failed.UTC()}} {
			time.Sleep(time.Duration(wait) * replayPatience)
			if w, err := countWaiting(t.Context(), letters); w != want || err != nil {
				t.Errorf("waiting %v after it was begun: %+v, %v, want %+v", time.Duration(wait)*replayPatience, w, err, want)
			}
		}
		if n, err := letters.Count(t.Context(), dlq.Filter{}); n != 0 || err != nil {
			t.Errorf("open letters = %d, %v, want none", n, err)
		}
	})
}
