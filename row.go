package jetbox

import "time"

// State is what a row of the outbox is in; see the contract in package outbox.
type State string

const (
	// Pending rows wait to be published.
	Pending State = "PENDING"
	// Processing rows are claimed by a relay. This state is derived from the
	// claim and shown by a view; it is never stored per row.
	Processing State = "PROCESSING"
	// Published rows are on a stream: the PubAck was recorded.
	Published State = "PUBLISHED"
	// DeadLetter rows cannot be published. They keep payload and reason until a
	// person retries or discards them.
	DeadLetter State = "DEAD_LETTER"
)

// Row is one outbox row in a relay's hands.
type Row struct {
	// Pos is the row's id: insertion order, and order within an ordering key.
	Pos int64

	// Event is what to publish.
	Event Event

	// Attempts is how often publishing failed because of this row.
	Attempts int

	// Fresh reports that the row was never claimed before, so that it cannot have
	// been sent: nothing of it is on its way, or on the stream.
	Fresh bool

	// InDoubt reports that the row may have been sent, and in no claim that it still
	// lies in: only the time in which it was written says where to look for it on the
	// stream.
	InDoubt bool

	// Earlier is the claim that the row was first in, if it still lies in it: where
	// to look for the row on the stream. One that is InDoubt has none.
	Earlier *Earlier

	// Fault says why the row is no event at all, for instance headers that are
	// not a JSON object. Such a row is parked, never sent.
	Fault error
}

// Ask is what a relay asks of a claim.
type Ask struct {
	// Limit is the most rows it wants.
	Limit int

	// InHand are rows claimed before and not recorded yet: they are left out.
	InHand []int64

	// Before is where the streams stand. The rows claimed are sent later.
	Before []Position
}

// Position is where a stream stood at some moment.
type Position struct {
	Stream  string    `json:"stream"`
	Created time.Time `json:"created"`     // tells a stream from an older one of its name
	Seq     uint64    `json:"seq"`         // its last
	At      time.Time `json:"at,omitzero"` // when that was, by the broker's clock
}

// Earlier is a claim whose rows may have been sent.
type Earlier struct {
	// Age is how old it was when the row was claimed again, by the source's clock.
	Age time.Duration

	// Before is where the streams stood, as that claim was told.
	Before []Position
}

// Outcome is what became of one claimed row. A source records it only on a row
// that is still Pending.
type Outcome struct {
	// Pos names the row.
	Pos int64

	// State is Published, DeadLetter, or Pending for a row that is to be tried
	// again after Delay.
	State State

	// Stream and StreamSeq say where the broker stored it. StreamSeq is zero
	// when that is not known exactly.
	Stream    string
	StreamSeq uint64

	// MsgID and Created, the message's ID and the time of the stream's creation, are
	// set where a Published row may be remembered as the stream's [Anchor].
	MsgID   string
	Created time.Time

	// Remove says that a Published row leaves the table with this record.
	Remove Removal

	// Unsent says that a Pending row was not sent after all: it stays as it is, and
	// as if it had not been claimed.
	Unsent bool

	// InDoubt says of a row that is not Published that it may have been sent and stored
	// all the same. A source keeps that with the row, also while it is a dead letter,
	// until the next outcome; see [Row.InDoubt].
	InDoubt bool

	// Reason is why it was not published.
	Reason string

	// Attempted reports that the failure was the row's own and counts against
	// its attempts. An outage never does.
	Attempted bool

	// Delay is how long a Pending row waits. Later rows of its key wait with it.
	Delay time.Duration

	// Freeze keeps the ordering key of a DeadLetter row waiting until a person
	// retries or discards that row.
	Freeze bool
}

// Removal is what happens to a row with the record of its publication.
type Removal int

const (
	// Keep leaves the row for as long as the retention says.
	Keep Removal = iota
	// Delete removes it.
	Delete
	// Archive moves it to the archive.
	Archive
)

// Candidate is a relay that asks for the lease of a source.
type Candidate struct {
	// Owner is random per process start.
	Owner string

	// Length is how long the lease is to last, from now.
	Length time.Duration

	// Unable says that it cannot publish just now: where relays share a source,
	// the able ones get its part.
	Unable bool
}

// Lease is a relay's right to send a source's rows, or another's. Where relays
// share a source, the right is to the rows of some shards of it, and each relay
// has a lease of its own.
type Lease struct {
	// Owner is random per process start.
	Owner string

	// Epoch grows with every takeover, so that a relay that slept through one
	// cannot write.
	Epoch int64

	// Held reports that the asking relay is the owner, and so has at least one
	// shard.
	Held bool

	// Shards is how many shards of the source the owner holds.
	Shards int

	// Excess is how many of these another relay should have. The holder claims no
	// more of their rows, settles what it has sent, and yields.
	Excess int

	// Peers is how many other relays share the source.
	Peers int

	// Holder is the owner's process, for people: host and pid.
	Holder string

	// Expires is when the lease ends unless renewed, by the source's clock.
	Expires time.Time
}
