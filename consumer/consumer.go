package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Handler handles one delivery. nil acknowledges the message, an error asks for
// another delivery, one marked by [jetbox.Permanent] (or by cenkalti/backoff's
// Permanent, which is the same) makes it a dead letter. It runs on a worker's
// goroutine, and as often at the same time as there are workers. ctx ends after
// HandleTimeout, or when Run stops and DrainTimeout has passed. What is done
// before nil is returned is acknowledged, even after that.
//
// Middleware is a func(Handler) Handler.
type Handler func(ctx context.Context, d *Delivery) error

// Consumer runs a [Handler] for the messages of one durable consumer. It is
// safe for concurrent use, but only one Run at a time does anything.
type Consumer struct {
	js      jetstream.JetStream
	nc      *nats.Conn
	handler Handler
	batch   BatchHandler // nil: handler
	most    int          // messages a worker has at once
	cfg     Config
	running atomic.Bool
}

// New returns a Consumer that reads through js, and starts nothing. It closes
// neither js nor its connection, which should have MaxReconnects(-1): Run
// returns an error when the connection is closed for good.
func New(js jetstream.JetStream, h Handler, cfg Config) (*Consumer, error) {
	if h == nil {
		return nil, errors.New("consumer: Handler is nil, want a function")
	}
	c, err := newConsumer(js, cfg)
	if err != nil {
		return nil, err
	}
	c.handler, c.most = h, 1
	return c, nil
}

// NewBatch is [New] for a [BatchHandler].
func NewBatch(js jetstream.JetStream, h BatchHandler, cfg Config) (*Consumer, error) {
	if h == nil {
		return nil, errors.New("consumer: BatchHandler is nil, want a function")
	}
	c, err := newConsumer(js, cfg)
	if err != nil {
		return nil, err
	}
	c.batch, c.most = h, c.cfg.Batch
	return c, nil
}

func newConsumer(js jetstream.JetStream, cfg Config) (*Consumer, error) {
	if js == nil {
		return nil, errors.New("consumer: JetStream is nil, want a connection")
	}
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Consumer{js: js, nc: js.Conn(), cfg: cfg}, nil
}

// Run creates the consumer if it is missing and handles its messages until ctx
// is canceled. Then it hands back what no handler saw, waits for the handlers
// in hand, flushes their acks and returns nil. A handler that ignores its
// canceled context holds Run up for as long as it likes.
//
// Any other result is a failure to report or to restart on: the connection is
// closed, the stream is missing, an existing consumer cannot be used, or the
// server refuses to create one. An outage is none of these.
func (c *Consumer) Run(ctx context.Context) error {
	if !c.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer c.running.Store(false)
	if err := newRun(ctx, c).loop(); err != nil {
		return fmt.Errorf("consume %s/%s: %w", c.cfg.Stream, c.cfg.Durable, err)
	}
	return nil
}
