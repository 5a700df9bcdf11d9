package dlq

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// On three replicas a failed condition has another code (10164), which can also
// mean that a write is on its way, and a full stream refuses every write. The
// clock is real: a cluster speaks TCP.
func TestReplicatedLettersAreStillOneEach(t *testing.T) {
	cluster := embedded.RunTestCluster(t, 3)
	nc, err := cluster.Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, js: js}
	w.events = w.createEvents(func(c *jetstream.StreamConfig) { c.Replicas = 3 })
	w.letters = w.newLetters(js, Config{Replicas: 3})
	if diffs, err := w.letters.Setup(t.Context(), "EVENTS"); err != nil || len(diffs) > 0 {
		t.Fatalf("Setup() = %q, %v", diffs, err)
	}
	for range 10 {
		f := w.event("billing", "events.a", "", []byte("x"))
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if err := w.letters.Intend(t.Context(), f); err != nil {
					t.Errorf("Intend: %v", err)
				}
				if err := w.letters.Park(t.Context(), f); err != nil {
					t.Errorf("Park: %v", err)
				}
			})
		}
		wg.Wait()
		w.wantState(ownID(f), StateOpen)
		results := make(chan error, 3)
		for range 3 {
			wg.Go(func() {
				_, err := w.letters.Replay(t.Context(), ownID(f))
				results <- err
			})
		}
		wg.Wait()
		won := 0
		for range 3 {
			if err := <-results; err == nil {
				won++
			} else if !errors.Is(err, jetbox.ErrLetterGone) {
				t.Errorf("Replay: %v", err)
			}
		}
		// A rival that sees the letter replaying takes it over; whoever closes
		// it has done it.
		if won != 1 {
			t.Errorf("operators that succeeded = %d, want 1", won)
		}
		w.wantState(ownID(f), StateReplayed)
	}
	deadline := time.Now().Add(10 * time.Second)
	for len(w.list(Filter{States: []State{StateReplayed}})) != 10 { // a follower may lag
		if time.Now().After(deadline) {
			t.Fatalf("letters replayed = %d, want 10", len(w.list(Filter{States: []State{StateReplayed}})))
		}
		time.Sleep(10 * time.Millisecond)
	}
	if n := len(w.replayed()); n != 10 {
		t.Errorf("replays on the stream = %d, want 10", n)
	}
	w.wantMsgs("DLQ", 10)
}
