package dlq

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// rights are what each role may publish, and no more than it does in the tests
// below; it may subscribe to its own inbox. The README has them too.
var rights = map[string][]string{
	"relay": {
		"events.>",
		"$JS.API.STREAM.NAMES",
		"$JS.API.STREAM.INFO.EVENTS",
		"$JS.API.STREAM.MSG.GET.EVENTS",
		// To look before it sends; without them it looks message by message.
		"$JS.API.CONSUMER.CREATE.EVENTS.*",
		"$JS.API.CONSUMER.MSG.NEXT.EVENTS.*",
		"$JS.API.CONSUMER.DELETE.EVENTS.*",
	},
	"worker": {
		"$JS.API.CONSUMER.INFO.EVENTS.billing",
		"$JS.API.CONSUMER.MSG.NEXT.EVENTS.billing",
		"$JS.ACK.EVENTS.billing.>",
		"dlq.EVENTS.billing.>",
		"$JS.API.STREAM.MSG.GET.DLQ",
		"$JS.API.STREAM.MSG.DELETE.DLQ", // withdraws intents
	},
	"router": {
		"$JS.API.CONSUMER.INFO.JETBOX_ADVISORIES.router-EVENTS",
		"$JS.API.CONSUMER.MSG.NEXT.JETBOX_ADVISORIES.router-EVENTS",
		"$JS.ACK.JETBOX_ADVISORIES.router-EVENTS.>",
		"$JS.API.STREAM.INFO.EVENTS",
		"$JS.API.STREAM.MSG.GET.EVENTS",
		"dlq.EVENTS.>",
		"$JS.API.STREAM.MSG.GET.DLQ",
		// To find the letter of a message that is gone.
		"$JS.API.STREAM.INFO.DLQ",
		"$JS.API.CONSUMER.CREATE.DLQ.*.dlq.EVENTS.>",
		"$JS.API.CONSUMER.MSG.NEXT.DLQ.*",
		"$JS.API.CONSUMER.INFO.DLQ.*",
		"$JS.API.CONSUMER.DELETE.DLQ.*",
	},
	// What the router needs on top for a work-queue or interest stream.
	"sweeper": {
		"$JS.API.CONSUMER.LIST.EVENTS",
		"$JS.API.STREAM.MSG.DELETE.EVENTS",
	},
	"operator": {
		"$JS.API.STREAM.INFO.DLQ",
		"$JS.API.CONSUMER.CREATE.DLQ.>",
		"$JS.API.CONSUMER.MSG.NEXT.DLQ.*",
		"$JS.API.CONSUMER.INFO.DLQ.*",
		"$JS.API.CONSUMER.DELETE.DLQ.*",
		"$JS.API.STREAM.MSG.GET.DLQ",
		"$JS.API.CONSUMER.INFO.EVENTS.*", // for how long an intent is in hand
		"dlq.EVENTS.>",
		"events.>",
		"$JS.API.STREAM.INFO.EVENTS",
		"$JS.API.STREAM.MSG.DELETE.DLQ", // parts of a letter that is discarded
	},
	// To look for an interrupted replay on a limits stream.
	"looker": {
		"$JS.API.CONSUMER.CREATE.EVENTS.>",
		"$JS.API.CONSUMER.MSG.NEXT.EVENTS.*",
		"$JS.API.CONSUMER.DELETE.EVENTS.*",
	},
	// The same on a work-queue or interest stream, without a consumer.
	"walker": {
		"$JS.API.STREAM.MSG.GET.EVENTS",
	},
}

// guarded is a broker on which every role has its own user.
type guarded struct {
	t     *testing.T
	srv   *server.Server
	admin *world
	dir   string
	users map[string]*watched
}

// watched is the connection of a user: it sees what the user publishes, and may
// lose what the server answers.
type watched struct {
	guarded *guarded
	rights  []string

	mu     sync.Mutex
	deaf   bool            // guarded by mu
	used   map[string]bool // guarded by mu; rights by which something was published
	denied []error         // guarded by mu
}

// inGuarded runs f with a broker where the roles named share a user each, as
// "role" or "role+role".
func inGuarded(t *testing.T, users []string, f func(t *testing.T, g *guarded), adjust ...func(*jetstream.StreamConfig)) {
	t.Helper()
	dir := t.TempDir()
	dropTimers()
	t.Cleanup(dropTimers)
	synctest.Test(t, func(t *testing.T) {
		g := &guarded{t: t, dir: dir, users: map[string]*watched{}}
		opts := &server.Options{
			DontListen: true, JetStream: true, StoreDir: filepath.Join(dir, "store"), NoLog: true, NoSigs: true,
			Users: []*server.User{{Username: "admin", Password: "p"}},
		}
		for _, user := range users {
			w := &watched{guarded: g, used: map[string]bool{}}
			for role := range strings.SplitSeq(user, "+") {
				w.rights = append(w.rights, rights[role]...)
			}
			name, _, _ := strings.Cut(user, "+")
			g.users[name] = w
			opts.Users = append(opts.Users, &server.User{Username: name, Password: "p", Permissions: &server.Permissions{
				Publish:   &server.SubjectPermission{Allow: w.rights},
				Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX_" + name + ".>"}},
			}})
		}
		srv, err := server.NewServer(opts)
		if err != nil {
			t.Fatal(err)
		}
		srv.Start()
		t.Cleanup(func() { srv.Shutdown(); srv.WaitForShutdown() })
		g.srv = srv
		g.admin = &world{t: t}
		nc, err := nats.Connect("", nats.InProcessServer(srv), nats.UserInfo("admin", "p"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		if g.admin.js, err = jetstream.New(nc); err != nil {
			t.Fatal(err)
		}
		g.admin.events = g.admin.createEvents(adjust...)
		g.admin.letters = g.admin.newLetters(g.admin.js, Config{})
		if _, err := g.admin.letters.Setup(t.Context(), "EVENTS"); err != nil {
			t.Fatal(err)
		}
		f(t, g)
		for name, w := range g.users {
			w.check(name)
		}
	})
}

// check fails the test where a user was refused something, or has a right it does
// not use.
func (w *watched) check(name string) {
	w.guarded.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, err := range w.denied[:min(len(w.denied), 3)] {
		w.guarded.t.Errorf("%s: %v", name, err)
	}
	for _, right := range w.rights {
		if !w.used[right] {
			w.guarded.t.Errorf("%s did not use its right to publish on %s", name, right)
		}
	}
}

// as connects a user, with the inbox it may have.
func (g *guarded) as(name string) *world {
	g.t.Helper()
	u := g.users[name]
	nc, err := nats.Connect("", nats.InProcessServer(u), nats.UserInfo(name, "p"), nats.CustomInboxPrefix("_INBOX_"+name),
		nats.ReconnectBufSize(-1), nats.MaxReconnects(-1), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			u.mu.Lock()
			defer u.mu.Unlock()
			u.denied = append(u.denied, err)
		}))
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(nc.Close)
	w := &world{t: g.t, events: g.admin.events}
	if w.js, err = jetstream.New(nc); err != nil {
		g.t.Fatal(err)
	}
	w.letters = w.newLetters(w.js, Config{})
	return w
}

func (w *watched) InProcessConn() (net.Conn, error) {
	conn, err := w.guarded.srv.InProcessConn()
	return &watchedConn{Conn: conn, by: w}, err
}

type watchedConn struct {
	net.Conn
	by   *watched
	rest []byte // of what was written, not yet a whole line or payload
	skip int    // payload still to come
}

func (c *watchedConn) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		c.by.mu.Lock()
		deaf := c.by.deaf
		c.by.mu.Unlock()
		if err != nil || !deaf {
			return n, err
		}
	}
}

// Write notes the subjects of what is published.
func (c *watchedConn) Write(p []byte) (int, error) {
	c.rest = append(c.rest, p...)
	for {
		n := min(c.skip, len(c.rest))
		c.rest, c.skip = c.rest[n:], c.skip-n
		line, rest, whole := bytes.Cut(c.rest, []byte("\r\n"))
		if c.skip > 0 || !whole {
			return c.Conn.Write(p)
		}
		c.rest = rest
		words := strings.Fields(string(line))
		if len(words) > 2 && (words[0] == "PUB" || words[0] == "HPUB") {
			_, _ = fmt.Sscan(words[len(words)-1], &c.skip)
			c.skip += len("\r\n")
			c.by.publishes(words[1])
		}
	}
}

func (w *watched) publishes(subject string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, right := range w.rights {
		if covers(right, subject) {
			w.used[right] = true
		}
	}
}

func (w *watched) setDeaf(deaf bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deaf = deaf
}

// The relay publishes, and after a crash in which the PubAcks were lost looks for
// what it may have sent before it sends again.
func TestRelayWithTheRightsItNeeds(t *testing.T) {
	inGuarded(t, []string{"relay"}, func(t *testing.T, g *guarded) {
		db := filepath.Join(g.dir, "app.db")
		store, err := sqlite.Open(t.Context(), sqlite.Config{Path: db})
		if err != nil {
			t.Fatal(err)
		}
		defer store.Close()
		if err := store.Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		add := func(subject string, n int) {
			for range n {
				tx, err := store.DB().BeginTx(t.Context(), nil)
				if err != nil {
					t.Fatal(err)
				}
				if err := sqlite.Append(t.Context(), tx, &jetbox.Event{Subject: subject, Payload: []byte("x")}); err != nil {
					t.Fatal(err)
				}
				if err := tx.Commit(); err != nil {
					t.Fatal(err)
				}
			}
		}
		start := func() (stop func()) {
			r, err := relay.New(store, g.as("relay").js, relay.Config{DrainTimeout: time.Second, Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- r.Run(ctx) }()
			return func() {
				cancel()
				if err := <-done; err != nil {
					t.Errorf("relay: %v", err)
				}
			}
		}
		stop := start()
		add("events.a", 3)
		time.Sleep(5 * time.Second)
		g.admin.wantMsgs("EVENTS", 3)
		g.users["relay"].setDeaf(true)
		add("events.a", 3)
		time.Sleep(2 * time.Second)
		stop()
		g.users["relay"].setDeaf(false)
		g.admin.wantMsgs("EVENTS", 6)
		time.Sleep(time.Hour)
		stop = start()
		add("events.a", 1)
		add("nowhere.a", 1) // looked up, and found nowhere
		time.Sleep(time.Minute)
		stop()
		g.admin.wantMsgs("EVENTS", 7)
	})
}

// A worker handles, retries, parks and withdraws; the router parks what a foreign
// consumer gave up, before and after it is gone; the operator lists, replays,
// finishes what was interrupted, and discards.
func TestWorkerRouterAndOperatorWithTheRightsTheyNeed(t *testing.T) {
	for _, retention := range []jetstream.RetentionPolicy{jetstream.LimitsPolicy, jetstream.WorkQueuePolicy} {
		t.Run(retention.String(), func(t *testing.T) {
			users := []string{"worker", "router", "operator+looker"}
			if retention != jetstream.LimitsPolicy {
				users = []string{"worker", "router+sweeper", "operator+walker"}
			}
			inGuarded(t, users, func(t *testing.T, g *guarded) {
				g.provision()
				g.work()
				g.operate()
			}, func(c *jetstream.StreamConfig) { c.Retention = retention })
		})
	}
}

// provision makes the consumers, which nobody else may.
func (g *guarded) provision() {
	g.t.Helper()
	g.admin.newConsumer(jetstream.ConsumerConfig{Durable: "billing", MaxDeliver: 3, AckWait: 30 * time.Second, FilterSubject: "events.billing.>"})
	g.admin.newConsumer(jetstream.ConsumerConfig{Durable: "foreign", MaxDeliver: 2, FilterSubject: "events.foreign.>"})
	_, err := g.admin.js.CreateConsumer(g.t.Context(), "JETBOX_ADVISORIES", jetstream.ConsumerConfig{
		Durable: "router-EVENTS", AckPolicy: jetstream.AckExplicitPolicy, MaxDeliver: -1,
		FilterSubject: "$JS.EVENT.ADVISORY.CONSUMER.*.EVENTS.>",
	})
	if err != nil {
		g.t.Fatal(err)
	}
}

// work lets messages fail in every way, and waits until all is parked.
func (g *guarded) work() {
	t, a := g.t, g.admin
	t.Helper()
	worker, router := g.as("worker"), g.as("router")
	mended := errors.New("mended at the last moment")
	h := func(_ context.Context, d *consumer.Delivery) error {
		switch {
		case d.Subject == "events.billing.late" && d.Last, d.Letter != "":
			return nil
		case d.Subject == "events.billing.never":
			return jetbox.Permanent(errors.New("never"))
		default:
			return mended
		}
	}
	c, err := consumer.New(worker.js, h, consumer.Config{
		Stream: "EVENTS", Durable: "billing", MaxDeliver: 3, FilterSubjects: []string{"events.billing.>"}, DeadLetters: worker.letters,
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("consumer: %v", err)
		}
	})
	router.runRouter(router.letters, RouterConfig{})
	publish := func(subject string, payload []byte) (seq uint64) {
		t.Helper()
		ack, err := a.js.Publish(t.Context(), subject, payload)
		if err != nil {
			t.Fatal(err)
		}
		return ack.Sequence
	}
	for _, s := range []string{"never", "late", "bad"} {
		publish("events.billing."+s, []byte(s))
	}
	publish("events.billing.big", make([]byte, 1<<20-300))
	foreign, err := a.js.Consumer(t.Context(), "EVENTS", "foreign")
	if err != nil {
		t.Fatal(err)
	}
	publish("events.foreign.bad", nil)
	a.exhaust(foreign)
	time.Sleep(2 * time.Minute) // its letter is not the last one then
	gone := publish("events.foreign.gone", nil)
	if m := a.next(foreign); m == nil || m.Term() != nil {
		t.Fatal("nothing to terminate")
	}
	_ = a.events.DeleteMsg(t.Context(), gone)
	time.Sleep(5 * time.Minute)
	var got []string
	for _, l := range a.list(Filter{}) {
		got = append(got, strings.TrimPrefix(l.Subject, "events."))
	}
	slices.Sort(got)
	if want := []string{"", "billing.bad", "billing.big", "billing.never", "foreign.bad"}; !slices.Equal(got, want) {
		t.Errorf("letters of %q, want %q", got, want)
	}
}

func (g *guarded) operate() {
	t := g.t
	t.Helper()
	o := g.as("operator")
	f := g.admin.event("billing", "events.none.intent", "i", nil)
	if err := g.admin.letters.Intend(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	if n := len(o.list(Filter{Consumer: "nobody"})); n != 0 {
		t.Errorf("letters of nobody = %d, want 0", n)
	}
	dying := o.newLetters(o.js, Config{})
	dying.testOnlyCrash = func(at string) error {
		if at == "replay published" {
			return errKilled
		}
		return nil
	}
	for _, l := range o.list(Filter{}) {
		switch l.Subject {
		case "":
			if _, err := o.letters.Discard(t.Context(), l.ID); err != nil {
				t.Error(err)
			}
		case "events.billing.big":
			if _, err := o.letters.Discard(t.Context(), l.ID); err != nil {
				t.Error(err)
			}
		case "events.billing.bad":
			if _, err := dying.Replay(t.Context(), l.ID); !errors.Is(err, errKilled) {
				t.Errorf("Replay = %v, want it killed", err)
			}
			time.Sleep(time.Minute)
			o.replay(l.ID)
		default:
			o.replay(l.ID)
		}
	}
	time.Sleep(time.Minute)
	for _, l := range g.admin.list(Filter{States: []State{StateOpen, StateReplaying}}) {
		t.Errorf("letter left: %+v", l)
	}
}
