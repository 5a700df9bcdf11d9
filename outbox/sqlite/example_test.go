package sqlite_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
)

// An order and its event are both there, or neither is.
func ExampleAppend() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	store, err := sqlite.Open(ctx, sqlite.Config{Path: filepath.Join(dir, "shop.db")})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		log.Fatal(err)
	}
	if _, err := store.DB().ExecContext(ctx, "CREATE TABLE orders (id TEXT PRIMARY KEY, total INTEGER)"); err != nil {
		log.Fatal(err)
	}

	placeOrder := func(id string) error {
		tx, err := store.DB().BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, "INSERT INTO orders VALUES (?, 4200)", id); err != nil {
			return err
		}
		err = sqlite.Append(ctx, tx, &jetbox.Event{
			Key:           "order-created-" + id,
			Subject:       "events.order.created",
			AggregateType: "order",
			AggregateID:   id,
			Payload:       []byte(`{"total":4200}`),
		})
		if err != nil {
			return err
		}
		return tx.Commit()
	}
	if err := placeOrder("o-1"); err != nil {
		log.Fatal(err)
	}
	if _, err := store.DB().ExecContext(ctx, "DELETE FROM orders"); err != nil {
		log.Fatal(err)
	}
	fmt.Println("again:", errors.Is(placeOrder("o-1"), outbox.ErrDuplicateKey))

	for e, err := range store.List(ctx, outbox.Filter{}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(e.ID, e.State, e.Event.Subject, e.Event.OrderingKey(), string(e.Event.Payload))
	}
	// Output:
	// again: true
	// 1 PENDING events.order.created order/o-1 {"total":4200}
}

// An application's pool: every connection has the settings.
func ExampleOpenDB() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, err := sqlite.OpenDB(ctx, filepath.Join(dir, "shop.db"))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	for _, name := range []string{"journal_mode", "foreign_keys", "busy_timeout", "synchronous"} {
		var value string
		if err := db.QueryRowContext(ctx, "PRAGMA "+name).Scan(&value); err != nil {
			log.Fatal(err)
		}
		fmt.Println(name, value)
	}
	_, err = sqlite.OpenDB(ctx, ":memory:")
	fmt.Println(err)
	// Output:
	// journal_mode wal
	// foreign_keys 1
	// busy_timeout 5000
	// synchronous 1
	// open SQLite file ":memory:": a database in memory cannot be shared by the connections of a pool: name a file
}
