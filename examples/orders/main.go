// Command orders is an application that uses jetbox as a library: it writes an
// order and its event in one transaction, and a consumer keeps a projection of
// the customers' totals, in one transaction with its ledger.
//
// It needs nothing but Go: the broker runs in the process. Everything is in one
// SQLite file and one folder, which a second run goes on with:
//
//	go run ./examples/orders
//
// What to look at: placeOrder is the writing side, project the reading side, and
// run the wiring. A real application would have the two sides in two programs, a
// NATS server between them, and "relay run" beside the first.
package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	dedup "github.com/seed-5e04d8fb/jetbox/dedup/sqlite"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, "orders-data", os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "orders:", err)
		os.Exit(1)
	}
}

// Placed is the payload of the event order.placed.
type Placed struct {
	Order    int64  `json:"order"`
	Customer string `json:"customer"`
	Cents    int64  `json:"cents"`
}

// placeOrder records the order and its event in one transaction: after the commit
// both are there, after anything else neither is.
func placeOrder(ctx context.Context, db *sql.DB, customer string, cents int64) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // nothing to do after a commit
	res, err := tx.ExecContext(ctx, `INSERT INTO orders (customer, cents) VALUES (?, ?)`, customer, cents)
	if err != nil {
		return err
	}
	id, err := res.LastInsertId()
	if err != nil {
		return err
	}
	payload, err := json.Marshal(Placed{Order: id, Customer: customer, Cents: cents})
	if err != nil {
		return err
	}
	err = sqlite.Append(ctx, tx, &jetbox.Event{
		Subject:       "events.order.placed",
		Type:          "order.placed",
		AggregateType: "customer", // events of one customer keep their order
		AggregateID:   customer,
		Payload:       payload,
	})
	if err != nil {
		return err
	}
	return tx.Commit()
}

// project adds an order to its customer's total. The ledger's entry is in the
// same transaction, so that a redelivery adds nothing.
func project(ctx context.Context, tx *sql.Tx, d *consumer.Delivery) error {
	var p Placed
	if err := json.Unmarshal(d.Payload, &p); err != nil {
		return jetbox.Permanent(err) // no retry makes it readable
	}
	_, err := tx.ExecContext(ctx, `INSERT INTO totals (customer, orders, cents) VALUES (?, 1, ?)
		ON CONFLICT (customer) DO UPDATE SET orders = orders + 1, cents = cents + excluded.cents`, p.Customer, p.Cents)
	return err
}

// run places three orders and waits until the projection has them.
func run(ctx context.Context, dir string, out io.Writer) error {
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
	_, err = js.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}})
	if err != nil {
		return err
	}
	store, err := sqlite.Open(ctx, sqlite.Config{Path: filepath.Join(dir, "orders.db")})
	if err != nil {
		return err
	}
	defer store.Close()
	if err := setUp(ctx, store); err != nil {
		return err
	}

	r, err := relay.New(store, js, relay.Config{})
	if err != nil {
		return err
	}
	ledger, err := dedup.New(ctx, store.DB(), dedup.Config{})
	if err != nil {
		return err
	}
	c, err := consumer.New(js, consumer.Once(ledger, project), consumer.Config{Stream: "EVENTS", Durable: "totals"})
	if err != nil {
		return err
	}
	stop := start(ctx, r.Run, c.Run)

	for _, o := range []struct {
		customer string
		cents    int64
	}{{"ada", 1999}, {"grace", 500}, {"ada", 1}} {
		if err := placeOrder(ctx, store.DB(), o.customer, o.cents); err != nil {
			return errors.Join(err, stop())
		}
	}
	r.Wake() // the relay would find the rows anyway
	err = printTotals(ctx, store.DB(), out)
	return errors.Join(err, stop())
}

func setUp(ctx context.Context, store *sqlite.Store) error {
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	_, err := store.DB().ExecContext(ctx, `
		CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, customer TEXT NOT NULL, cents INTEGER NOT NULL);
		CREATE TABLE IF NOT EXISTS totals (customer TEXT PRIMARY KEY, orders INTEGER NOT NULL, cents INTEGER NOT NULL)`)
	return err
}

// start runs functions until the returned stop is called, which returns their
// errors.
func start(ctx context.Context, runs ...func(context.Context) error) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	errs := make(chan error, len(runs))
	for _, f := range runs {
		go func() { errs <- f(ctx) }()
	}
	return func() error {
		cancel()
		var err error
		for range runs {
			err = errors.Join(err, <-errs)
		}
		return err
	}
}

// printTotals waits until every order is in the projection.
func printTotals(ctx context.Context, db *sql.DB, out io.Writer) error {
	for {
		var missing int
		err := db.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM orders) -
			(SELECT coalesce(sum(orders), 0) FROM totals)`).Scan(&missing)
		if err != nil {
			return err
		}
		if missing == 0 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	rows, err := db.QueryContext(ctx, `SELECT customer, orders, cents FROM totals ORDER BY customer`)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var (
			customer      string
			orders, cents int64
		)
		if err := rows.Scan(&customer, &orders, &cents); err != nil {
			return err
		}
		fmt.Fprintf(out, "%s: %d orders, %d.%02d\n", customer, orders, cents/100, cents%100)
	}
	return rows.Err()
}
