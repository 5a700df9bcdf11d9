package sqlite_test

import (
	"database/sql"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
)

// One relay, nobody else writing: claim 500 rows, record them published. WAL,
// synchronous=FULL, payloads of 512 bytes.
func BenchmarkClaimAndRecord(b *testing.B) {
	s, _ := migrated(b)
	l, err := s.Acquire(b.Context(), jetbox.Candidate{Owner: "bench", Length: time.Hour})
	if err != nil {
		b.Fatal(err)
	}
	const batch = 500
	outcomes := make([]jetbox.Outcome, batch)
	for b.Loop() {
		b.StopTimer()
		mustExec(b, s.DB(), `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
			INSERT INTO outbox (subject, payload, aggregate_id) SELECT 'events.bench', zeroblob(512), i % 50 FROM n`, batch)
		b.StartTimer()
		rows, err := s.Claim(b.Context(), l, jetbox.Ask{Limit: batch})
		if err != nil || len(rows) != batch {
			b.Fatalf("claimed %d rows, %v, want %d", len(rows), err, batch)
		}
		for i, r := range rows {
			outcomes[i] = jetbox.Outcome{Pos: r.Pos, State: jetbox.Published, Stream: "EVENTS", StreamSeq: uint64(r.Pos)}
		}
		if err := s.Record(b.Context(), l, outcomes); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(batch*b.N)/b.Elapsed().Seconds(), "rows/s")
}

// One transaction per event, one writer. WAL, synchronous=NORMAL.
func BenchmarkAppend(b *testing.B) {
	s, _ := migrated(b)
	payload := make([]byte, 512)
	for b.Loop() {
		if err := inTx(b, s.DB(), func(tx *sql.Tx) error {
			return sqlite.Append(b.Context(), tx, &jetbox.Event{Subject: "events.bench", AggregateID: "k", Payload: payload})
		}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "tx/s")
}

func inTx(t testing.TB, db *sql.DB, f func(tx *sql.Tx) error) error {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit()
}
