package jetbox

import (
	"strings"
	"time"

	"github.com/google/uuid"
)

// DefaultContentType is the media type of an event that names none.
const DefaultContentType = "application/json"

// Event is a fact the application recorded, with an ID that never changes.
// Only Subject is mandatory. An Event is a plain value: copy it freely, but
// Headers and Payload are shared by the copies.
type Event struct {
	// ID is the stable event ID, 1 to 512 bytes of printable text. Append
	// fills an empty one with a UUIDv7 (RFC 9562).
	ID string

	// Key is the idempotency key: it becomes the message ID, which the broker
	// uses to drop repeats inside its duplicate window, and what a consumer's
	// ledger remembers. Default: the ID, so that two equal payloads are two
	// events unless the writer says otherwise ([ContentKey] derives a key from
	// the content).
	Key string

	// Subject is where the event is published: dot-separated tokens without
	// wildcards, at most 1,024 bytes.
	Subject string

	// Type says what happened, such as "order.created". Default: the subject.
	Type string

	// AggregateType and AggregateID name the thing the event is about. Together
	// they are the ordering key: events that share it are stored in the order
	// of their rows. An empty AggregateID means no ordering.
	AggregateType, AggregateID string

	// AggregateSeq is the version of the aggregate, for consumers that look for
	// gaps. Nil means that the writer does not count.
	AggregateSeq *int64

	// SchemaVersion is the version of the payload's schema. Optional.
	SchemaVersion string

	// ContentType is a label for the payload, which is never parsed or checked.
	// Default [DefaultContentType].
	ContentType string

	// Headers are extra message headers. Names that steer the broker or belong
	// to jetbox are refused, see [Event.Validate].
	Headers map[string][]string

	// Payload is delivered byte for byte. Nil and empty are the same: no bytes.
	Payload []byte

	// Time is when the event was recorded, in whole milliseconds. Append fills
	// a zero one.
	Time time.Time

	// NotBefore is the earliest time to publish. Zero means now. An event that
	// waits for its time holds back nobody.
	NotBefore time.Time
}

// NewID returns a fresh event ID: a UUIDv7 (RFC 9562), which sorts by time.
func NewID() string {
	return uuid.Must(uuid.NewV7()).String()
}

// WithDefaults returns a copy of e whose empty ID, Key, Type, ContentType and
// Time are filled: what Append stores and a relay publishes.
// now is used for Time only.
func (e Event) WithDefaults(now time.Time) Event {
	if e.ID == "" {
		e.ID = NewID()
	}
	if e.Key == "" {
		e.Key = e.ID
	}
	if e.Type == "" {
		e.Type = e.Subject
	}
	if e.ContentType == "" {
		e.ContentType = DefaultContentType
	}
	if e.Time.IsZero() {
		e.Time = now
	}
	e.Time = e.Time.UTC().Truncate(time.Millisecond)
	return e
}

var orderingKeyEscaper = strings.NewReplacer("%", "%25", "/", "%2F")

// OrderingKey returns "type/id", or the ID alone without a type, with % and /
// inside either part written %25 and %2F so that two different pairs never
// make one key. It is empty for an event without an aggregate ID, which is
// ordered with nothing.
func (e Event) OrderingKey() string {
	if e.AggregateID == "" {
		return ""
	}
	id := orderingKeyEscaper.Replace(e.AggregateID)
	if e.AggregateType == "" {
		return id
	}
	return orderingKeyEscaper.Replace(e.AggregateType) + "/" + id
}
