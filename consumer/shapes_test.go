package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/dedup"
	"github.com/seed-5e04d8fb/jetbox/dedup/sqlite"
)

type placed struct {
	Order int `json:"order"`
}

// A typed handler gets what the payload says; what it cannot say is permanent.
func TestJSONHandlerParksWhatItCannotRead(t *testing.T) {
	t.Parallel()
	var got []int
	h := consumer.JSON(func(_ context.Context, p placed, d *consumer.Delivery) error {
		got = append(got, p.Order)
		if d.ID == "bad" {
			return errHandler
		}
		return nil
	})
	for _, tt := range []struct {
		id, payload string
		want        bool // handled
		permanent   bool
	}{
		{"good", `{"order": 7}`, true, false},
		{"bad", `{"order": 8}`, false, false},
		{"cut", `{"order": 9`, false, true},
		{"other type", `{"order": "nine"}`, false, true},
		{"empty", ``, false, true},
		{"two", `{}{}`, false, true},
	} {
		err := h(t.Context(), &consumer.Delivery{Event: jetbox.Event{ID: tt.id, Payload: []byte(tt.payload)}})
		if (err == nil) != tt.want || jetbox.IsPermanent(err) != tt.permanent {
			t.Errorf("%s: %v, want handled %v, permanent %v", tt.id, err, tt.want, tt.permanent)
		}
		if tt.permanent && !strings.Contains(err.Error(), "placed") {
			t.Errorf("%s: %v, want it to name the type", tt.id, err)
		}
	}
	if !slices.Equal(got, []int{7, 8}) {
		t.Errorf("handled %v, want 7 and 8", got)
	}
}

// Events go to the handler of their type, or to the one for the rest; without
// one they are parked, not looped.
func TestRoutesByEventType(t *testing.T) {
	t.Parallel()
	var got []string
	note := func(name string) consumer.Handler {
		return func(context.Context, *consumer.Delivery) error {
			got = append(got, name)
			return nil
		}
	}
	r := consumer.Routes{"order.placed": note("placed"), "order.paid": note("paid"), "order.dropped": nil}
	event := func(typ string) *consumer.Delivery { return &consumer.Delivery{Event: jetbox.Event{Type: typ}} }
	for _, typ := range []string{"order.paid", "order.placed"} {
		if err := r.Handle(t.Context(), event(typ)); err != nil {
			t.Errorf("%s: %v", typ, err)
		}
	}
	for _, typ := range []string{"order.lost", "order.dropped", ""} {
		if err := r.Handle(t.Context(), event(typ)); !errors.Is(err, consumer.ErrNoRoute) || !jetbox.IsPermanent(err) {
			t.Errorf("%q: %v, want a permanent ErrNoRoute", typ, err)
		}
	}
	r[""] = note("rest")
	for _, typ := range []string{"order.lost", ""} {
		if err := r.Handle(t.Context(), event(typ)); err != nil {
			t.Errorf("%q: %v", typ, err)
		}
	}
	if want := []string{"paid", "placed", "rest", "rest"}; !slices.Equal(got, want) {
		t.Errorf("handled by %v, want %v", got, want)
	}
}

// cenkalti's own Permanent is the same as ours: BR-46, design 7.
func TestBackoffPermanentIsPermanent(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publish("k")
		dlq := &letters{}
		b.start(func(context.Context, *consumer.Delivery) error {
			return fmt.Errorf("wrapped: %w", backoff.Permanent(errHandler))
		}, consumer.Config{DeadLetters: dlq})
		b.pass(time.Second)
		if n := len(dlq.named("park")); n != 1 {
			b.Errorf("letters = %d, want 1 at once", n)
		}
	})
}

// A delivery says what its headers say, for other programs' messages too.
func TestDeliverySaysWhatTheHeadersSay(t *testing.T) {
	inBubble(t, func(b *bus) {
		seq := int64(42)
		ev := jetbox.Event{
			ID: "e1", Subject: "events.a", AggregateType: "or/der", AggregateID: "7%", AggregateSeq: &seq, SchemaVersion: "3",
			Headers: map[string][]string{"traceparent": {"00-aa-bb-01"}, "tracestate": {"v=1"}},
		}.WithDefaults(time.Now())
		b.publishRaw(&nats.Msg{Subject: ev.Subject, Header: ev.Header("test")})
		b.publishRaw(&nats.Msg{Subject: "events.b", Header: nats.Header{"ce-partitionkey": {"customer 9"}}})
		b.publishRaw(&nats.Msg{Subject: "events.c"})
		got := map[string]*consumer.Delivery{}
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			got[d.Subject] = d
			return nil
		}, consumer.Config{})
		b.pass(time.Second)
		a := got["events.a"]
		parent, state := a.TraceContext()
		if a.ID != "e1" || a.OrderingKey() != ev.OrderingKey() || *a.AggregateSeq != 42 || a.SchemaVersion != "3" ||
			parent != "00-aa-bb-01" || state != "v=1" {
			b.Errorf("delivery = %+v, key %q, trace %q %q", a, a.OrderingKey(), parent, state)
		}
		if key := got["events.b"].OrderingKey(); key != "customer 9" {
			b.Errorf("key of another program's message = %q, want what its header says", key)
		}
		if c := got["events.c"]; c.OrderingKey() != "" || c.AggregateSeq != nil {
			b.Errorf("delivery without headers = %+v", c)
		}
	})
}

// A hole in an aggregate's sequence is told once, with both ends; redeliveries,
// replays, other aggregates and the first event are none.
func TestGapsInAnAggregateAreTold(t *testing.T) {
	inBubble(t, func(b *bus) {
		publish := func(aggregate string, seq int64) {
			ev := jetbox.Event{Subject: "events.x", AggregateID: aggregate, AggregateSeq: &seq}.WithDefaults(time.Now())
			b.publishRaw(&nats.Msg{Subject: ev.Subject, Header: ev.Header("test")})
		}
		var gaps []string
		fail := true
		b.start(func(_ context.Context, d *consumer.Delivery) error {
			if d.AggregateID == "a" && *d.AggregateSeq == 6 && fail {
				fail = false
				return errHandler
			}
			return nil
		}, consumer.Config{GapFunc: func(d *consumer.Delivery, last int64) {
			gaps = append(gaps, fmt.Sprintf("%s %d-%d", d.AggregateID, last, *d.AggregateSeq))
		}})
		publish("b", 100)
		for _, seq := range []int64{5, 6, 7, 9, 8, 10, 20} {
			publish("a", seq)
		}
		publish("b", 101)
		b.publish("no-sequence")
		b.pass(time.Minute)
		if want := []string{"a 7-9", "a 10-20"}; !slices.Equal(gaps, want) {
			b.Errorf("gaps = %v, want %v", gaps, want)
		}
		b.wantSettled()
	})
}

// What is slow is done outside the transaction, and spared for what was handled.
func TestOncePreparedPreparesOutsideAndAppliesOnce(t *testing.T) {
	inBubble(t, func(b *bus) {
		db, err := sql.Open("sqlite", "file:"+b.TempDir()+"/app.db?_pragma=journal_mode(wal)")
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { db.Close() })
		ledger, err := sqlite.New(b.Context(), db, sqlite.Config{})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := db.Exec(`CREATE TABLE effects (key TEXT)`); err != nil {
			b.Fatal(err)
		}
		var prepared, duplicates atomic.Int64
		b.publish("a", "b")
		b.pass(3 * time.Minute)
		b.publish("a") // a second copy, beyond the duplicate window
		b.start(consumer.OncePrepared(ledger, func(_ context.Context, d *consumer.Delivery) (string, error) {
			prepared.Add(1)
			// The database is free meanwhile.
			if _, err := db.Exec(`INSERT INTO effects VALUES ('other')`); err != nil {
				b.Error(err)
			}
			if d.Key == "b" && d.NumDelivered == 1 {
				return "", errHandler
			}
			return "prepared " + d.Key, nil
		}, func(ctx context.Context, tx *sql.Tx, _ *consumer.Delivery, text string) error {
			_, err := tx.ExecContext(ctx, `INSERT INTO effects VALUES (?)`, text)
			return err
		}), consumer.Config{DuplicateFunc: func(*consumer.Delivery) { duplicates.Add(1) }})
		b.pass(time.Minute)
		var effects int
		if err := db.QueryRow(`SELECT count(*) FROM effects WHERE key IN ('prepared a', 'prepared b')`).Scan(&effects); err != nil {
			b.Fatal(err)
		}
		if effects != 2 || prepared.Load() != 3 || duplicates.Load() != 1 {
			b.Errorf("effects = %d, prepared = %d, duplicates = %d, want 2, 3 and 1", effects, prepared.Load(), duplicates.Load())
		}
		b.wantSettled()
	})
}

// Oldest is what a ledger must remember from: the first message not settled.
func TestOldestIsTheFirstThatMayBeDelivered(t *testing.T) {
	inBubble(t, func(b *bus) {
		var stored []time.Time
		for _, k := range []string{"a", "b", "c"} {
			b.publish(k)
			stored = append(stored, time.Now())
			b.pass(time.Minute)
		}
		var open atomic.Value
		open.Store("b")
		c, err := consumer.New(b.js, func(_ context.Context, d *consumer.Delivery) error {
			if d.Key == open.Load() {
				return errHandler
			}
			return nil
		}, b.config(consumer.Config{MaxDeliver: 100, MaxBackoff: time.Second}))
		if err != nil {
			b.Fatal(err)
		}
		oldest := func() time.Time {
			b.Helper()
			at, err := c.Oldest(b.Context())
			if err != nil {
				b.Fatalf("Oldest: %v", err)
			}
			return at
		}
		if at := oldest(); at.Sub(stored[0]).Abs() > time.Second {
			b.Errorf("before the consumer exists: %v, want the first message's %v", at, stored[0])
		}
		stop := b.run(c)
		b.pass(time.Minute)
		if at := oldest(); at.Sub(stored[1]).Abs() > time.Second {
			b.Errorf("while b fails: %v, want %v", at, stored[1])
		}
		open.Store("")
		b.pass(time.Minute)
		if at := oldest(); !at.IsZero() {
			b.Errorf("with everything settled: %v, want zero", at)
		}
		if err := stop(); err != nil {
			b.Error(err)
		}
		b.publish("d")
		if at := oldest(); time.Since(at) > time.Second {
			b.Errorf("with a new message and nobody running: %v, want now", at)
		}
	})
}

// Middleware wraps a handler: nothing else is needed.
func ExampleHandler_middleware() {
	log := func(next consumer.Handler) consumer.Handler {
		return func(ctx context.Context, d *consumer.Delivery) error {
			err := next(ctx, d)
			fmt.Println(d.Type, "->", err)
			return err
		}
	}
	type Placed struct{ Order int }
	h := log(consumer.Routes{
		"order.placed": consumer.JSON(func(_ context.Context, p Placed, _ *consumer.Delivery) error {
			fmt.Println("order", p.Order)
			return nil
		}),
	}.Handle)
	for _, ev := range []jetbox.Event{
		{Type: "order.placed", Payload: []byte(`{"order":7}`)},
		{Type: "order.sung"},
	} {
		_ = h(context.Background(), &consumer.Delivery{Event: ev})
	}
	// Output:
	// order 7
	// order.placed -> <nil>
	// order.sung -> no handler for this type of event: "order.sung"
}

// One transaction for many events: with dedup/sqlite and dedup/postgres tx is the
// one that writes their effects.
func ExampleOnceAll() {
	js, end, err := exampleBus()
	if err != nil {
		panic(err)
	}
	defer end()
	ledger, err := dedup.NewMemory(24 * time.Hour)
	if err != nil {
		panic(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	billed := 0
	bill := consumer.OnceAll(ledger, func(_ context.Context, _ struct{}, ds []*consumer.Delivery) error {
		for _, d := range ds {
			if d.Type != "order.created" {
				return &consumer.DeliveryError{Delivery: d, Err: jetbox.Permanent(errors.New("not an order"))}
			}
			fmt.Println("bill", d.Key)
		}
		if billed += len(ds); billed == 2 {
			stop()
		}
		return nil
	})
	c, err := consumer.NewBatch(js, bill, consumer.Config{
		Stream: "EVENTS", Durable: "billing", Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		panic(err)
	}
	if err := c.Run(ctx); err != nil {
		panic(err)
	}
	// Output:
	// bill order-1
	// bill order-2
}
