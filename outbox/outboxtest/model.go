package outboxtest

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

func modelScenarios() []scenario {
	name := func(i int) string {
		return fmt.Sprintf("claims are what the promised order allows, random schedule %d", i)
	}
	var all []scenario
	for i := range 4 {
		all = append(all, scenario{name(i + 1), migrated(randomSchedule)})
	}
	return all
}

// seedVariable replays a random schedule.
const seedVariable = "JETBOX_TEST_SEED"

func logSeed(t *testing.T) uint64 {
	t.Helper()
	seed := rand.Uint64()
	if s := os.Getenv(seedVariable); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("%s=%q: %v", seedVariable, s, err)
		}
	}
	t.Logf("replay with %s=%d go test -run '%s'", seedVariable, seed, t.Name())
	return seed
}

// modelRow is a row as the promises say it must be. When it is due is known
// only between two instants, since the store reads the clock inside its call.
type modelRow struct {
	id       int64
	key      string
	state    jetbox.State
	attempts int
	reason   string
	waits    bool      // for its retry: holds its key although it is not due
	frozen   bool      // dead, and its key waits for a person
	from, to time.Time // available at, earliest and latest
}

// notDue and due are false both while it cannot be told.
func (r *modelRow) notDue(now time.Time) bool { return r.from.After(now) }
func (r *modelRow) due(now time.Time) bool    { return !r.to.Add(time.Millisecond).After(now) }

// modelRun drives two relays, a writer and an operator over one outbox, one call
// at a time, and compares each answer with the model.
type modelRun struct {
	*bench
	rng     *rand.Rand
	relays  [2]*bench
	leases  [2]jetbox.Lease
	active  int // which relay holds the lease
	rows    map[int64]*modelRow
	hand    []int64 // what the active relay claimed last
	history []string
}

const (
	modelSteps = 250
	modelKeys  = 3

	// expired is how long a lease lasts: not long enough for anything, so that
	// the other relay can take over at any time.
	expired = time.Millisecond
)

func randomSchedule(t *testing.T, b *bench) {
	seed := logSeed(t)
	m := &modelRun{
		bench:  b,
		rng:    rand.New(rand.NewPCG(seed, 0)),
		relays: [2]*bench{b.another(), b.another()},
		rows:   make(map[int64]*modelRow),
	}
	m.leases[0] = m.relays[0].takeOver("relay 0", expired)
	defer func() {
		if t.Failed() {
			t.Logf("history:\n%s\n%s", strings.Join(m.history, "\n"), b.dump())
		}
	}()
	for range modelSteps {
		m.step()
		if t.Failed() {
			return
		}
	}
	m.finish()
}

func (m *modelRun) note(format string, args ...any) {
	m.history = append(m.history, fmt.Sprintf(format, args...))
}

func (m *modelRun) step() {
	switch n := m.rng.IntN(100); {
	case n < 25:
		m.append()
	case n < 55:
		m.claimSome()
	case n < 80:
		m.recordSome()
	case n < 84:
		m.operate()
	case n < 90:
		m.takeOverNow()
	case n < 93:
		m.compare()
	default:
		time.Sleep(time.Duration(m.rng.IntN(8)) * time.Millisecond)
	}
}

func (m *modelRun) append() {
	events := make([]*jetbox.Event, 1+m.rng.IntN(4))
	for i := range events {
		key := ""
		if k := m.rng.IntN(modelKeys + 1); k > 0 {
			key = strconv.Itoa(k)
		}
		events[i] = keyed(key, 1)[0]
		switch m.rng.IntN(6) {
		case 0:
			later(events[i], time.Now().Add(-time.Duration(m.rng.IntN(int(time.Hour)))))
		case 1, 2:
			later(events[i], time.Now().Add(time.Duration(m.rng.IntN(int(30*time.Millisecond)))))
		}
	}
	if m.rng.IntN(5) == 0 {
		tx, err := m.DB().BeginTx(m.t.Context(), nil)
		m.check(err)
		m.check(m.Append(m.t.Context(), tx, events...))
		m.check(tx.Rollback())
		m.note("append %d events, rolled back", len(events))
		return
	}
	for i, id := range m.add(events...) {
		r := &modelRow{id: id, key: events[i].OrderingKey(), state: jetbox.Pending}
		if at := events[i].NotBefore; !at.IsZero() {
			r.from, r.to = at, at.Add(time.Millisecond)
		}
		m.rows[id] = r
		m.note("append row %d, key %q, not before %v", id, r.key, events[i].NotBefore)
	}
}

func (m *modelRun) claimSome() {
	n := 1 + m.rng.IntN(12)
	before := time.Now()
	rows := m.relays[m.active].claim(m.leases[m.active], n)
	after := time.Now()
	m.hand = positions(rows)
	m.note("claim %d = %v between %v and %v", n, m.hand, before, after)
	if len(rows) > n || !slices.IsSorted(m.hand) {
		m.t.Fatalf("claim of %d = %v, want at most so many, lowest first", n, m.hand)
	}
	for i, row := range rows {
		m.allowed(row, m.hand[:i], before, after)
	}
	m.complete(before)
}

// allowed checks one claimed row against promise 4: of a key's rows that are
// committed and due, the one with the lowest id comes next, and a row that waits
// for its retry counts as due.
func (m *modelRun) allowed(row jetbox.Row, earlier []int64, before, after time.Time) {
	m.t.Helper()
	r := m.rows[row.Pos]
	switch {
	case r == nil:
		m.t.Fatalf("claimed row %d, which is not there", row.Pos)
	case r.state != jetbox.Pending:
		m.t.Fatalf("claimed row %d, which is %s", r.id, r.state)
	case r.notDue(after):
		m.t.Fatalf("claimed row %d at %v, due between %v and %v", r.id, after, r.from, r.to)
	case row.Attempts != r.attempts:
		m.t.Fatalf("claimed row %d with %d attempts, want %d", r.id, row.Attempts, r.attempts)
	case r.key == "":
		return
	}
	for _, p := range m.rows {
		if p.key != r.key || p.id >= r.id || slices.Contains(earlier, p.id) {
			continue
		}
		if p.frozen || (p.state == jetbox.Pending && (p.waits || p.due(before))) {
			m.t.Fatalf("claimed row %d of key %s before row %d: %+v", r.id, r.key, p.id, *p)
		}
	}
}

// complete checks that the claim in hand left nothing out: every row that comes
// next of its key is there, up to the last one claimed.
func (m *modelRun) complete(before time.Time) {
	m.t.Helper()
	settled := make(map[string]bool) // keys whose next row is known, or not to be known
	for _, id := range slices.Sorted(maps.Keys(m.rows)) {
		r := m.rows[id]
		if settled[r.key] && r.key != "" {
			continue
		}
		next := false
		switch {
		case r.frozen:
			settled[r.key] = true
		case r.state == jetbox.Pending && r.due(before):
			settled[r.key], next = true, true
		case r.state == jetbox.Pending && (r.waits || !r.notDue(before)):
			settled[r.key] = true
		}
		if next && !slices.Contains(m.hand, id) && (len(m.hand) == 0 || id < m.hand[len(m.hand)-1]) {
			m.t.Fatalf("claimed %v without row %d of key %q, which is next: %+v", m.hand, id, r.key, *r)
		}
	}
}

// recordSome records outcomes of some of the rows in hand, and now and then of
// one that is not.
func (m *modelRun) recordSome() {
	var outcomes []jetbox.Outcome
	for _, id := range m.hand {
		if m.rng.IntN(4) > 0 {
			outcomes = append(outcomes, m.outcome(id))
		}
	}
	if ids := slices.Sorted(maps.Keys(m.rows)); len(ids) > 0 && m.rng.IntN(5) == 0 {
		if id := ids[m.rng.IntN(len(ids))]; !slices.Contains(m.hand, id) {
			outcomes = append(outcomes, m.outcome(id))
		}
	}
	if len(outcomes) == 0 {
		return
	}
	before := time.Now()
	m.relays[m.active].record(m.leases[m.active], outcomes...)
	after := time.Now()
	for _, o := range outcomes {
		m.note("record %+v between %v and %v", o, before, after)
		m.apply(o, before, after)
	}
}

func (m *modelRun) outcome(id int64) jetbox.Outcome {
	switch n := m.rng.IntN(12); {
	case n < 6:
		return published(id)[0]
	case n < 9:
		o := retry(id, time.Duration(m.rng.IntN(20))*time.Millisecond)
		o.Attempted = m.rng.IntN(3) > 0
		return o
	default:
		return dead(id, m.rng.IntN(3) == 0)
	}
}

func (m *modelRun) apply(o jetbox.Outcome, before, after time.Time) {
	r := m.rows[o.Pos]
	if r == nil || r.state != jetbox.Pending {
		return // gone or ended: nothing changes
	}
	r.state = o.State
	if o.Attempted {
		r.attempts++
	}
	r.reason, r.waits = o.Reason, false
	switch o.State {
	case jetbox.Pending:
		r.waits = true
		r.from, r.to = before.Add(o.Delay-time.Millisecond), after.Add(o.Delay)
	case jetbox.DeadLetter:
		r.frozen = o.Freeze
	}
}

// operate retries or discards dead rows.
func (m *modelRun) operate() {
	var ids []int64
	for id, r := range m.rows {
		if r.state == jetbox.DeadLetter && m.rng.IntN(2) == 0 {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return
	}
	change, discard := m.Retry, m.rng.IntN(2) == 0
	if discard {
		change = m.Discard
	}
	m.note("operator: discard %v, %v", discard, ids)
	if n, err := change(m.t.Context(), outbox.Filter{IDs: ids}); err != nil || n != len(ids) {
		m.t.Fatalf("change of dead rows %v (discard %v) = %d, %v", ids, discard, n, err)
	}
	m.hand = slices.DeleteFunc(m.hand, func(id int64) bool { return slices.Contains(ids, id) })
	for _, id := range ids {
		r := m.rows[id]
		if discard {
			delete(m.rows, id)
			continue
		}
		*r = modelRow{id: id, key: r.key, state: jetbox.Pending}
	}
}

// takeOverNow lets the other relay take over, from one that has released its
// lease or one that sleeps, and the old one find out.
func (m *modelRun) takeOverNow() {
	old, oldLease := m.relays[m.active], m.leases[m.active]
	if m.rng.IntN(2) == 0 {
		m.check(old.Release(m.t.Context(), oldLease))
	}
	m.active = 1 - m.active
	m.leases[m.active] = m.relays[m.active].takeOver(fmt.Sprintf("relay %d", m.active), expired)
	m.note("relay %d took over", m.active)
	if len(m.hand) > 0 {
		if err := old.Record(m.t.Context(), oldLease, []jetbox.Outcome{m.outcome(m.hand[0])}); !errors.Is(err, jetbox.ErrLeaseLost) {
			m.t.Fatalf("Record under the old lease = %v, want ErrLeaseLost", err)
		}
	}
	m.hand = nil
}

// compare lists the outbox.
func (m *modelRun) compare() {
	m.t.Helper()
	n := 0
	for e, err := range m.List(m.t.Context(), outbox.Filter{}) {
		m.check(err)
		n++
		r := m.rows[e.ID]
		if r == nil {
			m.t.Fatalf("row %d is in the outbox, want it gone", e.ID)
		}
		state := e.State
		if state == jetbox.Processing {
			state = jetbox.Pending
		}
		// What says nothing of an attempt is left out.
		reason := strings.TrimPrefix(strings.TrimPrefix(e.LastError, outbox.OutcomeUnknown), ": ")
		if state != r.state || e.Attempts != r.attempts || reason != r.reason {
			m.t.Fatalf("row %d is %s, %d attempts, %q; want %+v", e.ID, e.State, e.Attempts, e.LastError, *r)
		}
	}
	if n != len(m.rows) {
		m.t.Fatalf("%d rows in the outbox, want %d", n, len(m.rows))
	}
	for _, id := range m.hand {
		if e := m.show(id); m.rows[id].state == jetbox.Pending && !m.rows[id].waits && e.State != jetbox.Processing {
			m.t.Fatalf("row %d was claimed and is %s", id, e.State)
		}
	}
}

// finish settles everything: nothing may be left asleep.
func (m *modelRun) finish() {
	m.compare()
	m.eventually("settle every row", func() (bool, string) {
		m.hand = nil
		m.claimSome()
		before := time.Now()
		out := published(m.hand...)
		m.relays[m.active].record(m.leases[m.active], out...)
		for _, o := range out {
			m.apply(o, before, time.Now())
		}
		var pending, frozen []int64
		for id, r := range m.rows {
			if r.state == jetbox.Pending {
				pending = append(pending, id)
			}
			if r.frozen {
				frozen = append(frozen, id)
			}
		}
		if len(frozen) > 0 {
			_, err := m.Discard(m.t.Context(), outbox.Filter{IDs: frozen})
			m.check(err)
			for _, id := range frozen {
				delete(m.rows, id)
			}
		}
		return len(pending) == 0, fmt.Sprintf("rows %v are pending\n%s", pending, m.dump())
	})
	m.compare()
}
