// Package dlq keeps dead letters: messages that a consumer could not handle,
// parked in a stream with their reason until a person replays or discards them.
//
// A failed (stream incarnation, consumer, stream sequence) has one letter,
// however many ways report it and however often. There are three ways in: the
// consumer itself, before it terminates the message; a [Router], from the server's
// advisories, captured in a stream; and the router's sweep, of what no advisory told.
// The broker enforces that it is one letter, and not for a window only: its subject
// is its identity,
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
// event to a ledger. Where the letter's own headers would take it beyond the
// broker's limits, the original lies beside it, in messages on subjects below its
// own (<letter>.part.>), and the letter itself has what fits, marked by Dlq-Missing;
// Show and Replay put it together. What was gone before anybody could read it is
// said in the letter's error ("payload unavailable: ...").
//
// # What reaches a letter
//
// Failures of consumers that use package consumer always do: they are stored before
// the last delivery is handled and before the message is terminated. For others,
// and for processes that die, there are advisories, which the server sends at most
// once: when nobody captures them, and at times when the leader of the stream that
// does changes, they are lost; and for a MaxDeliver of 2 and more only while
// somebody pulls. The sweep makes up for lost ones where a stream removes what is
// acknowledged: on a work-queue stream, what is still stored although its consumer
// is past it was given up. It does so on an interest stream too, once all consumers
// of the subject are past the message and it is clear which of them gave it up: the
// only one with a MaxDeliver, or the one that has a letter; where it is not, the log
// says so, and the message stays. On a limits stream exhausted messages look like
// all others: a foreign consumer whose advisory is lost has no letter there. Nor has
// a terminated message whose advisory is lost, anywhere: its term removed it.
//
// Advisories are only hints. Messages that were deleted or expired are no letters,
// nor is anything from another domain or from before the stream or the message
// existed. A forged advisory can make a letter too many, and a term after an ack
// does; neither takes a message from a consumer. On a work-queue or interest stream
// the router removes a message after its letter is stored, and only when all
// consumers that want it are past it.
//
// Several routers share the work, and services in one account each take what is
// about their event stream. Streams may be in another account: see
// Config.AdvisoryPrefix and Config.Events.
//
// Crashes: a letter is stored before anything is settled, so a crash repeats a
// report, which the identity absorbs. A replay that dies leaves its letter
// replaying; whoever replays it next looks for the message of that attempt on
// the event stream, then publishes or finishes. Looking proves nothing where
// the stream removes messages (work-queue, interest, limits); there the message
// is published again under the same message ID, and beyond the duplicate window
// only a ledger makes the effect happen once.
//
// A terminated message that is gone before a router sees it, and whose consumer is
// not one of this library, is looked up among all letters of its consumer, which
// costs time in proportion to them.
package dlq
