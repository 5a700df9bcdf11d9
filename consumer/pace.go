package consumer

import "time"

// pace says how many messages to ask for. It belongs to the run's loop.
//
// A delivery counts although its handler never returned, so a message that
// kills the process costs every neighbor in hand a delivery, each time. Pace
// keeps neighbors away from messages that may do that:
//
//   - While a suspect is in hand (delivered before, and not handed back by
//     us), nothing more is asked for.
//   - At the start, while messages that were out then may come back, one
//     message is in hand at a time.
//   - After an idle time the first request is for one message, and each
//     message that is no suspect doubles the next request.
//
// Naks of other instances look like suspects: the price is a short pause.
type pace struct {
	ramp int // size of the next request

	starting bool
	out      int                 // unsettled when Run began
	floor    uint64              // none of them has a higher stream sequence
	until    time.Time           // their ack waits have run out by then
	back     map[uint64]struct{} // those that came back to us
	cleared  bool                // since until, something arrived that was none of them, or nothing did
}

// begin starts the clock when the consumer was first seen.
func (p *pace) begin(l *live, now time.Time) {
	p.ramp = 1
	p.starting = l.ackPending > 0
	p.out, p.floor = l.ackPending, l.delivered
	p.until = now.Add(l.ackWait)
	p.back = make(map[uint64]struct{})
}

// batch returns how many messages to ask for, given those with the workers.
func (p *pace) batch(workers, busy, suspects int) int {
	if suspects > 0 {
		return 0
	}
	if p.starting && busy > 0 {
		return 0
	}
	// With nothing in hand, all that came back has been survived.
	if p.starting && (p.cleared || len(p.back) >= p.out) {
		p.starting, p.back = false, nil
	}
	if p.starting {
		return 1
	}
	return min(workers-busy, max(p.ramp, 1))
}

// arrived notes a message. Redeliveries go before new messages, so a new one
// after the last ack wait ended means that none is left.
func (p *pace) arrived(m *message, now time.Time) {
	if m.suspect {
		p.ramp = 1
	} else {
		p.ramp = min(2*p.ramp, 1<<20)
	}
	if !p.starting {
		return
	}
	if m.d.StreamSeq <= p.floor {
		p.back[m.d.StreamSeq] = struct{}{}
	} else if !m.suspect && now.After(p.until) {
		p.cleared = true
	}
}

// idle notes that a request ended with nothing more to deliver.
func (p *pace) idle(now time.Time) {
	p.ramp = 1
	if p.starting && now.After(p.until) {
		p.cleared = true
	}
}
