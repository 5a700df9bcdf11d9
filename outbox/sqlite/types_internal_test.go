package sqlite

import (
	"fmt"
	"testing"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// A BLOB and a TEXT of the same bytes are one value to the relay and two to an
// index: the second event was taken for a repeat of the first. What identifies an
// event or its key must be text.
func TestBlobsAreRefusedWhereTextIdentifies(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	for _, column := range []string{"event_id", "idempotency_key", "subject", "aggregate_type", "aggregate_id"} {
		columns, values := "subject, payload, "+column, "'events.a', 'x', x'6162'"
		if column == "subject" {
			columns, values = "subject, payload", "x'6162', 'x'"
		}
		_, err := s.db.ExecContext(t.Context(), fmt.Sprintf("INSERT INTO outbox (%s) VALUES (%s)", columns, values))
		se, ok := err.(*sqlite.Error) //nolint:errorlint // the driver returns it bare
		if !ok || se.Code() != sqlite3.SQLITE_CONSTRAINT_CHECK {
			t.Errorf("a BLOB in %s: %v, want a failed check", column, err)
		}
	}
}
