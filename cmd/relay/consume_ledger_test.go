package main

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/dlq"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// The ledger in PostgreSQL: what succeeded is not run again, also by the next
// process, which finds the same message under the same key.
func TestConsumeExecWithLedgerInPostgres(t *testing.T) {
	t.Parallel()
	needShell(t)
	r := startRun(t)
	url := pgtest.URL(t)
	consume := func() *proc {
		return start(t, r.dir, "consume", "--durable", "d", "--nats", r.nats, "--ledger", url, "--exec", `cat >> log; echo >> log`)
	}
	log := func() string {
		b, _ := os.ReadFile(filepath.Join(r.dir, "log")) // not there yet
		return string(b)
	}
	first := consume()
	once(t, r.dir, "emit", "events.a", "good", "--key", "k1")
	eventuallySQL(t, url, `SELECT to_regclass('jetbox_ledger') IS NOT NULL`)
	eventuallySQL(t, url, `SELECT count(*) = 1 FROM jetbox_ledger WHERE consumer = 'EVENTS/d' AND key = 'k1'`)
	first.signal(t, syscall.SIGTERM)
	if code := first.wait(t); code != exitFine {
		t.Errorf("consume ended with %d", code)
	}
	if err := connectJS(t, r.nats).DeleteConsumer(t.Context(), "EVENTS", "d"); err != nil {
		t.Fatal(err)
	}
	consume()
	once(t, r.dir, "emit", "events.a", "last", "--key", "k2")
	eventually(t, "the last event", func() (bool, string) { return strings.Contains(log(), "last\n"), log() })
	if got := log(); got != "good\nlast\n" {
		t.Errorf("run were %q, want each event once", got)
	}
}

// fakeLedger fails on request: a real database does not do so between two calls.
type fakeLedger struct {
	doFunc func() error

	mu   sync.Mutex
	keys map[string]bool // guarded by mu
}

func (l *fakeLedger) Do(ctx context.Context, name, key string, apply func(context.Context, *sql.Tx) error) (bool, error) {
	if err := errors.Join(ctx.Err(), l.doFunc(), apply(ctx, nil)); err != nil {
		return false, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.keys[name+" "+key] = true
	return false, nil
}

func (l *fakeLedger) Seen(_ context.Context, name, key string) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.keys[name+" "+key], nil
}

func (l *fakeLedger) Run(context.Context) error { return nil }

// What has happened is noted also when time is up; what failed is not; and when
// it cannot be noted, the event is settled all the same.
func TestLedgerIsToldWhatHappened(t *testing.T) {
	t.Parallel()
	down := errors.New("database down")
	var broken error
	l := &fakeLedger{keys: map[string]bool{}, doFunc: func() error { return broken }}
	var log strings.Builder
	var runs int
	var result error
	ctx, cancel := context.WithCancel(t.Context())
	h := besideLedger(l, slog.New(slog.NewTextHandler(&log, nil)), func(context.Context, *consumer.Delivery) error {
		runs++
		cancel()
		return result
	})
	result = errors.New("busy")
	if err := h(ctx, delivery("")); !errors.Is(err, result) {
		t.Errorf("failing: %v, want the handler's error", err)
	}
	result, broken = nil, down
	if err := h(context.WithoutCancel(ctx), delivery("")); err != nil || !strings.Contains(log.String(), "database down") {
		t.Errorf("succeeding with a ledger that is down: %v, want success and a warning; logged %q", err, log.String())
	}
	broken = nil
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	if err := h(ctx, delivery("")); err != nil {
		t.Errorf("succeeding as time is up: %v", err)
	}
	if err := h(context.WithoutCancel(ctx), delivery("")); err != nil || runs != 3 {
		t.Errorf("after it: %v, and %d runs, want 3", err, runs)
	}
}

// An entry is needed for as long as its message may be delivered again: from
// the oldest unsettled message on, or the oldest letter that may be replayed.
func TestLedgerKeepsWhatMayComeBack(t *testing.T) {
	// Not parallel: on a fake clock, with a broker.
	synctest.Test(t, func(t *testing.T) {
		srv := embedded.RunTest(t)
		nc, err := srv.Connect()
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		_, err = js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}})
		if err != nil {
			t.Fatal(err)
		}
		letters, err := dlq.New(js, dlq.Config{})
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		var oldest time.Time
		keep := keeper(func(context.Context) (time.Time, error) { return oldest, nil }, letters, "EVENTS", "d")
		if got, err := keep(t.Context(), "EVENTS/d"); err != nil || !got.Equal(time.Unix(0, 0)) {
			t.Errorf("the first time: keep from %v, %v, want all", got, err)
		}
		// What the answer before needed is in the next one too.
		check := func(what string, want time.Time) {
			t.Helper()
			_, err := keep(t.Context(), "EVENTS/d")
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
			got, err := keep(t.Context(), "EVENTS/d")
			if err != nil || !got.Equal(want) {
				t.Errorf("%s: keep from %v, %v, want %v", what, got, err, want)
			}
		}
		check("there are no streams of letters", time.Time{})
		if _, err := letters.Setup(t.Context(), "EVENTS"); err != nil {
			t.Fatal(err)
		}
		check("nothing is open", time.Time{})
		oldest = start.Add(-time.Hour)
		check("an old message", oldest)
		ack, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: "events.a", Header: nats.Header{"Idempotency-Key": {"k"}}})
		if err != nil {
			t.Fatal(err)
		}
		f := jetbox.Failure{
			Stream: "EVENTS", Consumer: "d", Seq: ack.Sequence, Stored: start.Add(-3 * time.Hour), Subject: "events.a",
			Header: map[string][]string{"Idempotency-Key": {"k"}}, Deliveries: 5, Reason: jetbox.ReasonMaxDeliveries, Err: "x",
		}
		if err := letters.Park(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		check("an open letter that is older", f.Stored)
		oldest = start.Add(-4 * time.Hour)
		check("an open letter that is younger", oldest)
		other := f
		other.Consumer, other.Stored = "other", start.Add(-9*time.Hour)
		if err := letters.Park(t.Context(), other); err != nil {
			t.Fatal(err)
		}
		check("another consumer's letter", oldest)
		if got, err := keep(t.Context(), "EVENTS/other"); err != nil || got.IsZero() || got.After(start.Add(-1000*time.Hour)) {
			t.Errorf("another consumer's entries are kept from %v, %v, want all", got, err)
		}

		time.Sleep(time.Minute)
		for l, err := range letters.List(t.Context(), dlq.Filter{Consumer: "d"}) {
			if err != nil {
				t.Fatal(err)
			}
			if _, err := letters.Replay(t.Context(), l.ID); err != nil {
				t.Fatal(err)
			}
		}
		oldest = start.Add(time.Minute) // the replay itself
		check("a replay that is not settled", f.Stored)
		oldest = time.Time{}
		check("a replay that came after nothing was to be delivered", f.Stored)
		oldest = time.Now().Add(30 * time.Second)
		check("a replay whose message may have another clock's time", f.Stored)
		time.Sleep(2 * time.Minute)
		oldest = time.Now()
		if got, err := keep(t.Context(), "EVENTS/d"); err != nil || !got.Equal(f.Stored) {
			t.Errorf("a replay that was not settled when last asked: keep from %v, %v, want %v", got, err, f.Stored)
		}
		check("a replay that is settled", oldest)
		oldest = time.Time{}
		check("everything is settled", time.Time{})
		srv.Close()
		if _, err := keep(t.Context(), "EVENTS/d"); err == nil {
			t.Error("without a broker nobody knows, want an error")
		}
	})
}
