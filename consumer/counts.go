package consumer

import (
	"math"
	"time"
)

// counts is a look at the hand.
type counts struct {
	atGate, behind, busy, aside int

	lapsed   int // busy ones whose handlers are overdue
	suspects int
	bytes    int           // behind and at the gate
	crowded  int           // lanes that are full
	crowd    string        // the key of one of them
	retries  int           // other deliveries we asked for that have not come
	pace     time.Duration // what a message takes a worker
	size     int           // bytes of a message
}

// inHand is how many there are, but for those aside: their handlers are done,
// or wait for the broker. Nor those whose handlers are overdue: they are out.
func (c counts) inHand() int { return c.atGate + c.behind + c.busy - c.lapsed }

func (h *hand) counts() counts {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.wake = math.MaxInt
	return counts{
		atGate: h.count[atGate], behind: h.count[behind], busy: h.busy(), aside: h.count[aside],
		lapsed: h.lapsed, suspects: h.suspects, bytes: h.bytes, crowded: h.crowded, crowd: h.crowd,
		retries: len(h.naks), pace: h.pace, size: h.size,
	}
}

// due returns how many other deliveries may come by now: those we asked for, and
// those that lanes wait for. Of those that should have come before overdue, when
// something else came, it counts one: another instance has them, most likely.
func (h *hand) due(now, overdue time.Time) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	late := 0
	count := func(due time.Time) {
		switch {
		case due.After(now):
		case due.Before(overdue):
			late = 1
		default:
			n++
		}
	}
	for _, k := range h.naks {
		count(k.due)
	}
	for _, l := range h.lanes {
		for _, e := range l.expected {
			if _, asked := h.naks[e.seq]; !asked {
				count(e.due)
			}
		}
	}
	return max(n, late)
}
