package main

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go/jetstream"

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
