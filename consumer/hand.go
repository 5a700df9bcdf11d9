package consumer

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// message is one delivery from the moment it arrived until it was settled.
type message struct {
	msg *nats.Msg
	d   *Delivery

	// suspect is one that was delivered before and that this process did not
	// hand back: whoever had it may have died of it.
	suspect bool

	intended bool // its intent letter is stored

	// Guarded by hand.mu.
	held     bool      // waits aside for a dead letter
	deadline time.Time // when its handler must be done; zero while none runs
	lapsed   bool      // its handler is overdue: no more in-progress signals
}

func (m *message) attrs() []slog.Attr {
	return []slog.Attr{
		slog.String("stream", m.d.Stream),
		slog.String("consumer", m.d.Consumer),
		slog.Uint64("stream_seq", m.d.StreamSeq),
		slog.String("event", m.d.ID),
		slog.Uint64("attempt", m.d.NumDelivered),
	}
}

// hand is everything delivered and not settled, and what is known of messages
// handed back. Safe for concurrent use.
type hand struct {
	mu       sync.Mutex
	messages map[*message]struct{} // guarded by mu
	held     int                   // guarded by mu; how many of them wait aside
	suspects int                   // guarded by mu; how many of the others are suspect
	naks     map[uint64]uint64     // guarded by mu; stream sequence to the delivery we handed back

	// changed has a value after messages left: there may be a free worker.
	changed chan struct{}
}

// maxNaks bounds the memory of naks: entries stay behind when another instance
// gets the redelivery. Forgetting them is harmless, a few of our own retries
// are then handled with the caution for suspects.
const maxNaks = 8192

func newHand() *hand {
	return &hand{
		messages: make(map[*message]struct{}),
		naks:     make(map[uint64]uint64),
		changed:  make(chan struct{}, 1),
	}
}

// add takes in a message that just arrived, and decides whether it is suspect.
func (h *hand) add(m *message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.messages[m] = struct{}{}
	if m.d.NumDelivered <= 1 {
		return
	}
	if h.naks[m.d.StreamSeq] == m.d.NumDelivered-1 {
		delete(h.naks, m.d.StreamSeq)
		return
	}
	m.suspect = true
	h.suspects++
}

// handedBack remembers that we asked for another delivery.
func (h *hand) handedBack(m *message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.naks) >= maxNaks {
		clear(h.naks)
	}
	h.naks[m.d.StreamSeq] = m.d.NumDelivered
}

// remove forgets a settled message. Doing so twice is harmless.
func (h *hand) remove(m *message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.messages[m]; !ok {
		return
	}
	delete(h.messages, m)
	if m.held {
		h.held--
	} else if m.suspect {
		h.suspects--
	}
	h.notify()
}

// hold moves a message aside: it occupies no worker. Its handler, if it ran,
// has survived it.
func (h *hand) hold(m *message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m.held = true
	h.held++
	if m.suspect {
		h.suspects--
	}
	h.notify()
}

// release undoes hold for a message that goes to a worker again.
func (h *hand) release(m *message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m.held = false
	h.held--
	if m.suspect {
		h.suspects++
	}
}

func (h *hand) notify() {
	select {
	case h.changed <- struct{}{}:
	default:
	}
}

// counts returns how many messages are with the workers or on their way there,
// how many of those are suspect, and how many wait aside.
func (h *hand) counts() (busy, suspects, held int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.messages) - h.held, h.suspects, h.held
}

// start notes that a handler runs, and stop that it returned. overdue reports
// that the server was left to deliver the message again meanwhile.
func (h *hand) start(m *message, deadline time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m.deadline = deadline
}

func (h *hand) stop(m *message) (overdue bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m.deadline = time.Time{}
	return m.lapsed
}

// alive returns the messages to keep, and those that have just become overdue.
func (h *hand) alive(now time.Time) (keep, lapsed []*message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for m := range h.messages {
		switch {
		case m.lapsed:
		case !m.deadline.IsZero() && now.After(m.deadline):
			m.lapsed = true
			lapsed = append(lapsed, m)
		default:
			keep = append(keep, m)
		}
	}
	return keep, lapsed
}

// keepAlive sends in-progress signals for everything in hand, three in an ack
// wait, until ctx is done. The ack wait runs from the delivery, not from the
// start of the handler, so it covers what waits for a worker too.
func (r *run) keepAlive(ctx context.Context) {
	for sleep(ctx, r.live.Load().signalEvery()) {
		if !r.nc.IsConnected() {
			continue // they would pile up in the client and say nothing true later
		}
		keep, lapsed := r.hand.alive(time.Now())
		for _, m := range keep {
			r.send(m, ackProgress)
		}
		for _, m := range lapsed {
			r.cfg.Logger.LogAttrs(ctx, slog.LevelError, "handler ignores its canceled context, the server will deliver again", m.attrs()...)
		}
	}
}
