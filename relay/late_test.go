package relay_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// Rows that become visible below rows of their key that are published already are
// published, counted once each, and told of once a batch.
func TestRowsThatBecomeVisibleTooLateAreCounted(t *testing.T) {
	inBubble(t, func(r *rig) {
		log, late := &logBook{}, 0
		_, stop := r.start(r.store, relay.Config{Logger: log.logger(), Hooks: relay.Hooks{LateFunc: func() { late++ }}})
		steps := []struct {
			name string
			rows map[int64]string // id to key
			late int
		}{
			{"the first of each key", map[int64]string{100: "a", 101: "b", 102: ""}, 0},
			{"higher ones", map[int64]string{110: "a", 111: "b", 112: ""}, 0},
			{"a key not seen before", map[int64]string{50: "c"}, 0},
			{"without a key", map[int64]string{51: "", 52: ""}, 0},
			{"two of one key and one of another", map[int64]string{60: "a", 70: "a", 61: "b", 200: "c"}, 3},
			{"above the late ones, below the highest", map[int64]string{105: "a"}, 1},
			{"above all", map[int64]string{300: "a"}, 0},
		}
		lines := 0
		for _, step := range steps {
			before := late
			tx, err := r.store.DB().BeginTx(r.t.Context(), nil)
			r.must(err)
			for id, key := range step.rows {
				_, err := tx.ExecContext(r.t.Context(), "INSERT INTO outbox (id, subject, payload, aggregate_id) VALUES (?, 'events.a', 'x', nullif(?, ''))", id, key)
				r.must(err)
			}
			r.must(tx.Commit())
			time.Sleep(2 * time.Second)
			if got := late - before; got != step.late {
				r.t.Fatalf("%s: %d late rows, want %d", step.name, got, step.late)
			}
			if step.late > 0 {
				lines++
			}
		}
		stop()
		got := log.lines("ordering key")
		if len(got) != lines || !strings.Contains(got[0], "level=INFO") || !strings.Contains(got[0], "count=3") {
			r.t.Fatalf("log: %q, want %d lines, the first of 3 rows", got, lines)
		}
		if n := len(r.stored()); n != 15 {
			r.t.Fatalf("stream has %d messages, want 15", n)
		}
	})
}

// What is sent again because its outcome was not known, and what was scheduled, is
// where it should be.
func TestRowsSentAgainOrScheduledAreNotLate(t *testing.T) {
	inBubble(t, func(r *rig) {
		src := &faultySource{Store: r.store}
		losses := 1
		src.RecordFunc = func() error {
			if losses--; losses >= 0 {
				return jetbox.ErrLeaseLost
			}
			return nil
		}
		acks, late := 0, 0
		scheduled := event("events.a", "k", "scheduled")
		scheduled.NotBefore = time.Now().Add(5 * time.Second)
		r.append(scheduled)
		for i := range 3 {
			r.append(event("events.a", "k", fmt.Sprint(i)))
		}
		_, stop := r.start(src, relay.Config{Hooks: relay.Hooks{
			PublishedFunc: func(time.Duration, time.Duration, bool) { acks++ },
			LateFunc:      func() { late++ },
		}})
		time.Sleep(20 * time.Second)
		stop()
		r.wantPayloads("0", "1", "2", "scheduled")
		if acks != 7 || late != 0 {
			r.t.Fatalf("%d PubAcks and %d late rows, want 7 for 4 rows and none", acks, late)
		}
	})
}
