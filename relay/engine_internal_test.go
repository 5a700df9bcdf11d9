package relay

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/internal/faultbox"
)

// engineRig is a broker with streams, and an engine that publishes to it.
type engineRig struct {
	t     *testing.T
	srv   *embedded.Server
	box   *faultbox.Box       // between the engine and the broker
	js    jetstream.JetStream // the engine's
	admin jetstream.JetStream // the test's own, always working
	e     *fastEngine
	ids   int
}

// withEngine runs f in a bubble, with the streams that are asked for.
func withEngine(t *testing.T, f func(t *testing.T, r *engineRig), streams ...jetstream.StreamConfig) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &engineRig{t: t, srv: embedded.RunTest(t)}
		r.box = &faultbox.Box{Server: r.srv}
		nc, err := nats.Connect("", nats.InProcessServer(r.box), nats.MaxReconnects(-1), nats.ReconnectBufSize(-1),
			nats.ReconnectWait(time.Second), nats.PingInterval(5*time.Second),
			nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
		r.must(err)
		defer nc.Close()
		r.js, err = jetstream.New(nc)
		r.must(err)
		admin, err := r.srv.Connect(nats.MaxReconnects(-1))
		r.must(err)
		defer admin.Close()
		r.admin, err = jetstream.New(admin)
		r.must(err)
		for _, cfg := range streams {
			_, err := r.admin.CreateStream(t.Context(), cfg)
			r.must(err)
		}
		r.e = r.newEngine()
		defer r.e.close()
		f(t, r)
	})
}

// batched is a stream with fast batches.
func batched(name string, subjects ...string) jetstream.StreamConfig {
	return jetstream.StreamConfig{Name: name, Subjects: subjects, AllowBatchPublish: true}
}

func (r *engineRig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *engineRig) newEngine() *fastEngine {
	r.t.Helper()
	cfg := Config{Logger: slog.New(slog.DiscardHandler)}.withDefaults()
	d := new(denials)
	d.watch(r.js.Conn())
	e, err := newEngine(r.js, cfg, newStreams(r.js, "S"), d)
	r.must(err)
	return e
}

// msg is a fresh message with an ID of its own.
func (r *engineRig) msg(subject, key string) message {
	r.ids++
	return withID(subject, key, fmt.Sprint("id-", r.ids))
}

func withID(subject, key, id string) message {
	return message{
		key:    key,
		stream: "S",
		fresh:  true,
		msg: &nats.Msg{
			Subject: subject,
			Header:  nats.Header{jetbox.HeaderMsgID: {id}, jetbox.HeaderCEID: {id}},
			Data:    []byte("x"),
		},
	}
}

// msgs are n fresh messages of one subject without keys.
func (r *engineRig) msgs(n int, subject string) (batch []message) {
	for range n {
		batch = append(batch, r.msg(subject, ""))
	}
	return batch
}

func always() bool { return true }

func (r *engineRig) publish(batch []message) []result {
	r.t.Helper()
	return r.e.publish(r.t.Context(), batch, always)
}

// onStream is the IDs on a stream, in its order, by sequence.
func (r *engineRig) onStream(name string) (ids []string, seqs map[string]uint64) {
	r.t.Helper()
	ctx := context.Background()
	st, err := r.admin.Stream(ctx, name)
	r.must(err)
	seqs = make(map[string]uint64)
	left := st.CachedInfo().State.Msgs
	if left == 0 {
		return nil, seqs
	}
	reader, err := r.admin.OrderedConsumer(ctx, name, jetstream.OrderedConsumerConfig{HeadersOnly: true})
	r.must(err)
	msgs, err := reader.Fetch(int(left))
	r.must(err)
	for m := range msgs.Messages() {
		meta, err := m.Metadata()
		r.must(err)
		id := m.Headers().Get(jetbox.HeaderMsgID)
		if other, twice := seqs[id]; twice && id != "" {
			r.t.Fatalf("%s is on the stream twice, at %d and %d", id, other, meta.Sequence.Stream)
		}
		ids = append(ids, id)
		seqs[id] = meta.Sequence.Stream
		left--
	}
	if r.must(msgs.Error()); left != 0 {
		r.t.Fatalf("%d messages of stream %s are missing", left, name)
	}
	return ids, seqs
}

// wantStored fails unless every message has its own PubAck with the sequence at
// which the stream has it, and none was a duplicate.
func (r *engineRig) wantStored(batch []message, results []result) {
	r.t.Helper()
	_, seqs := r.onStream("S")
	for i, res := range results {
		id := batch[i].msg.Header.Get(jetbox.HeaderMsgID)
		if res.err != nil || res.ack == nil {
			r.t.Fatalf("message %d, %s: %+v, want it stored", i, id, res)
		}
		if res.ack.Sequence != seqs[id] || res.ack.Stream != "S" || res.ack.Duplicate {
			r.t.Fatalf("message %d, %s: %+v, want sequence %d", i, id, res.ack, seqs[id])
		}
	}
}

// wantMode fails unless the stream is served by the engine.
func (r *engineRig) wantMode(stream, mode string) {
	r.t.Helper()
	if got := r.e.mode(stream); got != mode {
		r.t.Fatalf("stream %s is served by %q, want %q", stream, got, mode)
	}
}

// counting counts what an engine is given.
type counting struct {
	engine
	sent int
}

func (c *counting) publish(ctx context.Context, batch []message, maySend func() bool) []result {
	c.sent += len(batch)
	return c.engine.publish(ctx, batch, maySend)
}

// slowly counts what goes message by message from now on.
func (r *engineRig) slowly() *counting {
	c := &counting{engine: r.e.slow}
	r.e.slow = c
	return c
}
