package dlq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/internal/delay"
)

const (
	routerAckWait = 15 * time.Second

	// routerPrefetch is few: an advisory in the buffer of a router that is
	// killed waits for the ack wait.
	routerPrefetch = 16

	defaultSweepEvery = time.Minute
)

// RouterConfig tunes a [Router]. Only EventStream is mandatory.
type RouterConfig struct {
	// EventStream is the stream whose consumers' failures are parked.
	EventStream string

	// Durable is the consumer on the advisory stream, which all routers of the
	// event stream share. Default "router-" and the event stream's name, with
	// Config.AdvisoryPrefix between them.
	Durable string

	// Backoff and MaxBackoff bound the growing delay after which an advisory
	// that could not be parked is tried again. Default 1s and 1m.
	Backoff    time.Duration
	MaxBackoff time.Duration

	// SweepEvery is how often a work-queue or interest stream is searched for
	// exhausted messages that no advisory told of. A search looks twice, five
	// seconds apart, or three minutes where the stream is replicated. Default 1m.
	SweepEvery time.Duration
}

func (c RouterConfig) withDefaults(advisoryPrefix string) RouterConfig {
	if c.Durable == "" {
		c.Durable = "router-" + c.EventStream
		if advisoryPrefix != "" {
			c.Durable = "router-" + strings.ReplaceAll(advisoryPrefix, ".", "-") + "-" + c.EventStream
		}
	}
	if c.SweepEvery == 0 {
		c.SweepEvery = defaultSweepEvery
	}
	if c.Backoff == 0 {
		c.Backoff = time.Second
	}
	if c.MaxBackoff == 0 {
		c.MaxBackoff = time.Minute
	}
	return c
}

func (c RouterConfig) validate() error {
	if !validName(c.EventStream) {
		return fmt.Errorf("dlq: router: EventStream is %q, want a stream name", c.EventStream)
	}
	if !validName(c.Durable) {
		return fmt.Errorf("dlq: router: Durable is %q, want a consumer name", c.Durable)
	}
	if c.Backoff < 0 || c.MaxBackoff < c.Backoff {
		return fmt.Errorf("dlq: router: Backoff is %v and MaxBackoff %v, want positive durations, the second at least the first",
			c.Backoff, c.MaxBackoff)
	}
	if c.SweepEvery < 0 {
		return fmt.Errorf("dlq: router: SweepEvery is %v, want a positive duration", c.SweepEvery)
	}
	return nil
}

// Router parks what consumers could not report themselves: messages whose
// handler died, and those of consumers not written with this library. It reads
// the captured advisories of one event stream, and settles one only after the
// broker has the letter. A work-queue or interest stream it also searches for
// exhausted messages whose advisory was lost. Any number of routers, in any
// processes, share the work. A Router is used by one Run at a time.
type Router struct {
	letters *Letters
	events  *Letters // reads and removes on the event stream
	cfg     RouterConfig
	delay   delay.Policy
}

// NewRouter returns a router for one event stream. It starts nothing.
func NewRouter(letters *Letters, cfg RouterConfig) (*Router, error) {
	if letters == nil {
		return nil, errors.New("dlq: router: no letters given")
	}
	cfg = cfg.withDefaults(letters.cfg.AdvisoryPrefix)
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Router{letters: letters, events: letters.events, cfg: cfg, delay: delay.Policy{Initial: cfg.Backoff, Max: cfg.MaxBackoff}}, nil
}

// Run routes advisories and sweeps until ctx is canceled, and returns nil then. Whatever
// the broker refuses or does not answer is tried again, with growing delays: an
// advisory stays on its stream until its letter is stored. The durable consumer
// is created when missing and otherwise used as it is.
func (r *Router) Run(ctx context.Context) error {
	log := r.letters.cfg.Logger.With(slog.String("stream", r.cfg.EventStream), slog.String("consumer", r.cfg.Durable))
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { r.sweepLoop(ctx, log) })
	var said string // the last failure that was logged, until the router has worked for a while
	for failures := 0; ctx.Err() == nil; {
		began := time.Now()
		err := r.route(ctx, log)
		if time.Since(began) > r.cfg.MaxBackoff {
			failures, said = 0, ""
		}
		failures++
		if ctx.Err() == nil && err.Error() != said {
			said = err.Error()
			log.LogAttrs(ctx, slog.LevelWarn, "dead-letter router interrupted, will retry", slog.Any("err", err))
		}
		_ = sleep(ctx, r.delay.After(failures))
	}
	return nil
}

// route handles advisories until it cannot get any more, and returns why.
func (r *Router) route(ctx context.Context, log *slog.Logger) error {
	c, err := r.consumer(ctx)
	if err != nil {
		return err
	}
	msgs, err := c.Messages(jetstream.PullMaxMessages(routerPrefetch), jetstream.WithMessagesErrOnMissingHeartbeat(true))
	if err != nil {
		return err
	}
	defer handBack(msgs)
	for failures := 0; ; {
		m, err := msgs.Next(jetstream.NextContext(ctx))
		if err != nil {
			return err
		}
		err = r.handle(ctx, m, log)
		if err == nil {
			failures = 0
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		r.nak(m)
		if _, ok := errors.AsType[*postponed](err); ok {
			continue
		}
		// What one advisory runs into, the next most likely does too. Waiting
		// here as well keeps a long backlog from being handed round and round.
		if failures++; failures == 1 {
			log.LogAttrs(ctx, slog.LevelWarn, "park failed, will retry", slog.String("subject", m.Subject()), slog.Any("err", err))
		}
		if err := sleep(ctx, min(r.delay.After(failures), routerAckWait/2)); err != nil {
			return err
		}
	}
}

// nak gives an advisory back for later. Should the nak get lost, the ack wait
// does the same.
func (r *Router) nak(m jetstream.Msg) {
	attempt := 1
	if meta, err := m.Metadata(); err == nil {
		attempt = int(min(meta.NumDelivered, 64))
	}
	_ = m.NakWithDelay(r.delay.After(attempt))
}

// handBack lets another router have what this one has fetched and not begun.
func handBack(msgs jetstream.MessagesContext) {
	msgs.Drain()
	for {
		m, err := msgs.Next(jetstream.NextMaxWait(time.Second))
		if err != nil {
			return
		}
		_ = m.Nak()
	}
}

func (r *Router) consumer(ctx context.Context) (jetstream.Consumer, error) {
	stream := r.letters.cfg.Advisories
	js := r.letters.js
	c, err := js.Consumer(ctx, stream, r.cfg.Durable)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		c, err = js.CreateConsumer(ctx, stream, jetstream.ConsumerConfig{
			Durable:       r.cfg.Durable,
			Description:   "Dead-letter router of stream " + r.cfg.EventStream,
			FilterSubject: r.letters.cfg.advisorySubject(anyAdvisorySubject) + "." + r.cfg.EventStream + ".>",
			DeliverPolicy: jetstream.DeliverAllPolicy,
			AckPolicy:     jetstream.AckExplicitPolicy,
			AckWait:       routerAckWait,
			MaxDeliver:    -1,
		})
		if errors.Is(err, jetstream.ErrConsumerExists) {
			c, err = js.Consumer(ctx, stream, r.cfg.Durable)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open consumer %s on stream %s: %w", r.cfg.Durable, stream, err)
	}
	return c, nil
}
