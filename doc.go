// Package jetbox is the vocabulary of a transactional outbox and event bus
// adapter for NATS JetStream: what an event is, which names it has on the
// wire, and the words the other packages use to each other.
//
// An application appends an [Event] to its outbox in the transaction that
// changes its own tables (package outbox). A relay moves committed rows to a
// stream (package relay). Durable pull consumers hand them to handlers
// (package consumer), which can record what they handled in the transaction of
// the effect (package dedup). What cannot be handled is parked as a dead letter
// (package dlq). Package embedded runs a broker inside the process.
//
// What the whole promises: nothing committed is lost, nothing uncommitted is
// seen, one copy of an event on the stream within the broker's duplicate
// window, order per ordering key, and one effect per event where the handler
// uses a ledger. ARCHITECTURE.md lists what is true after a crash at each step.
//
// This package does no I/O, starts no goroutine and keeps no state. Its
// functions are safe for concurrent use; its values are not locked.
package jetbox
