package jetbox_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// The tests of the files beyond_*: one copy and order per key on a stream that has
// forgotten the message IDs when rows of unknown outcome are sent again, with an outbox
// in PostgreSQL and relays in processes of their own.

// forgotten is the duplicate window of those streams: as the issue says where chaos
// runs at length, and less for a short run, which it makes no easier.
func forgotten() time.Duration {
	if *chaosFor > 0 {
		return 2 * time.Second
	}
	return 500 * time.Millisecond
}

// forgetful is such a stream, where fast batches are on or off.
func forgetful(fast bool) jetstream.StreamConfig {
	return jetstream.StreamConfig{Duplicates: forgotten(), AllowBatchPublish: fast}
}

// engines runs a test with each of the relay's two ways to publish.
func engines(t *testing.T, f func(t *testing.T, fast bool)) {
	t.Helper()
	for _, fast := range []bool{false, true} {
		name := "one puback each"
		if fast {
			name = "fast batch"
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(t, fast)
		})
	}
}

// scaled is how many of something there are: few, or many where chaos runs at length,
// and all that the issue asks for from half a minute on.
func scaled(few, many, all int) int {
	switch {
	case *chaosFor == 0:
		return few
	case *chaosFor < 30*time.Second:
		return many
	}
	return all
}

// newForgetful starts the outbox, the broker and its stream.
func newForgetful(t *testing.T, fast bool) *several {
	t.Helper()
	return newSeveralOn(t, pgtest.URL(t), 500*time.Millisecond, forgetful(fast))
}

// insertKeyed commits n rows of so many keys, one in three of them without a key.
func (s *several) insertKeyed(prefix string, n, keys int) {
	s.t.Helper()
	s.exec(`INSERT INTO outbox (event_id, subject, aggregate_id, payload)
		SELECT $1 || g, 'events.a', CASE WHEN g % 3 > 0 THEN 'k' || g % $3::int END, ($1 || g)::bytea FROM generate_series(1, $2) g`,
		prefix, n, keys)
}

// foreign stores messages of other publishers.
func (s *several) foreign(n int) {
	s.t.Helper()
	for i := range n {
		_, err := s.js.PublishAsync("events.other", []byte("other"), jetstream.WithStallWait(patience))
		s.must(err)
		if i%1000 == 999 {
			<-s.js.PublishAsyncComplete()
		}
	}
	<-s.js.PublishAsyncComplete()
}

// onStream is how many messages the stream has.
func (s *several) onStream() int {
	s.t.Helper()
	stream, err := s.js.Stream(s.t.Context(), "EVENTS")
	s.must(err)
	return int(stream.CachedInfo().State.Msgs)
}

// awaitOnStream waits until the stream has at least so many.
func (s *several) awaitOnStream(n int) {
	s.t.Helper()
	s.await(fmt.Sprintf("%d messages on the stream", n), patience, func() (string, bool) {
		got := s.onStream()
		return fmt.Sprintf("%d, %+v", got, s.stats()), got >= n
	})
}

// verifyOurs waits for the drain and fails the test unless the stream has, of all but
// the messages of others, every row once and each key in its order, and no row was sent
// on good faith.
func (s *several) verifyOurs(others int) {
	s.t.Helper()
	s.awaitDrained()
	run := sharedRun{committed: make(map[string]bool), table: s.table()}
	for _, row := range run.table {
		run.committed[row.msgID] = row.status == "DEAD_LETTER"
	}
	for _, m := range s.stored() {
		if m.data != "other" {
			run.stream = append(run.stream, m)
		}
	}
	if v := run.check(); len(v) > 0 {
		s.t.Fatalf("%d violations:\n%s", len(v), strings.Join(v[:min(len(v), 20)], "\n"))
	}
	if n := s.onStream(); n != len(run.stream)+others {
		s.t.Fatalf("%d messages on the stream, %d of them ours, want %d of others", n, len(run.stream), others)
	}
	if n := strings.Count(s.said(), resent); n > 0 {
		s.t.Errorf("%d rows were sent again unverified, on a stream that has everything", n)
	}
}

// said is what the relays have logged.
func (s *several) said() string {
	s.t.Helper()
	text, err := os.ReadFile(s.log.Name())
	s.must(err)
	return string(text)
}

// looked fails the test unless relays have looked for rows.
func (s *several) looked() {
	s.t.Helper()
	if !strings.Contains(s.said(), "looked on the stream for events of unknown outcome") {
		s.t.Error("no relay has looked for anything: the test shows nothing")
	}
}

// usedEngine fails the test unless the relays have used the engine that it is about.
func (s *several) usedEngine(fast bool) {
	s.t.Helper()
	if said := s.said(); strings.Contains(said, `engine="fast batch"`) != fast {
		s.t.Errorf("fast batches were used: %v, want %v", !fast, fast)
	}
}

// loseAcks stores rows whose PubAcks a relay does not get, and returns it with the gate
// that holds them back. Of the rows at least so many are on the stream.
func (s *several) loseAcks(rows, keys, stored int) (cmd *exec.Cmd, g *gate) {
	s.t.Helper()
	g = newGate(s.t, s.child.Broker)
	cmd = s.startBehind(g)
	s.awaitShares(patience)
	s.insert("first", 20)
	s.awaitStored(20, patience)
	g.hold(fromBroker)
	s.insertKeyed("row", rows, keys)
	s.awaitOnStream(20 + stored)
	return cmd, g
}

// peak is the most memory that a process has had, in bytes; 0 where nobody tells.
func peak(cmd *exec.Cmd) (bytes int64) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(text), "VmHWM:")
	_, _ = fmt.Sscanf(rest, "%d", &bytes)
	return bytes << 10
}
