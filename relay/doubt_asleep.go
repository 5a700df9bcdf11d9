package relay

import (
	"errors"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// asleepMost is how many rows are remembered: when there are more, which takes as many
// that sleep or that other relays have settled, all are forgotten. Those that slept are
// looked for from the time on in which they were written then.
const asleepMost = 10_000

// asleep is what this relay knows of rows that may be on their streams, while they wait
// in no claim that says so: behind their key, or in an outage of a stream of their own.
// It is the earliest claim that they may have been sent under, nil for one that is
// certainly not stored. Another relay does not know it, and has only the time in which
// they were written to go by.
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

// settle forgets the rows of which the outcome is known.
func (a asleep) settle(outcomes []jetbox.Outcome) {
	if len(a) == 0 {
		return
	}
	for _, o := range outcomes {
		if o.State != jetbox.Pending || o.Attempted {
			delete(a, o.Pos)
		}
	}
}

// fallsAsleep remembers what is known of a row that was sent, got an error, and is to
// sleep.
func (s *session) fallsAsleep(row jetbox.Row, err error) {
	inDoubt := !row.Fresh && !s.absent[row.Pos]
	switch {
	case inDoubt && row.Earlier != nil:
		s.asleep.note(row.Pos, row.Earlier)
	case s.unverified[row.Pos]:
		// There is no place from which a look would find what was sent before.
	case notStored(err):
		s.asleep.note(row.Pos, nil)
	default:
		s.asleep.note(row.Pos, &jetbox.Earlier{Before: s.before})
	}
}

// codeInProcess is the answer to a message whose ID an earlier one has that is not stored
// yet, and may never be (nats-server 2.15).
const codeInProcess = 10158

// notStored reports whether an outage certainly kept a message from being stored.
func notStored(err error) (certain bool) {
	var api *jetstream.APIError
	if errors.As(err, &api) {
		return api.ErrorCode != codeInProcess
	}
	return errors.Is(err, errDenied) || errors.Is(err, jetstream.ErrNoStreamResponse) || errors.Is(err, nats.ErrNoResponders)
}
