package relay_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// closedAhead is a source that fails to claim beside what is in hand, once another relay
// is to have some of the shards and this one has been told.
type closedAhead struct {
	*sharedSource
	excess int
}

func (s closedAhead) Claim(ctx context.Context, l jetbox.Lease, ask jetbox.Ask) ([]jetbox.Row, error) {
	if len(ask.InHand) == 0 {
		return s.sharedSource.Claim(ctx, l, ask)
	}
	s.want(s.excess)
	time.Sleep(1500 * time.Millisecond) // a renewal
	return nil, errors.New("connection reset")
}

// refusedWithOneBehind appends a row that no stream takes and one of its key behind it,
// which is claimed and not sent.
func (r *rig) refusedWithOneBehind() {
	r.append(event("nowhere.a", "k", "1"), event("events.a", "k", "2"))
}

// A row that was not sent is recorded as such before its shard goes: to the next holder
// the claim that it lies in may be the only one.
func TestOutcomesInHandAreRecordedBeforeShardsAreGivenBack(t *testing.T) {
	inBubble(t, func(r *rig) {
		src := newSharedSource(r, 2)
		var atYield []outbox.Entry
		src.YieldFunc = func() error {
			atYield = append(atYield, r.show(1), r.show(2))
			return nil
		}
		r.refusedWithOneBehind()
		_, stop := r.start(closedAhead{src, 1}, relay.Config{Lease: 3 * time.Second})
		time.Sleep(5 * time.Second)
		stop()
		if len(atYield) < 2 || atYield[0].Attempts != 1 || atYield[1].State != jetbox.Pending {
			t.Errorf("at the yield the rows were %+v, want an attempt of the first recorded, and no claim on the other", atYield)
		}
	})
}

// When everything has to be given back without a record, and is not after all, what was
// not sent stays claimed: somebody else may have sent it meanwhile.
func TestRowsNotSentStayClaimedAfterAYield(t *testing.T) {
	inBubble(t, func(r *rig) {
		src := newSharedSource(r, 1)
		full, broken := newFault("no space left"), newFault("read-only")
		src.RecordFunc, src.YieldFunc = full.err, broken.err
		r.refusedWithOneBehind()
		_, stop := r.start(closedAhead{src, 1}, relay.Config{Lease: 3 * time.Second})
		time.Sleep(10 * time.Second)
		src.want(0)
		full.heal()
		time.Sleep(6 * time.Second)
		stop()
		r.wantState(1, jetbox.Pending, "no stream")
		r.wantState(2, jetbox.Pending, outbox.OutcomeUnknown)
	})
}
