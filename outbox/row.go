package outbox

import (
	"slices"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// Entry is a row as an operator sees it. It is a plain value.
type Entry struct {
	// ID is the row's id: insertion order.
	ID int64

	// Event is what the row holds. Event.NotBefore is when the row may be
	// published, or tried again. Fields the wire cannot carry are as they are.
	Event jetbox.Event

	// State includes jetbox.Processing, derived from the claim.
	State jetbox.State

	// Attempts counts publish attempts that failed because of this row, LastError
	// says why the last one did.
	Attempts  int
	LastError string

	// PublishedAt is when the PubAck was recorded, zero before.
	PublishedAt time.Time

	// Stream and StreamSeq say where the broker stored it; StreamSeq is zero
	// when that is not known exactly.
	Stream    string
	StreamSeq uint64
}

// OutcomeUnknown begins the last error of a row that a relay may have sent, and that is in
// no claim any more that says so: it waits, for its own sake or behind an earlier row of
// its key, or is a dead letter. The reason, as far as there is one, follows after a colon.
const OutcomeUnknown = "claimed before, and the outcome is not known"

// LastError is what a store writes as the last error of a row that was not published. It
// is for stores.
func LastError(o jetbox.Outcome) string {
	if !o.InDoubt {
		return o.Reason
	}
	return OutcomeUnknown + ": " + o.Reason
}

// SplitUnsent separates the outcomes to write from the rows whose claims are to be
// taken back. It is for stores.
func SplitUnsent(outcomes []jetbox.Outcome) (rest []jetbox.Outcome, unsent []int64) {
	if !slices.ContainsFunc(outcomes, func(o jetbox.Outcome) bool { return o.Unsent }) {
		return outcomes, nil
	}
	for _, o := range outcomes {
		if o.Unsent {
			unsent = append(unsent, o.Pos)
		} else {
			rest = append(rest, o)
		}
	}
	return rest, unsent
}

// Filter chooses rows. The zero value means all of them.
type Filter struct {
	// State, when set, is the state wanted.
	State jetbox.State

	// IDs, when set, are the only rows wanted.
	IDs []int64

	// Subject, when set, is the exact subject wanted.
	Subject string

	// Reason, when set, is a text that LastError contains.
	Reason string

	// Limit is the most rows wanted. Default 0: no limit.
	Limit int
}

// Stats is the state of an outbox, read from the database, so that it is true
// also while no relay works.
type Stats struct {
	// Pending counts committed rows not yet published, claimed ones included.
	Pending int64

	// Claimed counts those of them that a relay holds: sent, or about to be.
	Claimed int64

	// OldestPending is when the oldest pending row that is due was recorded; zero
	// when none is.
	OldestPending time.Time

	// DeadLetter counts parked rows.
	DeadLetter int64

	// TableBytes is the space the outbox takes in the database; on SQLite, what
	// the whole file takes.
	TableBytes int64

	// Leases say who may publish: one for each relay that has announced itself,
	// also while it holds no shard, and only live ones. None of them is Held:
	// nobody asks.
	Leases []jetbox.Lease

	// Shards is how many shards the outbox has; on SQLite, 1.
	Shards int
}
