package embedded_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// A broker for this process alone. With Listen it would serve others as well.
func ExampleStart() {
	dir, err := os.MkdirTemp("", "broker") // a real one uses a folder that stays
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	ctx := context.Background()
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
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}}); err != nil {
		log.Fatal(err)
	}
	for range 2 {
		ack, err := js.Publish(ctx, "events.hello", []byte("{}"), jetstream.WithMsgID("1"))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(ack.Stream, ack.Sequence, ack.Duplicate)
	}
	// Output:
	// EVENTS 1 false
	// EVENTS 1 true
}
