package kv_test

import (
	"context"
	"fmt"
	"os"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/dedup/kv"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// exampleBroker starts a broker. Programs connect to theirs instead.
func exampleBroker() (js jetstream.JetStream, end func(), err error) {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		return nil, nil, err
	}
	srv, err := embedded.Start(context.Background(), embedded.Config{Dir: dir})
	if err != nil {
		return nil, nil, err
	}
	nc, err := srv.Connect()
	if err != nil {
		return nil, nil, err
	}
	js, err = jetstream.New(nc)
	return js, func() {
		nc.Close()
		_ = srv.Close()
		_ = os.RemoveAll(dir)
	}, err
}

// A mail is sent once to each customer, by whichever instance gets the event.
func Example() {
	js, end, err := exampleBroker()
	if err != nil {
		panic(err)
	}
	defer end()
	ctx := context.Background()
	ledger, err := kv.New(ctx, js, kv.Config{})
	if err != nil {
		panic(err)
	}
	for range 2 { // delivered twice
		seen, err := ledger.Do(ctx, "EVENTS/mailer", "order-1", func(context.Context, struct{}) error {
			fmt.Println("send the mail")
			return nil
		})
		fmt.Println("seen:", seen, "err:", err)
	}
	// Output:
	// send the mail
	// seen: false err: <nil>
	// seen: true err: <nil>
}
