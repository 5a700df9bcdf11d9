// Command singleactive runs two instances of a consumer of which one is active:
// the events of a customer are handled in their order, also when the active
// instance stops in the middle and the other one takes over.
//
// It needs nothing but Go: the broker runs in the process.
//
//	go run ./examples/singleactive
//
// What to look at: startInstance, and SingleActive in it. With a shared durable
// instead, both instances would be handed events of every customer, and nothing
// would keep the second event of one from being handled before the first.
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

const stream = "ORDERS"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	dir, err := os.MkdirTemp("", "singleactive")
	if err == nil {
		err = errors.Join(run(ctx, dir, os.Stdout), os.RemoveAll(dir))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "singleactive:", err)
		os.Exit(1)
	}
}

// seen is an event as an instance handled it.
type seen struct {
	instance, customer string
	order              int64
}

// run publishes orders of three customers, and stops the first instance when it
// has handled some of them.
func run(ctx context.Context, dir string, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	broker, err := embedded.Start(ctx, embedded.Config{Dir: dir})
	if err != nil {
		return err
	}
	defer broker.Close()
	const perCustomer = 8
	customers := []string{"ada", "grace", "mary"}
	if err := publish(ctx, broker, customers, perCustomer); err != nil {
		return err
	}

	handled := make(chan seen)
	stopFirst, firstEnded, err := startInstance(ctx, broker, "first", handled)
	if err != nil {
		return err
	}
	last := make(map[string]int64)
	total, takenOver := len(customers)*perCustomer, false
	stopSecond, secondEnded := func() {}, func() error { return nil }
	for n := 1; n <= total; n++ {
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
		switch n {
		case 1:
			if stopSecond, secondEnded, err = startInstance(ctx, broker, "second", handled); err != nil {
				stopFirst()
				return errors.Join(err, firstEnded())
			}
		case total / 3:
			stopFirst() // it finishes what it has in hand
		}
		if s.instance == "second" && !takenOver {
			takenOver = true
			fmt.Fprintln(out, "the second instance took over")
		}
	}
	for _, c := range customers {
		fmt.Fprintf(out, "%s: %d orders, in their order\n", c, last[c])
	}
	stopSecond()
	return errors.Join(firstEnded(), secondEnded())
}

// startInstance runs a consumer on a connection of its own, as another process
// would, until stop is called. ended waits for its end.
func startInstance(ctx context.Context, broker *embedded.Server, name string, handled chan<- seen) (stop func(), ended func() error, err error) {
	nc, err := broker.Connect(nats.MaxReconnects(-1))
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	handle := func(ctx context.Context, d *consumer.Delivery) error {
		time.Sleep(20 * time.Millisecond) // work
		select {
		case handled <- seen{name, d.AggregateID, *d.AggregateSeq}:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	c, err := consumer.New(js, handle, consumer.Config{
		Stream: stream, Durable: "totals", Workers: 4,
		SingleActive: true,
		Logger:       slog.New(slog.DiscardHandler),
	})
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	ctx, stop = context.WithCancel(ctx)
	result := make(chan error, 1)
	go func() {
		defer nc.Close()
		result <- c.Run(ctx)
	}()
	return stop, func() error { return <-result }, nil
}

// publish stores the customers' orders, one of each in turn.
func publish(ctx context.Context, broker *embedded.Server, customers []string, orders int64) error {
	nc, err := broker.Connect()
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: stream, Subjects: []string{"orders.>"}}); err != nil {
		return err
	}
	for n := int64(1); n <= orders; n++ {
		for _, c := range customers {
			ev := jetbox.Event{
				Subject: "orders.placed", AggregateType: "customer", AggregateID: c, AggregateSeq: &n,
			}.WithDefaults(time.Now())
			if _, err := js.PublishMsg(ctx, &nats.Msg{Subject: ev.Subject, Header: ev.Header("shop")}); err != nil {
				return err
			}
		}
	}
	return nil
}
