package jetbox

import "time"

// Anchor is a message that a stream has acknowledged, as an outbox remembers it. A
// stream that ends before it, or has another message there, has lost what it had
// acknowledged.
type Anchor struct {
	Stream  string
	Created time.Time // of the stream, to the nanosecond: tells it from an older one of its name
	Seq     uint64
	MsgID   string // "" where only the sequence is known

	// Pos is the row's id, and At when it was recorded, by the source's clock.
	Pos int64
	At  time.Time

	// Shared reports that several relays record what they publish to the stream, so
	// that rows are recorded only about in the order of their sequences.
	Shared bool

	// Older reports that published rows may be retained that an older stream of the
	// name had, and that they were not recalled.
	Older bool

	// Recall is what is under way on the stream, nil for nothing.
	Recall *Recall
}

// Recall says which published rows of a stream become pending again. While one is
// under way nothing is claimed, so that no new row overtakes an old one of its key.
type Recall struct {
	// Number tells it from others on the stream. It is random.
	Number int64 `json:"number"`

	// After and AfterTime choose rows of the stream as it is now: those with a higher
	// sequence, and those without a sequence that were recorded later.
	After     uint64    `json:"after"`
	AfterTime time.Time `json:"after_time"`

	// Older chooses the rows of older streams of the name instead.
	Older bool `json:"older"`

	// Done is the id up to which rows were looked at, and Rows how many of them have
	// become pending.
	Done int64 `json:"done"`
	Rows int   `json:"rows"`
}

// PublishedRow is a row that was recorded as published.
type PublishedRow struct {
	Pos   int64
	ID    string // of the event
	MsgID string
	Seq   uint64 // 0 where it is not known
	At    time.Time
}

// Recalled is what is to be done with rows of a recall.
type Recalled struct {
	// Lost are not on the stream: they become pending, as if never sent.
	Lost []int64

	// Moved are on the stream, at another sequence than was recorded.
	Moved []PublishedRow

	// Done is the id up to which all rows were looked at, with these. End says that
	// these were the last.
	Done int64
	End  bool
}
