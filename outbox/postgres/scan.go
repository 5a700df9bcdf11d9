package postgres

import (
	"database/sql"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/outboxrow"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// columns of the outbox, which its dead letters and its archive share.
const columns = `id, event_id, idempotency_key, subject, event_type, aggregate_type, aggregate_id,
	aggregate_seq, schema_version, content_type, headers, status, attempts, last_error, available_at,
	created_at, published_at, stream, stream_seq, payload`

// eventColumns are those that a claim needs.
const eventColumns = `o.id, o.event_id, o.idempotency_key, o.subject, o.event_type, o.aggregate_type, o.aggregate_id,
	o.aggregate_seq, o.schema_version, o.content_type, o.headers::text, o.attempts, o.available_at, o.created_at, o.payload`

// publishedColumns are columns as they are after a row r was published, given its
// sequence r.seq and, as $4, the stream.
const publishedColumns = `r.id, r.event_id, r.idempotency_key, r.subject, r.event_type, r.aggregate_type, r.aggregate_id,
	r.aggregate_seq, r.schema_version, r.content_type, r.headers, 'PUBLISHED', r.attempts, NULL, r.available_at,
	r.created_at, clock_timestamp(), nullif($4, ''), r.seq, r.payload`

// entryColumns are those that an operator sees.
const entryColumns = eventColumns + `, v.status, o.last_error, o.published_at, o.stream, o.stream_seq`

// record is a row as stored.
type record struct {
	outboxrow.Row
	availableAt, publishedAt *time.Time
	status                   string
	lastErr, stream          sql.NullString
	streamSeq                sql.NullInt64
}

// eventFields are the destinations of eventColumns, in its order.
func (r *record) eventFields() []any {
	return []any{
		&r.ID, &r.EventID, &r.Key, &r.Subject, &r.Type, &r.AggType, &r.AggID,
		&r.AggSeq, &r.Schema, &r.ContentType, &r.Headers, &r.Attempts, &r.availableAt, &r.CreatedAt, &r.Payload,
	}
}

// entryFields are the destinations of entryColumns.
func (r *record) entryFields() []any {
	return append(r.eventFields(), &r.status, &r.lastErr, &r.publishedAt, &r.stream, &r.streamSeq)
}

func (r *record) times() {
	if r.availableAt != nil {
		r.AvailableAt = r.availableAt.UTC()
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
		StreamSeq: uint64(r.streamSeq.Int64),
	}
	if err != nil && e.LastError == "" {
		e.LastError = err.Error()
	}
	if r.publishedAt != nil {
		e.PublishedAt = r.publishedAt.UTC()
	}
	return e
}
