package sqlite

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"modernc.org/sqlite"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// watched hands out connections that write down what is asked of them.
type watched struct {
	driver.Connector
	mu      sync.Mutex
	queries map[string]bool // guarded by mu
}

func (w *watched) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := w.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return &watchedConn{c, w}, nil
}

func (w *watched) saw(query string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queries[query] = true
}

type watchedConn struct {
	driver.Conn
	w *watched
}

func (c *watchedConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	return c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
}

func (c *watchedConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	c.w.saw(query)
	return c.Conn.(driver.ConnPrepareContext).PrepareContext(ctx, query)
}

func (c *watchedConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	c.w.saw(query)
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, query, args)
}

func (c *watchedConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	c.w.saw(query)
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, query, args)
}

// newWatchedStore is a store of whose statements every one is written down.
func newWatchedStore(t *testing.T) (*Store, *watched) {
	t.Helper()
	path := t.TempDir() + "/outbox.db"
	w := &watched{queries: make(map[string]bool)}
	pool := func(set settings, conns int) *sql.DB {
		c, err := sqlite.NewConnector(driverDSN(path, set))
		if err != nil {
			t.Fatal(err)
		}
		db := sql.OpenDB(&watched{Connector: c, queries: w.queries})
		db.SetMaxOpenConns(conns)
		t.Cleanup(func() { db.Close() })
		return db
	}
	s := &Store{table: DefaultTable, db: pool(writerSettings, 1), relay: pool(relaySettings, 1), reader: pool(readerSettings, 1), path: path}
	if err := s.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.opened, err = os.Stat(path); err != nil {
		t.Fatal(err)
	}
	clear(w.queries)
	return s, w
}

// aDay runs everything that a relay and an operator do every day.
func aDay(t *testing.T, s *Store) {
	t.Helper()
	ctx := t.Context()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	l := acquire(t, s, "a", time.Hour)
	_, err := s.Claim(ctx, l, jetbox.Ask{Limit: 10})
	check(err)
	exec(t, s, `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40)
		INSERT INTO "{t}" (subject, payload, aggregate_id, available_at)
		SELECT 's', '', 'k' || (i % 5), CASE WHEN i % 7 = 0 THEN 9999999999999 END FROM n`)
	rows, err := s.Claim(ctx, l, jetbox.Ask{Limit: 20})
	check(err)
	var outcomes []jetbox.Outcome
	for i, r := range rows {
		outcomes = append(outcomes, []jetbox.Outcome{
			{Pos: r.Pos, State: jetbox.Pending, Reason: "refused", Attempted: true},
			{Pos: r.Pos, State: jetbox.DeadLetter, Freeze: true},
			{Pos: r.Pos, State: jetbox.Published},
			{Pos: r.Pos, State: jetbox.Published, Remove: jetbox.Delete},
			{Pos: r.Pos, State: jetbox.Published, Remove: jetbox.Archive},
		}[i%5])
	}
	check(s.Record(ctx, l, outcomes))
	_, err = s.Claim(ctx, l, jetbox.Ask{Limit: 1})
	check(err)
	_, err = s.Stats(ctx)
	check(err)
	for _, f := range []outbox.Filter{
		{State: jetbox.DeadLetter}, {State: jetbox.Processing}, {IDs: []int64{1}}, {State: jetbox.DeadLetter, Subject: "s", Limit: 3},
	} {
		for _, err := range s.List(ctx, f) {
			check(err)
		}
	}
	_, err = s.Retry(ctx, outbox.Filter{Limit: 1})
	check(err)
	_, err = s.Discard(ctx, outbox.Filter{})
	check(err)
	_, err = s.Prune(ctx, l, time.Now().Add(time.Hour), true)
	check(err)
	check(s.Release(ctx, l))
}

var wholeTable = regexp.MustCompile(`^SCAN (outbox|o|p|b)( |$)`)

// Catalog BR-16: nothing that is done again and again may read the table from
// one end to the other. What it may read through is an index that holds only the
// rows it is about.
func TestNoEverydayStatementScansTheTable(t *testing.T) {
	t.Parallel()
	s, w := newWatchedStore(t)
	aDay(t, s)
	var queries []string
	for q := range w.queries {
		if strings.Contains(q, `"outbox"`) && !strings.Contains(q, "RECURSIVE") {
			queries = append(queries, q)
		}
	}
	if slices.Sort(queries); len(queries) < 20 {
		t.Fatalf("%d statements were seen, want those of a day: %q", len(queries), queries)
	}
	for _, q := range queries {
		plan := explain(t, s.db, q)
		for _, step := range plan {
			derived := slices.Contains(plan, strings.Replace(step, "SCAN", "CO-ROUTINE", 1)) // a subquery's rows, not the table's
			if wholeTable.MatchString(step) && !strings.Contains(step, "INDEX outbox_") && !derived {
				t.Errorf("%s\n\treads the whole table:\n\t%s", q, strings.Join(plan, "\n\t"))
			}
			if strings.Contains(step, "USE TEMP B-TREE FOR ORDER BY") && strings.Contains(q, "LIMIT") && !strings.Contains(q, "json_each") {
				t.Errorf("%s\n\tsorts:\n\t%s", q, strings.Join(plan, "\n\t"))
			}
		}
	}
}

func explain(t *testing.T, db *sql.DB, query string) (plan []string) {
	t.Helper()
	args := make([]any, strings.Count(query, "?"))
	rows, err := db.QueryContext(t.Context(), "EXPLAIN QUERY PLAN "+query, args...)
	for err != nil && len(args) > 0 { // numbered parameters are fewer than their uses
		args = args[1:]
		rows, err = db.QueryContext(t.Context(), "EXPLAIN QUERY PLAN "+query, args...)
	}
	if err != nil {
		t.Fatalf("explain %s: %v", query, err)
	}
	defer rows.Close()
	for rows.Next() {
		var id, parent, unused int
		var detail string
		if err := rows.Scan(&id, &parent, &unused, &detail); err != nil {
			t.Fatal(err)
		}
		plan = append(plan, detail)
	}
	return plan
}

// Rows that may not go cost a claim nothing once they have been met: they are in
// no index that it reads, and it changes none of them.
func TestSleepingRowsCostAClaimNothing(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	l := acquire(t, s, "a", time.Hour)
	exec(t, s, `INSERT INTO "{t}" (subject, payload, aggregate_id) VALUES ('s', '', 'frozen')`)
	rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 10})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Record(t.Context(), l, []jetbox.Outcome{{Pos: rows[0].Pos, State: jetbox.DeadLetter, Freeze: true}}); err != nil {
		t.Fatal(err)
	}
	const scheduled, behind = 5000, 2000 // more make no difference but to a race detector
	many := `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
		INSERT INTO "{t}" (subject, payload, aggregate_id, available_at) SELECT 's', '', ?, ? FROM n`
	exec(t, s, many, scheduled, nil, time.Now().Add(time.Hour).UnixMilli())
	exec(t, s, many, behind, "frozen", nil)
	exec(t, s, `INSERT INTO "{t}" (subject, payload) VALUES ('s', 'a'), ('s', 'b')`)

	claim := func(n, want int) (changes int64) {
		t.Helper()
		before := relayChanges(t, s)
		rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: n})
		if err != nil || len(rows) != want {
			t.Fatalf("claim of %d = %d rows, %v, want %d", n, len(rows), err, want)
		}
		return relayChanges(t, s) - before
	}
	if n := claim(1, 1); n < scheduled+behind {
		t.Errorf("the first claim changed %d rows, want the sleepers", n)
	}
	if n := count(t, s, `SELECT count(*) FROM "{t}" INDEXED BY "{t}_ready" WHERE status = 'PENDING' AND hold = 0`); n != 2 {
		t.Errorf("the index of ready rows has %d, want the 2 that may go", n)
	}
	const leaseRow = 2 // the fence, and the range
	if n := claim(10, 2); n != leaseRow {
		t.Errorf("the next claim changed %d rows, want the %d of the lease", n, leaseRow)
	}
	if n := count(t, s, `SELECT count(*) FROM "{t}" INDEXED BY "{t}_due" WHERE status = 'PENDING' AND hold IN (1, 2)
		AND coalesce(available_at, 0) <= ?`, time.Now().UnixMilli()); n != 0 {
		t.Errorf("%d rows look due, want none", n)
	}
	if err := s.Record(t.Context(), l, []jetbox.Outcome{
		{Pos: rows[0].Pos + scheduled + behind + 1, State: jetbox.Published},
		{Pos: rows[0].Pos + scheduled + behind + 2, State: jetbox.Published},
	}); err != nil {
		t.Fatal(err)
	}
	if n := claim(10, 0); n != 0 {
		t.Errorf("an idle claim changed %d rows, want none: it takes no lock", n)
	}
}

func relayChanges(t *testing.T, s *Store) int64 {
	t.Helper()
	var n int64
	if err := s.relay.QueryRowContext(t.Context(), "SELECT total_changes()").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// NULL means now, also for a row that was asleep when somebody wrote it.
func TestSleepingRowWhoseTimeIsSetToNullIsDue(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	l := acquire(t, s, "a", time.Hour)
	exec(t, s, `INSERT INTO "{t}" (subject, payload, available_at) VALUES ('s', '', 9999999999999), ('s', '', NULL)`)
	rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 10})
	if err != nil || len(rows) != 1 {
		t.Fatalf("claim = %v, %v, want one row", rows, err)
	}
	if err := s.Record(t.Context(), l, []jetbox.Outcome{{Pos: rows[0].Pos, State: jetbox.Pending, Delay: time.Hour}}); err != nil {
		t.Fatal(err)
	}
	exec(t, s, `UPDATE "{t}" SET available_at = NULL`)
	rows, err = s.Claim(t.Context(), l, jetbox.Ask{Limit: 10})
	if err != nil || len(rows) != 2 {
		t.Errorf("claim after available_at = NULL gave %d rows, %v, want both", len(rows), err)
	}
}

// Catalog BR-16: 500 payloads of 900 kB were claimed at once, and took 600 MB.
func TestLongPayloadsAreClaimedAFewAtATime(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	const rows, size = 60, 900_000
	if _, err := s.db.Exec(`WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < ?)
		INSERT INTO outbox (subject, payload) SELECT 's', zeroblob(?) FROM c`, rows, size); err != nil {
		t.Fatal(err)
	}
	l, err := s.Acquire(t.Context(), jetbox.Candidate{Owner: "a", Length: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	got := 0
	for got < rows {
		claimed, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 500})
		if err != nil {
			t.Fatal(err)
		}
		if n := len(claimed); n == 0 || n > claimBytes/size+1 {
			t.Fatalf("claimed %d payloads of %d bytes, %d before: want some, and not more than fit %d bytes",
				n, size, got, claimBytes)
		}
		outcomes := make([]jetbox.Outcome, len(claimed))
		for i, r := range claimed {
			if r.Pos != int64(got+i+1) {
				t.Fatalf("claim %d is row %d, want the lowest first", got+i, r.Pos)
			}
			outcomes[i] = jetbox.Outcome{Pos: r.Pos, State: jetbox.Published}
		}
		if err := s.Record(t.Context(), l, outcomes); err != nil {
			t.Fatal(err)
		}
		got += len(claimed)
	}
}
