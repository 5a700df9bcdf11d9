package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/outboxrow"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// Append records events in the default table, in the caller's transaction; see
// [Writer.Append].
func Append(ctx context.Context, tx *sql.Tx, events ...*jetbox.Event) error {
	return Writer{}.Append(ctx, tx, events...)
}

// Writer appends events to one outbox table. The zero value appends to
// [DefaultTable]. It is a plain value, safe for concurrent use.
type Writer struct {
	// Table is the outbox's name. Default [DefaultTable].
	Table string
}

// Append records events in the caller's transaction: they are published if and
// only if it commits. It fills the empty ID, Type, ContentType and Time of the
// events in place. All events are checked before the first is written; the error
// then wraps jetbox.ErrInvalidEvent. An event ID or key that a retained row has
// is outbox.ErrDuplicateKey; roll back, or at least write nothing more that
// belongs to that event. tx is never committed or rolled back here.
//
// Any SQLite database with the tables will do, whatever settings it was opened
// with; [OpenDB] has the recommended ones.
func (w Writer) Append(ctx context.Context, tx *sql.Tx, events ...*jetbox.Event) error {
	table := Config{Table: w.Table}.withDefaults().Table
	if err := checkTable(table); err != nil {
		return err
	}
	if err := outbox.Prepare(time.Now(), events); err != nil {
		return err
	}
	if len(events) == 0 {
		return nil
	}
	stmt, err := tx.PrepareContext(ctx, expand(table, insertSQL))
	if err != nil {
		return fmt.Errorf("append to %s: %w", table, noTables(err))
	}
	defer stmt.Close()
	for _, ev := range events {
		args, err := insertArgs(ev)
		if err != nil {
			return fmt.Errorf("append event %s to %s: %w", ev.ID, table, err)
		}
		if _, err := stmt.ExecContext(ctx, args...); err != nil {
			if isUnique(err) {
				err = fmt.Errorf("%w: %w", outbox.ErrDuplicateKey, err)
			}
			return fmt.Errorf("append event %s to %s: %w", ev.ID, table, err)
		}
	}
	return nil
}

// Append appends to the store's table; see [Writer.Append]. tx must be on the
// store's file.
func (s *Store) Append(ctx context.Context, tx *sql.Tx, events ...*jetbox.Event) error {
	return Writer{Table: s.table}.Append(ctx, tx, events...)
}

const insertSQL = `INSERT INTO "{t}" (event_id, idempotency_key, subject, event_type, aggregate_type, aggregate_id,
	aggregate_seq, schema_version, content_type, headers, available_at, created_at, payload)
	VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`

func insertArgs(ev *jetbox.Event) ([]any, error) {
	headers, err := outboxrow.EncodeHeaders(ev.Headers)
	if err != nil {
		return nil, err
	}
	var notBefore *int64
	if !ev.NotBefore.IsZero() {
		// Up, not down: never before the instant the writer asked for.
		notBefore = new(ev.NotBefore.Add(time.Millisecond - 1).UnixMilli())
	}
	typ := ev.Type
	if typ == ev.Subject {
		typ = ""
	}
	payload := ev.Payload
	if payload == nil {
		payload = []byte{} // nil would be NULL
	}
	return []any{
		ev.ID, null(ev.Key), ev.Subject, null(typ), null(ev.AggregateType), null(ev.AggregateID),
		ev.AggregateSeq, null(ev.SchemaVersion), ev.ContentType, headers, notBefore, ev.Time.UnixMilli(), payload,
	}, nil
}

func null(s string) any {
	if s == "" {
		return nil
	}
	return s
}
