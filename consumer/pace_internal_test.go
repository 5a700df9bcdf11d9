package consumer

import (
	"testing"
	"time"
)

func newArrival(seq, delivered uint64, suspect bool) *message {
	return &message{d: &Delivery{StreamSeq: seq, NumDelivered: delivered}, suspect: suspect, pending: 1000}
}

// The first request after an idle time is for one message; each that is no
// suspect doubles the next, up to the free workers.
func TestPaceDoublesAfterEachNewMessage(t *testing.T) {
	t.Parallel()
	var p pace
	now := time.Unix(0, 0)
	p.begin(&live{}, now, now.Add(30*time.Second), false)
	p.known = 1000
	const workers = 10
	for i, want := range []int{1, 2, 4, 8, 10, 10} {
		if got := p.target(workers, 0, counts{busy: 0, suspects: 0}); got != want {
			t.Errorf("request %d is for %d, want %d", i+1, got, want)
		}
		p.arrived(newArrival(uint64(i), 1, false), now)
	}
	if got := p.target(workers, 0, counts{busy: 7, suspects: 0}); got != 3 {
		t.Errorf("request with 7 workers busy is for %d, want 3", got)
	}
	if got := p.target(workers, 0, counts{busy: 12, suspects: 0}); got > 0 {
		t.Errorf("request with more in hand than workers is for %d, want none", got)
	}
	p.idle(now)
	if got := p.target(workers, 0, counts{busy: 0, suspects: 0}); got != 1 {
		t.Errorf("request after an idle time is for %d, want 1", got)
	}
}

func TestPaceAsksForNothingWhileASuspectIsInHand(t *testing.T) {
	t.Parallel()
	var p pace
	now := time.Unix(0, 0)
	p.begin(&live{}, now, now.Add(30*time.Second), false)
	p.known = 1000
	for range 5 {
		p.arrived(newArrival(1, 1, false), now)
	}
	p.arrived(newArrival(2, 2, true), now)
	if got := p.target(10, 0, counts{busy: 1, suspects: 1}); got != 0 {
		t.Errorf("request beside a suspect is for %d, want 0", got)
	}
	if got := p.target(10, 0, counts{busy: 0, suspects: 0}); got != 1 {
		t.Errorf("request after a suspect is for %d, want 1", got)
	}
}

// While messages delivered before the start may come back, one is in hand.
func TestPaceStartsSlowlyUntilWhatWasOutIsSettled(t *testing.T) {
	t.Parallel()
	start := time.Unix(0, 0)
	after := start.Add(31 * time.Second)
	begin := func() *pace {
		p := &pace{}
		p.begin(&live{ackPending: 2, delivered: 10}, start, start.Add(30*time.Second), false)
		p.known = 1000
		return p
	}
	wantSlow := func(t *testing.T, p *pace, want bool) {
		t.Helper()
		p.ramp, p.known = 8, 8
		if got := p.target(10, 0, counts{busy: 0, suspects: 0}) == 1; got != want {
			t.Errorf("one at a time = %v, want %v", got, want)
		}
	}
	t.Run("nothing beside one", func(t *testing.T) {
		t.Parallel()
		if got := begin().target(10, 0, counts{busy: 1, suspects: 0}); got != 0 {
			t.Errorf("request with one in hand is for %d, want 0", got)
		}
	})
	t.Run("undelivered backlog does not end it", func(t *testing.T) {
		t.Parallel()
		p := begin()
		for seq := uint64(11); seq < 20; seq++ {
			p.arrived(newArrival(seq, 1, false), start)
		}
		wantSlow(t, p, true)
	})
	t.Run("all came back", func(t *testing.T) {
		t.Parallel()
		p := begin()
		p.arrived(newArrival(3, 2, true), start)
		wantSlow(t, p, true)
		p.arrived(newArrival(3, 3, false), start)
		wantSlow(t, p, true)
		p.arrived(newArrival(9, 2, true), start)
		wantSlow(t, p, false)
	})
	t.Run("new message after the ack wait", func(t *testing.T) {
		t.Parallel()
		p := begin()
		p.arrived(newArrival(11, 1, false), after)
		wantSlow(t, p, false)
	})
	t.Run("nothing to deliver after the ack wait", func(t *testing.T) {
		t.Parallel()
		p := begin()
		p.idle(start)
		wantSlow(t, p, true)
		p.idle(after)
		wantSlow(t, p, false)
	})
	t.Run("nothing was out", func(t *testing.T) {
		t.Parallel()
		p := &pace{}
		p.begin(&live{}, start, start.Add(30*time.Second), false)
		p.known = 1000
		wantSlow(t, p, false)
	})
}
