package consumer_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// BenchmarkConsume shows what pulling only for free workers costs: a round trip
// for each message and worker. Server in the process, file storage, no fsync.
func BenchmarkConsume(b *testing.B) {
	for _, workers := range []int{1, 16, 128} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			srv := embedded.RunTest(b)
			nc, err := srv.Connect()
			if err != nil {
				b.Fatal(err)
			}
			defer nc.Close()
			js, err := jetstream.New(nc)
			if err != nil {
				b.Fatal(err)
			}
			if _, err := js.CreateStream(b.Context(), jetstream.StreamConfig{Name: streamName, Subjects: []string{"events.>"}}); err != nil {
				b.Fatal(err)
			}
			for range b.N {
				if _, err := js.PublishMsgAsync(&nats.Msg{Subject: "events.k", Data: make([]byte, 512)}); err != nil {
					b.Fatal(err)
				}
			}
			<-js.PublishAsyncComplete()
			left := make(chan struct{}, b.N)
			c, err := consumer.New(js, func(context.Context, *consumer.Delivery) error {
				left <- struct{}{}
				return nil
			}, consumer.Config{Stream: streamName, Durable: durable, Workers: workers, Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				b.Fatal(err)
			}
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			done := make(chan error, 1)
			b.ResetTimer()
			go func() { done <- c.Run(ctx) }()
			for range b.N {
				<-left
			}
			b.StopTimer()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
			cancel()
			if err := <-done; err != nil {
				b.Error(err)
			}
		})
	}
}
