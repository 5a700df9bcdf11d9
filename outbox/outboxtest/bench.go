package outboxtest

import (
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// long is a lease, or a delay, that no scenario outlives.
const long = time.Hour

// bench is where a scenario works: a database and one store on it, which is
// writer, relay and operator unless the scenario opens more.
type bench struct {
	Store
	t  *testing.T
	db Database
}

// newBench opens a store and leaves the tables to the scenario.
func newBench(t *testing.T, db Database) *bench {
	t.Helper()
	b := &bench{t: t, db: db}
	b.Store = b.open()
	return b
}

// open opens another store on the same database.
func (b *bench) open() Store {
	b.t.Helper()
	s := b.db.Open(b.t)
	b.t.Cleanup(func() {
		if err := s.Close(); err != nil {
			b.t.Errorf("close store: %v", err)
		}
	})
	return s
}

// another is a bench around another store on the same database.
func (b *bench) another() *bench {
	b.t.Helper()
	return &bench{Store: b.open(), t: b.t, db: b.db}
}

// migrated makes a scenario that starts with tables.
func migrated(run func(t *testing.T, b *bench)) func(t *testing.T, b *bench) {
	return func(t *testing.T, b *bench) {
		b.check(b.Migrate(t.Context()))
		run(t, b)
	}
}

func (b *bench) check(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// sql puts the table's name in the place of {t}.
func (b *bench) sql(query string) string {
	return strings.ReplaceAll(query, "{t}", b.Table())
}

func (b *bench) exec(query string) {
	b.t.Helper()
	if _, err := b.DB().ExecContext(b.t.Context(), b.sql(query)); err != nil {
		b.t.Fatalf("%s: %v", query, err)
	}
}

// number reads one number.
func (b *bench) number(query string) int64 {
	b.t.Helper()
	var n int64
	if err := b.DB().QueryRowContext(b.t.Context(), b.sql(query)).Scan(&n); err != nil {
		b.t.Fatalf("%s: %v", query, err)
	}
	return n
}

// quote is a text literal. Neither database gives a backslash a meaning in it.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// inTx runs f in a transaction and commits it.
func (b *bench) inTx(f func(tx *sql.Tx)) {
	b.t.Helper()
	tx, err := b.DB().BeginTx(b.t.Context(), nil)
	b.check(err)
	defer tx.Rollback()
	f(tx)
	b.check(tx.Commit())
}

// add appends events in a transaction of their own and returns their row ids.
func (b *bench) add(events ...*jetbox.Event) []int64 {
	b.t.Helper()
	ids := make([]int64, len(events))
	b.inTx(func(tx *sql.Tx) {
		b.check(b.Append(b.t.Context(), tx, events...))
		for i, ev := range events {
			id, err := rowID(tx, b.Store, ev)
			b.check(err)
			ids[i] = id
		}
	})
	return ids
}

// rowID finds the row of an appended event.
func rowID(tx *sql.Tx, s Store, ev *jetbox.Event) (id int64, err error) {
	err = tx.QueryRow("SELECT id FROM " + s.Table() + " WHERE event_id = " + quote(ev.ID)).Scan(&id)
	if err != nil {
		return 0, fmt.Errorf("find the row of event %s: %w", ev.ID, err)
	}
	return id, nil
}

// keyed makes n events of one ordering key; none without a key.
func keyed(key string, n int) []*jetbox.Event {
	events := make([]*jetbox.Event, n)
	for i := range events {
		events[i] = &jetbox.Event{
			Subject:     "events.test",
			AggregateID: key,
			Payload:     fmt.Appendf(nil, "%s %d", key, i),
		}
		if key != "" {
			events[i].AggregateType = "thing"
		}
	}
	return events
}

// later schedules an event.
func later(ev *jetbox.Event, at time.Time) *jetbox.Event {
	ev.NotBefore = at
	return ev
}

// lease takes the lease for as long as the scenario lasts.
func (b *bench) lease(owner string) jetbox.Lease {
	b.t.Helper()
	return b.leaseFor(owner, long)
}

func (b *bench) leaseFor(owner string, length time.Duration) jetbox.Lease {
	b.t.Helper()
	l, err := b.Acquire(b.t.Context(), jetbox.Candidate{Owner: owner, Length: length})
	b.check(err)
	if !l.Held {
		b.t.Fatalf("Acquire by %s: lease = %+v, want it held", owner, l)
	}
	b.wantShare(l)
	return l
}

// takeOver waits until owner gets a lease that runs out.
func (b *bench) takeOver(owner string, length time.Duration) jetbox.Lease {
	b.t.Helper()
	var l jetbox.Lease
	b.eventually("take over the lease", func() (bool, string) {
		var err error
		l, err = b.Acquire(b.t.Context(), jetbox.Candidate{Owner: owner, Length: length})
		b.check(err)
		return l.Held, fmt.Sprintf("%+v", l)
	})
	return l
}

func (b *bench) claim(l jetbox.Lease, n int) []jetbox.Row {
	b.t.Helper()
	rows, err := b.Claim(b.t.Context(), l, jetbox.Ask{Limit: n})
	b.check(err)
	return rows
}

// claimIDs claims and checks which rows, in which order.
func (b *bench) claimIDs(l jetbox.Lease, n int, want ...int64) []jetbox.Row {
	b.t.Helper()
	rows := b.claim(l, n)
	if got := positions(rows); !slices.Equal(got, want) {
		b.t.Fatalf("claim of %d = rows %v, want %v\n%s", n, got, want, b.dump())
	}
	return rows
}

// claimWhenDue claims until there is something.
func (b *bench) claimWhenDue(l jetbox.Lease, n int) []jetbox.Row {
	b.t.Helper()
	var rows []jetbox.Row
	b.eventually("claim a row", func() (bool, string) {
		rows = b.claim(l, n)
		return len(rows) > 0, "none may go"
	})
	return rows
}

func positions(rows []jetbox.Row) []int64 {
	var ids []int64
	for _, r := range rows {
		ids = append(ids, r.Pos)
	}
	return ids
}

func (b *bench) record(l jetbox.Lease, outcomes ...jetbox.Outcome) {
	b.t.Helper()
	b.check(b.Record(b.t.Context(), l, outcomes))
}

// published is the outcome of each row as the broker would tell it.
func published(ids ...int64) []jetbox.Outcome {
	out := make([]jetbox.Outcome, len(ids))
	for i, id := range ids {
		out[i] = jetbox.Outcome{Pos: id, State: jetbox.Published, Stream: "EVENTS", StreamSeq: uint64(1000 + id)}
	}
	return out
}

// retry is the outcome of a row that was refused and is tried again.
func retry(id int64, delay time.Duration) jetbox.Outcome {
	return jetbox.Outcome{Pos: id, State: jetbox.Pending, Reason: "refused", Attempted: true, Delay: delay}
}

// dead is the outcome of a row that is parked.
func dead(id int64, freeze bool) jetbox.Outcome {
	return jetbox.Outcome{Pos: id, State: jetbox.DeadLetter, Reason: "poison", Attempted: true, Freeze: freeze}
}

// drain claims and records, n at a time, until nothing may go, and returns the
// rows in the order they came.
func (b *bench) drain(l jetbox.Lease, n int) []jetbox.Row {
	b.t.Helper()
	var all []jetbox.Row
	for {
		rows := b.claim(l, n)
		if len(rows) == 0 {
			return all
		}
		all = append(all, rows...)
		b.record(l, published(positions(rows)...)...)
	}
}

func (b *bench) show(id int64) outbox.Entry {
	b.t.Helper()
	e, err := b.Show(b.t.Context(), id)
	b.check(err)
	return e
}

// states reads the view of states, by row id.
func (b *bench) states() map[int64]string {
	b.t.Helper()
	rows, err := b.DB().QueryContext(b.t.Context(), b.sql("SELECT id, status FROM {t}_status"))
	b.check(err)
	defer rows.Close()
	states := make(map[int64]string)
	for rows.Next() {
		var (
			id     int64
			status string
		)
		b.check(rows.Scan(&id, &status))
		states[id] = status
	}
	b.check(rows.Err())
	return states
}

// wantStates checks the view of states, and List beside it.
func (b *bench) wantStates(want jetbox.State, ids ...int64) {
	b.t.Helper()
	states := b.states()
	for _, id := range ids {
		if got := states[id]; got != string(want) {
			b.t.Errorf("row %d is %q in the view, want %s", id, got, want)
		}
		if got := b.show(id).State; got != want {
			b.t.Errorf("row %d is %q to Show, want %s", id, got, want)
		}
	}
}

// dump is every column of every row that a relay may change, for comparing
// before and after.
func (b *bench) dump() string {
	b.t.Helper()
	var out strings.Builder
	for _, table := range []string{"{t}", "{t}_dead_letter", "{t}_archive"} {
		rows, err := b.DB().QueryContext(b.t.Context(), b.sql("SELECT * FROM "+table+" ORDER BY id"))
		b.check(err)
		names, err := rows.Columns()
		b.check(err)
		for rows.Next() {
			values := make([]any, len(names))
			dest := make([]any, len(names))
			for i := range values {
				dest[i] = &values[i]
			}
			b.check(rows.Scan(dest...))
			out.WriteString(b.sql(table) + ":")
			for i, v := range values {
				if raw, ok := v.([]byte); ok {
					v = string(raw)
				}
				fmt.Fprintf(&out, " %s=%v", names[i], v)
			}
			out.WriteByte('\n')
		}
		b.check(rows.Err())
		rows.Close()
	}
	return out.String()
}

// eventually polls until ok, and tells the last state when it never is.
func (b *bench) eventually(what string, ok func() (done bool, state string)) {
	b.t.Helper()
	const patience, step = 60 * time.Second, 2 * time.Millisecond
	deadline := time.Now().Add(patience)
	for {
		done, state := ok()
		if done {
			return
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("%s: not after %v: %s", what, patience, state)
		}
		time.Sleep(step)
	}
}

// pass lets a moment pass that differs in whole milliseconds, and returns the
// one in between.
func pass() time.Time {
	const tick = 3 * time.Millisecond
	time.Sleep(tick)
	now := time.Now()
	time.Sleep(tick)
	return now
}
