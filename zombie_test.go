//go:build unix

package jetbox_test

import (
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// oneByOne is a stream whose messages are acknowledged each: what a gate holds back
// can then be told message by message.
var oneByOne = jetstream.StreamConfig{}

// startBehind starts a relay whose broker is behind the gate.
func (s *several) startBehind(g *gate) *exec.Cmd {
	s.t.Helper()
	c := s.child
	c.Broker = g.url
	cmd := c.start(s.t, s.log)
	s.alive = append(s.alive, cmd)
	return cmd
}

// A paused relay overwrote what the one that took over had recorded, and what it
// had on its way was sent a second time: BR-10. Here its messages reach the broker
// after the others', some are refused, and then it goes on, wants to record, and to
// send the next row of a key.
func TestPausedRelayWakesUpAndChangesNothing(t *testing.T) {
	t.Parallel()
	s := newSeveralOn(t, pgtest.URL(t), time.Second, oneByOne)
	s.child.Backoff = time.Minute // a row that was refused stays as it is
	_, err := s.js.CreateStream(t.Context(), jetstream.StreamConfig{
		Name: "FULL", Subjects: []string{"full"}, MaxMsgsPerSubject: 1, Discard: jetstream.DiscardNew, DiscardNewPerSubject: true,
	})
	s.must(err)
	insert := func(name, subject string, n int) {
		s.exec(`INSERT INTO outbox (event_id, subject, payload) SELECT $1 || g, $2, ($1 || g)::bytea FROM generate_series(1, $3) g`,
			name, subject, n)
	}
	recorded := func(what string, published, refused, dead int) {
		t.Helper()
		s.await(what+" recorded", patience, func() (string, bool) {
			var p, r, d int
			s.must(s.pool.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE status = 'PUBLISHED'),
				count(*) FILTER (WHERE status = 'PENDING' AND attempts = 1), count(*) FILTER (WHERE status = 'DEAD_LETTER')
				FROM outbox`).Scan(&p, &r, &d))
			return fmt.Sprintf("%d published, %d refused, %d dead", p, r, d), p == published && r == refused && d == dead
		})
	}
	g := newGate(t, s.child.Broker)
	paused := s.startBehind(g)
	s.awaitShares(patience)
	insert("first", "events.a", 9)
	insert("filler", "full", 1)
	recorded("what the relay sent before", 10, 0, 0) // it knows both streams from now on

	g.hold(toBroker)
	s.exec(`BEGIN; INSERT INTO outbox (event_id, subject, payload) SELECT 'row' || g, 'events.a', 'x' FROM generate_series(1, 40) g;
		INSERT INTO outbox (event_id, subject, aggregate_id, payload) SELECT 'key' || g, 'events.a', 'k', 'x' FROM generate_series(1, 10) g;
		INSERT INTO outbox (event_id, subject, payload) SELECT 'refused' || g, 'full', 'x' FROM generate_series(1, 10) g; COMMIT`)
	s.await("all messages but those behind a key on their way", patience, func() (string, bool) {
		held := g.held(toBroker)
		n := strings.Count(held, "PUB events.a ") + strings.Count(held, "PUB full ")
		return fmt.Sprint(n), n == 51
	})
	s.must(paused.Process.Signal(syscall.SIGSTOP))
	s.start(1)
	s.exec(`INSERT INTO outbox (event_id, subject, payload) SELECT 'dead' || g, 'events.*', 'x' FROM generate_series(1, 10) g`)
	recorded("what the other relay did", 60, 10, 10)
	const all = `true`
	before := s.dump(all)
	acks := s.acks.Load()

	g.open()
	s.await("the messages of the paused relay", patience, func() (string, bool) {
		return fmt.Sprint(s.acks.Load() - acks), s.acks.Load() >= acks+41
	})
	s.must(paused.Process.Signal(syscall.SIGCONT))
	s.awaitShares(patience)
	pause(t.Context(), s.child.Lease)
	s.wantUnchanged(before, s.dump(all))
	if n, d := len(s.stored()), s.duplicates.Load(); n != 59 || d != 41 {
		t.Errorf("%d messages and %d duplicates, want 59 and 41", n, d)
	}
	insert("last", "events.a", 10)
	recorded("new rows", 70, 10, 10)
}

// Rows stayed in processing for ever after their relay had died, or were sent a
// second time: BR-08, BR-11. Here the broker has them, and its PubAcks do not
// arrive before the relay is killed.
func TestRowsOfARelayKilledBeforeItRecordsAreNotRepeated(t *testing.T) {
	t.Parallel()
	s := newSeveralOn(t, pgtest.URL(t), 500*time.Millisecond, oneByOne)
	g := newGate(t, s.child.Broker)
	const rounds, rows = 3, 100
	for round := range rounds {
		g.open()
		killed := s.startBehind(g)
		s.awaitShares(patience)
		s.insert(fmt.Sprintf("first%d.", round), 1)
		s.awaitStored(round*(rows+1)+1, patience)
		g.hold(fromBroker)
		s.insert(fmt.Sprintf("row%d.", round), rows)
		s.await("all rows stored", patience, func() (string, bool) {
			n := len(s.stored())
			return fmt.Sprint(n), n == (round+1)*(rows+1)
		})
		if st := s.stats(); st.Pending != rows || st.Claimed != rows {
			t.Fatalf("without PubAcks: %+v", st)
		}
		s.end(killed, os.Kill)
		begin := time.Now()
		s.start(1)
		s.awaitStored((round+1)*(rows+1), patience)
		if took, limit := time.Since(begin), takeoverLimit(s.child.Lease); took > limit {
			t.Errorf("recorded %v after the kill, want at most %v with a lease of %v", took, limit, s.child.Lease)
		}
		s.end(s.alive[0], syscall.SIGTERM)
	}
	if d := s.duplicates.Load(); d != rounds*rows {
		t.Errorf("%d duplicates, want each of the %d rows once", d, rounds*rows)
	}
	s.wantOnce()
	var attempts int
	s.must(s.pool.QueryRow(t.Context(), `SELECT max(attempts) FROM outbox`).Scan(&attempts))
	if attempts > 1 {
		t.Errorf("%d attempts counted, want at most 1", attempts)
	}
}

// direction of what a gate holds back.
type direction int

const (
	toBroker direction = iota
	fromBroker
)

// gate stands between a client in another process and the broker, and holds back
// what goes in one direction. It is safe for concurrent use.
type gate struct {
	url string

	mu      sync.Mutex // guards what follows
	changed *sync.Cond
	closed  bool
	era     int // of the connections that are let live
	holds   [2]bool
	back    [2]strings.Builder // what was held back since the last open
}

// newGate returns a gate in front of a broker, or of the first of several.
func newGate(t *testing.T, broker string) *gate {
	t.Helper()
	broker, _, _ = strings.Cut(broker, ",")
	u, err := url.Parse(broker)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &gate{url: "nats://" + l.Addr().String()}
	g.changed = sync.NewCond(&g.mu)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", u.Host)
			if err != nil {
				client.Close()
				continue
			}
			g.mu.Lock()
			era := g.era
			g.mu.Unlock()
			for d, p := range map[direction]*pipe{
				toBroker:   {gate: g, from: client, to: server, era: era},
				fromBroker: {gate: g, from: server, to: client, era: era},
			} {
				wg.Go(func() { p.read(d) })
				wg.Go(func() { p.write(d) })
			}
		}
	})
	t.Cleanup(func() {
		l.Close()
		g.mu.Lock()
		g.closed = true
		g.changed.Broadcast()
		g.mu.Unlock()
		wg.Wait()
	})
	return g
}

// pipe is one direction of a connection. It is read to the end also while what
// was read is held back.
type pipe struct {
	*gate
	from, to net.Conn
	era      int
	queue    []byte // guarded by mu of gate
	over     bool
}

func (p *pipe) read(d direction) {
	buf := make([]byte, 1<<16)
	for {
		n, err := p.from.Read(buf)
		p.mu.Lock()
		p.queue = append(p.queue, buf[:n]...)
		if p.holds[d] {
			p.back[d].Write(buf[:n])
		}
		p.over = p.over || err != nil
		p.changed.Broadcast()
		p.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// write closes both connections when the pipe is at its end, or the gate closed.
func (p *pipe) write(d direction) {
	defer p.to.Close()
	defer p.from.Close()
	for {
		p.mu.Lock()
		for !p.closed && p.era == p.gate.era && (p.holds[d] || len(p.queue) == 0) && !p.over {
			p.changed.Wait()
		}
		some, end := p.queue, p.closed || p.era != p.gate.era || p.over
		p.queue = nil
		p.mu.Unlock()
		if end {
			return
		}
		if _, err := p.to.Write(some); err != nil {
			return
		}
	}
}

// hold holds back what goes in a direction from now on.
func (g *gate) hold(d direction) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.holds[d] = true
}

// held returns what is held back.
func (g *gate) held(d direction) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.back[d].String()
}

// cut loses what is held back, and closes all connections. New ones pass.
func (g *gate) cut() {
	g.mu.Lock()
	g.era++
	g.mu.Unlock()
	g.open()
}

// open lets everything pass.
func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.holds = [2]bool{}
	g.back[toBroker].Reset()
	g.back[fromBroker].Reset()
	g.changed.Broadcast()
}
