package consumer

import (
	"cmp"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/seed-5e04d8fb/jetbox"
)

// message is one delivery from the moment it arrived until it was settled.
type message struct {
	msg *nats.Msg
	d   *Delivery

	// suspect is one that was delivered before and that this process did not
	// hand back: whoever had it may have died of it.
	suspect bool
	// alone is one that goes into no batch with others.
	alone bool
	// again is that it was delivered before.
	again bool
	// pending is how many messages the server still had when it sent this one.
	pending uint64

	intended bool // its intent letter is stored

	// Guarded by hand.mu. The first three are of the last delivery, which may be
	// later than the one that a handler has.
	reply     string // where its answers go
	delivered uint64
	last      bool

	place    place
	lane     *lane     // nil: ordered with nothing
	leads    bool      // its lane waits for it
	deadline time.Time // when its handler must be done; zero while none runs
	lapsed   bool      // its handler is overdue: no more in-progress signals
	gone     bool      // no more in hand
}

// place is where a message in hand is.
type place int

const (
	atGate  place = iota // newer than what may still come back
	behind               // waits for an earlier one of its key
	ready                // waits for a worker
	running              // a worker has it
	aside                // waits for its dead letter
	places
)

// attrs name the message in a log. They need no decoded event: a worker may be
// decoding it.
func (m *message) attrs() []slog.Attr {
	return []slog.Attr{
		slog.String("stream", m.d.Stream),
		slog.String("consumer", m.d.Consumer),
		slog.Uint64("stream_seq", m.d.StreamSeq),
		slog.String("event", m.d.header(jetbox.HeaderCEID)),
		slog.Uint64("attempt", m.d.NumDelivered),
	}
}

// hand is everything delivered and not settled: what waits behind its key, the
// queue for the workers and what they have. It also knows what was handed back.
// Safe for concurrent use.
type hand struct {
	mu       sync.Mutex
	more     sync.Cond           // the queue has a message, or is closed
	messages map[uint64]*message // guarded by mu, as is everything below; to be kept alive, by stream sequence
	count    [places]int         // of messages, by their place
	suspects int                 // of those ready or running, but for the lapsed
	lapsed   int                 // of those running
	bytes    int                 // of those behind or at the gate
	queue    []*message          // the ready ones
	gate     []*message
	lanes    map[string]*lane
	crowded  int    // lanes with laneSize messages or more behind
	crowd    string // the key of the last one that was
	naks     map[uint64]nak
	closed   bool // nothing more becomes ready

	pace time.Duration // what a message takes a worker, if slow; 0 is unknown
	size int           // bytes of a message, on average
	wake int           // tell the loop when no more than so many are busy

	laneSize int

	// changed has a value after messages left: there may be a free worker.
	changed chan struct{}
}

// nak is another delivery we asked for.
type nak struct {
	delivered uint64    // the delivery we handed back
	due       time.Time // when it may come
}

// maxNaks bounds the memory of naks: entries stay for a time when another
// instance gets the redelivery. Forgetting them is harmless, a few of our own
// retries are then handled with the caution for suspects. It is above what
// MaxAckPending allows by default.
const maxNaks = 1 << 15

// weight of the past: so many messages change an average.
const weight = 16

func newHand(laneSize int) *hand {
	h := &hand{
		laneSize: laneSize,
		messages: make(map[uint64]*message),
		lanes:    make(map[string]*lane),
		naks:     make(map[uint64]nak),
		wake:     math.MaxInt,
		changed:  make(chan struct{}, 1),
	}
	h.more.L = &h.mu
	return h
}

// add takes in a message that just arrived and decides whether it is suspect.
// key is its ordering key, empty for one that is ordered with nothing. With
// gated, which needs a key, it waits until openGate.
//
// One that is in hand already, because the server could not hear that somebody
// works on it, stays as it is. Its answer goes to the later delivery, and nobody
// handles it twice.
func (h *hand) add(m *message, key string, gated bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m.reply, m.delivered, m.last = m.msg.Reply, m.d.NumDelivered, m.d.Last
	// A stream that was created again has other messages of the same sequence.
	if old := h.messages[m.d.StreamSeq]; old != nil && old.d.Stored.Equal(m.d.Stored) {
		old.reply, old.delivered, old.last = m.reply, m.delivered, m.last
		old.alone = old.alone || m.alone
		return
	}
	h.messages[m.d.StreamSeq] = m
	h.size += (m.msg.Size() - h.size) / weight
	if m.d.NumDelivered > 1 {
		if h.naks[m.d.StreamSeq].delivered != m.d.NumDelivered-1 {
			m.suspect, m.alone = true, true
		}
		delete(h.naks, m.d.StreamSeq)
	}
	if key != "" {
		h.join(m, key)
	}
	if gated {
		h.put(m, atGate)
		h.gate = append(h.gate, m)
		return
	}
	h.enter(m)
}

// enter sends a message on its way to the workers.
func (h *hand) enter(m *message) {
	if m.lane == nil {
		h.makeReady(m)
		return
	}
	h.wait(m)
	h.advance(m.lane)
}

// openGate lets those at the gate through, in stream order.
func (h *hand) openGate() {
	h.mu.Lock()
	defer h.mu.Unlock()
	slices.SortFunc(h.gate, bySequence)
	for _, m := range h.gate {
		h.take(m)
		h.enter(m)
	}
	h.gate = nil
}

func bySequence(a, b *message) int { return cmp.Compare(a.d.StreamSeq, b.d.StreamSeq) }

// makeReady gives a message to whichever worker is free.
func (h *hand) makeReady(m *message) {
	h.put(m, ready)
	h.queue = append(h.queue, m)
	h.more.Signal()
}

// put counts a message at a place, take undoes it.
func (h *hand) put(m *message, p place) {
	m.place = p
	h.count[p]++
	switch p {
	case ready, running:
		h.burden(m, 1)
	case behind, atGate:
		h.bytes += m.msg.Size()
	}
	if p == atGate {
		m.lane.gated++
	}
}

func (h *hand) take(m *message) {
	h.count[m.place]--
	switch m.place {
	case ready, running:
		h.burden(m, -1)
	case behind, atGate:
		h.bytes -= m.msg.Size()
	}
	if m.place == atGate {
		m.lane.gated--
	}
}

// burden counts a message with a worker, or for one. An overdue handler has not
// ended the process in all its time: nobody waits for it any longer.
func (h *hand) burden(m *message, n int) {
	switch {
	case m.lapsed:
		h.lapsed += n
	case m.suspect:
		h.suspects += n
	}
}

// next waits for messages to handle: one, or up to most that a batch may hold.
// None means that there will be no more. The result is stored in buf.
func (h *hand) next(buf []*message, most int, timeout time.Duration) []*message {
	h.mu.Lock()
	defer h.mu.Unlock()
	for len(h.queue) == 0 {
		if h.closed {
			return nil
		}
		h.more.Wait()
	}
	deadline := time.Now().Add(timeout)
	for len(buf) < most && len(h.queue) > 0 {
		m := h.queue[0]
		if m.alone && len(buf) > 0 {
			break
		}
		h.queue[0] = nil // the array lives on
		h.queue = h.queue[1:]
		h.start(m, deadline)
		buf = append(buf, m)
		if m.alone {
			break
		}
		buf = h.follow(m, buf, most, deadline)
	}
	return buf
}

// start gives a message to a worker, which has until the deadline.
func (h *hand) start(m *message, deadline time.Time) {
	h.take(m)
	h.put(m, running)
	m.deadline = deadline
	m.d.NumDelivered, m.d.Last = m.delivered, m.last
}

// restart gives the handler of a message a new deadline.
func (h *hand) restart(m *message, deadline time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m.deadline = deadline
}

// stop notes that the handler of a message returned, and what it took for each
// message it had, 0 if that says nothing. overdue reports that the server was
// left to deliver it again, last that there will be no other delivery.
func (h *hand) stop(m *message, took time.Duration) (overdue, last bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if took > 0 {
		h.pace = max(took, h.pace+(took-h.pace)/weight)
	}
	m.deadline = time.Time{}
	return m.lapsed, m.last
}

// remove forgets a settled message and lets its lane go on. Doing so twice is
// harmless.
func (h *hand) remove(m *message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.drop(m)
}

func (h *hand) drop(m *message) {
	if m.gone {
		return
	}
	m.gone = true
	h.forget(m)
	h.take(m)
	h.leave(m)
	h.notify()
}

// forget stops keeping a message alive: another delivery of it is a new one.
func (h *hand) forget(m *message) {
	if h.messages[m.d.StreamSeq] == m {
		delete(h.messages, m.d.StreamSeq)
	}
}

// hold moves a message aside: it occupies no worker. Its handler, if it ran,
// has survived it. With keep, its key waits for it.
func (h *hand) hold(m *message, keep bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.take(m)
	h.put(m, aside)
	m.deadline = time.Time{}
	if !keep {
		h.leave(m)
	}
	h.notify()
}

// release undoes hold for a message that goes to a worker again, before others.
// It reports whether there is one, and the server was not left to deliver it
// again.
func (h *hand) release(m *message) (ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || m.lapsed {
		return false
	}
	h.take(m)
	h.put(m, ready)
	h.queue = slices.Insert(h.queue, 0, m)
	h.more.Signal()
	return true
}

// notify tells the loop, when it wants to know.
func (h *hand) notify() {
	if h.busy() <= h.wake {
		h.nudge()
	}
}

// nudge makes the loop look.
func (h *hand) nudge() {
	select {
	case h.changed <- struct{}{}:
	default:
	}
}

func (h *hand) busy() int { return h.count[ready] + h.count[running] }

// quietUntil stops telling the loop of messages that left, until no more than
// so many are busy. late reports that it is so already.
func (h *hand) quietUntil(busy int) (late bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.wake = busy
	return h.busy() <= busy
}

// handedBack remembers that we asked for another delivery, which holds up the
// lane until it comes.
func (h *hand) handedBack(m *message, wait time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.naks) >= maxNaks {
		clear(h.naks)
	}
	due := time.Now().Add(wait)
	h.naks[m.d.StreamSeq] = nak{m.delivered, due}
	h.forget(m)
	h.expect(m, due)
}

// forgetNaks forgets what was handed back.
func (h *hand) forgetNaks() {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.naks)
}

// answerTo returns where the answer to a message goes.
func (h *hand) answerTo(m *message) (reply string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return m.reply
}
