package demo

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	dedupsqlite "github.com/seed-5e04d8fb/jetbox/dedup/sqlite"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
)

const (
	orderSubject = "events.order.created"
	orderType    = "order"

	// poisoned is the order whose event billing cannot handle at first.
	poisoned = 2
)

// shop is the application that writes: its orders are beside the outbox.
type shop struct{ store *sqlite.Store }

func openShop(ctx context.Context, store *sqlite.Store) (*shop, error) {
	_, err := store.DB().ExecContext(ctx, `CREATE TABLE orders (id INTEGER PRIMARY KEY, cents INTEGER NOT NULL)`)
	if err != nil {
		return nil, fmt.Errorf("create table orders: %w", err)
	}
	return &shop{store}, nil
}

// place records an order and its event in one transaction. between, when set,
// runs between the two.
func (s *shop) place(ctx context.Context, order int, between func() error) error {
	tx, err := s.store.DB().BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, `INSERT INTO orders VALUES (?, ?)`, order, 100*order); err != nil {
		return err
	}
	if between != nil {
		if err := between(); err != nil {
			return err
		}
	}
	payload, err := json.Marshal(map[string]int{"order": order, "cents": 100 * order})
	if err != nil {
		return err
	}
	err = s.store.Append(ctx, tx, &jetbox.Event{
		Subject:       orderSubject,
		Type:          "order.created",
		AggregateType: orderType,
		AggregateID:   strconv.Itoa(order),
		Payload:       payload,
	})
	if err != nil {
		return err
	}
	return tx.Commit()
}

// expect checks the number of orders and of rows in the outbox.
func (s *shop) expect(ctx context.Context, orders, rows int) error {
	var gotOrders, gotRows int
	err := s.store.DB().QueryRowContext(ctx, `SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM outbox)`).
		Scan(&gotOrders, &gotRows)
	if err == nil && (gotOrders != orders || gotRows != rows) {
		err = fmt.Errorf("%d orders and %d rows, want %d and %d", gotOrders, gotRows, orders, rows)
	}
	return err
}

// row returns the outbox row of an order.
func (s *shop) row(ctx context.Context, order int) (outbox.Entry, error) {
	for e, err := range s.store.List(ctx, outbox.Filter{}) {
		if err != nil || e.Event.AggregateID == strconv.Itoa(order) {
			return e, err
		}
	}
	return outbox.Entry{}, fmt.Errorf("order %d: %w", order, outbox.ErrNotFound)
}

// billing is the application that reads: one invoice per order, in a database
// of its own, together with the ledger of what it has handled.
type billing struct {
	db     *sql.DB
	handle consumer.Handler
	mended atomic.Bool

	mu    sync.Mutex
	tries []time.Time // of the poisoned order; guarded by mu
}

var errNoCountry = errors.New("no tax rate for this country")

func openBilling(ctx context.Context, path string) (*billing, error) {
	db, err := sqlite.OpenDB(ctx, path)
	if err != nil {
		return nil, err
	}
	b := &billing{db: db}
	// No key: a second invoice for an order would be there to be seen.
	if _, err := db.ExecContext(ctx, `CREATE TABLE invoices (order_id INTEGER NOT NULL)`); err != nil {
		return nil, errors.Join(fmt.Errorf("create table invoices: %w", err), db.Close())
	}
	ledger, err := dedupsqlite.New(ctx, db, dedupsqlite.Config{})
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	b.handle = consumer.Once(ledger, b.invoice)
	return b, nil
}

func (b *billing) close() error { return b.db.Close() }

// invoice writes with the transaction that also enters the event in the ledger.
func (b *billing) invoice(ctx context.Context, tx *sql.Tx, d *consumer.Delivery) error {
	var order struct{ Order int }
	if err := json.Unmarshal(d.Payload, &order); err != nil {
		return jetbox.Permanent(err)
	}
	if order.Order == poisoned && !b.mended.Load() {
		b.mu.Lock()
		b.tries = append(b.tries, time.Now())
		b.mu.Unlock()
		return errNoCountry
	}
	_, err := tx.ExecContext(ctx, `INSERT INTO invoices VALUES (?)`, order.Order)
	return err
}

func (b *billing) invoices(ctx context.Context, order int) (n int, err error) {
	err = b.db.QueryRowContext(ctx, `SELECT count(*) FROM invoices WHERE order_id = ?`, order).Scan(&n)
	return n, err
}

// gaps returns the times between the tries of the poisoned order.
func (b *billing) gaps() []time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []time.Duration
	for i := 1; i < len(b.tries); i++ {
		out = append(out, b.tries[i].Sub(b.tries[i-1]))
	}
	return out
}
