package relay

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// A stream of three nodes changes its leader again and again while batches are on
// their way. Each time the stream has a prefix of the batch; in the end everything
// is there once, in the order of its key, where the results say.
func TestLeaderChangesDuringBatchesKeepOrderAndCount(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("elections take seconds")
	}
	c := embedded.RunTestCluster(t, 3)
	nc, err := c.Connect(nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond), nats.ReconnectBufSize(-1))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	cfg := batched("S", "s.>")
	cfg.Replicas = 3
	if _, err := js.CreateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	r := &engineRig{t: t, js: js, admin: js}
	r.e, err = newEngine(js, Config{Logger: slog.New(slog.DiscardHandler)}.withDefaults(), newStreams(js, "S"), new(denials))
	if err != nil {
		t.Fatal(err)
	}
	defer r.e.close()

	ctx, stop := context.WithCancel(t.Context())
	var changer sync.WaitGroup
	changes := 0
	changer.Go(func() {
		for ctx.Err() == nil {
			pause(ctx, 700*time.Millisecond)
			if _, err := nc.RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN.S", nil); err == nil {
				changes++
			}
		}
	})
	slow := r.slowly()
	var all []message
	said := make(map[string]uint64) // where a PubAck says that a message is
	broken, batches := 0, 0
	for began := time.Now(); time.Since(began) < 3*time.Second; batches++ {
		var batch []message
		for i := range 1000 {
			batch = append(batch, r.msg("s.a", fmt.Sprint("k", i%7)))
		}
		all = append(all, batch...)
		for left := batch; len(left) > 0; {
			results := r.publish(left)
			var again []message
			for i, res := range results {
				if res.ack != nil {
					said[left[i].msg.Header.Get(jetbox.HeaderMsgID)] = res.ack.Sequence
					continue
				}
				if res.err != nil && classify(res.err) != classOutage {
					t.Fatalf("message %d: %v", i, res.err)
				}
				m := left[i]
				m.fresh = m.fresh && res.err == nil
				again = append(again, m)
			}
			if left = again; len(left) > 0 {
				broken++
				pause(ctx, 100*time.Millisecond)
			}
			if time.Since(began) > time.Minute {
				t.Fatalf("%d messages are not stored after a minute: %+v", len(left), results[0])
			}
		}
	}
	stop()
	changer.Wait()
	ids, seqs := r.onStream("S")
	if len(ids) != len(all) {
		t.Errorf("stream has %d messages, want %d", len(ids), len(all))
	}
	for id, seq := range said {
		if seqs[id] != seq {
			t.Fatalf("%s is at %d, its PubAck says %d", id, seqs[id], seq)
		}
	}
	r.wantKeysInOrder(all)
	t.Logf("%d batches of 1000, %d leader changes, %d calls left something, %d messages went one by one",
		batches, changes, broken, slow.sent)
	if changes < 3 {
		t.Errorf("%d leader changes, want some", changes)
	}
}
