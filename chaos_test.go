package jetbox_test

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	ledger "github.com/seed-5e04d8fb/jetbox/dedup/sqlite"
	"github.com/seed-5e04d8fb/jetbox/dlq"
	"github.com/seed-5e04d8fb/jetbox/internal/faultbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

var (
	chaosFor  = flag.Duration("chaos.for", 0, "how long to run random schedules; 0 runs one")
	chaosSeed = flag.Uint64("chaos.seed", 0, "seed of the first schedule; 0 draws one")
)

// TestChaos runs the whole bus through random faults, and checks the six
// invariants of history.check after each schedule has healed and drained.
func TestChaos(t *testing.T) {
	seed := *chaosSeed
	if seed == 0 {
		seed = rand.Uint64() >> 16
	}
	for begin := time.Now(); ; seed++ {
		ok := t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Logf("replay with: go test . -run TestChaos -chaos.seed=%d", seed)
			inBubble(t, func(b *bus) { chaos(b, seed) })
		})
		if !ok || time.Since(begin) >= *chaosFor {
			return
		}
	}
}

// chaosLength is how long faults go on, and healing how long the bus may take to
// drain after the last: in fake time.
const (
	chaosLength = 45 * time.Second
	healing     = 10 * time.Minute
)

// monkey is one chaos run. Each actor has a random source of its own, so that the
// order of goroutines changes as little as possible.
type monkey struct {
	*bus
	seed    uint64
	over    chan struct{} // closed when the faults end
	mended  atomic.Bool   // handlers fail no more, but for poison
	mu      sync.Mutex    // guards history
	history history
}

func chaos(b *bus, seed uint64) {
	m := &monkey{bus: b, seed: seed, over: make(chan struct{})}
	m.history = history{
		committed:  make(map[string][]int),
		rolledBack: make(map[string]bool),
		deadRows:   make(map[string]string),
		letters:    make(map[string]string),
	}
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	b.t.Cleanup(func() { cancel(); wg.Wait() })
	for i := range 3 {
		wg.Go(func() { m.write(m.rand(100 + i)) })
	}
	for i := range 2 {
		wg.Go(func() { m.relays(ctx, m.rand(200+i)) })
		wg.Go(func() { m.consumers(ctx, m.rand(300+i)) })
	}
	wg.Go(func() { m.faults(m.rand(400)) })
	wg.Go(func() {
		router, err := dlq.NewRouter(b.letters, dlq.RouterConfig{EventStream: "EVENTS"})
		if err == nil {
			err = router.Run(ctx)
		}
		if err != nil {
			b.t.Errorf("router: %v", err)
		}
	})

	time.Sleep(chaosLength)
	close(m.over)
	m.mended.Store(true)
	for end := time.Now().Add(healing); time.Now().Before(end) && !m.drained(); {
		time.Sleep(5 * time.Second)
	}
	m.collect()
	cancel()
	wg.Wait()
	if v := m.history.check(); len(v) > 0 {
		b.t.Fatalf("seed %d violates:\n%s", seed, strings.Join(v[:min(len(v), 20)], "\n"))
	}
	committed := 0
	for _, numbers := range m.history.committed {
		committed += len(numbers)
	}
	if committed < 50 || len(m.history.effects) < 30 {
		b.t.Fatalf("seed %d: only %d committed and %d handled, the run shows nothing", seed, committed, len(m.history.effects))
	}
	b.t.Logf("%d committed, %d rolled back, %d on the stream, %d handled, %d dead rows, %d letters", committed,
		len(m.history.rolledBack), len(m.history.stored), len(m.history.effects), len(m.history.deadRows), len(m.history.letters))
}

func (m *monkey) rand(stream int) *rand.Rand {
	return rand.New(rand.NewPCG(m.seed, uint64(stream)))
}

// running sleeps and reports whether the faults go on.
func (m *monkey) running(d time.Duration) bool {
	select {
	case <-m.over:
		return false
	case <-time.After(d): //nolint:forbidigo // a bubble's timer, gone with it
		return true
	}
}

// write commits and rolls back changes of random aggregates. The counter row is
// the aggregate: it is locked before the event is appended.
func (m *monkey) write(r *rand.Rand) {
	for m.running(time.Duration(r.IntN(300)) * time.Millisecond) {
		key := fmt.Sprint("k", r.IntN(6))
		subject := "events.a"
		switch n := r.IntN(100); {
		case n < 4:
			subject = "events.poison"
		case n < 6:
			subject = "nowhere.a"
		}
		// An error before the commit is a change that did not happen.
		if err := m.tryWrite(key, subject, 1+r.IntN(3), r.IntN(10) < 3); errors.Is(err, errUnknown) {
			m.t.Errorf("commit: %v", err)
		}
	}
}

var errUnknown = errors.New("the outcome of a commit is unknown")

func (m *monkey) tryWrite(key, subject string, events int, rollback bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	tx, err := m.store.DB().BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	var ids []int
	for range events {
		var n int
		if _, err := tx.ExecContext(ctx, `INSERT INTO orders VALUES (?, 1)
			ON CONFLICT (id) DO UPDATE SET version = version + 1`, key); err != nil {
			return err
		}
		if err := tx.QueryRowContext(ctx, `SELECT version FROM orders WHERE id = ?`, key).Scan(&n); err != nil {
			return err
		}
		payload := fmt.Sprintf("%s:%d", key, n)
		if rollback {
			payload = fmt.Sprintf("%s:%d", key, 1_000_000+m.rolled())
		}
		ev := &jetbox.Event{Subject: subject, AggregateType: "order", AggregateID: key, Payload: []byte(payload)}
		if err := m.store.Append(ctx, tx, ev); err != nil {
			return err
		}
		if rollback {
			m.mu.Lock()
			m.history.rolledBack[payload] = true
			m.mu.Unlock()
		}
		ids = append(ids, n)
	}
	if rollback {
		return tx.Rollback()
	}
	// The lock is held over the commit: the history has the order of commits.
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("%w: %w", errUnknown, err)
	}
	m.history.committed[key] = append(m.history.committed[key], ids...)
	return nil
}

func (m *monkey) rolled() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.history.rolledBack)
}

// client is a connection of one actor's own.
func (m *monkey) client() (*faultbox.Box, *nats.Conn, jetstream.JetStream, error) {
	box := &faultbox.Box{Server: m.srv}
	nc, err := nats.Connect("", nats.InProcessServer(box), nats.MaxReconnects(-1), nats.ReconnectBufSize(-1),
		nats.ReconnectWait(200*time.Millisecond), nats.RetryOnFailedConnect(true), nats.PingInterval(5*time.Second))
	if err != nil {
		return nil, nil, nil, err
	}
	js, err := jetstream.New(nc)
	return box, nc, js, err
}

// mortal is a source whose process can die: from then on no call does anything.
type mortal struct {
	*sqlite.Store
	dead atomic.Bool
}

var errDead = errors.New("this process is dead")

func (m *mortal) alive() error {
	if m.dead.Load() {
		return errDead
	}
	return nil
}

func (m *mortal) Acquire(ctx context.Context, c jetbox.Candidate) (jetbox.Lease, error) {
	if err := m.alive(); err != nil {
		return jetbox.Lease{}, err
	}
	return m.Store.Acquire(ctx, c)
}

func (m *mortal) Release(ctx context.Context, l jetbox.Lease) error {
	if err := m.alive(); err != nil {
		return err
	}
	return m.Store.Release(ctx, l)
}

func (m *mortal) Claim(ctx context.Context, l jetbox.Lease, ask jetbox.Ask) ([]jetbox.Row, error) {
	if err := m.alive(); err != nil {
		return nil, err
	}
	return m.Store.Claim(ctx, l, ask)
}

func (m *mortal) Record(ctx context.Context, l jetbox.Lease, o []jetbox.Outcome) error {
	if err := m.alive(); err != nil {
		return err
	}
	return m.Store.Record(ctx, l, o)
}

// relays runs one relay after the other: stopped, killed, cut off or muted.
func (m *monkey) relays(ctx context.Context, r *rand.Rand) {
	for ctx.Err() == nil {
		box, nc, js, err := m.client()
		if err != nil {
			m.t.Errorf("relay's client: %v", err)
			return
		}
		src := &mortal{Store: m.store}
		rel, err := relay.New(src, js, relay.Config{
			Lease: 3 * time.Second, Batch: 1 + r.IntN(40), MaxAttempts: 3, DrainTimeout: 2 * time.Second,
			Logger: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			m.t.Errorf("relay: %v", err)
			return
		}
		run, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- rel.Run(run) }()
		for healthy := r.IntN(4); healthy > 0 && m.running(time.Duration(r.IntN(3000))*time.Millisecond); healthy-- {
			switch r.IntN(4) {
			case 0:
				box.Cut(false)
			case 1:
				box.Mute(true) // PubAcks are lost, messages are stored
				m.running(time.Duration(r.IntN(7000)) * time.Millisecond)
				box.Mute(false)
				box.Cut(false)
			}
		}
		if !m.running(time.Duration(r.IntN(3000)) * time.Millisecond) {
			<-ctx.Done() // healed: this one works to the end
		} else if r.IntN(2) == 0 {
			src.dead.Store(true)
			box.Cut(true)
		}
		stop()
		if err := <-done; err != nil {
			m.t.Errorf("relay: %v", err)
		}
		nc.Close()
	}
}

// consumers runs one instance of the consumer after the other.
func (m *monkey) consumers(ctx context.Context, r *rand.Rand) {
	led, err := ledger.New(ctx, m.store.DB(), ledger.Config{})
	if err != nil {
		m.t.Errorf("ledger: %v", err)
		return
	}
	var mu sync.Mutex // guards r, which the handlers share with the loop
	roll := func(n int) int {
		mu.Lock()
		defer mu.Unlock()
		return r.IntN(n)
	}
	handler := consumer.Once(led, func(ctx context.Context, tx *sql.Tx, d *consumer.Delivery) error {
		if _, err := tx.ExecContext(ctx, "INSERT INTO shipped VALUES (?, 1)", string(d.Payload)); err != nil {
			return err
		}
		switch n := roll(100); {
		case d.Subject == "events.poison" && n < 50:
			return jetbox.Permanent(errors.New("poison"))
		case d.Subject == "events.poison":
			panic("poison")
		case m.mended.Load():
			return nil
		case n < 10:
			return errors.New("a dependency is down")
		case n < 15:
			panic("a bug")
		}
		return nil
	})
	for ctx.Err() == nil {
		box, nc, js, err := m.client()
		if err != nil {
			m.t.Errorf("consumer's client: %v", err)
			return
		}
		letters, err := dlq.New(js, dlq.Config{Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			m.t.Errorf("letters: %v", err)
			return
		}
		c, err := consumer.New(js, handler, consumer.Config{
			Stream: "EVENTS", Durable: "shipping", Workers: 3, MaxDeliver: 4, AckWait: 5 * time.Second,
			Backoff: 200 * time.Millisecond, DeadLetters: letters, Logger: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			m.t.Errorf("consumer: %v", err)
			return
		}
		run, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- c.Run(run) }()
		if !m.running(time.Duration(roll(15000)) * time.Millisecond) {
			<-ctx.Done()
		} else if roll(2) == 0 {
			box.Cut(true) // acks on their way are lost
		}
		stop()
		if err := <-done; err != nil && ctx.Err() == nil && m.running(0) {
			m.t.Errorf("consumer: %v", err)
		}
		nc.Close()
	}
}

// faults restarts the broker and holds the database's write lock.
func (m *monkey) faults(r *rand.Rand) {
	for m.running(time.Duration(r.IntN(10000)) * time.Millisecond) {
		if r.IntN(2) == 0 {
			if err := m.srv.Close(); err != nil {
				m.t.Errorf("stop broker: %v", err)
			}
			m.running(time.Duration(r.IntN(8000)) * time.Millisecond)
			if err := m.srv.Restart(context.Background()); err != nil {
				m.t.Errorf("restart broker: %v", err)
				return
			}
			continue
		}
		ctx, cancel := context.WithCancel(context.Background())
		tx, err := m.store.DB().BeginTx(ctx, nil)
		if err == nil {
			m.running(time.Duration(r.IntN(2000)) * time.Millisecond)
			err = tx.Rollback()
		}
		cancel()
		if err != nil && !strings.Contains(err.Error(), "locked") {
			m.t.Errorf("foreign lock: %v", err)
		}
	}
}

// drained reports that no row is pending and no message is in a consumer's way.
func (m *monkey) drained() bool {
	ctx := m.t.Context()
	st, err := m.store.Stats(ctx)
	if err != nil || st.Pending > 0 {
		return false
	}
	c, err := m.admin.Consumer(ctx, "EVENTS", "shipping")
	if err != nil {
		return false
	}
	info, err := c.Info(ctx)
	return err == nil && info.NumPending == 0 && info.NumAckPending == 0
}

// collect reads what is there after the run.
func (m *monkey) collect() {
	ctx := m.t.Context()
	st, err := m.store.Stats(ctx)
	m.must(err)
	m.history.pending, m.history.claimed = st.Pending, st.Claimed
	for e, err := range m.store.List(ctx, outbox.Filter{State: jetbox.DeadLetter}) {
		m.must(err)
		m.history.deadRows[string(e.Event.Payload)] = e.LastError
	}
	for l, err := range m.letters.List(ctx, dlq.Filter{}) {
		m.must(err)
		m.history.letters[string(l.Payload)] = strings.Trim(l.Reason+" "+l.Error, " ")
	}
	rows, err := m.store.DB().QueryContext(ctx, "SELECT order_id FROM shipped")
	m.must(err)
	defer rows.Close()
	for rows.Next() {
		var id string
		m.must(rows.Scan(&id))
		m.history.effects = append(m.history.effects, id)
	}
	m.must(rows.Err())
	stream, err := m.admin.Stream(ctx, "EVENTS")
	m.must(err)
	for seq := uint64(1); seq <= stream.CachedInfo().State.LastSeq; seq++ {
		msg, err := stream.GetMsg(ctx, seq)
		m.must(err)
		m.history.stored = append(m.history.stored, string(msg.Data))
	}
}
