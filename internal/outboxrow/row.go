// Package outboxrow reads rows of an outbox table, whichever database they come
// from: the same columns make the same event, and what is no event gets the same
// reason. It does no I/O.
package outboxrow

import (
	"database/sql"
	"fmt"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// Row is a row as stored: nothing is filled, nothing is checked.
type Row struct {
	ID                            int64
	EventID, Subject, ContentType string
	Headers                       string // JSON
	Key, Type, AggType, AggID     sql.NullString
	Schema                        sql.NullString
	AggSeq                        sql.NullInt64
	Attempts                      int
	CreatedAt                     time.Time
	AvailableAt                   time.Time // zero when NULL
	Payload                       []byte
}

// Event returns the row's event with defaults filled, and an error when its
// headers cannot be read.
func (r *Row) Event() (jetbox.Event, error) {
	ev := jetbox.Event{
		ID:            r.EventID,
		Key:           r.Key.String,
		Subject:       r.Subject,
		Type:          r.Type.String,
		AggregateType: r.AggType.String,
		AggregateID:   r.AggID.String,
		SchemaVersion: r.Schema.String,
		ContentType:   r.ContentType,
		Payload:       r.Payload,
		Time:          r.CreatedAt,
		NotBefore:     r.AvailableAt,
	}
	if r.AggSeq.Valid {
		seq := r.AggSeq.Int64 // r may be read into again
		ev.AggregateSeq = &seq
	}
	ev = ev.WithDefaults(time.Time{})
	if r.EventID == "" {
		// Raw SQL may bring it. A fresh ID each time it is looked at would be
		// taken for the row's own.
		ev.ID, ev.Key = "", r.Key.String
	}
	headers, err := ParseHeaders(r.Headers)
	if err != nil {
		return ev, fmt.Errorf("%w: headers column: %w", jetbox.ErrInvalidEvent, err)
	}
	ev.Headers = headers
	return ev, nil
}

// Claimed returns the row for a relay, with its fault when it is no event.
func (r *Row) Claimed() jetbox.Row {
	ev, err := r.Event()
	if err == nil {
		err = r.fault()
	}
	if err == nil {
		err = ev.Validate()
	}
	return jetbox.Row{Pos: r.ID, Event: ev, Attempts: r.Attempts, Fault: err}
}

// fault finds what WithDefaults would paper over: an empty text where raw SQL
// meant to give an ID is no ID.
func (r *Row) fault() error {
	switch {
	case r.EventID == "":
		return fmt.Errorf("%w: event ID is empty", jetbox.ErrInvalidEvent)
	case r.Key.Valid && r.Key.String == "":
		return fmt.Errorf("%w: idempotency key is empty, not NULL", jetbox.ErrInvalidEvent)
	}
	return nil
}
