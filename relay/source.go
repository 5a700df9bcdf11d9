package relay

import (
	"context"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// Source is where a Relay takes events from. All methods must be safe for
// concurrent use. Those that take a lease are fenced: once another relay has
// taken over they change nothing and return jetbox.ErrLeaseLost, or nil when there
// was nothing to change.
type Source interface {
	Leaser

	// Claim records, durably, which rows are about to be sent and returns up to
	// as many as asked for that may go now, lowest first. None is no error. It
	// runs beside Record only where every outcome lets its key go on, and then
	// these rows are among those in hand.
	Claim(ctx context.Context, l jetbox.Lease, ask jetbox.Ask) ([]jetbox.Row, error)

	// Record writes the outcomes of claimed rows. Repeating it is harmless.
	Record(ctx context.Context, l jetbox.Lease, outcomes []jetbox.Outcome) error

	// Wait returns nil when there may be something to claim. It is a hint, in
	// both directions: the relay polls beside it.
	Wait(ctx context.Context) error
}

// Leaser says which relay may work.
type Leaser interface {
	// Acquire takes the lease for the candidate, or renews its own under the same
	// epoch. While other relays have all of the source it changes no lease, and
	// the one returned says who, with Held false.
	Acquire(ctx context.Context, c jetbox.Candidate) (jetbox.Lease, error)

	// Release gives the lease back. It is no error to have lost it, nor to have had
	// none: an epoch of 0 stands for whichever the owner has, and a relay that only
	// stood by where several share a source takes its leave with it.
	Release(ctx context.Context, l jetbox.Lease) error
}

// Yielder is a Source that several relays share.
type Yielder interface {
	// Yield gives back the shards that another relay should have, and returns
	// jetbox.ErrLeaseLost when the lease is not the caller's any more. Repeating
	// it is harmless. The relay calls it while nothing that it has sent is on its
	// way, and not while Claim runs. Some of what it claimed may not be recorded
	// even so, when recording has failed for long: the next holder has to take it
	// for sent.
	Yield(ctx context.Context, l jetbox.Lease) error
}

// Recaller is a Source that remembers what the streams have acknowledged, and that can
// take back what it recorded as published: so a relay notices when a broker has lost
// it, and publishes it again.
type Recaller interface {
	// Anchors returns what is known of each stream: at least the message with the
	// highest sequence, of the outcomes recorded that may be remembered. Where
	// several relays record, there may be one for each.
	Anchors(ctx context.Context) ([]jetbox.Anchor, error)

	// SetAnchor replaces what is known of a stream, unless that is not of the one
	// created at that time any more, or a recall is under way: then it changes
	// nothing. With another time of creation, what was recorded so far was published
	// to an older stream.
	SetAnchor(ctx context.Context, l jetbox.Lease, created time.Time, a jetbox.Anchor) error

	// Recallable returns some of the published rows that a recall chooses, those with
	// the lowest ids after one, and up to which id it has looked; math.MaxInt64 when
	// there are no more. None is no error.
	Recallable(ctx context.Context, stream string, r jetbox.Recall, after int64) (rows []jetbox.PublishedRow, upTo int64, err error)

	// Recall carries out a step of the recall that is under way on a stream, and moves
	// it on, and reports that this is done: it is not, and nothing is changed, when
	// the recall is not where the caller has seen it. While one is under way on any
	// stream, Claim returns nothing to anybody.
	Recall(ctx context.Context, l jetbox.Lease, stream string, r jetbox.Recall, step jetbox.Recalled) (done bool, err error)
}

// Pruner is a Source that keeps what was published until it is told otherwise.
type Pruner interface {
	// Prune removes what was recorded as published before a time, or moves it to
	// the archive, and returns how many rows that were.
	Prune(ctx context.Context, l jetbox.Lease, before time.Time, archive bool) (pruned int, err error)
}
