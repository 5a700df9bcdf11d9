package relay_test

import (
	"fmt"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// latest is the broker as it runs now. To reload its options is no way to change them
// here: the server has a data race with its own timers then (nats-server 2.15).
type latest struct{ atomic.Pointer[server.Server] }

func (l *latest) InProcessConn() (net.Conn, error) { return l.Load().InProcessConn() }

// inDenied runs f with a broker that lets the relay publish to everything but what is
// denied, and grant, which takes that back with a restart.
func inDenied(t *testing.T, stream jetstream.StreamConfig, denied []string, f func(r *rig, grant func())) {
	t.Helper()
	dir, storeDir := t.TempDir(), t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, path: filepath.Join(dir, "app.db")}
		var srv latest
		run := func(denied ...string) {
			s, err := server.NewServer(&server.Options{
				DontListen: true, JetStream: true, StoreDir: storeDir, NoLog: true, NoSigs: true, SyncInterval: time.Hour,
				Users: []*server.User{
					{Username: "admin", Password: "a"},
					{Username: "relay", Password: "r", Permissions: &server.Permissions{
						Publish: &server.SubjectPermission{Deny: denied},
					}},
				},
			})
			r.must(err)
			s.Start()
			srv.Store(s)
		}
		stop := func() {
			srv.Load().Shutdown()
			srv.Load().WaitForShutdown()
		}
		run(denied...)
		defer stop()
		connect := func(user, password string) jetstream.JetStream {
			nc, err := nats.Connect("", nats.InProcessServer(&srv), nats.UserInfo(user, password), nats.MaxReconnects(-1),
				nats.ReconnectBufSize(-1), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
			r.must(err)
			t.Cleanup(nc.Close)
			js, err := jetstream.New(nc)
			r.must(err)
			return js
		}
		r.js, r.admin = connect("relay", "r"), connect("admin", "a")
		stream.Name, stream.Subjects = "EVENTS", []string{"events.>"}
		_, err := r.admin.CreateStream(t.Context(), stream)
		r.must(err)
		r.store = r.open()
		defer r.store.Close()
		r.must(r.store.Migrate(t.Context()))
		f(r, func() { stop(); run(); time.Sleep(5 * time.Second) })
	})
	// A timer of the bubble that nats.go keeps for the process ends it when a later test
	// draws it; see embedded.RunTest.
	runtime.GC()
	runtime.GC()
}

// A user who may have no consumer on the stream looks message by message.
func TestLookWithoutTheRightToAConsumer(t *testing.T) {
	for _, denied := range []string{"$JS.API.CONSUMER.>", "$JS.API.CONSUMER.MSG.NEXT.>"} {
		t.Run(denied, func(t *testing.T) {
			inDenied(t, jetstream.StreamConfig{}, []string{denied}, func(r *rig, _ func()) {
				want := r.numbers("events.a", "k", 10)
				r.crash()
				time.Sleep(beyond)
				unverified := 0
				_, stop := r.start(r.store, counted(&unverified))
				time.Sleep(time.Minute)
				stop()
				r.wantPayloads(want...)
				r.wantState(10, jetbox.Published, "")
				if unverified > 0 {
					t.Errorf("%d rows were sent again unverified", unverified)
				}
			})
		})
	}
}

// A user who may not read the stream at all cannot find out what it has. The relay says
// so and sends nothing, until it is granted.
func TestRelayThatMayNotLookIsNotReadyAndSendsNothing(t *testing.T) {
	long(t)
	denied := []string{"$JS.API.CONSUMER.>", "$JS.API.STREAM.MSG.GET.>", "$JS.API.DIRECT.GET.>"}
	for name, age := range map[string]time.Duration{
		"beyond the window":  beyond,
		"duplicates therein": 0,
	} {
		for _, direct := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", direct gets ", direct), func(t *testing.T) {
				inDenied(t, jetstream.StreamConfig{AllowDirect: direct}, denied, func(r *rig, grant func()) {
					want := r.numbers("events.a", "k", 10)
					r.crash()
					time.Sleep(age)
					rel, stop := r.start(r.store, relay.Config{})
					defer stop()
					time.Sleep(30 * time.Second)
					r.wantHealth(rel, false, "permission to read the stream refused")
					time.Sleep(10 * time.Second)
					r.wantHealth(rel, false, "permission to read the stream refused")
					r.wantPayloads(want...)
					grant()
					time.Sleep(time.Minute)
					r.wantHealth(rel, true, "")
					r.wantPayloads(want...)
					r.wantState(10, jetbox.Published, "")
				})
			})
		}
	}
}

// A relay that cannot read back its fast batches does without them, and says why.
func TestFastBatchesThatCannotBeReadBackAreGivenUp(t *testing.T) {
	inDenied(t, jetstream.StreamConfig{AllowBatchPublish: true}, []string{"$JS.API.CONSUMER.>"}, func(r *rig, _ func()) {
		log := new(logBook)
		_, stop := r.start(r.store, relay.Config{Logger: log.logger()})
		var want []string
		for i := range 3 {
			_, err := r.admin.Publish(r.t.Context(), "events.other", []byte("other"))
			r.must(err)
			want = append(want, "other")
			want = append(want, r.numbers(fmt.Sprint("events.", i), "k", 30)...)
			time.Sleep(30 * time.Second)
		}
		stop()
		r.wantPayloads(want...)
		if lines := log.lines("cannot be read back"); len(lines) != 1 || !strings.Contains(lines[0], "permission to read the stream refused") {
			t.Errorf("the relay has logged %q, want once why it does without fast batches", lines)
		}
	})
}

// What the server refused to this user is certainly not stored: sent later, it is not
// counted as sent without proof.
func TestDeniedRowsAreNotInDoubt(t *testing.T) {
	inDenied(t, jetstream.StreamConfig{}, []string{"events.secret"}, func(r *rig, grant func()) {
		r.append(event("events.secret", "k", "1"), event("events.a", "k", "2"))
		unverified := 0
		_, stop := r.start(r.store, counted(&unverified))
		time.Sleep(30 * time.Second) // it is tried several times
		r.wantPayloads()
		grant()
		time.Sleep(30 * time.Second)
		stop()
		r.wantPayloads("1", "2")
		if unverified > 0 {
			t.Errorf("%d rows counted as sent again unverified", unverified)
		}
	})
}
