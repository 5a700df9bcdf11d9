package dedup

import "errors"

var (
	// ErrNoTables is returned when the ledger has not been created in the
	// database, or by an older version. Call Migrate as the tables' owner.
	ErrNoTables = errors.New("ledger tables do not exist")

	// ErrSchemaTooNew is returned when the tables were made by a newer version
	// of jetbox. The text names both versions. Upgrade this program.
	ErrSchemaTooNew = errors.New("ledger schema is newer than this program")

	// ErrHeldTooLong is returned by Do and DoAll when a handler kept its
	// transaction open for longer than the ledger's MaxHold. It was rolled
	// back. Do slow things before, outside the transaction.
	ErrHeldTooLong = errors.New("transaction was held open for too long")
)
