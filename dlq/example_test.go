package dlq_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/dlq"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// A message that one consumer could not handle is parked, looked at, and
// replayed for that consumer once its handler is mended.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "jetbox")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	srv, err := embedded.Start(ctx, embedded.Config{Dir: dir})
	if err != nil {
		log.Fatal(err)
	}
	defer srv.Close()
	nc, err := srv.Connect()
	if err != nil {
		log.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		log.Fatal(err)
	}
	events, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}})
	if err != nil {
		log.Fatal(err)
	}

	letters, err := dlq.New(js, dlq.Config{})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := letters.Setup(ctx, "EVENTS"); err != nil {
		log.Fatal(err)
	}

	if _, err := js.Publish(ctx, "events.order.created", []byte(`{"order":7}`), jetstream.WithMsgID("k1")); err != nil {
		log.Fatal(err)
	}
	m, err := events.GetMsg(ctx, 1)
	if err != nil {
		log.Fatal(err)
	}
	// Package consumer does this before it terminates the message.
	err = letters.Park(ctx, jetbox.Failure{
		Stream: "EVENTS", Consumer: "billing", Seq: m.Sequence, Stored: m.Time,
		Subject: m.Subject, Header: m.Header, Payload: m.Data,
		Deliveries: 5, Reason: jetbox.ReasonMaxDeliveries, Err: "no such customer",
	})
	if err != nil {
		log.Fatal(err)
	}

	for l, err := range letters.List(ctx, dlq.Filter{Consumer: "billing"}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s: %s after %d deliveries: %s\n", l.Subject, l.Reason, l.Deliveries, l.Error)
		replayed, err := letters.Replay(ctx, l.ID)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s, message %d\n", replayed.State, replayed.ReplaySeq)
	}
	m, err = events.GetMsg(ctx, 2)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(m.Data), m.Header.Get(jetbox.HeaderIdempotencyKey), m.Header.Get(jetbox.HeaderReplayFor))
	// Output:
	// events.order.created: max_deliveries after 5 deliveries: no such customer
	// replayed, message 2
	// {"order":7} k1 EVENTS/billing
}
