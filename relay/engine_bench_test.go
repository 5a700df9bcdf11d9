package relay

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// benchPayload and benchBatch are what the comparison of engines is made with.
const (
	benchPayload = 512
	benchBatch   = 1000
)

// BenchmarkEngines publishes the same messages, all headers of the contract
// included, by the asynchronous publish of jetstream with nothing around it, and
// by the engines. The broker is in this process, on file storage, and syncs once a
// minute. x_raw is the rate divided by that of the raw publish just before.
func BenchmarkEngines(b *testing.B) {
	for _, bm := range []struct {
		name   string
		keys   int
		engine func(f *fastEngine) engine
		chosen bool // IDs that others could take: one by one, or read back in long chains
	}{
		{"pubacks/keys=1000", 1000, func(f *fastEngine) engine { return f.slow }, false},
		{"fast/keys=1000", 1000, func(f *fastEngine) engine { return f }, false},
		{"fast/keys=1", 1, func(f *fastEngine) engine { return f }, false},
		{"chosen/keys=1000", 1000, func(f *fastEngine) engine { return f }, true},
		{"chosen/keys=1", 1, func(f *fastEngine) engine { return f }, true},
	} {
		b.Run(bm.name, func(b *testing.B) { benchEngine(b, bm.keys, bm.engine, bm.chosen) })
	}
}

func benchEngine(b *testing.B, keys int, choose func(*fastEngine) engine, chosen bool) {
	srv := embedded.RunTest(b)
	nc, err := srv.Connect()
	if err != nil {
		b.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(8192))
	if err != nil {
		b.Fatal(err)
	}
	if _, err := js.CreateStream(b.Context(), batched("S", "s.>")); err != nil {
		b.Fatal(err)
	}
	f, err := newEngine(js, Config{Logger: slog.New(slog.DiscardHandler)}.withDefaults(), newStreams(js, "S"), new(denials))
	if err != nil {
		b.Fatal(err)
	}
	defer f.close()
	eng := choose(f)
	run := 0
	build := func() []message { run++; return benchMessages(run, keys, chosen) }
	publish := func(batch []message) {
		for i, res := range eng.publish(context.Background(), batch, always) {
			if res.ack == nil || res.ack.Duplicate {
				b.Fatalf("message %d: %+v, %v", i, res.ack, res.err)
			}
		}
	}
	publish(build())

	var raw, own time.Duration
	for b.Loop() {
		batch := build()
		own += timed(func() { publish(batch) })
		batch = build()
		raw += timed(func() {
			for _, m := range batch {
				if _, err := js.PublishMsgAsync(m.msg); err != nil {
					b.Fatal(err)
				}
			}
			<-js.PublishAsyncComplete()
		})
		f.states.of("S").lose() // those were not the engine's
		f.states.of("S").assume(b, js)
	}
	n := float64(b.N * benchBatch)
	b.ReportMetric(n/own.Seconds(), "msgs/s")
	b.ReportMetric(n/raw.Seconds(), "raw_msgs/s")
	b.ReportMetric(raw.Seconds()/own.Seconds(), "x_raw")
}

func timed(f func()) time.Duration {
	began := time.Now()
	f()
	return time.Since(began)
}

// assume takes the stream's sequence for known and proven, as it is between two
// batches of a relay.
func (s *fastState) assume(b *testing.B, js jetstream.JetStream) {
	b.Helper()
	st, err := js.Stream(b.Context(), "S")
	if err != nil {
		b.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.created, s.seq, s.at, s.proven = st.CachedInfo().Created, st.CachedInfo().State.LastSeq, time.Now(), true
}

func benchMessages(run, keys int, chosen bool) []message {
	batch := make([]message, benchBatch)
	for i := range batch {
		seq := int64(i)
		e := jetbox.Event{
			ID:            fmt.Sprintf("%08x-0000-4000-8000-%012d", run, i),
			Subject:       "s.orders",
			Type:          "order.placed",
			AggregateType: "order",
			AggregateID:   fmt.Sprint(i % keys),
			AggregateSeq:  &seq,
			SchemaVersion: "1",
			ContentType:   "application/json",
			Time:          time.Now(),
			Payload:       make([]byte, benchPayload),
		}
		if e.Key = e.ID; chosen {
			e.Key = fmt.Sprintf("order-%08x-%024d", run, i)
		}
		batch[i] = message{
			key:    e.OrderingKey(),
			stream: "S",
			fresh:  true,
			msg:    &nats.Msg{Subject: e.Subject, Header: e.Header("jetbox"), Data: e.Payload},
		}
	}
	return batch
}
