package postgres_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
)

// migrated opens a store on a fresh database and creates its tables.
func migrated(t testing.TB, cfg postgres.Config) *postgres.Store {
	t.Helper()
	if cfg.URL == "" {
		cfg.URL = pgtest.URL(t)
	}
	s := another(t, cfg)
	check(t, s.Migrate(t.Context()))
	return s
}

// another opens a store, as another process would.
func another(t testing.TB, cfg postgres.Config) *postgres.Store {
	t.Helper()
	s := open(t, cfg)
	t.Cleanup(func() { s.Close() })
	return s
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func exec(t testing.TB, s *postgres.Store, query string, args ...any) {
	t.Helper()
	if _, err := s.Pool().Exec(t.Context(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// value reads one value.
func value[T any](t testing.TB, s *postgres.Store, query string, args ...any) T {
	t.Helper()
	rows, err := s.Pool().Query(t.Context(), query, args...)
	check(t, err)
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return v
}

// add inserts rows of plain SQL, n for each key; "" is none.
func add(t testing.TB, s *postgres.Store, n int, keys ...string) {
	t.Helper()
	exec(t, s, `INSERT INTO outbox (subject, aggregate_id, payload)
		SELECT 'events.test', nullif(key, ''), convert_to(n::text, 'UTF8') FROM generate_series(1, $1) n, unnest($2::text[]) key ORDER BY n`, n, keys)
}

func acquire(t testing.TB, s *postgres.Store, owner string, length time.Duration) jetbox.Lease {
	t.Helper()
	l, err := s.Acquire(t.Context(), jetbox.Candidate{Owner: owner, Length: length})
	check(t, err)
	return l
}

// drain claims and records until nothing is left, and returns the rows.
func drain(t testing.TB, s *postgres.Store, l jetbox.Lease, n int) (all []jetbox.Row) {
	t.Helper()
	for {
		rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: n})
		check(t, err)
		if len(rows) == 0 {
			return all
		}
		all = append(all, rows...)
		check(t, s.Record(t.Context(), l, published(rows...)))
	}
}

func published(rows ...jetbox.Row) []jetbox.Outcome {
	var out []jetbox.Outcome
	for _, r := range rows {
		out = append(out, jetbox.Outcome{Pos: r.Pos, State: jetbox.Published, Stream: "EVENTS", StreamSeq: uint64(r.Pos)})
	}
	return out
}

func keys(n int) (keys []string) {
	for i := range n {
		keys = append(keys, fmt.Sprintf("k%d", i))
	}
	return keys
}

func TestReshardKeepsEveryRowAndEveryKeyInOneShard(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	s := migrated(t, postgres.Config{URL: url, Shards: 4})
	add(t, s, 5, append(keys(20), "")...)
	exec(t, s, `INSERT INTO outbox (subject, aggregate_id, payload, available_at) VALUES ('s', 'k1', '', now() + interval '1 hour')`)
	l := acquire(t, s, "a", time.Minute)
	claimed, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 10})
	check(t, err)
	for _, shards := range []int{9, 1, 16} {
		if err := s.Reshard(t.Context(), shards); !errors.Is(err, postgres.ErrInUse) || !strings.Contains(err.Error(), l.Holder) {
			t.Errorf("Reshard under a lease = %v, want ErrInUse that names %s", err, l.Holder)
		}
	}
	check(t, s.Release(t.Context(), l))
	// A session that has inserted before has planned with the old number.
	writer, err := s.Pool().Acquire(t.Context())
	check(t, err)
	defer writer.Release()
	insert := func() {
		_, err := writer.Exec(t.Context(), `INSERT INTO outbox (subject, aggregate_id, payload) SELECT 's', 'k' || n, '' FROM generate_series(1, 20) n`)
		check(t, err)
	}
	insert()
	for _, shards := range []int{9, 1, 16, 16} {
		check(t, s.Reshard(t.Context(), shards))
		insert()
		for _, table := range []string{"queue", "wait"} {
			if n := value[int64](t, s, `SELECT count(*) FROM outbox_`+table+` x JOIN outbox o USING (id)
				WHERE x.shard <> outbox_shard_of(o.aggregate_type, o.aggregate_id, o.id) OR x.shard NOT BETWEEN 0 AND $1 - 1`, shards); n != 0 {
				t.Errorf("%d of %s: %d rows are not in the shard of their key", shards, table, n)
			}
		}
		if n := value[int64](t, s, `SELECT count(*) FROM outbox_shard`); n != int64(shards) {
			t.Errorf("the outbox has %d shards, want %d", n, shards)
		}
		if n := value[int64](t, s, `SELECT count(*) FROM outbox_status WHERE status = 'PROCESSING'`); n < int64(len(claimed)) {
			t.Errorf("%d shards: %d rows are processing, want the %d of unknown outcome", shards, n, len(claimed))
		}
	}
	l = acquire(t, s, "b", time.Minute)
	if l.Shards != 16 {
		t.Errorf("lease = %+v, want 16 shards", l)
	}
	rows := drain(t, s, l, 7)
	if len(rows) != 205 || !slices.IsSortedFunc(rows, func(a, b jetbox.Row) int { return int(a.Pos - b.Pos) }) {
		t.Errorf("drained %d rows, want 205 in the order of their ids", len(rows))
	}
	for _, bad := range []int{0, -1, 257} {
		if err := s.Reshard(t.Context(), bad); err == nil || !strings.Contains(err.Error(), fmt.Sprint(bad)) {
			t.Errorf("Reshard(%d) = %v, want an error that names it", bad, err)
		}
	}
}

// A transaction that has inserted before is waited for: its rows would otherwise
// stay in a shard that nobody holds.
func TestReshardWaitsForOpenWriters(t *testing.T) {
	t.Parallel()
	s := migrated(t, postgres.Config{Shards: 16})
	tx, err := s.Pool().Begin(t.Context())
	check(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	check(t, postgres.AppendPgx(t.Context(), tx, &jetbox.Event{Subject: "s", AggregateID: "k1"}, &jetbox.Event{Subject: "s", AggregateID: "k2"}))
	done := make(chan error, 1)
	go func() { done <- s.Reshard(t.Context(), 1) }()
	select {
	case err := <-done:
		t.Fatalf("Reshard = %v while a writer is open", err)
	case <-time.After(100 * time.Millisecond): //nolint:forbidigo // once
	}
	check(t, tx.Commit(t.Context()))
	check(t, <-done)
	l := acquire(t, s, "a", time.Minute)
	if rows := drain(t, s, l, 10); len(rows) != 2 {
		t.Errorf("drained %d rows, want 2", len(rows))
	}
}
