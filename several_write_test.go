package jetbox_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
)

// sharedKeys is how many ordering keys the writers use.
const sharedKeys = 50

// sharedWriters commit and roll back transactions with rows of one or more keys,
// and rows without any. As applications do, they lock what they change before they
// append: even keys by a row, odd ones by an advisory lock.
type sharedWriters struct {
	*several
	seed uint64
	hold time.Duration // the longest that a transaction is held open
	stop context.CancelFunc
	wg   sync.WaitGroup
	// backlogs counts the calls of backlog.
	backlogs int

	mu         sync.Mutex      // guards what follows
	committed  map[string]bool // by message ID, see sharedRun
	rolledBack map[string]bool
	held       int // transactions held open
}

// write starts n writers. The caller stops them with end.
func (s *several) write(n int, seed uint64, hold time.Duration) *sharedWriters {
	s.t.Helper()
	s.exec(`CREATE TABLE account (id INTEGER PRIMARY KEY)`)
	s.exec(`INSERT INTO account SELECT generate_series(0, $1 - 1)`, sharedKeys)
	w := &sharedWriters{several: s, seed: seed, hold: hold, committed: make(map[string]bool), rolledBack: make(map[string]bool)}
	ctx, cancel := context.WithCancel(s.t.Context())
	w.stop = cancel
	s.t.Cleanup(w.end)
	for i := range n {
		w.wg.Go(func() { w.run(ctx, i) })
	}
	return w
}

func (w *sharedWriters) end() {
	w.stop()
	w.wg.Wait()
}

func (w *sharedWriters) run(ctx context.Context, writer int) {
	r := rand.New(rand.NewPCG(w.seed, uint64(100+writer)))
	for n := 0; ctx.Err() == nil; n++ {
		tx := &sharedTx{w: w, r: r, name: fmt.Sprintf("w%d.%d", writer, n)}
		if err := tx.run(); err != nil {
			w.t.Errorf("writer %d: %v", writer, err)
			return
		}
		pause(ctx, time.Duration(r.IntN(4000))*time.Microsecond)
	}
}

// sharedTx is one transaction.
type sharedTx struct {
	w    *sharedWriters
	r    *rand.Rand
	name string
	tx   pgx.Tx
	rows []string // message IDs
	gone []string // of rows that a savepoint took back
}

// run is not interrupted by the end of the writing: a commit that is may have
// happened.
func (x *sharedTx) run() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var err error
	if x.tx, err = x.w.pool.Begin(ctx); err != nil {
		return err
	}
	defer func() { _ = x.tx.Rollback(ctx) }()
	keys, err := x.lock(ctx)
	if err != nil {
		return err
	}
	if err := x.append(ctx, keys, 1+x.r.IntN(12)); err != nil {
		return err
	}
	if x.r.IntN(5) == 0 {
		if err := x.undo(ctx, keys); err != nil {
			return err
		}
	}
	if x.r.IntN(8) == 0 {
		x.w.mu.Lock()
		x.w.held++
		x.w.mu.Unlock()
		pause(ctx, time.Duration(x.r.Int64N(int64(x.w.hold))))
	}
	return x.finish(ctx, x.r.IntN(4) == 0)
}

// lock locks up to three keys, in an order that all writers keep. Some
// transactions have none.
func (x *sharedTx) lock(ctx context.Context) (keys []int, err error) {
	chosen := make(map[int]bool)
	for range x.r.IntN(4) {
		chosen[x.r.IntN(sharedKeys)] = true
	}
	keys = slices.Sorted(maps.Keys(chosen))
	for _, k := range keys {
		if err := lockKey(ctx, x.tx, k); err != nil {
			return nil, err
		}
	}
	return keys, nil
}

func lockKey(ctx context.Context, tx pgx.Tx, key int) error {
	query := `SELECT pg_advisory_xact_lock($1)`
	if key%2 == 0 {
		query = `SELECT FROM account WHERE id = $1 FOR UPDATE`
	}
	_, err := tx.Exec(ctx, query, key)
	return err
}

// append adds n rows, by the library or by SQL that knows nothing of it.
func (x *sharedTx) append(ctx context.Context, keys []int, n int) error {
	plain := x.r.IntN(2) == 0
	var events []*jetbox.Event
	for range n {
		ev := &jetbox.Event{
			ID: fmt.Sprintf("%s.%d", x.name, len(x.rows)), Subject: fmt.Sprint("events.s", x.r.IntN(5)),
		}
		ev.Payload = []byte(ev.ID)
		if len(keys) > 0 && x.r.IntN(5) > 0 {
			ev.AggregateType, ev.AggregateID = "account", fmt.Sprint(keys[x.r.IntN(len(keys))])
		}
		x.rows = append(x.rows, ev.ID)
		events = append(events, ev)
		if !plain {
			continue
		}
		if _, err := x.tx.Exec(ctx, `INSERT INTO outbox (event_id, subject, aggregate_type, aggregate_id, payload)
			VALUES ($1, $2, $3, nullif($4, ''), $5)`, ev.ID, ev.Subject, "account", ev.AggregateID, ev.Payload); err != nil {
			return err
		}
	}
	if plain {
		return nil
	}
	return postgres.AppendPgx(ctx, x.tx, events...)
}

// undo appends rows that a savepoint takes back.
func (x *sharedTx) undo(ctx context.Context, keys []int) error {
	if _, err := x.tx.Exec(ctx, `SAVEPOINT before`); err != nil {
		return err
	}
	kept := len(x.rows)
	if err := x.append(ctx, keys, 1+x.r.IntN(4)); err != nil {
		return err
	}
	x.gone = append(x.gone, x.rows[kept:]...)
	x.rows = x.rows[:kept]
	_, err := x.tx.Exec(ctx, `ROLLBACK TO before`)
	return err
}

// finish ends the transaction and notes what it did.
func (x *sharedTx) finish(ctx context.Context, rollback bool) error {
	var err error
	if rollback {
		x.rows, x.gone = nil, append(x.gone, x.rows...)
		err = x.tx.Rollback(ctx)
	} else {
		err = x.tx.Commit(ctx)
	}
	if err != nil {
		return err
	}
	x.w.mu.Lock()
	defer x.w.mu.Unlock()
	for _, id := range x.rows {
		x.w.committed[id] = false
	}
	for _, id := range x.gone {
		x.w.rolledBack[id] = true
	}
	return nil
}

// backlog commits n rows at once, of all keys and without one, so that relays have
// full batches in hand when they are killed.
func (w *sharedWriters) backlog(n int) {
	w.t.Helper()
	ctx := w.t.Context()
	tx, err := w.pool.Begin(ctx)
	w.must(err)
	defer func() { _ = tx.Rollback(ctx) }()
	for k := range sharedKeys {
		w.must(lockKey(ctx, tx, k))
	}
	w.backlogs++
	name := fmt.Sprintf("backlog%d.", w.backlogs)
	_, err = tx.Exec(ctx, `INSERT INTO outbox (event_id, subject, aggregate_type, aggregate_id, payload)
		SELECT $1 || g, 'events.s' || g % 5, 'account', CASE WHEN g % 6 > 0 THEN (g % $2)::text END, ($1 || g)::bytea
		FROM generate_series(1, $3) g`, name, sharedKeys, n)
	w.must(err)
	w.must(tx.Commit(ctx))
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range n {
		w.committed[name+fmt.Sprint(i+1)] = false
	}
}

// doomed commits rows that no relay can send: a subject with a wildcard, and one
// that no stream takes. They end as dead letters.
func (w *sharedWriters) doomed(n int) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range n {
		id := fmt.Sprintf("doomed.%d", i)
		w.exec(`INSERT INTO outbox (event_id, subject, payload) VALUES ($1, $2, $1::text::bytea)`, id, []string{"events.*", "nowhere.a"}[i%2])
		w.committed[id] = true
	}
}

// counts returns how many rows were committed and rolled back so far, and how many
// transactions were held open.
func (w *sharedWriters) counts() (committed, rolledBack, held int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.committed), len(w.rolledBack), w.held
}

// sharedSeed returns the seed of a run, and logs it first.
func sharedSeed(t *testing.T) uint64 {
	t.Helper()
	seed := *chaosSeed
	if seed == 0 {
		seed = rand.Uint64() >> 16
	}
	t.Logf("seed %d; replay with: go test . -run '^%s$' -chaos.seed=%d -chaos.for=%v", seed, t.Name(), seed, *chaosFor)
	return seed
}
