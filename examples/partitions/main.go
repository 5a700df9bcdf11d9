// Command partitions spreads the events of a stream over three partitions, by
// customer, and runs two instances that share them: each partition has one
// active instance, so the events of a customer are handled in their order, and
// all instances have work.
//
// It needs nothing but Go: the broker runs in the process.
//
//	go run ./examples/partitions
//
// What to look at: createStream, whose subject transform adds the number of the
// partition, and startInstance, which runs a consumer for each of them. How many
// partitions there are is fixed when the stream is created: it bounds how many
// instances can be active, and a change moves keys from one to another. Which
// instance gets which partition is left to chance here; package pcgroups of
// github.com/synadia-io/orbit.go deals them out to members that come and go.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

const (
	stream     = "ORDERS"
	partitions = 3
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	dir, err := os.MkdirTemp("", "partitions")
	if err == nil {
		err = errors.Join(run(ctx, dir, os.Stdout), os.RemoveAll(dir))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "partitions:", err)
		os.Exit(1)
	}
}

// createStream makes a stream that takes orders.<customer>.<what> and stores
// orders.<partition>.<customer>.<what>.
func createStream(ctx context.Context, js jetstream.JetStream) error {
	_, err := js.CreateStream(ctx, jetstream.StreamConfig{
		Name:     stream,
		Subjects: []string{"orders.*.*"},
		SubjectTransform: &jetstream.SubjectTransformConfig{
			Source:      "orders.*.*",
			Destination: fmt.Sprintf("orders.{{partition(%d,1)}}.{{wildcard(1)}}.{{wildcard(2)}}", partitions),
		},
	})
	return err
}

// seen is an event as an instance handled it.
type seen struct {
	instance, partition int
	customer            string
	order               int64
}

// startInstance runs a consumer for each partition, on a connection of its own,
// as another process would. stop ends them.
func startInstance(ctx context.Context, broker *embedded.Server, instance int, handled chan<- seen) (stop func() error, err error) {
	nc, err := broker.Connect(nats.MaxReconnects(-1))
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	results := make(chan error, partitions)
	for p := range partitions {
		handle := func(ctx context.Context, d *consumer.Delivery) error {
			select {
			case handled <- seen{instance, p, d.AggregateID, *d.AggregateSeq}:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		c, err := consumer.New(js, handle, consumer.Config{
			Stream:         stream,
			Durable:        fmt.Sprintf("totals-%d", p),
			FilterSubjects: []string{fmt.Sprintf("orders.%d.>", p)},
			SingleActive:   true, // one instance for this partition
			Workers:        4,    // for different customers
			Logger:         slog.New(slog.DiscardHandler),
		})
		if err != nil {
			cancel()
			nc.Close()
			return nil, err
		}
		go func() { results <- c.Run(ctx) }()
	}
	return func() error {
		cancel()
		defer nc.Close()
		var err error
		for range partitions {
			err = errors.Join(err, <-results)
		}
		return err
	}, nil
}

// run publishes orders of ten customers and has two instances handle them, one
// of which stops in the middle.
func run(ctx context.Context, dir string, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	broker, err := embedded.Start(ctx, embedded.Config{Dir: dir})
	if err != nil {
		return err
	}
	defer broker.Close()
	const customers, orders = 10, 6
	if err := publish(ctx, broker, customers, orders); err != nil {
		return err
	}
	handled := make(chan seen)
	var stops []func() error
	for i := range 2 {
		stop, err := startInstance(ctx, broker, i, handled)
		if err != nil {
			return err
		}
		stops = append(stops, stop)
	}
	firstEnded := make(chan error, 1)
	last := make(map[string]int64)
	used := make(map[int]bool)
	for n := 1; n <= customers*orders; n++ {
		var s seen
		select {
		case s = <-handled:
		case <-ctx.Done():
			return ctx.Err()
		}
		if s.order != last[s.customer]+1 {
			return fmt.Errorf("%s: order %d after %d", s.customer, s.order, last[s.customer])
		}
		last[s.customer] = s.order
		used[s.partition] = true
		if n == customers*orders/2 {
			// In the background: it finishes what it has in hand.
			go func() { firstEnded <- stops[0]() }()
		}
	}
	complete := 0
	for _, n := range last {
		if n == orders {
			complete++
		}
	}
	fmt.Fprintf(out, "%d customers in %d partitions, each with %d orders in their order\n", complete, len(used), orders)
	return errors.Join(<-firstEnded, stops[1]())
}

// publish stores the customers' orders, one of each in turn.
func publish(ctx context.Context, broker *embedded.Server, customers int, orders int64) error {
	nc, err := broker.Connect()
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	if err := createStream(ctx, js); err != nil {
		return err
	}
	for n := int64(1); n <= orders; n++ {
		for i := range customers {
			customer := fmt.Sprintf("customer%d", i)
			ev := jetbox.Event{
				Subject: "orders." + customer + ".placed", AggregateType: "customer", AggregateID: customer, AggregateSeq: &n,
			}.WithDefaults(time.Now())
			if _, err := js.PublishMsg(ctx, &nats.Msg{Subject: ev.Subject, Header: ev.Header("shop")}); err != nil {
				return err
			}
		}
	}
	return nil
}
