//go:build unix

package jetbox_test

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// The stream refuses one row in the middle of a batch, and the relay is killed before it
// hears of anything. The row's key waits, all others go on: while its next rows arrive,
// through a restart and a takeover. What becomes of it when the row is parked, the policy
// says: BR-05, BR-13, BR-14.
func TestChaosRowRefusedInTheMiddleOfABatch(t *testing.T) {
	t.Parallel()
	engines(t, func(t *testing.T, fast bool) {
		for _, onDead := range []relay.OnDead{relay.Skip, relay.Freeze} {
			if *chaosFor == 0 && fast == (onDead == relay.Freeze) {
				continue // each engine and each policy once are enough for a short run
			}
			t.Run(string(onDead), func(t *testing.T) { refusedInTheMiddle(t, fast, onDead) })
		}
	})
}

func refusedInTheMiddle(t *testing.T, fast bool, onDead relay.OnDead) {
	ctx := t.Context()
	cfg := forgetful(fast)
	cfg.Discard, cfg.MaxMsgsPerSubject, cfg.DiscardNewPerSubject = jetstream.DiscardNew, 1, true
	s := newSeveralOn(t, pgtest.URL(t), 500*time.Millisecond, cfg)
	s.child.Backoff, s.child.OnDead = time.Minute, onDead
	s.child.Batch = 100 // the next one is claimed when the row is refused
	_, err := s.js.Publish(ctx, "events.full", []byte("other"))
	s.must(err)
	stored := 1
	insert := func(prefix, key string, n, refused int) {
		t.Helper()
		s.exec(`INSERT INTO outbox (event_id, subject, aggregate_id, payload)
			SELECT $1 || g, CASE WHEN g = $4 THEN 'events.full' ELSE 'events.a.' || $1 || g END,
				CASE g % 3 WHEN 1 THEN $2 WHEN 2 THEN 'l' || g % 5 END, ($1 || g)::bytea
			FROM generate_series(1, $3::int) g`, prefix, key, n, refused)
	}
	// Rows of the key are 1, 4, 7 and so on.
	const rows, refused = 300, 61
	const waiting = (rows - refused + 2) / 3
	settle := func(what string, n int) {
		t.Helper()
		stored += n
		s.await(what, patience, func() (string, bool) {
			var p int
			s.must(s.pool.QueryRow(ctx, `SELECT count(*) FROM outbox WHERE status = 'PUBLISHED'`).Scan(&p))
			return fmt.Sprintf("%d published, %+v", p, s.stats()), p == stored-1
		})
		if n := s.onStream(); n != stored {
			t.Fatalf("%s: %d messages on the stream, want %d", what, n, stored)
		}
	}

	g := newGate(t, s.child.Broker)
	killed := s.startBehind(g)
	s.awaitShares(patience)
	insert("first", "first", 30, 0)
	settle("rows without trouble", 30)
	g.hold(fromBroker)
	insert("row", "k", rows, refused)
	if fast {
		s.awaitOnStream(stored + refused - 1) // the batch ends here
	} else {
		s.awaitOnStream(stored + s.child.Batch/3) // what has no key
	}
	s.end(killed, os.Kill)
	pause(ctx, forgotten())
	s.start(1)
	settle("all but the key that waits", rows-waiting)

	for i, again := range []os.Signal{syscall.SIGTERM, os.Kill} {
		insert(fmt.Sprint("more", i, "."), "k", 30, 0)
		settle("all but the next rows of the key", 20)
		s.end(s.alive[0], again)
		s.start(1)
		insert(fmt.Sprint("other", i, "."), "m", 30, 0)
		settle("rows of other keys after a restart", 30)
	}

	status := func() (status, lastError string) {
		s.must(s.pool.QueryRow(ctx, `SELECT status, coalesce(last_error, '') FROM outbox WHERE event_id = 'row' || $1::int`, refused).
			Scan(&status, &lastError))
		return status, lastError
	}
	if st, why := status(); st != "PENDING" || !strings.Contains(why, "maximum messages per subject exceeded") {
		t.Fatalf("the refused row is %s: %s", st, why)
	}
	s.exec(`UPDATE outbox SET available_at = clock_timestamp() WHERE event_id = 'row' || $1::int`, refused)
	s.await("the row parked", patience, func() (string, bool) {
		st, why := status()
		return st + ": " + why, st == "DEAD_LETTER"
	})
	rest := waiting - 1 + 20 // with the next rows of the key
	if onDead == relay.Freeze {
		insert("still", "k", 30, 0)
		settle("all but the key that is frozen", 20)
		cfg.Name, cfg.Subjects = "EVENTS", []string{"events.>"}
		cfg.MaxMsgsPerSubject = 2
		_, err := s.js.UpdateStream(ctx, cfg)
		s.must(err)
		n, err := s.store.Retry(ctx, outbox.Filter{})
		s.must(err)
		if n != 1 {
			t.Fatalf("%d rows retried, want the one parked", n)
		}
		s.awaitDrained()
		s.verifyOurs(1)
		return
	}
	settle("the key without the row", rest)
	s.verifyOurs(1)
}
