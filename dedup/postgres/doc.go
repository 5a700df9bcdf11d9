// Package postgres keeps a ledger of handled events in PostgreSQL (13 or later),
// in the transaction of their effect.
//
// The entry and the effect are committed together: both are there or neither,
// whatever dies and whenever. [New] is for database/sql with any driver, [NewPgx]
// for a pgxpool.
//
// The entry is the first statement of the transaction. A call for a key that is
// being handled, in this process or another, waits there, and holds nothing
// anybody could wait for: no circle goes through the ledger. It waits for a fifth of a
// second at a time and gives its connection back in between. When the first one
// commits, the second is told "seen"; when it rolls back, or its process or
// connection dies, the second one applies. Serialization failures and deadlocks
// are repeated in place: apply may run several times, each time in a new
// transaction.
//
// An apply that keeps its transaction open without a statement for longer than
// [Config.MaxHold] loses it: the server ends the session, also when this process
// has been stopped and cannot.
//
// Everything is set for the transaction alone and no lock outlives it, so a
// pooler in transaction mode may be in front of the database; the pool must then
// not prepare statements by name, which is up to its settings
// (default_query_exec_mode=exec or cache_describe). Transactions have the
// isolation that is the default of their session.
//
// Entries older than the retention, by the database's clock, are removed in small
// batches by [Ledger.Run], which the caller starts, and where it does not run,
// every few hundred calls of Do. With a KeepFunc, only Run and [Ledger.Prune]
// remove anything. The ledger neither opens nor closes the database.
//
// The tables are made by [Ledger.Migrate] or [MigrationSQL], as their owner. The
// role of a consumer needs these rights on them, and what its handler needs:
//
//	GRANT USAGE ON SCHEMA billing TO consumer;
//	GRANT SELECT, INSERT, DELETE ON billing.jetbox_ledger TO consumer;
//	GRANT SELECT ON billing.jetbox_ledger_schema TO consumer;
package postgres
