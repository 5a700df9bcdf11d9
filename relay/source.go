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
	// does not run beside Record.
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

// Pruner is a Source that keeps what was published until it is told otherwise.
type Pruner interface {
	// Prune removes what was recorded as published before a time, or moves it to
	// the archive, and returns how many rows that were.
	Prune(ctx context.Context, l jetbox.Lease, before time.Time, archive bool) (pruned int, err error)
}
