package postgres_test

import (
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
)

// BenchmarkDrain claims and records without a broker, on a server that does not
// sync: what the statements themselves cost. Rows have 512 bytes and 1,000 keys.
func BenchmarkDrain(b *testing.B) {
	const scheduled, frozen = 1_000_000, 300_000
	for _, bb := range []struct {
		name    string
		remove  jetbox.Removal
		crowded bool
	}{
		{"kept", jetbox.Keep, false},
		{"deleted", jetbox.Delete, false},
		{"archived", jetbox.Archive, false},
		{"kept beside a million scheduled and 300k behind a frozen key", jetbox.Keep, true},
	} {
		b.Run(bb.name, func(b *testing.B) {
			s := migrated(b, postgres.Config{})
			l := acquire(b, s, "a", time.Hour)
			if bb.crowded {
				crowd(b, s, l, scheduled, frozen)
			}
			rows := 0
			for b.Loop() {
				b.StopTimer()
				fill(b, s, 20_000)
				exec(b, s, `VACUUM ANALYZE outbox_queue`)
				b.StartTimer()
				for {
					claimed, err := s.Claim(b.Context(), l, jetbox.Ask{Limit: 500})
					check(b, err)
					if len(claimed) == 0 {
						break
					}
					outcomes := published(claimed...)
					for i := range outcomes {
						outcomes[i].Remove = bb.remove
					}
					check(b, s.Record(b.Context(), l, outcomes))
					rows += len(claimed)
				}
			}
			b.ReportMetric(float64(rows)/b.Elapsed().Seconds(), "rows/s")
		})
	}
}

func fill(b *testing.B, s *postgres.Store, rows int) {
	b.Helper()
	exec(b, s, `INSERT INTO outbox (subject, aggregate_type, aggregate_id, payload)
		SELECT 'events.orders.created', 'order', 'o' || n % 1000, decode(repeat('61', 512), 'hex') FROM generate_series(1, $1) n`, rows)
}

// crowd puts rows in front that may not go.
func crowd(t testing.TB, s *postgres.Store, l jetbox.Lease, scheduled, frozen int) {
	t.Helper()
	exec(t, s, `INSERT INTO outbox (subject, aggregate_id, payload) VALUES ('events.test', 'frozen', '')`)
	rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 1})
	check(t, err)
	check(t, s.Record(t.Context(), l, []jetbox.Outcome{{Pos: rows[0].Pos, State: jetbox.DeadLetter, Reason: "poison", Freeze: true}}))
	exec(t, s, `INSERT INTO outbox (subject, aggregate_id, payload) SELECT 'events.test', 'frozen', '' FROM generate_series(1, $1)`, frozen)
	exec(t, s, `INSERT INTO outbox (subject, payload, available_at) SELECT 'events.test', '', now() + interval '1 day' FROM generate_series(1, $1)`, scheduled)
	began := time.Now()
	rows, err = s.Claim(t.Context(), l, jetbox.Ask{Limit: 500})
	check(t, err)
	if len(rows) > 0 {
		t.Fatalf("%d rows came that may not go", len(rows))
	}
	t.Logf("putting %d rows to sleep took %v", frozen, time.Since(began))
}
