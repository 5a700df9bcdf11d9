package sqlite

import (
	"errors"
	"os"
	"testing"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// Catalog BR-24: no snapshot is held between two calls, so that the WAL can be
// reset while the relay waits for the broker.
func TestWALStaysSmallWhileRowsAreClaimed(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	exec(t, s, `INSERT INTO "{t}" (subject, payload) VALUES ('s', '')`)
	l := acquire(t, s, "a", time.Hour)
	if rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 10}); err != nil || len(rows) != 1 {
		t.Fatalf("claim = %v, %v, want one row", rows, err)
	}
	next := 0
	for e, err := range s.List(t.Context(), outbox.Filter{}) { // an operator who reads on and on
		if err != nil {
			t.Fatal(err)
		}
		if next++; next > 1 || e.ID == 0 {
			break
		}
		for range 60 {
			exec(t, s, `INSERT INTO "{t}" (subject, payload) VALUES ('s', zeroblob(200000))`) // 12 MB in all
		}
		const most = 8 << 20
		st, err := os.Stat(s.file(t) + "-wal")
		if err != nil || st.Size() > most {
			t.Errorf("the WAL has %d bytes, %v, want at most %d", st.Size(), err, most)
		}
		var busy, log, done int
		if err := s.db.QueryRowContext(t.Context(), "PRAGMA wal_checkpoint(TRUNCATE)").Scan(&busy, &log, &done); err != nil || busy != 0 {
			t.Errorf("wal_checkpoint(TRUNCATE): busy = %d, %v, want that nobody holds a snapshot", busy, err)
		}
	}
}

// Catalog BR-12: what cannot be recorded is an error that says why, leaves
// nothing half done, and goes on when there is space again.
func TestFullDatabaseRecordsNothingAndRecovers(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	full := func(on bool) {
		t.Helper()
		limit := "1"
		if !on {
			limit = "1000000"
		}
		var got int
		if err := s.relay.QueryRowContext(t.Context(), "PRAGMA max_page_count = "+limit).Scan(&got); err != nil {
			t.Fatal(err)
		}
	}
	cannotRecord(t, s, full, sqlite3.SQLITE_FULL)
}

func TestReadOnlyDatabaseRecordsNothingAndRecovers(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	readOnly := func(on bool) {
		t.Helper()
		value := "0"
		if on {
			value = "1"
		}
		if _, err := s.relay.ExecContext(t.Context(), "PRAGMA query_only = "+value); err != nil {
			t.Fatal(err)
		}
	}
	cannotRecord(t, s, readOnly, sqlite3.SQLITE_READONLY)
}

// cannotRecord breaks writing, and checks that a record fails whole and works
// afterwards on the same store.
func cannotRecord(t *testing.T, s *Store, broken func(on bool), code int) {
	t.Helper()
	exec(t, s, `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 60)
		INSERT INTO "{t}" (subject, payload, aggregate_id) SELECT 's', zeroblob(8000), 'k' || i FROM n`)
	l := acquire(t, s, "a", time.Hour)
	rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	// Dead letters are copies: they need space.
	var outcomes []jetbox.Outcome
	for _, r := range rows {
		outcomes = append(outcomes, jetbox.Outcome{Pos: r.Pos, State: jetbox.DeadLetter, Reason: "poison"})
	}
	broken(true)
	for range 3 {
		err := s.Record(t.Context(), l, outcomes)
		var se *sqlite.Error
		if !errors.As(err, &se) || se.Code()&0xff != code {
			t.Errorf("Record = %v, want SQLite's code %d", err, code)
		}
		if n := count(t, s, `SELECT count(*) FROM "{t}" WHERE status = 'PENDING'`); n != int64(len(rows)) {
			t.Errorf("%d rows are pending after a record that failed, want all %d", n, len(rows))
		}
		if n := count(t, s, `SELECT count(*) FROM "{t}_dead_letter"`); n != 0 {
			t.Errorf("%d dead letters after a record that failed, want none", n)
		}
	}
	broken(false)
	if err := s.Record(t.Context(), l, outcomes); err != nil {
		t.Fatalf("Record afterwards: %v", err)
	}
	if n := count(t, s, `SELECT count(*) FROM "{t}_dead_letter"`); n != int64(len(rows)) {
		t.Errorf("%d dead letters, want %d", n, len(rows))
	}
	if again, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 100}); err != nil || len(again) > 0 {
		t.Errorf("claim afterwards = %d rows, %v, want none", len(again), err)
	}
}
