package relay

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/internal/faultbox"
)

// lookRig is a broker, a connection to look through, and one of the test's own.
type lookRig struct {
	t     testing.TB
	srv   *embedded.Server
	box   *faultbox.Box       // between js and the broker
	js    jetstream.JetStream // what is tested
	admin jetstream.JetStream // always works

	stored int // messages of others
}

// withLook runs f in a bubble, with the streams that are asked for. It is an error
// to leave a consumer on any stream.
func withLook(t *testing.T, f func(t *testing.T, r *lookRig), streams ...jetstream.StreamConfig) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &lookRig{t: t, srv: embedded.RunTest(t)}
		r.box = &faultbox.Box{Server: r.srv}
		nc, err := nats.Connect("", nats.InProcessServer(r.box), nats.MaxReconnects(-1), nats.ReconnectBufSize(-1),
			nats.ReconnectWait(time.Second), nats.PingInterval(5*time.Second),
			nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
		r.must(err)
		defer time.Sleep(time.Second) // what the box delays must arrive
		defer nc.Close()
		r.js, err = jetstream.New(nc)
		r.must(err)
		admin, err := r.srv.Connect(nats.MaxReconnects(-1))
		r.must(err)
		defer admin.Close()
		r.admin, err = jetstream.New(admin)
		r.must(err)
		for _, cfg := range streams {
			r.create(cfg)
		}
		f(t, r)
	})
}

func (r *lookRig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *lookRig) create(cfg jetstream.StreamConfig) jetstream.Stream {
	r.t.Helper()
	st, err := r.admin.CreateStream(r.t.Context(), cfg)
	r.must(err)
	return st
}

func (r *lookRig) stream() jetstream.Stream {
	r.t.Helper()
	st, err := r.admin.Stream(r.t.Context(), "S")
	r.must(err)
	return st
}

// now is where the stream stands.
func (r *lookRig) now() position {
	r.t.Helper()
	info := r.stream().CachedInfo()
	return position{Stream: "S", Created: info.Created, Seq: info.State.LastSeq}
}

// publish stores an event under its own ID, or under another message ID.
func (r *lookRig) publish(event, id string) uint64 {
	r.t.Helper()
	ack, err := r.admin.PublishMsg(r.t.Context(), eventMsg("s."+event, event, id))
	r.must(err)
	if ack.Duplicate {
		r.t.Fatalf("event %s under %s was dropped as a duplicate", event, id)
	}
	return ack.Sequence
}

func eventMsg(subject, event, id string) *nats.Msg {
	return &nats.Msg{
		Subject: subject,
		Header:  nats.Header{jetbox.HeaderMsgID: {id}, jetbox.HeaderCEID: {event}},
		Data:    []byte("payload of " + event),
	}
}

// others stores messages of other publishers.
func (r *lookRig) others(n int) {
	r.t.Helper()
	for range n {
		r.stored++
		_, err := r.admin.PublishMsgAsync(&nats.Msg{Subject: "s.other", Header: nats.Header{jetbox.HeaderMsgID: {fmt.Sprint("other-", r.stored)}}})
		r.must(err)
		if r.stored%1000 == 0 {
			<-r.admin.PublishAsyncComplete()
		}
	}
	<-r.admin.PublishAsyncComplete()
}

// want is what to look for: events under message IDs equal to theirs.
func want(events ...string) (wanted []wantedEvent) {
	for _, e := range events {
		wanted = append(wanted, wantedEvent{msgID: e, ceID: e})
	}
	return wanted
}

const noLimit = 1 << 30

// look looks to the end, and fails if that is not possible.
func (r *lookRig) look(from position, wanted []wantedEvent) lookResult {
	r.t.Helper()
	res, err := look(r.t.Context(), r.js, from, wanted, noLimit)
	r.must(err)
	if !res.done {
		r.t.Fatalf("look() = %+v, want it done", res)
	}
	return res
}

// wantSeqs fails unless the events were found at these sequences.
func (r *lookRig) wantSeqs(wanted []wantedEvent, seqs ...uint64) {
	r.t.Helper()
	for i, w := range wanted {
		if w.seq != seqs[i] {
			r.t.Fatalf("event %s found at %d, want %d", w.ceID, w.seq, seqs[i])
		}
	}
}

// wantNoConsumer fails if a consumer is left on the stream.
func (r *lookRig) wantNoConsumer() {
	r.t.Helper()
	for name := range r.stream().ConsumerNames(r.t.Context()).Name() {
		r.t.Fatalf("consumer %s was left on the stream", name)
	}
}

// hooked tells the test of each consumer that a look creates.
type hooked struct {
	jetstream.JetStream
	created func(*jetstream.ConsumerInfo)
}

func (h hooked) CreateConsumer(ctx context.Context, stream string, cfg jetstream.ConsumerConfig) (jetstream.Consumer, error) {
	c, err := h.JetStream.CreateConsumer(ctx, stream, cfg)
	if err == nil {
		h.created(c.CachedInfo())
	}
	return c, err
}

func lookStream(adjust ...func(*jetstream.StreamConfig)) jetstream.StreamConfig {
	cfg := jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}, Duplicates: time.Minute}
	for _, f := range adjust {
		f(&cfg)
	}
	return cfg
}

// long leaves a test out of short runs.
func long(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("takes long under the race detector")
	}
}
