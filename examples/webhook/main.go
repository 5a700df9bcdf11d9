// Command webhook hands events to an HTTP service that fails on purpose, and
// shows that each has one effect. Sender and receiver are in this one process:
//
//	go run ./examples/webhook
//
// The receiver (package receiver) uses the middleware of dedup/idempotent. The
// sender is a consumer of a dozen lines; without writing Go it is a command. Start
// the receiver alone, and the command beside a "relay run":
//
//	printf 'a secret' > key
//	go run ./examples/webhook receive
//	relay consume --durable shop --webhook http://127.0.0.1:9000/ --hmac-key-file key
//	relay emit events.order.placed '{"order":1}'
package main

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/examples/webhook/receiver"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	if len(os.Args) > 1 && os.Args[1] == "receive" {
		err = receive(ctx, "127.0.0.1:9000", "webhook.db", "key")
	} else {
		err = run(ctx, "webhook-data", os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "webhook:", err)
		os.Exit(1)
	}
}

// receive runs the receiver alone, and has it fail on purpose.
func receive(ctx context.Context, address, file, keyFile string) error {
	key, err := os.ReadFile(keyFile)
	if err != nil {
		return err
	}
	db, err := sqlite.OpenDB(ctx, file)
	if err != nil {
		return err
	}
	defer db.Close()
	r, err := receiver.New(ctx, db, bytes.TrimRight(key, "\r\n"))
	if err != nil {
		return err
	}
	r.Fail = true
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	return serve(ctx, l, r)
}

// serve serves until ctx is canceled.
func serve(ctx context.Context, l net.Listener, h http.Handler) error {
	srv := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second}
	stopped := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() { stopped <- srv.Shutdown(context.WithoutCancel(ctx)) })
	err := srv.Serve(l)
	if stop() || !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-stopped
}

// send posts an event, as relay consume --webhook does: 2xx is success; 409, 429,
// 5xx and no answer are tried again; anything else will not get better.
func send(ctx context.Context, url string, key []byte, d *consumer.Delivery) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(d.Payload))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", d.ContentType)
	req.Header.Set("Idempotency-Key", d.Key)
	req.Header.Set("X-Event-Id", d.ID)
	req.Header.Set("X-Event-Type", d.Type)
	now := strconv.FormatInt(time.Now().Unix(), 10)
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(now + "."))
	mac.Write(d.Payload)
	req.Header.Set("X-Jetbox-Signature", "t="+now+",v1="+hex.EncodeToString(mac.Sum(nil)))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	code := resp.StatusCode
	switch {
	case code < 300:
		return nil
	case code == http.StatusConflict, code == http.StatusTooManyRequests, code >= 500:
		return errors.New(resp.Status)
	}
	return jetbox.Permanent(errors.New(resp.Status))
}

// run publishes five events, and sends them until all have been received.
func run(ctx context.Context, dir string, out io.Writer) error {
	const events = 5
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	broker, err := embedded.Start(ctx, embedded.Config{Dir: filepath.Join(dir, "broker")})
	if err != nil {
		return err
	}
	defer broker.Close()
	nc, err := broker.Connect()
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}}); err != nil {
		return err
	}

	key := []byte("a secret")
	db, err := sqlite.OpenDB(ctx, filepath.Join(dir, "received.db"))
	if err != nil {
		return err
	}
	defer db.Close()
	r, err := receiver.New(ctx, db, key)
	if err != nil {
		return err
	}
	r.Fail = true
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	handled := make(chan struct{}, events)
	c, err := consumer.New(js, func(ctx context.Context, d *consumer.Delivery) error {
		return send(ctx, "http://"+l.Addr().String(), key, d)
	}, consumer.Config{
		Stream: "EVENTS", Durable: "webhook", Backoff: 20 * time.Millisecond,
		Logger: slog.New(slog.DiscardHandler), // it would warn of every failure
		HandledFunc: func(_ *consumer.Delivery, v consumer.Verdict, _ time.Duration) {
			if v == consumer.Ack {
				handled <- struct{}{}
			}
		},
	})
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 2)
	go func() { ended <- serve(running, l, r) }()
	go func() { ended <- c.Run(running) }()

	err = publish(ctx, js, events)
	for range events {
		if err == nil {
			select {
			case <-handled:
			case err = <-ended:
				ended <- nil
			case <-ctx.Done():
				err = ctx.Err()
			}
		}
	}
	stop()
	if err = errors.Join(err, <-ended, <-ended); err != nil {
		return err
	}
	all, different, err := r.Received(ctx)
	fmt.Fprintf(out, "%d events, %d requests, %d received, %d different\n", events, r.Requests(), all, different)
	return err
}

// publish stores events in the stream. An application writes them to its outbox
// instead: see examples/orders.
func publish(ctx context.Context, js jetstream.JetStream, n int) error {
	for i := range n {
		ev := jetbox.Event{
			Subject: "events.order.placed", Type: "order.placed", Payload: fmt.Appendf(nil, `{"order":%d}`, i),
		}.WithDefaults(time.Now())
		_, err := js.PublishMsg(ctx, &nats.Msg{Subject: ev.Subject, Header: ev.Header("webhook"), Data: ev.Payload})
		if err != nil {
			return err
		}
	}
	return nil
}
