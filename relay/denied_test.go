package relay_test

import (
	"fmt"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// Catalog BR-38: rows on a few subjects that the user may not publish to cost
// every batch the whole wait for a PubAck, and all other keys with it: a few rows
// a second.
func TestDeniedSubjectsDoNotHoldUpTheOthers(t *testing.T) {
	dir, storeDir := t.TempDir(), t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, path: filepath.Join(dir, "app.db")}
		srv, err := server.NewServer(&server.Options{
			DontListen: true, JetStream: true, StoreDir: storeDir, NoLog: true, NoSigs: true,
			Users: []*server.User{
				{Username: "admin", Password: "a"},
				{Username: "relay", Password: "r", Permissions: &server.Permissions{
					Publish: &server.SubjectPermission{Deny: []string{"events.secret.>"}},
				}},
			},
		})
		r.must(err)
		srv.Start()
		defer srv.WaitForShutdown()
		defer srv.Shutdown()
		connect := func(user, password string) jetstream.JetStream {
			nc, err := nats.Connect("", nats.InProcessServer(srv), nats.UserInfo(user, password), nats.MaxReconnects(-1),
				nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
			r.must(err)
			t.Cleanup(nc.Close)
			js, err := jetstream.New(nc)
			r.must(err)
			return js
		}
		r.js, r.admin = connect("relay", "r"), connect("admin", "a")
		_, err = r.admin.CreateStream(t.Context(), jetstream.StreamConfig{
			Name: "EVENTS", Subjects: []string{"events.>"}, Storage: jetstream.MemoryStorage,
		})
		r.must(err)
		r.store = r.open()
		defer r.store.Close()
		r.must(r.store.Migrate(t.Context()))

		const denied = 20
		for i := range denied {
			r.append(event(fmt.Sprint("events.secret.", i), fmt.Sprint("s", i), "x"))
		}
		rel, stop := r.start(r.store, relay.Config{})
		defer stop()
		time.Sleep(3 * time.Second)
		r.wantHealth(rel, false, "permission")
		for i := range 30 {
			for n := range 10 {
				r.append(event("events.a", fmt.Sprint("k", n%2), "x"))
			}
			time.Sleep(time.Second)
			if got, want := r.count("PUBLISHED"), 10*(i+1); got != want {
				t.Fatalf("after %d s %d rows of other subjects are published, want %d", i+1, got, want)
			}
		}
		r.wantHealth(rel, true, "")
		for id := range int64(denied) {
			r.wantState(id+1, jetbox.Pending, "permission to publish refused for subject events.secret.")
			if e := r.show(id + 1); e.Attempts != 0 {
				t.Fatalf("row %d has %d attempts: a missing permission is not its own failure", e.ID, e.Attempts)
			}
		}
	})
}
