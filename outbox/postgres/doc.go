// Package postgres keeps the outbox in PostgreSQL (13 or later), by pgx.
//
// It promises what package outbox promises, and that several relays may work on
// one outbox at once: the ordering keys are hashed into shards, and each shard
// has at most one relay. The database's clock decides about leases and due times.
//
// Beside the outbox stand a narrow queue with the ids of the rows that may go
// now, and a table of those that wait. A trigger fills them, whoever inserts, in
// the writer's transaction. So a row is seen when it commits, in whatever order
// transactions commit, and neither a gap in the ids nor a transaction that stays
// open elsewhere matters. Marking a row published touches no index.
//
// What it does not do: no row is seen while the trigger is disabled, until a
// sweep finds it, which takes minutes in a large table. A transaction that stays
// open in the same database, reading only, keeps the queue's dead entries from
// being removed; claims then slow down with their number.
//
// After a crash: a relay that died holds its shards until its lease ends. The
// relay that takes over finds what it had claimed, and sends what is
// unresolved there again under the same key. Every change a relay makes is one
// message to the server, which carries it out to its end or not at all, also when
// the relay is stopped in the middle: it never holds a transaction open.
package postgres
