package consumer_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/dedup"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// exampleBus starts a broker with two events on a stream. Programs connect to
// theirs instead.
func exampleBus() (js jetstream.JetStream, end func(), err error) {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		return nil, nil, err
	}
	ctx := context.Background()
	srv, err := embedded.Start(ctx, embedded.Config{Dir: dir})
	if err != nil {
		return nil, nil, err
	}
	nc, err := srv.Connect()
	if err != nil {
		return nil, nil, err
	}
	end = func() {
		nc.Close()
		if err := srv.Close(); err != nil {
			fmt.Println(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			fmt.Println(err)
		}
	}
	if js, err = jetstream.New(nc); err != nil {
		return nil, end, err
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}}); err != nil {
		return nil, end, err
	}
	for _, key := range []string{"order-1", "order-2"} {
		ev := jetbox.Event{Key: key, Subject: "events.order", Type: "order.created"}.WithDefaults(time.Now())
		if _, err := js.PublishMsg(ctx, &nats.Msg{Subject: ev.Subject, Header: ev.Header("shop")}); err != nil {
			return nil, end, err
		}
	}
	return js, end, nil
}

func ExampleConsumer() {
	js, end, err := exampleBus()
	if err != nil {
		panic(err)
	}
	defer end()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()

	handle := func(_ context.Context, d *consumer.Delivery) error {
		fmt.Println(d.Type, d.Key)
		if d.Key == "order-2" {
			stop() // a service stops on a signal
		}
		return nil
	}
	c, err := consumer.New(js, handle, consumer.Config{
		Stream: "EVENTS", Durable: "billing", FilterSubjects: []string{"events.order"},
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		panic(err)
	}
	fmt.Println("stopped:", c.Run(ctx))
	// Output:
	// order.created order-1
	// order.created order-2
	// stopped: <nil>
}

// The effect of an event happens once. With dedup/sqlite, tx is the *sql.Tx that
// writes it; here the effect is a line of output, and the ledger is in memory.
func ExampleOnce() {
	js, end, err := exampleBus()
	if err != nil {
		panic(err)
	}
	defer end()
	ledger, err := dedup.NewMemory(24 * time.Hour)
	if err != nil {
		panic(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()

	bill := consumer.Once(ledger, func(_ context.Context, _ struct{}, d *consumer.Delivery) error {
		fmt.Println("bill", d.Key)
		return nil
	})
	done := 0
	handle := func(ctx context.Context, d *consumer.Delivery) error {
		if err := bill(ctx, d); err != nil {
			return err
		}
		if d.NumDelivered == 1 {
			return fmt.Errorf("something after the effect fails")
		}
		fmt.Println("done", d.Key)
		if done++; done == 2 {
			stop()
		}
		return nil
	}
	c, err := consumer.New(js, handle, consumer.Config{
		Stream: "EVENTS", Durable: "billing", Backoff: 10 * time.Millisecond,
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		panic(err)
	}
	if err := c.Run(ctx); err != nil {
		panic(err)
	}
	// Unordered output:
	// bill order-1
	// bill order-2
	// done order-1
	// done order-2
}
