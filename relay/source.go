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
	// n that may go now, lowest first. None is no error.
	Claim(ctx context.Context, l jetbox.Lease, n int) ([]jetbox.Row, error)

	// Record writes the outcomes of claimed rows. Repeating it is harmless.
	Record(ctx context.Context, l jetbox.Lease, outcomes []jetbox.Outcome) error

	// Wait returns nil when there may be something to claim. It is a hint, in
	// both directions: the relay polls beside it.
	Wait(ctx context.Context) error
}

// Leaser says which relay may work.
type Leaser interface {
	// Acquire takes the lease for owner, or renews owner's own, to last for
	// length from now. While another relay has it nothing changes, and the
	// lease returned says who, with Held false.
	Acquire(ctx context.Context, owner string, length time.Duration) (jetbox.Lease, error)

	// Release gives the lease back. It is no error to have lost it.
	Release(ctx context.Context, l jetbox.Lease) error
}

// Pruner is a Source that keeps what was published until it is told otherwise.
type Pruner interface {
	// Prune removes what was recorded as published before a time, or moves it to
	// the archive, and returns how many rows that were.
	Prune(ctx context.Context, l jetbox.Lease, before time.Time, archive bool) (pruned int, err error)
}
