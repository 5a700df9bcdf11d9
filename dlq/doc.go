// Package dlq keeps dead letters: messages that a consumer could not handle,
// parked in a stream with their reason until a person replays or discards them.
//
// A failed (stream incarnation, consumer, stream sequence) has one letter,
// however many ways report it and however often: the consumer itself, before
// it terminates the message; a [Router], from the server's advisories; a second
// router. The broker enforces that, and not for a window only: the letter's
// subject is its identity,
//
//	dlq.<stream>.<consumer>.<sequence>-<time stored, unix ns>
//
// and it is created on condition that the subject has no message. Each further
// state of a letter is a new message on its subject, on condition that the last
// one is still the one that was read, and the stream keeps the last message of
// a subject. So two operators, or a consumer and a router, never overwrite each
// other, and a letter is whatever its subject's last message says.
//
//	(none) -> intent -> open -> replaying -> replayed -> open again ...
//	                      \-> discarded
//
// An intent is stored before the last delivery is handled and withdrawn when
// that goes well: a handler that kills its process leaves it behind, and it
// counts as a letter once it is older than the consumer's ack wait. A replay
// that fails again reopens the same letter, with a higher count and the error of
// the failure before added to its history, which has the last ten. After
// Config.MaxReplays replays it is refused, until somebody raises that.
//
// Letters are kept until they are replayed or discarded, however long that takes:
// watch the age of the oldest. Closed ones stay as marks, which absorb late reports
// of their failure, and expire after Config.KeepClosed; Prune removes them where the
// dead-letter stream takes no message TTL.
//
// A letter has the payload byte for byte and every header except those that
// command a server (Nats-*) or describe a letter (Dlq-*). A message that only
// had a Nats-Msg-Id keeps it as Idempotency-Key, or its replay would be another
// event to a ledger. What does not fit into the broker's limits is left out,
// marked and said in the letter's error: application headers first, then the
// payload ("payload unavailable: ..."). Keeping such a payload in an object
// store comes later; until then it is replayed from the original for as long as
// the stream has it.
//
// Crashes: a letter is stored before anything is settled, so a crash repeats a
// report, which the identity absorbs. A replay that dies leaves its letter
// replaying; whoever replays it next looks for the message of that attempt on
// the event stream, then publishes or finishes. Looking proves nothing where
// the stream removes messages (work-queue, interest, limits); there the message
// is published again under the same message ID, and beyond the duplicate window
// only a ledger makes the effect happen once.
//
// Not done here yet: a sweep for exhausted messages nobody reported. A terminated message that is gone from a work-queue stream
// before a router sees it is looked up among all letters of its consumer, which
// costs time in proportion to them.
package dlq
