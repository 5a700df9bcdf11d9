package consumer

import (
	"slices"
	"time"
)

// lane is the messages of one ordering key in hand. They are handled in stream
// order: one is with a worker (or several in one batch), the others wait behind
// it, and behind one that was handed back and is to come again.
type lane struct {
	key     string
	waiting []*message // by stream sequence
	leading int        // messages it waits for
	gated   int        // messages at the gate

	expected []expected // by stream sequence; later ones wait for the first
}

// expected is a message that was handed back and is to come again.
type expected struct {
	seq uint64
	due time.Time
}

// join makes m a message of its key's lane.
func (h *hand) join(m *message, key string) {
	l := h.lanes[key]
	if l == nil {
		l = &lane{key: key}
		h.lanes[key] = l
	}
	m.lane = l
	l.expected = slices.DeleteFunc(l.expected, func(e expected) bool { return e.seq == m.d.StreamSeq })
}

// wait puts m behind the earlier ones of its lane.
func (h *hand) wait(m *message) {
	l := m.lane
	h.put(m, behind)
	i := len(l.waiting)
	for i > 0 && bySequence(m, l.waiting[i-1]) < 0 {
		i--
	}
	l.waiting = slices.Insert(l.waiting, i, m)
	if len(l.waiting) == h.laneSize {
		h.crowded++
		h.crowd = l.key
	}
}

// open reports whether the first waiting message may go.
func (l *lane) open() (open bool) {
	return len(l.waiting) > 0 && (len(l.expected) == 0 || l.waiting[0].d.StreamSeq < l.expected[0].seq)
}

// shift takes the first waiting message, which leads from now on.
func (h *hand) shift(l *lane) *message {
	m := l.waiting[0]
	if len(l.waiting) == h.laneSize {
		h.crowded--
	}
	l.waiting[0] = nil // the array lives on
	l.waiting = l.waiting[1:]
	l.leading++
	m.leads = true
	h.take(m)
	return m
}

// advance queues the next message of a lane that waits for none, and forgets a
// lane that is empty.
func (h *hand) advance(l *lane) {
	switch {
	case l.leading > 0:
	case l.open() && !h.closed:
		h.makeReady(h.shift(l))
	case len(l.waiting) == 0 && len(l.expected) == 0 && l.gated == 0:
		delete(h.lanes, l.key)
	}
}

// follow adds to a batch what waits behind m in its lane and may go with it.
func (h *hand) follow(m *message, batch []*message, most int, deadline time.Time) []*message {
	l := m.lane
	for l != nil && len(batch) < most && l.open() && !l.waiting[0].alone && !h.closed {
		next := h.shift(l)
		h.put(next, behind) // for start to take it from
		h.start(next, deadline)
		batch = append(batch, next)
	}
	return batch
}

// leave ends a lane's waiting for m.
func (h *hand) leave(m *message) {
	if !m.leads {
		return
	}
	m.leads = false
	m.lane.leading--
	h.advance(m.lane)
}

// expect makes the lane of m, which leads it, wait until m comes again.
func (h *hand) expect(m *message, due time.Time) {
	l := m.lane
	if l == nil || !m.leads {
		return
	}
	i := len(l.expected)
	for i > 0 && l.expected[i-1].seq > m.d.StreamSeq {
		i--
	}
	l.expected = slices.Insert(l.expected, i, expected{m.d.StreamSeq, due})
}

// putBack undoes the start of a message that no handler is to be given. One that
// the server was left to deliver again is none of ours any more.
func (h *hand) putBack(m *message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if m.lapsed {
		h.drop(m)
		return
	}
	m.deadline = time.Time{}
	h.take(m)
	h.wait(m)
	h.leave(m)
}

// stuck reports whether messages that we wait for should have come by then.
func (h *hand) stuck(then time.Time) (any bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, k := range h.naks {
		if k.due.Before(then) {
			return true
		}
	}
	for _, l := range h.lanes {
		for _, e := range l.expected {
			if e.due.Before(then) {
				return true
			}
		}
	}
	return false
}

// giveUp ends the waiting for messages that are settled (up to floor), and for
// those that were due by then: another instance has them. It returns how many
// of the latter there were, and the key of one.
func (h *hand) giveUp(floor uint64, then time.Time) (lost int, key string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, l := range h.lanes {
		before := len(l.expected)
		l.expected = slices.DeleteFunc(l.expected, func(e expected) bool {
			if e.seq <= floor {
				return true
			}
			if e.due.Before(then) {
				lost++
				key = l.key
				return true
			}
			return false
		})
		if len(l.expected) < before {
			h.advance(l)
		}
	}
	for seq, k := range h.naks {
		if seq <= floor || k.due.Before(then) {
			delete(h.naks, seq)
		}
	}
	h.notify()
	return lost, key
}

// handBack takes out, in stream order, what no worker has and none will get:
// with all, everything, otherwise not what waits behind a message whose fate is
// open. What is on its last delivery stays, for the workers: handing it back
// would end it although no handler saw it, and that is worse than its order.
func (h *hand) handBack(all bool) (back []returned) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	h.queue = nil
	open := make(map[*lane]bool) // fates
	for _, m := range h.messages {
		if m.leads && m.place != ready || m.lane != nil && len(m.lane.expected) > 0 {
			open[m.lane] = true
		}
	}
	now := time.Now()
	for _, m := range h.messages {
		switch {
		case m.place == running || m.place == aside:
		case m.last:
			h.take(m)
			h.makeReady(m)
		case m.place == behind && open[m.lane] && !all:
		default:
			b := returned{message: m}
			if m.lane != nil {
				b.wait = m.lane.wait(m, now)
			}
			back = append(back, b)
			h.abandon(m)
		}
	}
	h.more.Broadcast()
	slices.SortFunc(h.queue, bySequence)
	slices.SortFunc(back, func(a, b returned) int { return bySequence(a.message, b.message) })
	return back
}

// letGo forgets what no worker has, and waits no longer for what was handed
// back: another instance gets all that. What is on its last delivery stays, as
// in handBack. It returns how many it forgot.
func (h *hand) letGo() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var leaders []*message
	for _, m := range h.messages {
		if m.place == running || m.place == aside || m.last {
			continue
		}
		n++
		h.abandon(m)
		if m.leads {
			leaders = append(leaders, m)
		}
	}
	clear(h.naks)
	gone := func(m *message) bool { return m.gone }
	h.queue = slices.DeleteFunc(h.queue, gone)
	h.gate = slices.DeleteFunc(h.gate, gone)
	for _, l := range h.lanes {
		crowded := len(l.waiting) >= h.laneSize
		l.waiting = slices.DeleteFunc(l.waiting, gone)
		if crowded && len(l.waiting) < h.laneSize {
			h.crowded--
		}
		l.expected = nil
	}
	for _, m := range leaders {
		h.leave(m)
	}
	for _, l := range h.lanes {
		h.advance(l)
	}
	return n
}

// abandon takes out a message that was not handled.
func (h *hand) abandon(m *message) {
	h.take(m)
	m.gone = true
	h.forget(m)
}

// wait returns for how long m must stay away to come after those it waits for.
func (l *lane) wait(m *message, now time.Time) (wait time.Duration) {
	for _, e := range l.expected {
		if e.seq < m.d.StreamSeq {
			wait = max(wait, e.due.Sub(now)+time.Millisecond)
		}
	}
	return wait
}

// returned is a message to hand back: after wait, so that it does not come
// before the one it waits for.
type returned struct {
	*message

	wait time.Duration
}
