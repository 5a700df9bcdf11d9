package relay

import (
	"cmp"
	"sync"

	"github.com/seed-5e04d8fb/jetbox"
)

// flow publishes a batch, and those that follow it, until there is none or
// something is in the way: an outage, a stop, a shard to give back. While a batch
// is on the wire, what became of the one before is recorded and the next is
// claimed; two batches are never on the wire at once. The error is an outage that
// the loop waits out, or ends the session.
func (s *session) flow(batch claimed) error {
	var done []jetbox.Outcome // of the batch before, to be recorded
	for {
		rows := batch.rows
		s.before = batch.before
		ahead := s.ahead(done, rows)
		outcomes, outage := s.send(rows)
		later, err := ahead()
		if err != nil {
			// Nothing else is published before this is recorded, or handed over.
			s.unrecorded = append(append(s.unrecorded, outcomes...), s.unsent(later.rows...)...)
			return err
		}
		next, back := split(later.rows, held(rows, outcomes))
		done = append(outcomes, s.unsent(back...)...)
		if outage != nil || len(next) == 0 || s.interrupted() {
			done = append(done, s.unsent(next...)...)
			if err := s.record(done); err != nil {
				return err
			}
			return outage
		}
		batch = claimed{next, later.before}
	}
}

// unsent returns the outcomes of rows that were claimed and not sent. A row that an
// earlier claim covers may have been sent under that one, which must not forget it:
// it has no outcome, unless it was looked for and is not there.
func (s *session) unsent(rows ...jetbox.Row) (back []jetbox.Outcome) {
	for _, r := range rows {
		if r.Fresh || s.absent[r.Pos] {
			back = append(back, jetbox.Outcome{Pos: r.Pos, State: jetbox.Pending, Unsent: true})
		} else if r.Earlier != nil {
			s.asleep.note(r.Pos, r.Earlier)
		}
	}
	return back
}

// ahead records outcomes and claims the next rows beside those in hand, in
// goroutines that end before the function returned does. Both go on at once when
// every outcome lets its key go on; else what is recorded decides about which rows
// may be claimed.
func (s *session) ahead(done []jetbox.Outcome, inHand []jetbox.Row) (wait func() (claimed, error)) {
	var (
		next           claimed
		recorded, read error
		work           sync.WaitGroup
	)
	hand := make([]int64, 0, len(inHand)+len(done))
	for _, r := range inHand {
		hand = append(hand, r.Pos)
	}
	claim := func() {
		if !s.interrupted() {
			next, read = s.claim(hand)
		}
	}
	if allSettled(done) {
		for _, o := range done {
			hand = append(hand, o.Pos)
		}
		work.Go(func() { recorded = s.record(done) })
		work.Go(claim)
	} else {
		work.Go(func() {
			if recorded = s.record(done); recorded == nil {
				claim()
			}
		})
	}
	return func() (claimed, error) {
		work.Wait()
		return next, cmp.Or(recorded, read)
	}
}

// allSettled reports that every row is done with and its key may go on.
func allSettled(outcomes []jetbox.Outcome) (settled bool) {
	for _, o := range outcomes {
		if !isSettled(o) {
			return false
		}
	}
	return true
}

// isSettled reports that a row was stored, or parked for good.
func isSettled(o jetbox.Outcome) (settled bool) {
	return o.State == jetbox.Published || o.State == jetbox.DeadLetter && !o.Freeze
}

// send publishes one batch and says what became of it.
func (s *session) send(rows []jetbox.Row) (outcomes []jetbox.Outcome, outage error) {
	left, known, outage := s.verify(rows)
	if outage != nil {
		if !s.stopped() {
			s.publishFault(outage)
		}
		return append(known, s.unsent(rows...)...), outage
	}
	batch, outcomes, outage := s.prepare(left)
	outcomes = append(known, outcomes...)
	if outage != nil {
		outcomes = append(outcomes, s.unsent(unsettled(rows, outcomes)...)...)
	}
	if len(batch) > 0 {
		var more []jetbox.Outcome
		more, outage = s.publish(batch)
		outcomes = append(outcomes, more...)
	}
	if s.ctx.Err() == nil {
		s.publishFault(outage)
	}
	return outcomes, outage
}

// unsettled returns the rows that have no outcome.
func unsettled(rows []jetbox.Row, outcomes []jetbox.Outcome) (rest []jetbox.Row) {
	has := make(map[int64]bool, len(outcomes))
	for _, o := range outcomes {
		has[o.Pos] = true
	}
	for _, r := range rows {
		if !has[r.Pos] {
			rest = append(rest, r)
		}
	}
	return rest
}

// interrupted reports that no other batch may follow this one: the loop has to
// look what there is to do first.
func (s *session) interrupted() (interrupted bool) {
	return !s.maySend() || s.share.now().Excess > 0 || s.watch.suspected(s.streams.js.Conn())
}

// held returns the ordering keys of a batch that may not go on: those of rows that
// were not stored, nor parked for good.
func held(rows []jetbox.Row, outcomes []jetbox.Outcome) map[string]bool {
	settled := make(map[int64]bool, len(outcomes))
	for _, o := range outcomes {
		if isSettled(o) {
			settled[o.Pos] = true
		}
	}
	if len(settled) == len(rows) {
		return nil
	}
	keys := make(map[string]bool)
	for _, r := range rows {
		if key := r.Event.OrderingKey(); key != "" && !settled[r.Pos] {
			keys[key] = true
		}
	}
	return keys
}

// split separates the rows whose keys may go on from the others: they are claimed
// again when the row before them is settled.
func split(rows []jetbox.Row, held map[string]bool) (kept, back []jetbox.Row) {
	if len(held) == 0 {
		return rows, nil
	}
	kept = rows[:0]
	for _, r := range rows {
		if held[r.Event.OrderingKey()] {
			back = append(back, r)
		} else {
			kept = append(kept, r)
		}
	}
	return kept, back
}
