package relay

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// Random batches with keys, messages that were tried before, subjects that are
// full, keys that are taken, other publishers, stops, lost acks and cut
// connections, all against a real server. After every call:
//
//  1. a message with a PubAck is on the stream at that sequence, or is a duplicate
//     of what is there;
//  2. a message that was not sent, or was refused, is not on the stream;
//  3. nothing is there twice;
//  4. of each key, the stream has what the batch has in the batch's order, and
//     nothing behind a message that is not stored.
func TestRandomBatchesAgreeWithTheStream(t *testing.T) {
	rounds := 4
	if testing.Short() {
		rounds = 2
	}
	for seed := range uint64(rounds) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			full := batched("S", "s.>")
			full.Discard, full.MaxMsgsPerSubject, full.DiscardNewPerSubject = jetstream.DiscardNew, 100_000, true
			full.MaxMsgSize, full.Duplicates = 5000, time.Hour
			withEngine(t, func(t *testing.T, r *engineRig) {
				rnd := rand.New(rand.NewPCG(seed, 1))
				var again []message // of unknown outcome in the call before
				for call := range 8 {
					again = r.randomCall(rnd, call, again)
				}
			}, full)
		})
	}
}

// randomCall makes one call and checks it. It returns what has to be sent again,
// as a relay would do.
func (r *engineRig) randomCall(rnd *rand.Rand, call int, again []message) []message {
	r.t.Helper()
	taken := fmt.Sprint("taken-", call)
	_, err := r.admin.Publish(r.t.Context(), "s.b", nil, jetstream.WithMsgID(taken))
	r.must(err)
	batch := again
	keys := 1 + rnd.IntN(40)
	for range rnd.IntN(1500) {
		m := r.msg("s.a", "")
		if rnd.IntN(5) > 0 {
			m.key = fmt.Sprint(call, "/", rnd.IntN(keys))
		}
		switch rnd.IntN(400) {
		case 0:
			m.msg.Data = make([]byte, 6000) // refused
		case 1:
			m.fresh = false
		case 2:
			m.msg.Header.Set(jetbox.HeaderMsgID, taken)
		}
		batch = append(batch, m)
	}
	if len(batch) == 0 {
		return nil
	}
	fault, at := rnd.IntN(8), rnd.IntN(len(batch))
	n, stop := 0, false
	results := r.e.publish(r.t.Context(), batch, func() bool {
		if n++; n == at {
			switch fault {
			case 0:
				r.box.Cut(false)
			case 1:
				r.box.Mute(true)
			case 2:
				stop = true
			case 3, 4:
				for range 1 + rnd.IntN(3) {
					_, err := r.admin.Publish(context.Background(), "s.other", nil)
					r.must(err)
				}
			}
		}
		return !stop
	})
	r.box.Mute(false)
	time.Sleep(time.Minute)
	return r.check(batch, results)
}

func (r *engineRig) check(batch []message, results []result) (again []message) {
	r.t.Helper()
	_, seqs := r.onStream("S")
	holes := make(map[string]int) // keys with a message that is not stored
	for i, res := range results {
		m := batch[i]
		id := m.msg.Header.Get(jetbox.HeaderMsgID)
		seq, there := seqs[id]
		if strings.HasPrefix(id, "taken") {
			there = res.ack != nil // that of the other event, which is settled then
		}
		switch {
		case res.ack != nil && (res.ack.Sequence != seq || res.ack.Stream != "S"):
			r.t.Fatalf("message %d, %s: %+v, is at %d", i, id, res.ack, seq)
		case res.ack != nil && strings.HasPrefix(id, "taken") && !res.ack.Duplicate:
			r.t.Fatalf("message %d has a taken key and is said to be stored: %+v", i, res.ack)
		case res.ack == nil && (res.err == nil || classify(res.err) != classOutage) && there && m.fresh:
			r.t.Fatalf("message %d, %s: %v, but is at %d", i, id, res.err, seq)
		}
		if hole, ok := holes[m.key]; ok && m.key != "" && there && m.fresh {
			r.t.Fatalf("message %d, %s: stored although %d of its key is not: %+v; %+v", i, id, hole, res, results[hole])
		}
		if !there && res.ack == nil && m.key != "" && !strings.HasPrefix(id, "taken") {
			if _, ok := holes[m.key]; !ok {
				holes[m.key] = i
			}
		}
		if res.ack == nil && (res.err == nil || classify(res.err) == classOutage) {
			m.fresh = m.fresh && res.err == nil
			again = append(again, m)
		}
	}
	r.wantKeysInOrder(batch)
	return again
}
