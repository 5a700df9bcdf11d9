package embedded_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// The tests of this file have a real server on a fake clock. None is parallel:
// servers with file storage share a goroutine of the process (package comment).

// inBubble runs f in a synctest bubble against a server that RunTest started.
func inBubble(t *testing.T, f func(t *testing.T, srv *embedded.Server, js jetstream.JetStream)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		srv := embedded.RunTest(t)
		f(t, srv, connect(t, srv))
	})
}

// connect returns a JetStream context on a connection that the test closes.
func connect(t *testing.T, srv *embedded.Server, opts ...nats.Option) jetstream.JetStream {
	t.Helper()
	nc, err := srv.Connect(opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

func createStream(t *testing.T, js jetstream.JetStream, cfg jetstream.StreamConfig) jetstream.Stream {
	t.Helper()
	s, err := js.CreateStream(t.Context(), cfg)
	if err != nil {
		t.Fatalf("create stream %s: %v", cfg.Name, err)
	}
	return s
}

// publish fails the test when the stream does not take the message.
func publish(t *testing.T, js jetstream.JetStream, subject, id string) *jetstream.PubAck {
	t.Helper()
	ack, err := js.Publish(t.Context(), subject, []byte("x"), jetstream.WithMsgID(id))
	if err != nil {
		t.Fatalf("publish %s to %s: %v", id, subject, err)
	}
	return ack
}

// streamInfo asks the server; a stream's cached info is never new.
func streamInfo(t *testing.T, js jetstream.JetStream, name string) *jetstream.StreamInfo {
	t.Helper()
	s, err := js.Stream(t.Context(), name)
	if err != nil {
		t.Fatalf("look up stream %s: %v", name, err)
	}
	return s.CachedInfo()
}

// A stream drops a repeated message ID for its duplicate window, counted from
// the first copy, and takes it afterwards.
func TestDuplicateWindowEndsOnTheFakeClock(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
		steps := []struct {
			wait time.Duration
			want bool
		}{{0, false}, {0, true}, {3 * time.Minute, false}}
		for _, st := range steps {
			time.Sleep(st.wait)
			if ack := publish(t, js, "s", "id"); ack.Duplicate != st.want {
				t.Errorf("after %v: Duplicate = %v, want %v", st.wait, ack.Duplicate, st.want)
			}
		}
	})
}

// A message that nobody acknowledges comes back after every ack wait, and after
// the last delivery its advisory lands in the stream that captures advisories.
func TestMaxDeliverEndsInACapturedAdvisory(t *testing.T) {
	const ackWait, slack = 30 * time.Second, 50 * time.Millisecond
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, jetstream.StreamConfig{
			Name: "ADV", Subjects: []string{"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>"},
		})
		s := createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
		cons, err := s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{
			Durable: "c", AckPolicy: jetstream.AckExplicitPolicy, AckWait: ackWait, MaxDeliver: 3,
		})
		if err != nil {
			t.Fatal(err)
		}
		publish(t, js, "s", "id")
		start := time.Now()
		var mu sync.Mutex
		var deliveries []time.Duration // guarded by mu; since start
		cc, err := cons.Consume(func(jetstream.Msg) {
			mu.Lock()
			defer mu.Unlock()
			deliveries = append(deliveries, time.Since(start))
		})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { cc.Stop(); <-cc.Closed() }()
		time.Sleep(4 * ackWait)

		mu.Lock()
		defer mu.Unlock()
		if len(deliveries) != 3 {
			t.Fatalf("deliveries at %v, want 3", deliveries)
		}
		for i, at := range deliveries {
			if want := time.Duration(i) * ackWait; at < want || at > want+slack {
				t.Errorf("delivery %d at %v, want %v", i+1, at, want)
			}
		}
		if n := streamInfo(t, js, "ADV").State.Msgs; n != 1 {
			t.Fatalf("advisories stored = %d, want 1", n)
		}
		adv, err := js.Stream(t.Context(), "ADV")
		if err != nil {
			t.Fatal(err)
		}
		msg, err := adv.GetMsg(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		var body struct {
			Stream     string `json:"stream"`
			Consumer   string `json:"consumer"`
			StreamSeq  uint64 `json:"stream_seq"`
			Deliveries int    `json:"deliveries"`
		}
		if err := json.Unmarshal(msg.Data, &body); err != nil {
			t.Fatalf("advisory %s: %v", msg.Data, err)
		}
		if body.Stream != "S" || body.Consumer != "c" || body.StreamSeq != 1 || body.Deliveries != 3 {
			t.Errorf("advisory = %+v, want S, c, sequence 1, 3 deliveries", body)
		}
		at := msg.Time.Sub(start)
		if want := 3 * ackWait; at < want || at > want+slack {
			t.Errorf("advisory at %v, want %v", at, want)
		}
	})
}

// What was stored is there after Close and Start on the same directory, and so
// is the memory of its message ID.
func TestNewServerOnTheSameDirectoryRemembersStreamAndMessageID(t *testing.T) {
	inBubble(t, func(t *testing.T, srv *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
		publish(t, js, "s", "id")
		if err := srv.Close(); err != nil {
			t.Fatal(err)
		}
		again := embedded.RunTest(t, func(c *embedded.Config) { c.Dir = srv.Dir() })
		js = connect(t, again)
		if ack := publish(t, js, "s", "id"); !ack.Duplicate || ack.Sequence != 1 {
			t.Errorf("repeat after the restart = %+v, want a duplicate of sequence 1", ack)
		}
		if n := streamInfo(t, js, "S").State.Msgs; n != 1 {
			t.Errorf("messages stored = %d, want 1", n)
		}
	})
}

// A client that is told to wait finds the restarted server by itself.
func TestClientReconnectsAfterAMinuteOfOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := embedded.RunTest(t)
		reconnected := make(chan struct{}, 10)
		js := connect(t, srv,
			nats.MaxReconnects(-1),
			nats.ReconnectBufSize(-1),
			nats.ReconnectHandler(func(*nats.Conn) { reconnected <- struct{}{} }))
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})

		start := time.Now()
		if err := srv.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := srv.InProcessConn(); !errors.Is(err, embedded.ErrClosed) {
			t.Errorf("connection to the closed server: err = %v, want ErrClosed", err)
		}
		time.Sleep(time.Minute)
		if err := srv.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		<-reconnected
		if outage := time.Since(start); outage > 65*time.Second {
			t.Errorf("reconnected after %v, want little more than a minute", outage)
		}
		publish(t, js, "s", "id")
		if n := len(reconnected); n != 0 {
			t.Errorf("%d further reconnects, want none", n)
		}
	})
}

// A PubAck that is lost on its way leaves the client without an answer; the
// repeat under the same message ID says that the message is stored.
func TestRepeatAfterALostPubAckIsADuplicate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := embedded.RunTest(t)
		box := &muteBox{srv: srv}
		nc, err := nats.Connect("", nats.InProcessServer(box))
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})

		box.mute()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if _, err := js.Publish(ctx, "s", nil, jetstream.WithMsgID("id")); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("publish with a lost PubAck: err = %v, want deadline exceeded", err)
		}
		if ack := publish(t, connect(t, srv), "s", "id"); !ack.Duplicate || ack.Sequence != 1 {
			t.Errorf("repeat = %+v, want a duplicate of sequence 1", ack)
		}
		if n := streamInfo(t, connect(t, srv), "S").State.Msgs; n != 1 {
			t.Errorf("messages stored = %d, want 1", n)
		}
	})
}

// muteBox hands out connections to srv whose answers it can swallow.
type muteBox struct {
	srv   *embedded.Server
	mu    sync.Mutex
	conns []*mutedConn // guarded by mu
}

func (b *muteBox) InProcessConn() (net.Conn, error) {
	conn, err := b.srv.InProcessConn()
	if err != nil {
		return nil, err
	}
	m := &mutedConn{Conn: conn}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.conns = append(b.conns, m)
	return m, nil
}

// mute swallows what the server sends from now on, whole connections at a time.
func (b *muteBox) mute() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.conns {
		c.mu.Lock()
		c.muted = true
		c.mu.Unlock()
	}
}

type mutedConn struct {
	net.Conn
	mu    sync.Mutex
	muted bool // guarded by mu
}

func (c *mutedConn) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		c.mu.Lock()
		muted := c.muted
		c.mu.Unlock()
		if !muted || err != nil {
			return n, err
		}
	}
}

// Message ages follow the fake clock, and an hour of it stays cheap.
func TestMaxAgeExpiresOnTheFakeClock(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, MaxAge: time.Hour})
		publish(t, js, "s", "id")
		time.Sleep(time.Hour - time.Minute)
		if n := streamInfo(t, js, "S").State.Msgs; n != 1 {
			t.Errorf("messages after 59 minutes = %d, want 1", n)
		}
		time.Sleep(2 * time.Minute)
		if n := streamInfo(t, js, "S").State.Msgs; n != 0 {
			t.Errorf("messages after 61 minutes = %d, want 0", n)
		}
	})
}

// What broke: closing a server while a pull is open and messages become due for
// redelivery never ended in a bubble. nats-server 2.15 leaves the subscriptions of
// the clients it closes, and sends to the open pull again and again, while the
// fake clock, for which the shutdown waits, stands still.
func TestCloseEndsWhileMessagesAreRedelivered(t *testing.T) {
	inBubble(t, func(t *testing.T, srv *embedded.Server, js jetstream.JetStream) {
		for round := range 10 {
			name := fmt.Sprint("S", round)
			s := createStream(t, js, jetstream.StreamConfig{Name: name, Subjects: []string{name}})
			for i := range 20 {
				publish(t, js, name, fmt.Sprint(i))
			}
			nc, inbox := js.Conn(), nats.NewInbox()
			if _, err := nc.Subscribe(inbox, func(*nats.Msg) {}); err != nil {
				t.Fatal(err)
			}
			for i := range 5 {
				durable := fmt.Sprint("c", i)
				_, err := s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{
					Durable: durable, AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Millisecond,
				})
				if err != nil {
					t.Fatal(err)
				}
				// Nobody acks: the pull stays open and everything comes back.
				err = nc.PublishRequest("$JS.API.CONSUMER.MSG.NEXT."+name+"."+durable, inbox, []byte(`{"batch":100000}`))
				if err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(time.Duration(20+7*round) * time.Millisecond)
			if err := srv.Close(); err != nil {
				t.Fatal(err)
			}
			nc.Close()
			if err := srv.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
			js = connect(t, srv)
		}
	})
}
