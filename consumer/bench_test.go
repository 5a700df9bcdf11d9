package consumer_test

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// BenchmarkConsume shows what a consumer costs beside the client's own Consume
// with an Ack for each message (raw). Server in the process, file storage, no
// fsync, full headers.
func BenchmarkConsume(b *testing.B) {
	b.Run("raw", func(b *testing.B) {
		js := benchStream(b)
		c, err := js.CreateConsumer(b.Context(), streamName, jetstream.ConsumerConfig{Durable: durable, AckPolicy: jetstream.AckExplicitPolicy})
		if err != nil {
			b.Fatal(err)
		}
		left := make(chan struct{}, b.N)
		b.ResetTimer()
		consuming, err := c.Consume(func(m jetstream.Msg) {
			if err := m.Ack(); err != nil {
				b.Error(err)
			}
			left <- struct{}{}
		})
		if err != nil {
			b.Fatal(err)
		}
		defer consuming.Stop()
		for range b.N {
			<-left
		}
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
	})
	for _, workers := range []int{1, 16, 128} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			js := benchStream(b)
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

// benchStream fills a stream with b.N events of as many aggregates.
func benchStream(b *testing.B) jetstream.JetStream {
	b.Helper()
	srv := embedded.RunTest(b)
	nc, err := srv.Connect()
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := js.CreateStream(b.Context(), jetstream.StreamConfig{Name: streamName, Subjects: []string{"events.>"}}); err != nil {
		b.Fatal(err)
	}
	for i := range b.N {
		ev := jetbox.Event{
			Subject: "events.k", AggregateType: "order", AggregateID: strconv.Itoa(i), Payload: make([]byte, 512),
		}.WithDefaults(time.Now())
		if _, err := js.PublishMsgAsync(&nats.Msg{Subject: ev.Subject, Header: ev.Header("bench"), Data: ev.Payload}); err != nil {
			b.Fatal(err)
		}
	}
	<-js.PublishAsyncComplete()
	return js
}
