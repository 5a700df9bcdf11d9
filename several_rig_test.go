package jetbox_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
)

// several is an outbox in PostgreSQL, a broker in this process, and relays in
// processes of their own that share the outbox.
type several struct {
	t     *testing.T
	child child
	store *postgres.Store // to look with
	pool  *pgxpool.Pool   // the writers'
	nc    *nats.Conn
	js    jetstream.JetStream
	alive []*exec.Cmd
	dir   string // what stays after a failure
	log   *os.File

	acks, duplicates atomic.Int64 // PubAcks that the broker has sent
}

// patience bounds waits whose length says nothing.
const patience = time.Minute

// newSeveral makes the stream as relay run does, with fast batches.
func newSeveral(t *testing.T, url string, lease time.Duration) *several {
	t.Helper()
	return newSeveralOn(t, url, lease, jetstream.StreamConfig{AllowBatchPublish: true})
}

func newSeveralOn(t *testing.T, url string, lease time.Duration, stream jetstream.StreamConfig) *several {
	t.Helper()
	srv := embedded.RunTest(t, func(c *embedded.Config) { c.Listen = "127.0.0.1:0" })
	return newSeveralAt(t, url, lease, stream, srv.ClientURL())
}

// newSeveralAt makes the stream on a broker that runs already, or finds it there.
func newSeveralAt(t *testing.T, url string, lease time.Duration, stream jetstream.StreamConfig, broker string) *several {
	t.Helper()
	ctx := t.Context()
	s := &several{t: t, child: child{Outbox: url, Broker: broker, Lease: lease}}
	var err error
	s.dir, err = os.MkdirTemp("", "jetbox-several-") //nolint:usetesting // it stays after a failure
	s.must(err)
	s.log, err = os.Create(filepath.Join(s.dir, "relays.log"))
	s.must(err)
	s.nc, err = nats.Connect(broker, nats.MaxReconnects(-1))
	s.must(err)
	s.js, err = jetstream.New(s.nc)
	s.must(err)
	stream.Name, stream.Subjects = "EVENTS", []string{"events.>"}
	_, err = s.js.CreateStream(ctx, stream)
	s.must(err)
	// Every PubAck goes to an inbox of the relay that waits for it.
	_, err = s.nc.Subscribe("_INBOX.>", func(m *nats.Msg) {
		if bytes.Contains(m.Data, []byte(`"stream":"EVENTS"`)) && bytes.Contains(m.Data, []byte(`"seq":`)) {
			s.acks.Add(1)
			if bytes.Contains(m.Data, []byte(`"duplicate":`)) {
				s.duplicates.Add(1)
			}
		}
	})
	s.must(err)
	s.connect()
	s.must(s.store.Migrate(ctx))
	t.Cleanup(s.close)
	return s
}

// connect connects to the database.
func (s *several) connect() {
	s.t.Helper()
	ctx := s.t.Context()
	var err error
	s.store, err = postgres.Open(ctx, postgres.Config{URL: s.child.Outbox})
	s.must(err)
	cfg, err := pgxpool.ParseConfig(s.child.Outbox)
	s.must(err)
	cfg.MaxConns = 20
	s.pool, err = pgxpool.NewWithConfig(ctx, cfg)
	s.must(err)
}

func (s *several) close() {
	for _, cmd := range s.alive {
		_ = cmd.Process.Kill() // also when it is stopped
		_ = cmd.Wait()
	}
	s.pool.Close()
	s.must(s.store.Close())
	s.nc.Close()
	s.log.Close()
	if s.t.Failed() {
		text, err := os.ReadFile(s.log.Name())
		lines := strings.Split(string(text), "\n")
		s.t.Logf("left behind: %s; what the relays said last (%v):\n%s", s.dir, err, strings.Join(lines[max(0, len(lines)-20):], "\n"))
		return
	}
	s.must(os.RemoveAll(s.dir))
}

func (s *several) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *several) exec(sql string, args ...any) {
	s.t.Helper()
	_, err := s.pool.Exec(s.t.Context(), sql, args...)
	s.must(err)
}

// start starts n relays.
func (s *several) start(n int) {
	s.t.Helper()
	for range n {
		s.alive = append(s.alive, s.child.start(s.t, s.log))
	}
}

// end sends a signal to a relay and waits for its end: SIGKILL, or SIGTERM for a
// stop that must be clean.
func (s *several) end(cmd *exec.Cmd, sig os.Signal) {
	s.t.Helper()
	s.must(cmd.Process.Signal(sig))
	err := cmd.Wait()
	if sig == syscall.SIGTERM {
		s.must(err)
		st := s.stats()
		if slices.ContainsFunc(st.Leases, func(l jetbox.Lease) bool { return isOf(l, cmd) }) {
			s.t.Errorf("relay %d has stopped and keeps its lease: %+v", cmd.Process.Pid, st)
		}
	}
	s.alive = slices.DeleteFunc(s.alive, func(c *exec.Cmd) bool { return c == cmd })
}

// random returns one of the relays that are alive.
func (s *several) random(r *rand.Rand) *exec.Cmd { return s.alive[r.IntN(len(s.alive))] }

// await polls a condition, which returns what it sees for the failure.
func (s *several) await(what string, limit time.Duration, done func() (state string, ok bool)) (took time.Duration) {
	s.t.Helper()
	for begin := time.Now(); ; {
		state, ok := done()
		if took = time.Since(begin); ok {
			return took
		}
		if took > limit {
			s.t.Fatalf("not within %v: %s; last seen: %s", limit, what, state)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (s *several) stats() outbox.Stats {
	s.t.Helper()
	st, err := s.store.Stats(s.t.Context())
	s.must(err)
	return st
}

func isOf(l jetbox.Lease, cmd *exec.Cmd) (is bool) {
	return strings.HasSuffix(l.Holder, fmt.Sprintf(" pid %d", cmd.Process.Pid))
}

// awaitShares waits until the relays alive, and no other, share all shards fairly.
func (s *several) awaitShares(limit time.Duration) (took time.Duration) {
	s.t.Helper()
	return s.await(fmt.Sprintf("%d relays share the shards", len(s.alive)), limit, func() (string, bool) {
		st := s.stats()
		fair, sum := len(st.Leases) == len(s.alive), 0
		for _, cmd := range s.alive {
			i := slices.IndexFunc(st.Leases, func(l jetbox.Lease) bool { return isOf(l, cmd) })
			if i < 0 {
				fair = false
				continue
			}
			n := st.Leases[i].Shards
			sum += n
			fair = fair && n >= st.Shards/len(s.alive) && n <= (st.Shards+len(s.alive)-1)/len(s.alive)
		}
		return fmt.Sprintf("%+v", st), fair && sum == st.Shards
	})
}

// shardsOf returns the shards that a relay holds.
func (s *several) shardsOf(cmd *exec.Cmd) (shards []int16) {
	s.t.Helper()
	rows, err := s.pool.Query(s.t.Context(), `SELECT s.shard FROM outbox_shard s JOIN outbox_relay r USING (owner)
		WHERE r.holder LIKE $1 ORDER BY s.shard`, fmt.Sprintf("%% pid %d", cmd.Process.Pid))
	s.must(err)
	defer rows.Close()
	for rows.Next() {
		var n int16
		s.must(rows.Scan(&n))
		shards = append(shards, n)
	}
	s.must(rows.Err())
	return shards
}

// awaitDrained waits until no row is pending.
func (s *several) awaitDrained() (took time.Duration) {
	s.t.Helper()
	return s.await("no row pending", 2*patience, func() (string, bool) {
		st := s.stats()
		return fmt.Sprintf("%+v", st), st.Pending == 0
	})
}

// stored reads the stream.
func (s *several) stored() (msgs []sharedMsg) {
	s.t.Helper()
	ctx := s.t.Context()
	stream, err := s.js.Stream(ctx, "EVENTS")
	s.must(err)
	c, err := s.js.OrderedConsumer(ctx, "EVENTS", jetstream.OrderedConsumerConfig{})
	s.must(err)
	it, err := c.Messages()
	s.must(err)
	defer it.Stop()
	for range stream.CachedInfo().State.Msgs {
		m, err := it.Next()
		s.must(err)
		meta, err := m.Metadata()
		s.must(err)
		msgs = append(msgs, sharedMsg{meta.Sequence.Stream, m.Headers().Get(jetbox.HeaderMsgID), string(m.Data())})
	}
	return msgs
}

// table reads the outbox.
func (s *several) table() (table []sharedRow) {
	s.t.Helper()
	rows, err := s.pool.Query(s.t.Context(), `SELECT id, event_id, coalesce(aggregate_id, ''), status, coalesce(last_error, ''),
		coalesce(stream_seq, 0) FROM outbox ORDER BY id`)
	s.must(err)
	defer rows.Close()
	for rows.Next() {
		var r sharedRow
		s.must(rows.Scan(&r.id, &r.msgID, &r.key, &r.status, &r.lastError, &r.seq))
		table = append(table, r)
	}
	s.must(rows.Err())
	return table
}

// settled are the rows that a relay is done with.
const settled = `status <> 'PENDING'`

// dump returns all that a relay may write of the rows under a condition, by id.
func (s *several) dump(condition string) map[int64]string {
	s.t.Helper()
	rows, err := s.pool.Query(s.t.Context(), `SELECT id, concat_ws('|', status, attempts, last_error, available_at, published_at, stream, stream_seq)
		FROM outbox WHERE `+condition)
	s.must(err)
	defer rows.Close()
	recorded := make(map[int64]string)
	for rows.Next() {
		var id int64
		var text string
		s.must(rows.Scan(&id, &text))
		recorded[id] = text
	}
	s.must(rows.Err())
	return recorded
}

// wantUnchanged compares two dumps.
func (s *several) wantUnchanged(before, after map[int64]string) {
	s.t.Helper()
	for id, was := range before {
		if is := after[id]; is != was {
			s.t.Errorf("row %d was recorded as %q, and later as %q", id, was, is)
		}
	}
}

// verify waits for the drain, and checks what is there after it: the invariants of
// sharedRun.check, no row pending or claimed, and no lease but those of the living.
func (s *several) verify(w *sharedWriters) {
	s.t.Helper()
	s.awaitDrained()
	s.awaitShares(2*s.child.Lease + patience/4)
	if st := s.stats(); st.Pending != 0 || st.Claimed != 0 {
		s.t.Fatalf("after the drain: %+v", st)
	}
	for _, table := range []string{"outbox_queue", "outbox_wait"} {
		var n int
		s.must(s.pool.QueryRow(s.t.Context(), "SELECT count(*) FROM "+table).Scan(&n))
		if n != 0 {
			s.t.Errorf("%d rows in %s after the drain", n, table)
		}
	}
	run := sharedRun{committed: w.committed, rolledBack: w.rolledBack, table: s.table(), stream: s.stored()}
	if v := run.check(); len(v) > 0 {
		s.keep("committed.json", w.committed)
		s.keep("table.txt", fmt.Sprintf("%+v", run.table))
		s.keep("stream.txt", fmt.Sprintf("%+v", run.stream))
		s.t.Fatalf("%d violations, see %s:\n%s", len(v), s.dir, strings.Join(v[:min(len(v), 20)], "\n"))
	}
}

// keep writes what explains a failure.
func (s *several) keep(name string, what any) {
	text, err := json.Marshal(what)
	if err == nil {
		err = os.WriteFile(filepath.Join(s.dir, name), text, 0o600)
	}
	if err != nil {
		s.t.Errorf("keep %s: %v", name, err)
	}
}

// pause sleeps: outside a bubble, where the time that passes is the point.
func pause(ctx context.Context, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	<-ctx.Done()
}
