package main

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// What an operator does about dead rows, chosen by subject and by reason: a key that
// was frozen for one goes on, a retried row keeps its idempotency key, and is stored
// before those of its key that waited behind it.
func TestDeadRowsAreChosenAndTheirFrozenKeysGoOn(t *testing.T) {
	t.Parallel()
	for name, db := range map[string]func(t *testing.T) string{
		"sqlite":   func(t *testing.T) string { t.Helper(); return "sqlite:" + filepath.Join(t.TempDir(), "jetbox.db") },
		"postgres": func(t *testing.T) string { t.Helper(); return pgtest.URL(t) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			retryAndDiscard(t, db(t))
		})
	}
}

func retryAndDiscard(t *testing.T, db string) {
	t.Helper()
	args := []string{"--db", db, "--max-attempts", "1", "--on-dead", "freeze", "--lease", "1s"}
	r := startRun(t, args...)
	relay := func(args ...string) string { t.Helper(); return once(t, r.dir, append(args, "--db", db)...) }
	emit := func(subject, aggregate, key string) {
		t.Helper()
		relay("emit", subject, "x", "--aggregate-type", "order", "--aggregate-id", aggregate, "--key", key)
	}
	published := func(want ...string) {
		t.Helper()
		eventually(t, fmt.Sprint(want, " published"), func() (bool, string) {
			got := relay("outbox", "list", "--status", "PUBLISHED", "--json")
			return strings.Count(got, "\n") == len(want) && !slices.ContainsFunc(want, func(key string) bool {
				return !strings.Contains(got, `"idempotency_key":"`+key+`"`)
			}), relay("outbox", "list")
		})
	}
	emit("nowhere.a", "1", "a1")
	emit("events.a", "1", "a2")
	emit("nowhere.b", "2", "b1")
	emit("events.b", "2", "b2")
	emit("events.c", "3", "c1")
	published("c1")
	eventually(t, "two dead rows", func() (bool, string) {
		got := relay("outbox", "list", "--status", "DEAD_LETTER", "--json")
		return strings.Count(got, "\n") == 2, got
	})

	if out := relay("outbox", "discard", "--subject", "nowhere.b"); out != "1 row discarded\n" {
		t.Errorf("outbox discard printed %q", out)
	}
	published("b2", "c1")

	js := connectJS(t, r.nats)
	if _, err := js.UpdateStream(t.Context(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>", "nowhere.>"}, AllowBatchPublish: true}); err != nil {
		t.Fatal(err)
	}
	var dead struct {
		LastError string `json:"last_error"`
	}
	if err := json.Unmarshal([]byte(relay("outbox", "list", "--status", "DEAD_LETTER", "--json")), &dead); err != nil || dead.LastError == "" {
		t.Fatalf("the dead row's reason is %q, %v", dead.LastError, err)
	}
	// A relay believes for a while that nobody takes a subject: start afresh.
	r.signal(t, syscall.SIGTERM)
	r.wait(t)
	if out := relay("outbox", "retry", "--reason", "another reason"); out != "" {
		t.Errorf("outbox retry for a reason nobody has printed %q", out)
	}
	if out := relay("outbox", "retry", "--reason", dead.LastError[:10]); out != "1 row retried\n" {
		t.Errorf("outbox retry printed %q", out)
	}
	again := startRunIn(t, r.dir, args...)
	published("a1", "a2", "b2", "c1")
	st, err := connectJS(t, again.nats).Stream(t.Context(), "EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	var order []string
	for seq := uint64(1); seq <= st.CachedInfo().State.LastSeq; seq++ {
		m, err := st.GetMsg(t.Context(), seq)
		if err != nil {
			t.Fatal(err)
		}
		order = append(order, m.Header.Get("Nats-Msg-Id"))
	}
	if got := strings.Join(order, " "); got != "c1 b2 a1 a2" {
		t.Errorf("the stream has %q, want %q", got, "c1 b2 a1 a2")
	}
}
