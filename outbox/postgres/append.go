package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/outboxrow"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// Append records events in the default table, in the caller's transaction; see
// [Writer.Append].
func Append(ctx context.Context, tx *sql.Tx, events ...*jetbox.Event) error {
	return Writer{}.Append(ctx, tx, events...)
}

// AppendPgx is [Append] for a transaction of pgx.
func AppendPgx(ctx context.Context, tx pgx.Tx, events ...*jetbox.Event) error {
	return Writer{}.AppendPgx(ctx, tx, events...)
}

// Writer appends events to one outbox table. The zero value appends to
// [DefaultTable]. It is a plain value, safe for concurrent use.
type Writer struct {
	// Table is the outbox's name, with or without a schema. Default
	// [DefaultTable], as the transaction's search path finds it.
	Table string
}

// Append records events in the caller's transaction: they are published if and
// only if it commits. It fills the empty ID, Type, ContentType and Time of the
// events in place. All events are checked before the first is written; the error
// then wraps jetbox.ErrInvalidEvent. An event ID or key that a retained row has
// is outbox.ErrDuplicateKey; like every error of the database it leaves the
// transaction fit for nothing but a rollback, to a savepoint or of the whole. tx
// is never committed or rolled back here.
//
// tx may be of any driver that speaks PostgreSQL; it needs the right to INSERT
// into the table, and no other.
func (w Writer) Append(ctx context.Context, tx *sql.Tx, events ...*jetbox.Event) error {
	return w.append(events, func(query string, args []any) error {
		_, err := tx.ExecContext(ctx, query, args...)
		return err
	})
}

// AppendPgx is Append for a transaction of pgx.
func (w Writer) AppendPgx(ctx context.Context, tx pgx.Tx, events ...*jetbox.Event) error {
	return w.append(events, func(query string, args []any) error {
		_, err := tx.Exec(ctx, query, args...)
		return err
	})
}

// Append appends to the store's table; see [Writer.Append]. tx must be on the
// store's database.
func (s *Store) Append(ctx context.Context, tx *sql.Tx, events ...*jetbox.Event) error {
	return s.Writer().Append(ctx, tx, events...)
}

// Writer appends to the store's table.
func (s *Store) Writer() Writer { return Writer{Table: s.schema + "." + s.table} }

// insertRows is how many events one statement inserts.
const insertRows = 100

func (w Writer) append(events []*jetbox.Event, exec func(query string, args []any) error) error {
	cfg := Config{Table: w.Table}.withDefaults()
	schema, table, err := splitTable(cfg.Table)
	if err != nil {
		return err
	}
	name := `"` + table + `"`
	if schema != "" {
		name = `"` + schema + `".` + name
	}
	if err := outbox.Prepare(time.Now(), events); err != nil {
		return err
	}
	for some := range slices.Chunk(events, insertRows) {
		var args []any
		for _, ev := range some {
			if args, err = insertArgs(args, ev); err != nil {
				return fmt.Errorf("append event %s to %s: %w", ev.ID, cfg.Table, err)
			}
		}
		if err := exec(insertSQL(name, len(some)), args); err != nil {
			return fmt.Errorf("append %s to %s: %w", ids(some), cfg.Table, appendError(err))
		}
	}
	return nil
}

func ids(events []*jetbox.Event) string {
	if len(events) == 1 {
		return "event " + events[0].ID
	}
	return fmt.Sprintf("events %s to %s", events[0].ID, events[len(events)-1].ID)
}

// appendError recognizes errors of any driver: they share the method that pgx's
// and lib/pq's have.
func appendError(err error) error {
	var coded interface{ SQLState() string }
	if !errors.As(err, &coded) {
		return err
	}
	switch coded.SQLState() {
	case codeUniqueViolation:
		return fmt.Errorf("%w: %w", outbox.ErrDuplicateKey, err)
	case codeUndefinedTable, codeInvalidSchema:
		return fmt.Errorf("%w: %w", outbox.ErrNoTables, err)
	}
	return err
}

const insertColumns = 13

func insertSQL(table string, rows int) string {
	var b strings.Builder
	b.WriteString(`INSERT INTO ` + table + ` (event_id, idempotency_key, subject, event_type, aggregate_type, aggregate_id,
	aggregate_seq, schema_version, content_type, headers, available_at, created_at, payload) VALUES `)
	for i := range rows {
		for j := range insertColumns {
			switch {
			case j > 0:
				b.WriteString(", $")
			case i > 0:
				b.WriteString("), ($")
			default:
				b.WriteString("($")
			}
			b.WriteString(strconv.Itoa(i*insertColumns + j + 1))
		}
	}
	b.WriteString(")")
	return b.String()
}

func insertArgs(args []any, ev *jetbox.Event) ([]any, error) {
	headers, err := outboxrow.EncodeHeaders(ev.Headers)
	if err != nil {
		return nil, err
	}
	var notBefore *time.Time
	if !ev.NotBefore.IsZero() {
		// Up, not down: never before the instant the writer asked for.
		notBefore = new(ev.NotBefore.Add(time.Millisecond - 1).Truncate(time.Millisecond))
	}
	typ := ev.Type
	if typ == ev.Subject {
		typ = ""
	}
	payload := ev.Payload
	if payload == nil {
		payload = []byte{} // nil would be NULL
	}
	return append(args,
		ev.ID, null(ev.Key), ev.Subject, null(typ), null(ev.AggregateType), null(ev.AggregateID),
		ev.AggregateSeq, null(ev.SchemaVersion), ev.ContentType, headers, notBefore, ev.Time, payload), nil
}

func null(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// storable makes a text that the database takes: it has no NUL, and the reasons
// of errors may quote what others sent.
func storable(text string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(text, "\ufffd"), "\x00", "\ufffd")
}
