package dlq

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// An account that runs the router and keeps the letters, beside the one that has
// the events, on a server in a JetStream domain. What APP exports is all that OPS
// needs: advisories to route, the API of the event stream to read, remove and
// look, and the events' subjects to replay.
const twoAccounts = `
jetstream { store_dir: %q, domain: hub }
accounts {
  APP {
    jetstream: enabled
    users: [{user: app, password: a}]
    exports: [
      {stream: "$JS.EVENT.ADVISORY.CONSUMER.>"}
      {service: "$JS.API.STREAM.INFO.EVENTS"}
      {service: "$JS.API.STREAM.MSG.GET.EVENTS"}
      {service: "$JS.API.STREAM.MSG.DELETE.EVENTS"}
      {service: "$JS.API.CONSUMER.LIST.EVENTS"}
      {service: "$JS.API.CONSUMER.INFO.EVENTS.*"}
      {service: "events.>"}
    ]
  }
  OPS {
    jetstream: enabled
    users: [{user: ops, password: o}]
    imports: [
      {stream: {account: APP, subject: "$JS.EVENT.ADVISORY.CONSUMER.>"}, prefix: app}
      {service: {account: APP, subject: "$JS.API.STREAM.INFO.EVENTS"}, to: "app.$JS.API.STREAM.INFO.EVENTS"}
      {service: {account: APP, subject: "$JS.API.STREAM.MSG.GET.EVENTS"}, to: "app.$JS.API.STREAM.MSG.GET.EVENTS"}
      {service: {account: APP, subject: "$JS.API.STREAM.MSG.DELETE.EVENTS"}, to: "app.$JS.API.STREAM.MSG.DELETE.EVENTS"}
      {service: {account: APP, subject: "$JS.API.CONSUMER.LIST.EVENTS"}, to: "app.$JS.API.CONSUMER.LIST.EVENTS"}
      {service: {account: APP, subject: "$JS.API.CONSUMER.INFO.EVENTS.*"}, to: "app.$JS.API.CONSUMER.INFO.EVENTS.*"}
      {service: {account: APP, subject: "events.>"}}
    ]
  }
}
`

// inAccounts runs f with the two accounts, APP's event stream adjusted.
func inAccounts(t *testing.T, f func(t *testing.T, app, ops *world), adjust ...func(*jetstream.StreamConfig)) {
	t.Helper()
	dir := t.TempDir()
	dropTimers()
	t.Cleanup(dropTimers)
	synctest.Test(t, func(t *testing.T) {
		conf := filepath.Join(dir, "nats.conf")
		if err := os.WriteFile(conf, fmt.Appendf(nil, twoAccounts, dir), 0o600); err != nil {
			t.Fatal(err)
		}
		opts, err := server.ProcessConfigFile(conf)
		if err != nil {
			t.Fatal(err)
		}
		opts.DontListen, opts.NoLog, opts.NoSigs = true, true, true
		srv, err := server.NewServer(opts)
		if err != nil {
			t.Fatal(err)
		}
		srv.Start()
		t.Cleanup(func() { srv.Shutdown(); srv.WaitForShutdown() })
		connect := func(user, password string) *nats.Conn {
			nc, err := nats.Connect("", nats.InProcessServer(srv), nats.UserInfo(user, password))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(nc.Close)
			return nc
		}
		app, ops := &world{t: t}, &world{t: t}
		if app.js, err = jetstream.New(connect("app", "a")); err != nil {
			t.Fatal(err)
		}
		app.events = app.createEvents(adjust...)
		nc := connect("ops", "o")
		if ops.js, err = jetstream.New(nc); err != nil {
			t.Fatal(err)
		}
		events, err := jetstream.NewWithAPIPrefix(nc, "app.$JS.API")
		if err != nil {
			t.Fatal(err)
		}
		ops.letters = ops.newLetters(ops.js, Config{AdvisoryPrefix: "app", Events: events})
		if diffs, err := ops.letters.Setup(t.Context(), "EVENTS"); err != nil || len(diffs) > 0 {
			t.Fatalf("Setup() = %q, %v, want no differences and no error", diffs, err)
		}
		f(t, app, ops)
	})
}

// dropTimers empties nats.go's pool of timers, which bubbles may not share: package
// embedded does it for servers of its own. A pool survives one collection, not two.
func dropTimers() {
	runtime.GC()
	runtime.GC()
}

func TestRouterInAnotherAccountParksAndReplays(t *testing.T) {
	for _, retention := range []jetstream.RetentionPolicy{jetstream.LimitsPolicy, jetstream.WorkQueuePolicy} {
		inAccounts(t, func(t *testing.T, app, ops *world) {
			ops.runRouter(ops.letters, RouterConfig{})
			c := app.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 2})
			f := app.event("c", "events.a", "k1", []byte("x"), "X-App", "a")
			app.exhaust(c)
			ops.wantRouted("router-app-EVENTS")
			l := ops.wantState(ownID(f), StateOpen)
			if string(l.Payload) != "x" || l.Header["X-App"][0] != "a" || l.Deliveries != 2 {
				t.Errorf("%v: letter = %+v, want all of the original", retention, l)
			}
			ops.replay(l.ID)
			if m := app.next(c); m == nil || string(m.Data()) != "x" || m.Headers().Get(jetbox.HeaderLetter) != l.ID || m.Ack() != nil {
				t.Fatalf("%v: the replay did not arrive", retention)
			}
			// A replay that is taken over looks in the other account.
			dying := ops.newLetters(ops.js, ops.letters.cfg)
			dying.testOnlyCrash = func(at string) error {
				if at == "replay published" {
					return errKilled
				}
				return nil
			}
			g := app.event("c", "events.b", "k2", []byte("y"))
			app.exhaust(c)
			ops.wantRouted("router-app-EVENTS")
			_, _ = dying.Replay(t.Context(), ownID(g))
			ops.wantState(ownID(g), StateReplaying)
			time.Sleep(time.Hour)
			ops.replay(ownID(g))
			if m := app.next(c); m == nil || string(m.Data()) != "y" {
				t.Errorf("%v: the second replay did not arrive", retention)
			}
			if m := app.next(c); m != nil {
				t.Errorf("%v: the second replay arrived twice", retention)
			}
		}, func(c *jetstream.StreamConfig) { c.Retention = retention })
	}
}

// The sweep works through the imported API as well.
func TestSweepInAnotherAccount(t *testing.T) {
	inAccounts(t, func(t *testing.T, app, ops *world) {
		c := app.newConsumer(jetstream.ConsumerConfig{Durable: "c", MaxDeliver: 1})
		var f jetbox.Failure
		ops.unheard(func() {
			f = app.event("c", "events.a", "k1", []byte("x"))
			app.exhaust(c)
		})
		ops.runRouter(ops.letters, RouterConfig{})
		time.Sleep(time.Minute)
		ops.wantState(ownID(f), StateOpen)
		app.wantMsgs("EVENTS", 0)
	}, workQueue)
}

// The account's own advisories, and those of a stream of that name in another
// domain, are not its business.
func TestAdvisoriesFromElsewhereAreNotRouted(t *testing.T) {
	inAccounts(t, func(t *testing.T, app, ops *world) {
		ops.runRouter(ops.letters, RouterConfig{})
		app.event("c", "events.a", "k1", []byte("x"))
		now := time.Now().Add(time.Second).UTC().Format(time.RFC3339Nano)
		for _, domain := range []string{"", `,"domain":"leaf"`} {
			ops.advise("app."+maxDeliveriesSubject+".EVENTS.c",
				fmt.Sprintf(`{"type":%q,"timestamp":%q,"stream":"EVENTS","consumer":"c","stream_seq":1,"deliveries":1%s}`, typeMaxDeliveries, now, domain))
		}
		ops.wantRouted("router-app-EVENTS")
		ops.wantMsgs("DLQ", 0)
		ops.advise("app."+maxDeliveriesSubject+".EVENTS.c",
			fmt.Sprintf(`{"type":%q,"timestamp":%q,"stream":"EVENTS","consumer":"c","stream_seq":1,"deliveries":1,"domain":"hub"}`, typeMaxDeliveries, now))
		ops.wantRouted("router-app-EVENTS")
		ops.wantMsgs("DLQ", 1)
	})
}
