package relay_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// slowRecords takes a moment for each Record, and notes which claims begin meanwhile.
type slowRecords struct {
	*sqlite.Store
	settled, unsettled atomic.Int32 // records under way
	beside, early      atomic.Int32 // claims that began beside one of them
}

func (s *slowRecords) Claim(ctx context.Context, l jetbox.Lease, ask jetbox.Ask) ([]jetbox.Row, error) {
	if s.settled.Load() > 0 {
		s.beside.Add(1)
	}
	if s.unsettled.Load() > 0 {
		s.early.Add(1)
	}
	return s.Store.Claim(ctx, l, ask)
}

func (s *slowRecords) Record(ctx context.Context, l jetbox.Lease, outcomes []jetbox.Outcome) error {
	now := &s.settled
	for _, o := range outcomes {
		if o.State != jetbox.Published {
			now = &s.unsettled
		}
	}
	now.Add(1)
	defer now.Add(-1)
	time.Sleep(time.Second)
	return s.Store.Record(ctx, l, outcomes)
}

// The next rows are claimed beside a record, but not beside one of a row that failed:
// that one decides which rows may be claimed.
func TestNothingIsClaimedBesideTheRecordOfAFailure(t *testing.T) {
	inBubble(t, func(r *rig) {
		for i := range 20 {
			r.append(event("events.a", fmt.Sprint("k", i%3), fmt.Sprint(i)))
		}
		r.append(event("nobody.takes.this", "k1", "refused"))
		for i := range 20 {
			r.append(event("events.a", fmt.Sprint("k", i%3), fmt.Sprint(i)))
		}
		src := &slowRecords{Store: r.store}
		_, stop := r.start(src, relay.Config{Batch: 5, MaxAttempts: 2})
		time.Sleep(2 * time.Minute)
		stop()
		if src.early.Load() > 0 || src.beside.Load() == 0 {
			t.Errorf("%d claims began beside the record of a failure, want none; %d beside others, want some",
				src.early.Load(), src.beside.Load())
		}
	})
}
