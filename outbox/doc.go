// Package outbox is what every outbox store has in common: the rules for
// appending events, what an operator sees of a row, and the errors.
//
// An outbox is a table beside the application's own tables. The application
// appends events in the transaction that makes the change they describe, so
// that both are there or neither is. Anything that speaks SQL may insert a row;
// the library only adds defaults and says early what the wire cannot carry.
//
// What a store promises:
//
//   - Append writes in the caller's transaction and nowhere else. It checks
//     every event before the database sees the first one, and never commits or
//     rolls back.
//   - A row is Pending until its PubAck is recorded or it is parked, whatever
//     crashes. Rows change state only from the state the change names.
//   - Changes by a relay are fenced by the epoch of its lease: after another
//     relay has taken over they change nothing and return jetbox.ErrLeaseLost.
//   - Among the rows of one ordering key that are committed and due, a claim
//     never hands out a row before one with a lower id. A row that waits for
//     its retry counts as due; one scheduled for later holds back nobody.
//   - The last message that each stream acknowledged is remembered with the record
//     of its row. Published rows become pending again only in a recall, by their ids,
//     and while one is under way nothing is claimed.
//   - Pending and DeadLetter rows are never pruned.
//
// Package outboxtest checks these promises; every store must pass it.
package outbox
