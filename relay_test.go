package jetbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	ledger "github.com/seed-5e04d8fb/jetbox/dedup/sqlite"
	"github.com/seed-5e04d8fb/jetbox/dlq"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/internal/faultbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// The stores, ledgers and letters fit where relay and consumer want them.
var (
	_ relay.Source             = (*sqlite.Store)(nil)
	_ relay.Pruner             = (*sqlite.Store)(nil)
	_ consumer.Ledger[*sql.Tx] = (*ledger.Ledger)(nil)
	_ consumer.DeadLetters     = (*dlq.Letters)(nil)
)

// bus is the whole bus as an application has it: orders and outbox in one file,
// a broker in the process, streams, letters.
type bus struct {
	t       *testing.T
	store   *sqlite.Store
	srv     *embedded.Server
	box     *faultbox.Box // between relay and consumers, and the broker
	nc      *nats.Conn
	js      jetstream.JetStream // through the box
	admin   jetstream.JetStream // the test's own, not through the box
	letters *dlq.Letters
}

// inBubble runs f on a fake clock. Bubbles with file storage may not run in
// parallel in one process (package embedded).
func inBubble(t *testing.T, f func(b *bus)) {
	t.Helper()
	dir := t.TempDir() // outside the bubble: its cleanup runs after
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		b := &bus{t: t, srv: embedded.RunTest(t)}
		b.box = &faultbox.Box{Server: b.srv}
		var err error
		b.nc, err = nats.Connect("", nats.InProcessServer(b.box), nats.MaxReconnects(-1), nats.ReconnectBufSize(-1),
			nats.ReconnectWait(200*time.Millisecond), nats.PingInterval(5*time.Second))
		b.must(err)
		t.Cleanup(b.nc.Close)
		b.js, err = jetstream.New(b.nc)
		b.must(err)
		nc, err := b.srv.Connect(nats.MaxReconnects(-1))
		b.must(err)
		t.Cleanup(nc.Close)
		b.admin, err = jetstream.New(nc)
		b.must(err)
		_, err = b.admin.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}, AllowBatchPublish: true})
		b.must(err)
		b.letters, err = dlq.New(b.js, dlq.Config{Logger: slog.New(slog.DiscardHandler)})
		b.must(err)
		_, err = b.letters.Setup(ctx, "EVENTS")
		b.must(err)
		b.store, err = sqlite.Open(ctx, sqlite.Config{Path: filepath.Join(dir, "orders.db")})
		b.must(err)
		t.Cleanup(func() { b.store.Close() })
		b.must(b.store.Migrate(ctx))
		b.exec(`CREATE TABLE orders (id TEXT PRIMARY KEY, version INTEGER NOT NULL)`)
		b.exec(`CREATE TABLE shipped (order_id TEXT, version INTEGER)`) // no key: a second effect would show
		f(b)
	})
}

func (b *bus) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bus) exec(query string, args ...any) {
	b.t.Helper()
	_, err := b.store.DB().ExecContext(b.t.Context(), query, args...)
	b.must(err)
}

func (b *bus) count(query string, args ...any) (n int) {
	b.t.Helper()
	b.must(b.store.DB().QueryRowContext(b.t.Context(), query, args...).Scan(&n))
	return n
}

// order changes an order and appends the event in one transaction. A failure
// injected between the two rolls both back.
func (b *bus) order(id string, inject error) error {
	ctx := b.t.Context()
	tx, err := b.store.DB().BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, `INSERT INTO orders VALUES (?, 1)
		ON CONFLICT (id) DO UPDATE SET version = version + 1`, id); err != nil {
		return err
	}
	if inject != nil {
		return inject
	}
	ev := &jetbox.Event{Subject: "events.order.placed", AggregateType: "order", AggregateID: id, Payload: []byte(id)}
	if err := b.store.Append(ctx, tx, ev); err != nil {
		return err
	}
	return tx.Commit()
}

// run starts something that runs until it is told to stop, and returns how to.
func (b *bus) run(f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	stop = sync.OnceFunc(func() {
		b.t.Helper()
		cancel()
		if err := <-done; err != nil {
			b.t.Errorf("Run: %v", err)
		}
	})
	b.t.Cleanup(stop)
	return stop
}

func (b *bus) relay(src relay.Source, cfg relay.Config) (stop func()) {
	b.t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	r, err := relay.New(src, b.js, cfg)
	b.must(err)
	return b.run(r.Run)
}

func (b *bus) stream() jetstream.StreamState {
	b.t.Helper()
	st, err := b.admin.Stream(b.t.Context(), "EVENTS")
	b.must(err)
	return st.CachedInfo().State
}

// Cycle 1: the order and its event are committed together, and a failure between
// the two leaves neither. Cycle 2: the row goes from PENDING to PUBLISHED, with
// the sequence of its PubAck.
func TestOrderAndEventAreCommittedTogetherAndRelayed(t *testing.T) {
	inBubble(t, func(b *bus) {
		injected := errors.New("injected between order and event")
		if err := b.order("o-0", injected); !errors.Is(err, injected) {
			b.t.Fatalf("order: %v", err)
		}
		if orders, events := b.count("SELECT count(*) FROM orders"), b.count("SELECT count(*) FROM outbox"); orders+events != 0 {
			b.t.Fatalf("after the rollback: %d orders, %d events", orders, events)
		}
		b.must(b.order("o-1", nil))
		if n := b.count(`SELECT count(*) FROM outbox_status WHERE status = 'PENDING'`); n != 1 {
			b.t.Fatalf("%d rows pending after the commit, want 1", n)
		}
		stop := b.relay(b.store, relay.Config{})
		time.Sleep(time.Second)
		stop()
		e, err := b.store.Show(b.t.Context(), 1)
		b.must(err)
		if e.State != jetbox.Published || e.Stream != "EVENTS" || e.StreamSeq != 1 {
			b.t.Fatalf("row: %+v", e)
		}
		if st := b.stream(); st.Msgs != 1 {
			b.t.Fatalf("stream: %+v", st)
		}
	})
}

// Cycle 3: a consumer that keeps failing is tried again with growing delays, up to
// MaxDeliver; then its message is a letter with its reason, while other events go
// on. The mended handler gets the letter by replay, once.
func TestPoisonIsParkedAndReplayedOnce(t *testing.T) {
	inBubble(t, func(b *bus) {
		ctx := b.t.Context()
		led, err := ledger.New(ctx, b.store.DB(), ledger.Config{})
		b.must(err)
		var mu sync.Mutex
		var tries []time.Time
		mended := false
		h := consumer.Once(led, func(ctx context.Context, tx *sql.Tx, d *consumer.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			if d.AggregateID == "poison" && !mended {
				tries = append(tries, time.Now())
				return errors.New("no address")
			}
			_, err := tx.ExecContext(ctx, "INSERT INTO shipped VALUES (?, 1)", d.AggregateID)
			return err
		})
		c, err := consumer.New(b.js, h, consumer.Config{
			Stream: "EVENTS", Durable: "shipping", MaxDeliver: 4, DeadLetters: b.letters,
			Logger: slog.New(slog.DiscardHandler),
		})
		b.must(err)
		router, err := dlq.NewRouter(b.letters, dlq.RouterConfig{EventStream: "EVENTS"})
		b.must(err)
		stops := []func(){b.relay(b.store, relay.Config{}), b.run(c.Run), b.run(router.Run)}
		b.must(b.order("poison", nil))
		for i := range 10 {
			b.must(b.order(fmt.Sprint("o-", i), nil))
		}
		time.Sleep(time.Minute)

		if n := b.count("SELECT count(*) FROM shipped"); n != 10 {
			b.t.Fatalf("%d orders shipped beside the poison, want 10", n)
		}
		mu.Lock()
		if len(tries) != 4 {
			b.t.Fatalf("the poison was tried %d times, want MaxDeliver 4", len(tries))
		}
		for i, want := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second} {
			if gap := tries[i+1].Sub(tries[i]); gap < want*8/10 || gap > want*12/10 {
				b.t.Errorf("gap %d is %v, want about %v", i+1, gap, want)
			}
		}
		mended = true
		mu.Unlock()

		letter := b.oneLetter()
		if letter.Reason != jetbox.ReasonMaxDeliveries || letter.Error != "no address" || letter.Deliveries != 4 ||
			string(letter.Payload) != "poison" || letter.Consumer != "shipping" {
			b.t.Fatalf("letter: %+v", letter)
		}
		if _, err := b.letters.Replay(ctx, letter.ID); err != nil {
			b.t.Fatal(err)
		}
		if _, err := b.letters.Replay(ctx, letter.ID); !errors.Is(err, jetbox.ErrLetterGone) {
			b.t.Fatalf("second replay: %v, want ErrLetterGone", err)
		}
		time.Sleep(10 * time.Second)
		for _, stop := range slices.Backward(stops) {
			stop()
		}
		if n := b.count("SELECT count(*) FROM shipped WHERE order_id = 'poison'"); n != 1 {
			b.t.Fatalf("the replayed order was shipped %d times, want once", n)
		}
		// The replay is a message of its own, inside the window of the first.
		st, err := b.admin.Stream(ctx, "EVENTS")
		b.must(err)
		first, err := st.GetMsg(ctx, 1)
		b.must(err)
		again, err := st.GetMsg(ctx, st.CachedInfo().State.LastSeq)
		b.must(err)
		if first.Header.Get(jetbox.HeaderMsgID) == again.Header.Get(jetbox.HeaderMsgID) ||
			first.Header.Get(jetbox.HeaderIdempotencyKey) != again.Header.Get(jetbox.HeaderIdempotencyKey) {
			b.t.Fatalf("first %v, replay %v: want a fresh message ID and the same key", first.Header, again.Header)
		}
	})
}

func (b *bus) oneLetter() dlq.Letter {
	b.t.Helper()
	var letters []dlq.Letter
	for l, err := range b.letters.List(b.t.Context(), dlq.Filter{}) {
		b.must(err)
		letters = append(letters, l)
	}
	if len(letters) != 1 {
		b.t.Fatalf("%d letters, want 1: %+v", len(letters), letters)
	}
	return letters[0]
}

// dying is a source whose process dies between the PubAck and the record.
type dying struct{ *sqlite.Store }

func (dying) Record(context.Context, jetbox.Lease, []jetbox.Outcome) error {
	return errors.New("the process died here")
}

func (dying) Release(context.Context, jetbox.Lease) error { return errors.New("it is dead") }

// Cycle 4: the relay dies after the PubAck and before the mark, the next one
// publishes again: Duplicate, one message, one effect.
func TestDeathBeforeTheMarkLeavesOneMessageAndOneEffect(t *testing.T) {
	inBubble(t, func(b *bus) {
		ctx := b.t.Context()
		led, err := ledger.New(ctx, b.store.DB(), ledger.Config{})
		b.must(err)
		c, err := consumer.New(b.js, consumer.Once(led, func(ctx context.Context, tx *sql.Tx, d *consumer.Delivery) error {
			_, err := tx.ExecContext(ctx, "INSERT INTO shipped VALUES (?, 1)", d.AggregateID)
			return err
		}), consumer.Config{Stream: "EVENTS", Durable: "shipping", Logger: slog.New(slog.DiscardHandler)})
		b.must(err)
		stopConsumer := b.run(c.Run)
		b.must(b.order("o-1", nil))

		stop := b.relay(dying{b.store}, relay.Config{DrainTimeout: 100 * time.Millisecond})
		time.Sleep(time.Second)
		stop()
		if st := b.stream(); st.Msgs != 1 || b.count("SELECT count(*) FROM outbox WHERE status = 'PENDING'") != 1 {
			b.t.Fatalf("after the death: %+v", st)
		}
		duplicates := 0
		stop = b.relay(b.store, relay.Config{Hooks: relay.Hooks{
			PublishedFunc: func(_, _ time.Duration, duplicate bool) {
				if duplicate {
					duplicates++
				}
			},
		}})
		time.Sleep(15 * time.Second) // the dead one's lease, and a poll
		stop()
		stopConsumer()
		e, err := b.store.Show(ctx, 1)
		b.must(err)
		if st := b.stream(); duplicates != 1 || st.Msgs != 1 || e.State != jetbox.Published || e.StreamSeq != 1 {
			b.t.Fatalf("%d duplicates, stream %+v, row %+v", duplicates, st, e)
		}
		if n := b.count("SELECT count(*) FROM shipped"); n != 1 {
			b.t.Fatalf("%d effects, want 1", n)
		}
	})
}
