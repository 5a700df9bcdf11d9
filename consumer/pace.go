package consumer

import "time"

const (
	// aheadTime is how much work may wait for the workers, so that none of them
	// waits for a round trip to the broker.
	aheadTime = 50 * time.Millisecond
	// maxAhead and aheadBytes bound it in messages and bytes.
	maxAhead   = 512
	aheadBytes = 16 << 20
)

// ahead returns how many messages may wait for workers who have been this
// fast: those they start on within aheadTime, and a twentieth of the ack wait.
// None while messages wait for their dead letters: more of them may do so, and
// there is a limit to it.
func ahead(workers int, c counts, ackWait time.Duration) int {
	if c.pace == 0 || c.aside > 0 {
		return 0
	}
	n := workers * int(min(aheadTime, ackWait/20)/c.pace)
	return min(n, maxAhead, aheadBytes/max(c.size, 1))
}

// pace says how many messages to ask for. It belongs to the run's loop.
//
// A delivery counts although its handler never returned, so a message that
// kills the process costs every neighbor in hand a delivery, each time. Pace
// keeps neighbors away from messages that may do that:
//
//   - While a suspect is in hand (delivered before, and not handed back by
//     us), nothing more is asked for, until its handler is overdue.
//   - At the start, while messages that were out then may come back, one
//     message is in hand at a time.
//   - After an idle time the first request is for one message, and each
//     message that is no suspect doubles the next request.
//   - No more is asked for than the server has, so that an idle consumer does
//     not get everything at once that another instance leaves behind.
//
// Naks of other instances look like suspects: the price is that all workers but
// one pause for as long as the handler of such a message takes, HandleTimeout at
// most.
type pace struct {
	ramp  int // size of the next request
	known int // what the server has for us

	starting bool
	out      int                 // unsettled when Run began
	floor    uint64              // none of them has a higher stream sequence
	until    time.Time           // their ack waits have run out by then
	back     map[uint64]struct{} // those that came back to us
	cleared  bool                // since until, something arrived that was none of them, or nothing did

	// With gated, what arrives waits at the gate until all that was out is in
	// hand: the server delivers it again in no particular order. more is that
	// the last one was such a message, probe asks whether others came.
	gated       bool
	more, probe bool
}

// begin starts the clock when the consumer was first seen, and, with gated, when
// this process became the active one.
func (p *pace) begin(l *live, now, until time.Time, gated bool) {
	p.ramp = 1
	p.starting = l.ackPending > 0
	p.out, p.floor = l.ackPending, l.delivered
	p.until = until
	p.back = make(map[uint64]struct{})
	p.cleared, p.gated, p.more, p.probe = false, gated, false, false
}

// target returns how many messages may be asked for when so many may be busy.
// due is how many of those that we handed back may come again.
func (p *pace) target(limit, due int, c counts) int {
	if c.suspects > 0 {
		return 0
	}
	if p.starting && c.busy > c.lapsed {
		return 0
	}
	// With nothing in hand, all that came back has been survived.
	if p.starting && (p.cleared || len(p.back) >= p.out) {
		p.starting, p.back = false, nil
	}
	if p.starting {
		// What waits in hand is no more to be burdened than what is handled.
		if c.inHand() > 0 && due == 0 && !p.more && !p.probe {
			return 0
		}
		return min(limit-c.busy, 1) // overdue handlers may have all workers
	}
	return min(limit-c.busy, p.most(c))
}

// most is how many to ask for at most, however many workers are free.
func (p *pace) most(c counts) int { return min(max(p.ramp, 1), max(p.known+c.retries, 1)) }

// arrived notes a message. Redeliveries go before new messages, so a new one
// after the last ack wait ended means that none is left.
func (p *pace) arrived(m *message, now time.Time) {
	p.known = int(min(m.pending, maxAhead*1024))
	if m.suspect {
		p.ramp = 1
	} else {
		p.ramp = min(2*p.ramp, 1<<20)
	}
	if !p.starting {
		return
	}
	p.more = p.gated && m.again
	if m.d.StreamSeq <= p.floor {
		p.back[m.d.StreamSeq] = struct{}{}
	} else if !m.suspect && now.After(p.until) {
		p.cleared = true
	}
}

// stops reports whether a message is to wait at the gate. One that has only two
// deliveries left does not: if what is handled meanwhile ends the process, it
// must have one to be handled alone.
func (p *pace) stops(d *Delivery, maxDeliver int) (gated bool) {
	return p.starting && p.gated && (maxDeliver == 0 || d.NumDelivered+2 <= uint64(maxDeliver))
}

// idle notes that a request ended with nothing more to deliver.
func (p *pace) idle(now time.Time) {
	p.ramp, p.known, p.more = 1, 0, false
	if p.starting && now.After(p.until) {
		p.cleared = true
	}
}
