package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	_ "modernc.org/sqlite"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/dedup"
	"github.com/seed-5e04d8fb/jetbox/dedup/postgres"
	"github.com/seed-5e04d8fb/jetbox/dedup/sqlite"
)

// The ledgers satisfy the interface by shape: neither package sees the other.
var (
	_ consumer.Ledger[*sql.Tx]  = (*sqlite.Ledger)(nil)
	_ consumer.Ledger[struct{}] = (*dedup.Memory)(nil)

	_ consumer.BatchLedger[*sql.Tx]  = (*sqlite.Ledger)(nil)
	_ consumer.BatchLedger[*sql.Tx]  = (*postgres.Ledger[*sql.Tx])(nil)
	_ consumer.BatchLedger[pgx.Tx]   = (*postgres.Ledger[pgx.Tx])(nil)
	_ consumer.BatchLedger[struct{}] = (*dedup.Memory)(nil)
)

// keyLedger remembers what it was asked.
type keyLedger struct {
	doFunc func(consumer, key string) (seen bool, err error)
}

func (l keyLedger) Do(ctx context.Context, consumer, key string, apply func(context.Context, struct{}) error) (bool, error) {
	if seen, err := l.doFunc(consumer, key); seen || err != nil {
		return seen, err
	}
	return false, apply(ctx, struct{}{})
}

// An event that a ledger has seen is acknowledged, counted and not handled.
func TestSeenEventIsAcknowledgedAsDuplicate(t *testing.T) {
	inBubble(t, func(b *bus) {
		ledger, err := dedup.NewMemory(time.Hour)
		if err != nil {
			b.Fatal(err)
		}
		b.publish("k")
		// Beyond the broker's duplicate window a second copy is stored.
		b.pass(3 * time.Minute)
		b.publish("k")
		var effects record
		duplicates, acks := 0, 0
		b.start(consumer.Once(ledger, func(_ context.Context, _ struct{}, d *consumer.Delivery) error {
			effects.add(d)
			return nil
		}), consumer.Config{
			DuplicateFunc: func(d *consumer.Delivery) { duplicates += int(d.StreamSeq) },
			HandledFunc: func(_ *consumer.Delivery, v consumer.Verdict, _ time.Duration) {
				if v == consumer.Ack {
					acks++
				}
			},
		})
		b.pass(time.Second)
		if n := len(effects.all()); n != 1 || duplicates != 2 || acks != 2 {
			b.Errorf("effects = %d, sequences counted as duplicates = %d, acks = %d, want 1, 2 and 2", n, duplicates, acks)
		}
		b.wantSettled()
	})
}

// A failed attempt leaves no entry: the next delivery applies.
func TestFailedAttemptIsNotSeen(t *testing.T) {
	inBubble(t, func(b *bus) {
		ledger, err := dedup.NewMemory(time.Hour)
		if err != nil {
			b.Fatal(err)
		}
		b.publish("error", "panic")
		var tries record
		b.start(consumer.Once(ledger, func(_ context.Context, _ struct{}, d *consumer.Delivery) error {
			tries.add(d)
			switch {
			case d.NumDelivered > 1:
				return nil
			case d.Key == "panic":
				panic("boom")
			}
			return errHandler
		}), consumer.Config{})
		b.pass(time.Minute)
		for _, k := range []string{"error", "panic"} {
			if n := len(tries.of(k)); n != 2 {
				b.Errorf("%s: %d attempts, want 2", k, n)
			}
		}
		b.wantSettled()
	})
}

// Permanent errors keep their meaning through the ledger and its transaction.
func TestPermanentErrorPassesThroughTheLedger(t *testing.T) {
	inBubble(t, func(b *bus) {
		db, err := sql.Open("sqlite", "file:"+filepath.Join(b.TempDir(), "app.db"))
		if err != nil {
			b.Fatal(err)
		}
		defer db.Close()
		ledger, err := sqlite.New(b.Context(), db, sqlite.Config{})
		if err != nil {
			b.Fatal(err)
		}
		b.publish("k")
		dlq := &letters{}
		stop := b.start(consumer.Once(ledger, func(context.Context, *sql.Tx, *consumer.Delivery) error {
			return jetbox.Permanent(errHandler)
		}), consumer.Config{DeadLetters: dlq})
		b.pass(time.Minute)
		if n := len(dlq.named("park")); n != 1 {
			b.Errorf("letters = %d, want 1", n)
		}
		if err := stop(); err != nil {
			b.Error(err)
		}
	})
}

// The key is the event's own; what has none is known by where and when it was
// stored, and a replay by where its original was.
func TestLedgerKeyIdentifiesTheEvent(t *testing.T) {
	inBubble(t, func(b *bus) {
		set := func(kv ...string) nats.Header {
			h := nats.Header{}
			for i := 0; i < len(kv); i += 2 {
				h.Set(kv[i], kv[i+1])
			}
			return h
		}
		b.publish("own")
		b.publishRaw(&nats.Msg{Subject: "events.x", Header: set("Nats-Msg-Id", "msg-id")})
		b.publishRaw(&nats.Msg{Subject: "events.x"})
		b.publishRaw(&nats.Msg{Subject: "events.x", Header: set("Idempotency-Key", strings.Repeat("x", 513))})
		for_ := streamName + "/" + durable
		b.publishRaw(&nats.Msg{Subject: "events.x", Header: set("Jetbox-Replay-For", for_, "Jetbox-Letter",
			"dlq.EVENTS.billing.7-99", "Nats-Msg-Id", "dlq.EVENTS.billing.7-99/replay/1")})
		b.publishRaw(&nats.Msg{Subject: "events.x", Header: set("Jetbox-Replay-For", for_, "Jetbox-Letter",
			"dlq.EVENTS.billing.8-99", "Nats-Msg-Id", "dlq.EVENTS.billing.8-99/replay/1", "Idempotency-Key", "own-2")})

		var mu sync.Mutex
		var keys []string
		b.start(consumer.Once(keyLedger{func(name, key string) (bool, error) {
			mu.Lock()
			defer mu.Unlock()
			if name != streamName+"/"+durable {
				b.Errorf("consumer = %q, want stream and durable name", name)
			}
			keys = append(keys, key)
			return false, nil
		}}, func(context.Context, struct{}, *consumer.Delivery) error { return nil }), consumer.Config{})
		b.pass(time.Second)

		mu.Lock()
		defer mu.Unlock()
		if len(keys) != 6 {
			b.Fatalf("keys = %q, want 6", keys)
		}
		for i, want := range []string{"own", "msg-id", "EVENTS/3/", "sha256:", "EVENTS/7/99", "own-2"} {
			exact := i != 2 && i != 3
			if exact && keys[i] != want || !strings.HasPrefix(keys[i], want) {
				b.Errorf("key of message %d = %q, want %q", i+1, keys[i], want)
			}
		}
	})
}

// A ledger that cannot say what happened leads to another delivery.
func TestLedgerErrorIsRetried(t *testing.T) {
	inBubble(t, func(b *bus) {
		b.publish("k")
		calls := 0
		b.start(consumer.Once(keyLedger{func(string, string) (bool, error) {
			calls++
			if calls == 1 {
				return false, errors.New("commit: outcome unknown")
			}
			return true, nil
		}}, func(context.Context, struct{}, *consumer.Delivery) error { return nil }), consumer.Config{})
		b.pass(time.Minute)
		if calls != 2 {
			b.Errorf("ledger was asked %d times, want 2", calls)
		}
		b.wantSettled()
	})
}

// endLedger rolls back after apply, and says why in its own way.
type endLedger struct{ endFunc func(applied error) error }

func (l endLedger) Do(ctx context.Context, _, _ string, apply func(context.Context, struct{}) error) (bool, error) {
	return false, l.endFunc(apply(ctx, struct{}{}))
}

func (l endLedger) DoAll(ctx context.Context, _ string, keys []string, apply func(context.Context, struct{}, []int) error) ([]bool, error) {
	return make([]bool, len(keys)), l.endFunc(apply(ctx, struct{}{}, []int{0}))
}

// What the ledger knows about the handler's error stays with it, and an error of
// the ledger is not taken for the handler's.
func TestErrorsOfALedgerAndItsHandler(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		endFunc   func(applied error) error
		want      string
		permanent bool
	}{
		"the handler's": {func(applied error) error { return applied }, "dependency down", true},
		"held too long": {
			func(applied error) error { return fmt.Errorf("%w: %w", dedup.ErrHeldTooLong, applied) },
			dedup.ErrHeldTooLong.Error() + ": dependency down", true,
		},
		"the ledger's": {
			func(error) error { return errors.New("no connection") },
			"S/c 7: no connection", false,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := &consumer.Delivery{Stream: "S", Consumer: "c", StreamSeq: 7}
			one := consumer.Once(endLedger{tt.endFunc}, func(context.Context, struct{}, *consumer.Delivery) error {
				return jetbox.Permanent(errHandler)
			})
			all := consumer.OnceAll(endLedger{tt.endFunc}, func(context.Context, struct{}, []*consumer.Delivery) error {
				return jetbox.Permanent(errHandler)
			})
			for _, err := range []error{one(t.Context(), d), all(t.Context(), []*consumer.Delivery{d})} {
				if err == nil || !strings.HasSuffix(err.Error(), tt.want) || jetbox.IsPermanent(err) != tt.permanent {
					t.Errorf("error = %v, permanent %v, want %q, %v", err, jetbox.IsPermanent(err), tt.want, tt.permanent)
				}
			}
		})
	}
}
