package bench

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/consumer"
	dedup "github.com/seed-5e04d8fb/jetbox/dedup/sqlite"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
)

const (
	// fewer is by how much fewer messages are consumed than drained: with a
	// ledger, most of them are a commit each.
	fewer = 4

	manyWorkers = 8

	rawHeartbeat = 2 * time.Second
)

func (r *rig) consumers(ctx context.Context) error {
	s := r.sample(max(r.cfg.Rows/fewer, 1), manyKeys)
	if _, err := r.publishRaw(ctx, s); err != nil { // fills the stream
		return err
	}
	before, err := r.consumeRaw(ctx, s.len())
	if err != nil {
		return err
	}
	type figure struct {
		workers              string
		plain, once, batches float64
	}
	var figures []figure
	for _, workers := range []int{1, manyWorkers} {
		f := figure{workers: fmt.Sprintf("%d workers", workers)}
		if workers == 1 {
			f.workers = "1 worker"
		}
		f.plain, err = r.consume(ctx, s.len(), func(cfg consumer.Config) (*consumer.Consumer, error) {
			cfg.Workers = workers
			return consumer.New(r.js, func(context.Context, *consumer.Delivery) error { return nil }, cfg)
		})
		if err != nil {
			return err
		}
		if f.once, err = r.consumeOnce(ctx, s.len(), workers, false); err != nil {
			return err
		}
		if f.batches, err = r.consumeOnce(ctx, s.len(), workers, true); err != nil {
			return err
		}
		figures = append(figures, f)
	}
	after, err := r.consumeRaw(ctx, s.len())
	if err != nil {
		return err
	}
	for _, f := range figures {
		r.results.compare("without ledger, "+f.workers, messagesPerSecond, f.plain, "Consume with Ack", mean(before, after))
		r.results.compare("with ledger, "+f.workers, messagesPerSecond, f.once, "Consume with Ack", mean(before, after))
		r.results.compare("with ledger, batches, "+f.workers, messagesPerSecond, f.batches, "a commit for each", f.once)
	}
	return nil
}

// consumeRaw is the yardstick: jetstream's own Consume, which has up to 500
// messages on order, and an Ack for each.
func (r *rig) consumeRaw(ctx context.Context, n int) (rate float64, err error) {
	const durable = "raw"
	c, err := r.js.CreateConsumer(ctx, r.cfg.Stream.Name, jetstream.ConsumerConfig{Durable: durable, AckPolicy: jetstream.AckExplicitPolicy})
	if err != nil {
		return 0, fmt.Errorf("create consumer %s: %w", durable, err)
	}
	defer func() { err = errors.Join(err, r.deleteConsumer(ctx, durable)) }()
	var handled atomic.Int64
	began := time.Now()
	t := start(ctx, func(ctx context.Context) error {
		// A busy machine makes it lose a pull now and then. It notices after two
		// heartbeats, which by default is as long as a measurement may stand.
		consuming, err := c.Consume(func(m jetstream.Msg) {
			if m.Ack() == nil { // what is not acknowledged is not counted, and missed below
				handled.Add(1)
			}
		}, jetstream.PullHeartbeat(rawHeartbeat))
		if err != nil {
			return err
		}
		<-ctx.Done()
		consuming.Stop()
		<-consuming.Closed()
		return nil
	})
	return timeConsumer(ctx, t, &handled, n, began)
}

// consumeOnce consumes with a ledger in an SQLite file, and an effect there: one
// transaction for each message, or for each batch of them.
func (r *rig) consumeOnce(ctx context.Context, n, workers int, batches bool) (rate float64, err error) {
	path := filepath.Join(r.dir, "ledger.db")
	db, err := sqlite.OpenDB(ctx, path)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, db.Close(), removeFiles(path)) }()
	if _, err := db.ExecContext(ctx, `CREATE TABLE effects (event TEXT NOT NULL)`); err != nil {
		return 0, fmt.Errorf("create table effects: %w", err)
	}
	ledger, err := dedup.New(ctx, db, dedup.Config{})
	if err != nil {
		return 0, err
	}
	apply := func(ctx context.Context, tx *sql.Tx, ds ...*consumer.Delivery) error {
		for _, d := range ds {
			if _, err := tx.ExecContext(ctx, `INSERT INTO effects (event) VALUES (?)`, d.ID); err != nil {
				return err
			}
		}
		return nil
	}
	rate, err = r.consume(ctx, n, func(cfg consumer.Config) (*consumer.Consumer, error) {
		cfg.Workers = workers
		if batches {
			return consumer.NewBatch(r.js, consumer.OnceAll(ledger, func(ctx context.Context, tx *sql.Tx, ds []*consumer.Delivery) error {
				return apply(ctx, tx, ds...)
			}), cfg)
		}
		return consumer.New(r.js, consumer.Once(ledger, func(ctx context.Context, tx *sql.Tx, d *consumer.Delivery) error {
			return apply(ctx, tx, d)
		}), cfg)
	})
	if err != nil {
		return 0, err
	}
	var effects int
	if err := db.QueryRowContext(ctx, `SELECT count(*) FROM effects`).Scan(&effects); err != nil {
		return 0, err
	}
	if effects != n {
		return 0, fmt.Errorf("%d effects of %d events", effects, n)
	}
	return rate, nil
}

// consume times the consumer that create returns until it has handled n messages.
func (r *rig) consume(ctx context.Context, n int, create func(consumer.Config) (*consumer.Consumer, error)) (rate float64, err error) {
	const durable = "jetbox"
	var handled atomic.Int64
	c, err := create(consumer.Config{
		Stream: r.cfg.Stream.Name, Durable: durable, Logger: r.cfg.Logger,
		HandledFunc: func(_ *consumer.Delivery, v consumer.Verdict, _ time.Duration) {
			if v == consumer.Ack {
				handled.Add(1)
			}
		},
	})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, r.deleteConsumer(ctx, durable)) }()
	// As it would be created by Run: the yardstick's is there before the clock
	// starts, too.
	_, err = r.js.CreateConsumer(ctx, r.cfg.Stream.Name, jetstream.ConsumerConfig{
		Durable: durable, AckPolicy: jetstream.AckExplicitPolicy, MaxDeliver: 5, MaxAckPending: 10_000,
	})
	if err != nil {
		return 0, fmt.Errorf("create consumer %s: %w", durable, err)
	}
	began := time.Now()
	return timeConsumer(ctx, start(ctx, c.Run), &handled, n, began)
}

// timeConsumer waits until so many messages were handled.
func timeConsumer(ctx context.Context, t *task, handled *atomic.Int64, n int, began time.Time) (rate float64, err error) {
	err = t.await(ctx, handled.Load, func(context.Context) (bool, error) { return handled.Load() >= int64(n), nil })
	took := time.Since(began)
	if err := errors.Join(err, t.stop()); err != nil {
		return 0, fmt.Errorf("consume %d messages: %w", n, err)
	}
	return perSecond(n, took), nil
}

func (r *rig) deleteConsumer(ctx context.Context, durable string) error {
	err := r.js.DeleteConsumer(ctx, r.cfg.Stream.Name, durable)
	if err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return fmt.Errorf("delete consumer %s: %w", durable, err)
	}
	return nil
}
