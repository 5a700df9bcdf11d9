package relay

import (
	"errors"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// asleepMost is how many rows are remembered: when there are more, which takes as many
// that sleep or that other relays have settled, all are forgotten.
const asleepMost = 10_000

// asleep is where to look for rows that may be on their streams, while they wait in no
// claim that says so: behind their key, or in an outage of a stream of their own. It is the
// earliest claim that they may have been sent under. The source knows that they are in
// doubt; who does not know this has only the time in which they were written to go by.
type asleep map[int64]*jetbox.Earlier

// note remembers a row's earlier claim, unless one that is older is known.
func (a asleep) note(pos int64, earlier *jetbox.Earlier) {
	if a[pos] != nil {
		return
	}
	if len(a) >= asleepMost {
		clear(a)
	}
	a[pos] = earlier
}

// settle forgets the rows that are not in doubt any more.
func (a asleep) settle(outcomes []jetbox.Outcome) {
	if len(a) == 0 {
		return
	}
	for _, o := range outcomes {
		if !o.InDoubt && !o.Unsent {
			delete(a, o.Pos)
		}
	}
}

// inDoubt reports whether a row may have been sent before this batch.
func (s *session) inDoubt(row jetbox.Row) (inDoubt bool) {
	return !s.absent[row.Pos] && (row.InDoubt || row.Earlier != nil || s.asleep[row.Pos] != nil)
}

// fallsAsleep reports whether a row that got an error, and is to sleep, may be on the
// stream, and remembers where it would be.
func (s *session) fallsAsleep(row jetbox.Row, err error) (inDoubt bool) {
	switch {
	case s.inDoubt(row):
		if row.Earlier != nil {
			s.asleep.note(row.Pos, row.Earlier)
		}
		return true
	case notStored(err):
		return false
	}
	s.asleep.note(row.Pos, &jetbox.Earlier{Before: s.before})
	return true
}

// codeInProcess is the answer to a message whose ID an earlier one has that is not stored
// yet, and may never be (nats-server 2.15).
const codeInProcess = 10158

// notStored reports whether an error certainly kept a message from being stored.
func notStored(err error) (certain bool) {
	var api *jetstream.APIError
	if errors.As(err, &api) {
		return api.ErrorCode != codeInProcess
	}
	return classify(err) != classOutage || errors.Is(err, errDenied) || errors.Is(err, jetstream.ErrNoStreamResponse) || errors.Is(err, nats.ErrNoResponders)
}
