package outbox

import "errors"

var (
	// ErrDuplicateKey is returned by Append when a retained row already has
	// this event ID or idempotency key. The caller's transaction can go on
	// where the database allows it (SQLite does); usually it means that this
	// event was recorded before.
	ErrDuplicateKey = errors.New("event ID or idempotency key is already in the outbox")

	// ErrNoTables is returned when the outbox has not been created. Run Migrate,
	// or "relay migrate".
	ErrNoTables = errors.New("outbox tables do not exist")

	// ErrSchemaTooNew is returned when the tables were written by a newer
	// version of jetbox. The text names both versions. Upgrade this program.
	ErrSchemaTooNew = errors.New("outbox schema is newer than this program")

	// ErrNotFound is returned for a row that does not exist.
	ErrNotFound = errors.New("no such row in the outbox")

	// ErrIllegalState is returned when a row is not in the state that a change
	// starts from, for instance a retry of a row that was published.
	ErrIllegalState = errors.New("row is not in the state this change starts from")
)
