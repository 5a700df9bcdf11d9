package jetbox_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// Two outboxes publish to one stream and have chosen the same idempotency keys. The
// broker drops by the key alone, so one of each two events is never stored. Its row says
// so; none is taken for published.
func TestKeysThatTwoOutboxesShareAreNeverSilent(t *testing.T) {
	t.Parallel()
	engines(t, func(t *testing.T, fast bool) {
		cfg := oneByOne // the broker remembers for two minutes
		cfg.AllowBatchPublish = fast
		one := newSeveralOn(t, pgtest.URL(t), 500*time.Millisecond, cfg)
		two := newSeveralAt(t, pgtest.URL(t), 500*time.Millisecond, cfg, one.child.Broker)
		// Long chains of a few keys: those go in fast batches although somebody has
		// chosen their IDs.
		const rows, chain = 120, 40
		for name, s := range map[string]*several{"one": one, "two": two} {
			s.exec(`INSERT INTO outbox (event_id, idempotency_key, subject, aggregate_id, payload)
				SELECT $1 || g, 'key' || g, 'events.a', 'k' || g / $3::int, ($1 || g)::bytea FROM generate_series(1, $2::int) g`, name, rows, chain)
			s.start(1)
		}
		published, taken := 0, 0
		defer one.usedEngine(fast)
		for _, s := range []*several{one, two} {
			s.awaitDrained()
			for _, row := range s.table() {
				switch {
				case row.status == "PUBLISHED":
					published++
				case row.status == "DEAD_LETTER" && strings.Contains(row.lastError, fmt.Sprintf("idempotency key \"key%d\" is taken", row.id)):
					taken++
				default:
					t.Errorf("row %d is %s: %s", row.id, row.status, row.lastError)
				}
			}
		}
		if n := one.onStream(); published != rows || taken != rows || n != rows {
			t.Errorf("%d rows published, %d parked because their key is taken, %d messages on the stream; want %d of each", published, taken, n, rows)
		}
		stored := make(map[string]bool)
		for _, m := range one.stored() {
			stored[m.data] = true
		}
		for name, s := range map[string]*several{"one": one, "two": two} {
			for i, row := range s.table() {
				if got := stored[fmt.Sprint(name, i+1)]; got != (row.status == "PUBLISHED") {
					t.Errorf("event %s%d is on the stream: %v, its row is %s", name, i+1, got, row.status)
				}
			}
		}
	})
}
