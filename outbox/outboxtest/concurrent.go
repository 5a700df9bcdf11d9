package outboxtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

func concurrentScenarios() []scenario {
	return []scenario{
		{"eight writers and two relays that take over from each other lose, repeat and reorder nothing", migrated(writersAndRelays)},
	}
}

const (
	writers      = 8
	transactions = 30 // of each writer
	shortLease   = 60 * time.Millisecond
)

// tracked is what the checker knows of one row.
type tracked struct {
	key       string
	committed bool // the commit has returned
	undone    bool // the rollback has begun
	seen      bool // a claim handed it out
	recording int  // calls of Record under way that may record it
	recorded  int  // calls of Record that have
}

// checker follows every row of a run and reports what must not happen.
type checker struct {
	t    *testing.T
	mu   sync.Mutex // guards rows
	rows map[int64]*tracked
}

// appended tells of rows whose transaction is about to end, ended how it ended.
func (c *checker) appended(ids []int64, events []*jetbox.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, id := range ids {
		if old := c.rows[id]; old != nil && !old.undone {
			c.t.Errorf("id %d was given out twice", id)
		}
		c.rows[id] = &tracked{key: events[i].OrderingKey()}
	}
}

func (c *checker) ended(ids []int64, committed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range ids {
		r := c.rows[id]
		r.committed, r.undone = committed, !committed
		if r.undone && r.seen {
			c.t.Errorf("row %d was claimed and then rolled back", id)
		}
	}
}

// waiting is the rows that any claim which starts now has to respect.
func (c *checker) waiting() map[string][]int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	rows := make(map[string][]int64)
	for id, r := range c.rows {
		if r.key != "" && r.committed && r.recording == 0 && r.recorded == 0 {
			rows[r.key] = append(rows[r.key], id)
		}
	}
	return rows
}

// claimed checks a claim that started when the given rows were waiting.
func (c *checker) claimed(owner string, rows []jetbox.Row, waiting map[string][]int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := make(map[int64]bool)
	for _, row := range rows {
		r := c.rows[row.Pos]
		switch {
		case r == nil || r.undone:
			c.t.Errorf("%s claimed row %d, which was rolled back", owner, row.Pos)
			continue
		case r.recorded > 0 && r.committed:
			// Recorded before the claim began, or while it ran by a relay that
			// has lost the lease: both must not be.
			c.t.Errorf("%s claimed row %d, which was recorded", owner, row.Pos)
		}
		r.seen = true
		for _, p := range waiting[r.key] {
			if q := c.rows[p]; p < row.Pos && !before[p] && q.recording == 0 && q.recorded == 0 {
				c.t.Errorf("%s claimed row %d of %s before row %d", owner, row.Pos, r.key, p)
			}
		}
		before[row.Pos] = true
	}
}

// record calls Record and checks that each row is recorded once.
func (c *checker) record(ctx context.Context, s Store, l jetbox.Lease, outcomes []jetbox.Outcome) error {
	c.count(outcomes, +1, 0)
	err := s.Record(ctx, l, outcomes)
	if err == nil {
		c.count(outcomes, -1, +1)
		return nil
	}
	c.count(outcomes, -1, 0)
	return err
}

func (c *checker) count(outcomes []jetbox.Outcome, recording, recorded int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range outcomes {
		if o.State != jetbox.Published {
			continue
		}
		r := c.rows[o.Pos]
		r.recording += recording
		if r.recorded += recorded; r.recorded > 1 {
			c.t.Errorf("row %d was recorded %d times", o.Pos, r.recorded)
		}
	}
}

// left counts committed rows that are not recorded.
func (c *checker) left() (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.rows {
		if r.committed && r.recorded == 0 {
			n++
		}
	}
	return n
}

func writersAndRelays(t *testing.T, b *bench) {
	c := &checker{t: t, rows: make(map[int64]*tracked)}
	seed := logSeed(t)
	var writing, relaying sync.WaitGroup
	for w := range writers {
		rng := rand.New(rand.NewPCG(seed, uint64(w)))
		writing.Go(func() { write(t, b, c, rng) })
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	for i, owner := range []string{"a", "b"} {
		rng, s := rand.New(rand.NewPCG(seed, 1000+uint64(i))), b.open()
		relaying.Go(func() { relayRows(ctx, t, s, owner, c, rng) })
	}
	writing.Wait()
	b.eventually("record every row", func() (bool, string) {
		return t.Failed() || c.left() == 0, fmt.Sprintf("%d rows are left", c.left())
	})
	stop()
	relaying.Wait()
	if n, want := int(b.number("SELECT count(*) FROM {t} WHERE status = 'PUBLISHED'")), int(b.number("SELECT count(*) FROM {t}")); n != want {
		t.Errorf("%d of %d rows are published", n, want)
	}
	committed := 0
	for _, r := range c.rows {
		if r.committed {
			committed++
		}
	}
	if n := int(b.number("SELECT count(*) FROM {t}")); n != committed {
		t.Errorf("%d rows are in the table, %d were committed", n, committed)
	}
}

// write runs one writer's transactions; some are rolled back.
func write(t *testing.T, b *bench, c *checker, rng *rand.Rand) {
	for range transactions {
		var events []*jetbox.Event
		for range 1 + rng.IntN(4) {
			key := ""
			if k := rng.IntN(6); k > 0 {
				key = fmt.Sprintf("key %d", k)
			}
			events = append(events, keyed(key, 1)...)
		}
		if err := writeOnce(t.Context(), b, c, events, rng.IntN(5) > 0); err != nil {
			t.Errorf("write: %v", err)
			return
		}
	}
}

func writeOnce(ctx context.Context, b *bench, c *checker, events []*jetbox.Event, commit bool) error {
	tx, err := b.DB().BeginTx(ctx, nil)
	for tries := 0; err != nil && tries < 10; tries++ {
		// Eight writers on a slow machine may wait longer for a lock than a
		// database lets them. Nothing has happened yet: begin again.
		tx, err = b.DB().BeginTx(ctx, nil)
	}
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := b.Append(ctx, tx, events...); err != nil {
		return err
	}
	var ids []int64
	for _, ev := range events {
		id, err := rowID(tx, b.Store, ev)
		if err != nil {
			return err
		}
		ids = append(ids, id)
	}
	c.appended(ids, events)
	if !commit {
		// Before the rollback: after it, another transaction may get these ids.
		c.ended(ids, false)
		return tx.Rollback()
	}
	err = tx.Commit()
	c.ended(ids, err == nil)
	return err
}

// relayRows relays until ctx is done. Now and then it goes silent with rows in
// hand for longer than its lease, and wakes up not knowing.
func relayRows(ctx context.Context, t *testing.T, s Store, owner string, c *checker, rng *rand.Rand) {
	var lease jetbox.Lease
	for ctx.Err() == nil && !t.Failed() {
		if !lease.Held || rng.IntN(4) == 0 {
			l, err := s.Acquire(ctx, jetbox.Candidate{Owner: owner, Length: shortLease})
			// On a busy machine the other one can take over between the two steps.
			if err != nil && ctx.Err() == nil && !errors.Is(err, jetbox.ErrLeaseLost) {
				t.Errorf("%s: %v", owner, err)
			}
			if lease = l; !l.Held {
				time.Sleep(time.Duration(1+rng.IntN(10)) * time.Millisecond)
				continue
			}
		}
		err := relayOnce(ctx, s, owner, lease, c, rng)
		switch {
		case errors.Is(err, jetbox.ErrLeaseLost):
			lease = jetbox.Lease{}
		case err != nil && ctx.Err() == nil:
			t.Errorf("%s: %v", owner, err)
		}
	}
}

func relayOnce(ctx context.Context, s Store, owner string, l jetbox.Lease, c *checker, rng *rand.Rand) error {
	waiting := c.waiting()
	rows, err := s.Claim(ctx, l, jetbox.Ask{Limit: 1 + rng.IntN(20)})
	if err != nil {
		return err
	}
	c.claimed(owner, rows, waiting)
	if rng.IntN(25) == 0 {
		time.Sleep(2 * shortLease)
	}
	// The way to the broker and back: without it no relay leaves the writers room.
	time.Sleep(time.Duration(1+rng.IntN(3)) * time.Millisecond)
	// What was sent is a part of each key's rows, in order, up to a failure.
	var outcomes []jetbox.Outcome
	held := make(map[string]bool)
	for _, row := range rows {
		key := row.Event.OrderingKey()
		switch {
		case key != "" && held[key]:
		case rng.IntN(8) == 0:
			held[key] = true
		case rng.IntN(8) == 0:
			outcomes = append(outcomes, retry(row.Pos, time.Duration(rng.IntN(10))*time.Millisecond))
			held[key] = true
		default:
			outcomes = append(outcomes, published(row.Pos)...)
		}
	}
	if len(outcomes) == 0 {
		return nil
	}
	return c.record(ctx, s, l, outcomes)
}
