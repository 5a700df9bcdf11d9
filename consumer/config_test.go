package consumer_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/consumer"
)

// Bad configuration is an error that names field, value and what is wanted. It
// needs no broker: New starts nothing.
func TestBadConfigurationIsRefused(t *testing.T) {
	t.Parallel()
	js, err := jetstream.New(&nats.Conn{})
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name   string
		adjust func(*consumer.Config)
		want   string
	}{
		{"no stream", func(c *consumer.Config) { c.Stream = "" }, `Stream is ""`},
		{"wildcard in the stream", func(c *consumer.Config) { c.Stream = "EV.>" }, `Stream is "EV.>"`},
		{"no durable", func(c *consumer.Config) { c.Durable = "" }, `Durable is ""`},
		{"blank in the durable", func(c *consumer.Config) { c.Durable = "a b" }, `Durable is "a b"`},
		{"empty filter", func(c *consumer.Config) { c.FilterSubjects = []string{"a", ""} }, "FilterSubjects[1]"},
		{"unlimited deliveries", func(c *consumer.Config) { c.MaxDeliver = -1 }, "MaxDeliver is -1"},
		{"workers", func(c *consumer.Config) { c.Workers = -2 }, "Workers is -2"},
		{"held", func(c *consumer.Config) { c.MaxHeld = -1 }, "MaxHeld is -1"},
		{"batch", func(c *consumer.Config) { c.Batch = -1 }, "Batch is -1"},
		{"behind a key", func(c *consumer.Config) { c.MaxBehindKey = -1 }, "MaxBehindKey is -1"},
		{"behind", func(c *consumer.Config) { c.MaxBehind = -1 }, "MaxBehind is -1"},
		{"ack wait", func(c *consumer.Config) { c.AckWait = -time.Second }, "AckWait is -1s"},
		{"backoff", func(c *consumer.Config) { c.Backoff = -time.Second }, "Backoff is -1s"},
		{"backoff above its limit", func(c *consumer.Config) { c.Backoff, c.MaxBackoff = time.Minute, time.Second }, "MaxBackoff is 1s"},
		{"handle timeout", func(c *consumer.Config) { c.HandleTimeout = -1 }, "HandleTimeout is -1ns"},
		{"drain timeout", func(c *consumer.Config) { c.DrainTimeout = -1 }, "DrainTimeout is -1ns"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			cfg := consumer.Config{Stream: "EVENTS", Durable: "d"}
			tt.adjust(&cfg)
			_, err := consumer.New(js, (&record{}).ok, cfg)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("New: %v, want an error with %q", err, tt.want)
			}
		})
	}
}

func TestMissingPartsAreRefused(t *testing.T) {
	t.Parallel()
	js, err := jetstream.New(&nats.Conn{})
	if err != nil {
		t.Fatal(err)
	}
	cfg := consumer.Config{Stream: "EVENTS", Durable: "d"}
	if _, err := consumer.New(js, nil, cfg); err == nil {
		t.Error("New with a nil handler = nil error, want one")
	}
	if _, err := consumer.NewBatch(js, nil, cfg); err == nil {
		t.Error("NewBatch with a nil handler = nil error, want one")
	}
	if _, err := consumer.New(nil, (&record{}).ok, cfg); err == nil {
		t.Error("New with a nil JetStream = nil error, want one")
	}
	if _, err := consumer.New(js, (&record{}).ok, cfg); err != nil {
		t.Errorf("New with what is mandatory: %v", err)
	}
}
