package sqlite

import (
	"database/sql"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/outboxrow"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// record is a row as stored. The table's checks guarantee that it can be
// scanned, whoever wrote it.
type record struct {
	outboxrow.Row
	lastErr, stream                      sql.NullString
	status                               string
	hold                                 int
	createdAt                            int64
	availableAt, publishedAt, streamSeqN sql.NullInt64
}

// fields are the destinations of columns, in its order.
func (r *record) fields() []any {
	return []any{
		&r.ID, &r.EventID, &r.Key, &r.Subject, &r.Type, &r.AggType, &r.AggID,
		&r.AggSeq, &r.Schema, &r.ContentType, &r.Headers, &r.status, &r.Attempts, &r.lastErr, &r.availableAt,
		&r.createdAt, &r.publishedAt, &r.stream, &r.streamSeqN, &r.hold, &r.Payload,
	}
}

// eventFields are the destinations of eventColumns, in its order.
func (r *record) eventFields() []any {
	return []any{
		&r.ID, &r.EventID, &r.Key, &r.Subject, &r.Type, &r.AggType, &r.AggID,
		&r.AggSeq, &r.Schema, &r.ContentType, &r.Headers, &r.Attempts, &r.availableAt, &r.createdAt, &r.Payload,
	}
}

// times turns the columns' milliseconds into times.
func (r *record) times() {
	r.CreatedAt = time.UnixMilli(r.createdAt)
	if r.availableAt.Valid {
		r.AvailableAt = time.UnixMilli(r.availableAt.Int64).UTC()
	}
}

func (r *record) row() jetbox.Row {
	r.times()
	return r.Claimed()
}

func (r *record) entry() outbox.Entry {
	r.times()
	ev, err := r.Event()
	e := outbox.Entry{
		ID:        r.ID,
		Event:     ev,
		State:     jetbox.State(r.status),
		Attempts:  r.Attempts,
		LastError: r.lastErr.String,
		Stream:    r.stream.String,
		StreamSeq: uint64(r.streamSeqN.Int64),
	}
	if err != nil && e.LastError == "" {
		e.LastError = err.Error()
	}
	if r.publishedAt.Valid {
		e.PublishedAt = time.UnixMilli(r.publishedAt.Int64).UTC()
	}
	return e
}
