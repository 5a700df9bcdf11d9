package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// Batches alone on a stream are believed from the growth of its sequence: none of
// their messages is sent a second time, and the sequences are exact.
func TestFastBatchesAreExactWhileNobodyElsePublishes(t *testing.T) {
	withEngine(t, func(t *testing.T, r *engineRig) {
		slow := r.slowly()
		for n := range 5 {
			batch := r.msgs(700, "s.a") // more than one window of acks
			if n == 3 {
				time.Sleep(time.Minute) // the last sequence is asked for again
			}
			r.wantStored(batch, r.publish(batch))
		}
		if slow.sent != 0 {
			t.Fatalf("%d messages went one by one, want none", slow.sent)
		}
		r.wantMode("S", modeFast)
	}, batched("S", "s.>"))
}

// A message that was tried before may still be on its way: the server would skip it
// in a batch and count it as stored. It goes the other way, and its key waits.
func TestOnlyFreshMessagesEnterABatch(t *testing.T) {
	withEngine(t, func(t *testing.T, r *engineRig) {
		slow := r.slowly()
		batch := r.msgs(400, "s.a")
		for i := range batch {
			batch[i].key = fmt.Sprint("k", i%4)
		}
		batch[0].fresh, batch[21].fresh = false, false // keys k0 and k1
		r.wantStored(batch, r.publish(batch))
		if slow.sent != 2 {
			t.Fatalf("%d messages went one by one, want the two", slow.sent)
		}
		r.wantKeysInOrder(batch)
	}, batched("S", "s.>"))
}

// wantKeysInOrder fails unless the stream has the messages of each key in the
// order of the batch.
func (r *engineRig) wantKeysInOrder(batch []message) {
	r.t.Helper()
	_, seqs := r.onStream("S")
	last := make(map[string]uint64)
	for _, m := range batch {
		seq, ok := seqs[m.msg.Header.Get(jetbox.HeaderMsgID)]
		if !ok || m.key == "" || strings.HasPrefix(m.msg.Header.Get(jetbox.HeaderMsgID), "taken") {
			continue
		}
		if seq < last[m.key] {
			r.t.Fatalf("key %s out of order: %s is at %d, one before it at %d",
				m.key, m.msg.Header.Get(jetbox.HeaderMsgID), seq, last[m.key])
		}
		last[m.key] = max(last[m.key], seq)
	}
}

// What others store in between makes a batch be looked for, message by message but
// without sending any again; then the stream is taken for a shared one.
func TestMessagesOfOthersInBetweenKeepSequencesExact(t *testing.T) {
	withEngine(t, func(t *testing.T, r *engineRig) {
		slow := r.slowly()
		for range 3 {
			batch := r.msgs(100, "s.a")
			results := r.e.publish(t.Context(), batch, r.interleaved(30))
			r.wantStored(batch, results)
		}
		if slow.sent != 200 {
			t.Fatalf("%d messages went one by one, want the second and third batch", slow.sent)
		}
		r.wantMode("S", modePubAck+": others publish to the stream")

		// One key is faster in a batch all the same.
		batch := r.msgs(100, "s.a")
		for i := range batch {
			batch[i].key = "k"
		}
		r.wantStored(batch, r.e.publish(t.Context(), batch, r.interleaved(30)))
		if slow.sent != 200 {
			t.Fatalf("%d messages went one by one, want no more", slow.sent)
		}
		time.Sleep(2 * sharedFor)
		for range 2 {
			batch = r.msgs(100, "s.a")
			r.wantStored(batch, r.publish(batch))
		}
		if slow.sent != 200 {
			t.Fatalf("%d messages went one by one, want no more", slow.sent)
		}
		r.wantMode("S", modeFast)
	}, batched("S", "s.>"))
}

// interleaved lets another publisher store a message before each every-th one.
func (r *engineRig) interleaved(every int) (maySend func() bool) {
	n := 0
	return func() bool {
		if n++; n%every == 0 {
			_, err := r.admin.Publish(context.Background(), "s.other", nil)
			r.must(err)
		}
		return true
	}
}

// A key that is taken, by another outbox say, is skipped by the server without a
// word. It comes out as a duplicate with the sequence of the other event, so that
// package relay can tell; also when as many messages of others came in between, and
// when the other event comes in while the batch is on its way.
func TestTakenKeyIsNeverSilent(t *testing.T) {
	for _, tt := range []struct {
		name   string
		chosen bool // the ID is the writer's choice, and not that of the event
		others int  // messages of others in between
		hot    bool // all of one key
		late   bool // the other event is one of these
	}{
		{"event's ID", false, 0, false, false},
		{"event's ID and another message", false, 1, false, false},
		{"chosen ID", true, 0, false, false},
		{"chosen ID and another message", true, 1, false, false},
		{"chosen ID in a hot key", true, 0, true, false},
		{"chosen ID in a hot key and another message", true, 1, true, false},
		{"taken on the way", true, 1, true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			withEngine(t, func(t *testing.T, r *engineRig) {
				take := func(id string) {
					_, err := r.admin.Publish(context.Background(), "s.b", nil, jetstream.WithMsgID(id))
					r.must(err)
				}
				if tt.chosen { // without, the very first batch must do
					warm := r.msgs(50, "s.a")
					r.wantStored(warm, r.publish(warm))
				}
				if !tt.late {
					take("taken")
				}
				batch := r.msgs(50, "s.a")
				batch[20] = withID("s.a", "", "taken")
				for i := range batch {
					if tt.chosen {
						batch[i].msg.Header.Set(jetbox.HeaderCEID, fmt.Sprint("event ", i))
					}
					if tt.hot {
						batch[i].key = "k"
					}
				}
				n := 0
				results := r.e.publish(t.Context(), batch, func() bool {
					if n++; n == 15 && tt.others == 1 {
						if tt.late {
							take("taken")
						} else {
							take("other")
						}
					}
					return true
				})
				_, seqs := r.onStream("S")
				if ack := results[20].ack; ack == nil || !ack.Duplicate || ack.Sequence != seqs["taken"] {
					t.Fatalf("the taken key: %+v, %v, want a duplicate of %d", ack, results[20].err, seqs["taken"])
				}
				r.wantStored(slices.Delete(batch, 20, 21), slices.Delete(results, 20, 21))
			}, batched("S", "s.>"))
		})
	}
}

// IDs that others may choose go one by one, unless one key has many of them.
func TestChosenIDsEnterABatchInLongChainsOnly(t *testing.T) {
	withEngine(t, func(t *testing.T, r *engineRig) {
		slow := r.slowly()
		for round, want := range []int{50, 50} {
			batch := r.msgs(100, "s.a")
			for i := range 50 {
				batch[i].msg.Header.Set(jetbox.HeaderCEID, "event")
				if round == 1 {
					batch[i].key = "k"
				}
			}
			r.wantStored(batch, r.publish(batch))
			if slow.sent != want {
				t.Fatalf("round %d: %d messages went one by one, want %d", round, slow.sent, want)
			}
		}
	}, batched("S", "s.>"))
}

// What others store between two batches is noticed too.
func TestMessagesOfOthersBetweenBatchesAreNoticed(t *testing.T) {
	for _, idle := range []time.Duration{0, 2 * lastFor} {
		withEngine(t, func(t *testing.T, r *engineRig) {
			batch := r.msgs(50, "s.a")
			r.wantStored(batch, r.publish(batch))
			_, err := r.admin.Publish(t.Context(), "s.other", nil)
			r.must(err)
			time.Sleep(idle)
			batch = r.msgs(50, "s.a")
			r.wantStored(batch, r.publish(batch))
			r.wantMode("S", modePubAck+": others publish to the stream")
		}, batched("S", "s.>"))
	}
}

// A message that the server refuses in the middle gets the server's error, what is
// before and behind it is stored, and of its key nothing behind it.
func TestRefusedMessageStopsItsKeyOnly(t *testing.T) {
	full := batched("S", "s.>")
	full.Discard, full.MaxMsgsPerSubject, full.DiscardNewPerSubject = jetstream.DiscardNew, 1, true
	small := batched("S", "s.>")
	small.MaxMsgSize = 1000
	for _, tt := range []struct {
		name  string
		cfg   jetstream.StreamConfig
		size  int
		class string
		words string
	}{
		{"subject is full", full, 1, classRow, "maximum messages per subject exceeded"},
		{"stream takes no such size", small, 2000, classPermanent, "message size exceeds maximum allowed"},
		{"connection takes no such size", batched("S", "s.>"), 2 << 20, classPermanent, "maximum payload exceeded"},
	} {
		for _, at := range []int{0, 1, 40, 79} {
			t.Run(fmt.Sprint(tt.name, " at ", at), func(t *testing.T) {
				withEngine(t, func(t *testing.T, r *engineRig) {
					slow := r.slowly()
					_, err := r.admin.Publish(t.Context(), "s.full", nil)
					r.must(err)
					var batch []message
					for i := range 80 {
						batch = append(batch, r.msg(fmt.Sprint("s.a.", i), fmt.Sprint("k", i%8)))
					}
					batch[at].msg.Subject, batch[at].msg.Data = "s.full", make([]byte, tt.size)
					if tt.name != "subject is full" {
						batch[at].msg.Subject = "s.big"
					}
					began := time.Now()
					results := r.publish(batch)
					if took := time.Since(began); took > fastPing {
						t.Errorf("took %v, want no wait for what the server has said", took)
					}
					if err := results[at].err; err == nil || classify(err) != tt.class || !strings.Contains(err.Error(), tt.words) {
						t.Fatalf("the refused message: %v", err)
					}
					for i, res := range results {
						switch behind := i > at && batch[i].key == batch[at].key; {
						case i == at:
						case behind && (res.ack != nil || res.err != nil):
							t.Fatalf("message %d, behind the refused one in its key: %+v", i, res)
						case !behind && res.ack == nil:
							t.Fatalf("message %d, of another key or before: %+v", i, res)
						}
					}
					if ids, _ := r.onStream("S"); len(ids) != 1+80-10+at/8 {
						t.Fatalf("stream has %d messages, want %d", len(ids), 1+80-10+at/8)
					}
					if most := 8 + fastLeast; slow.sent > most {
						t.Errorf("%d messages went one by one, want at most %d", slow.sent, most)
					}
				}, tt.cfg)
			})
		}
	}
}

// A stream whose batches were switched off behind our back is served all the same,
// without a wait, and not asked again for a while.
func TestDisabledFeatureFallsBack(t *testing.T) {
	withEngine(t, func(t *testing.T, r *engineRig) {
		first := r.msgs(50, "s.a")
		r.wantStored(first, r.publish(first))
		cfg := batched("S", "s.>")
		cfg.AllowBatchPublish = false
		_, err := r.admin.UpdateStream(t.Context(), cfg)
		r.must(err)

		began := time.Now()
		batch := r.msgs(1500, "s.a") // its beginning is refused message by message
		r.wantStored(batch, r.publish(batch))
		if took := time.Since(began); took > fastPing {
			t.Errorf("took %v, want no wait", took)
		}
		if got := r.e.mode("S"); !strings.HasPrefix(got, modePubAck+": batch publish is disabled") {
			t.Errorf("served by %q", got)
		}
		stale := &jetstream.StreamInfo{Config: batched("S", "s.>"), Created: time.Now()}
		if r.e.states.of("S").usable(stale, r.e.log) {
			t.Error("batches are tried again at once")
		}
		r.e.streams.forget()
		batch = r.msgs(50, "s.a")
		r.wantStored(batch, r.publish(batch))
		r.wantMode("S", modePubAck+": the stream or its server has no batch publishing")

		_, err = r.admin.UpdateStream(t.Context(), batched("S", "s.>"))
		r.must(err)
		time.Sleep(2 * offDisabled)
		r.e.streams.forget()
		slow := r.slowly()
		batch = r.msgs(50, "s.a")
		r.wantStored(batch, r.publish(batch))
		if slow.sent > 0 {
			t.Errorf("%d messages went one by one after the feature is back, want none", slow.sent)
		}
	}, batched("S", "s.>"))
}

// Nobody takes the subject although we think so: no message is lost, none waits
// for a timeout, and the error is that of the other engine.
func TestUnboundSubjectIsAnOutageAtOnce(t *testing.T) {
	withEngine(t, func(t *testing.T, r *engineRig) {
		batch := r.msgs(50, "s.a")
		r.publish(batch)
		r.must(r.admin.DeleteStream(t.Context(), "S"))
		began := time.Now()
		for i, res := range r.publish(r.msgs(50, "s.a")) {
			if res.ack != nil || !errors.Is(res.err, jetstream.ErrNoStreamResponse) {
				t.Fatalf("message %d: %+v", i, res)
			}
		}
		if took := time.Since(began); took > fastPing {
			t.Errorf("took %v, want no wait", took)
		}
		r.wantMode("S", modePubAck+": no stream answers")
	}, batched("S", "s.>"))
}

// Everything arrives and no ack comes back. Nothing is said to be stored, the next
// call finds the copies, and there is one of each.
func TestLostAcksOfABatchAreUnknown(t *testing.T) {
	withEngine(t, func(t *testing.T, r *engineRig) {
		r.publish(r.msgs(50, "s.a"))
		var batch []message
		for i := range 120 {
			batch = append(batch, r.msg("s.a", fmt.Sprint("k", i%5)))
		}
		n := 0
		results := r.e.publish(t.Context(), batch, func() bool {
			if n++; n == 60 {
				r.box.Mute(true)
			}
			return true
		})
		for i, res := range results {
			if res.ack != nil {
				t.Fatalf("message %d: %+v without any ack", i, res.ack)
			}
		}
		if ids, _ := r.onStream("S"); len(ids) != 170 {
			t.Fatalf("stream has %d messages, want all 170", len(ids))
		}
		r.box.Mute(false)
		time.Sleep(30 * time.Second) // the client notices and reconnects
		for i := range batch {
			batch[i].fresh = false
		}
		for i, res := range r.publish(batch) {
			if res.ack == nil || !res.ack.Duplicate {
				t.Fatalf("message %d sent again: %+v", i, res)
			}
		}
		r.wantKeysInOrder(batch)
	}, batched("S", "s.>"))
}

// Only the final ack is lost: the connection comes back while the call lasts.
func TestBatchThatLosesItsConnectionIsSettledInTheSameCall(t *testing.T) {
	withEngine(t, func(t *testing.T, r *engineRig) {
		r.publish(r.msgs(50, "s.a"))
		var batch []message
		for i := range 120 {
			batch = append(batch, r.msg("s.a", fmt.Sprint("k", i%5)))
		}
		n := 0
		results := r.e.publish(t.Context(), batch, func() bool {
			if n++; n == 60 {
				r.box.Cut(false)
				time.Sleep(10 * time.Millisecond)
			}
			return true
		})
		_, seqs := r.onStream("S")
		for i, res := range results {
			id := batch[i].msg.Header.Get(jetbox.HeaderMsgID)
			if res.ack != nil && res.ack.Sequence != seqs[id] {
				t.Fatalf("message %d: %+v, is at %d", i, res.ack, seqs[id])
			}
			if res.ack == nil && res.err == nil && seqs[id] != 0 {
				t.Fatalf("message %d: reported as not sent, is at %d", i, seqs[id])
			}
		}
		r.wantKeysInOrder(batch)
	}, batched("S", "s.>"))
}

// A stop, or the end of the lease, in the middle: the batch is closed, what was
// sent is settled, the rest was not sent, and the server keeps no open batch.
func TestStopInTheMiddleClosesTheBatch(t *testing.T) {
	withEngine(t, func(t *testing.T, r *engineRig) {
		batch := r.msgs(100, "s.a")
		n := 0
		began := time.Now()
		results := r.e.publish(t.Context(), batch, func() bool { n++; return n <= 61 })
		if took := time.Since(began); took >= fastPing {
			t.Errorf("took %v, want the batch ended at once", took)
		}
		for i, res := range results {
			if sent := i < 60; (res.ack != nil) != sent || res.err != nil {
				t.Fatalf("message %d: %+v", i, res)
			}
		}
		r.wantStored(batch[:60], results[:60])
		if n := r.abandoned(); n != 0 {
			t.Fatalf("%d batches were left open", n)
		}
	}, batched("S", "s.>"))
}

// abandoned is how many batches the server closed because nothing came.
func (r *engineRig) abandoned() (open int) {
	r.t.Helper()
	// The server tells nobody of an abandoned fast batch. One that is open makes
	// it ramp up the next one from an ack for each message.
	probe := r.js.Conn().NewInbox()
	sub, err := r.js.Conn().SubscribeSync(probe + ".>")
	r.must(err)
	r.must(r.js.Conn().PublishMsg(&nats.Msg{Subject: "s.probe", Reply: probe + ".500.fail.1.0.$FI"}))
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Second)
	defer cancel()
	m, err := sub.NextMsgWithContext(ctx)
	r.must(err)
	if !strings.Contains(string(m.Data), `"msgs":500`) {
		open = 1
	}
	r.must(r.js.Conn().PublishMsg(&nats.Msg{Subject: "s.probe", Reply: probe + ".500.fail.2.3.$FI"}))
	r.must(sub.Unsubscribe())
	return open
}

// The context bounds the wait for what was sent; that is of unknown outcome.
func TestContextBoundsABatch(t *testing.T) {
	withEngine(t, func(t *testing.T, r *engineRig) {
		r.publish(r.msgs(50, "s.a"))
		r.box.Hold(true)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		results := r.e.publish(ctx, r.msgs(100, "s.a"), always)
		took := time.Since(began)
		r.box.Hold(false)
		time.Sleep(time.Second) // the connection wakes up
		for i, res := range results {
			if !errors.Is(res.err, errNoAck) {
				t.Fatalf("message %d: %+v, want unknown", i, res)
			}
		}
		if took > 2*time.Second {
			t.Errorf("took %v, want the context's second", took)
		}
	}, batched("S", "s.>"))
}

// A key in two streams waits for the result of the first one.
func TestKeyAcrossStreamsKeepsItsOrder(t *testing.T) {
	full := batched("T", "t.>")
	full.MaxMsgSize = 500
	withEngine(t, func(t *testing.T, r *engineRig) {
		var batch []message
		for i := range 200 {
			m := r.msg("s.a", fmt.Sprint("k", i/10))
			if i/2%2 == 0 {
				m.msg.Subject, m.stream = "t.a", "T"
			}
			batch = append(batch, m)
		}
		batch[104].msg.Data = make([]byte, 1000) // to T, fifth of k10: refused
		for i, res := range r.publish(batch) {
			switch {
			case i == 104:
				if res.err == nil {
					t.Fatalf("message %d: %+v, want it refused", i, res)
				}
			case i > 104 && i < 110:
				if res.ack != nil || res.err != nil {
					t.Fatalf("message %d, behind the refused one: %+v", i, res)
				}
			case res.ack == nil || res.ack.Stream != batch[i].stream:
				t.Fatalf("message %d: %+v", i, res)
			}
		}
	}, batched("S", "s.>"), full)
}

// A stream without the feature, or with too few messages for a batch, is served as
// ever.
func TestSmallBatchesAndPlainStreamsGoOneByOne(t *testing.T) {
	withEngine(t, func(t *testing.T, r *engineRig) {
		slow := r.slowly()
		few := r.msgs(fastLeast-1, "s.a")
		r.wantStored(few, r.publish(few))
		r.wantMode("S", modeFast)
		plain := r.msgs(100, "p.a")
		for i := range plain {
			plain[i].stream = "P"
		}
		for i, res := range r.publish(plain) {
			if res.ack == nil || res.ack.Sequence != uint64(i)+1 {
				t.Fatalf("message %d: %+v", i, res)
			}
		}
		if slow.sent != fastLeast-1+100 {
			t.Fatalf("%d messages went one by one, want all", slow.sent)
		}
		r.wantMode("P", modePubAck+": the stream or its server has no batch publishing")
	}, batched("S", "s.>"), jetstream.StreamConfig{Name: "P", Subjects: []string{"p.>"}})
}

// On a work queue, where nothing can be read back, a taken key is found all the
// same, and what is stored is acknowledged.
func TestWorkQueueIsSettledOneByOne(t *testing.T) {
	queue := batched("S", "s.>")
	queue.Retention = jetstream.WorkQueuePolicy
	withEngine(t, func(t *testing.T, r *engineRig) {
		_, err := r.admin.Publish(t.Context(), "s.b", nil, jetstream.WithMsgID("taken"))
		r.must(err)
		for i, res := range r.publish(r.msgs(50, "s.a")) {
			if res.ack == nil || res.ack.Duplicate || res.ack.Sequence != uint64(i)+2 {
				t.Fatalf("message %d: %+v", i, res)
			}
		}
		for i, res := range r.publish(append(r.msgs(50, "s.a"), withID("s.a", "", "taken"))) {
			want := uint64(i) + 52
			if i == 50 {
				want = 1
			}
			if res.ack == nil || res.ack.Sequence != want {
				t.Fatalf("message %d: %+v, want sequence %d", i, res, want)
			}
		}
	}, queue)
}
