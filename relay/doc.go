// Package relay moves committed events from an outbox to a JetStream stream.
//
// Nothing committed is lost: an event is recorded as published only after the
// stream has acknowledged it. A crash between the two leaves its outcome
// unknown. Whoever finds it so sends it again under the same Nats-Msg-Id, and
// the broker drops the repeat inside its duplicate window; beyond the window it is
// looked for on the stream first, also when it slept meanwhile, was parked or went to
// another relay: the source keeps with the row whether its last send left that open.
// Events of one ordering key are stored in the order
// of their row ids, also when one fails, when a relay dies and when another takes
// over: what may have been sent before goes alone of its key, what never was, in
// fast batches where the stream takes them.
//
// A relay works while it holds the lease of its source; others stand by, or share
// the source with it, each with some shards of the keys. What another relay should
// have is given back when what was sent of it is recorded. A relay that has been
// unable to publish or to record for a whole lease says so, and hands over if
// another can. Every write is fenced by the lease's epoch, every send by the relay's
// own monotonic clock. It never waits for the network with a database transaction
// open.
//
// Failures are of four classes. An outage (broker away, stream missing or full,
// permission refused) stops sending, counts against no row and heals without a
// restart. A row that can never be published is parked at once; one refused for
// itself alone is tried again with growing delays, holding back its own key, and
// parked after MaxAttempts. And when the outcome cannot be recorded the relay
// keeps it in hand and publishes nothing more until it can.
//
// A Relay does not order events across keys. A row that becomes visible after a
// higher one of its key was published is published next, and counted.
//
// Where a stream has removed messages, absence proves nothing: a row of unknown
// outcome is sent again then, and counted. A message that is still on its way when
// its row is found absent and sent again, and arrives later than the duplicate window
// after that, is stored a second time; nobody sends one past the end of the lease.
//
// A broker can lose what it has acknowledged: it syncs later, or is restored from a
// backup. Where the source is a [Recaller], the relay asks for the last message that a
// stream has acknowledged: on every connection, after an outage of a publish, when
// sequences do not grow, and every minute. If the stream ends before it, or has another
// message there, the published rows after the last one that is still there are pending
// again, each looked for first, and nothing is claimed before, by any relay of the source.
// What dies meanwhile is gone on with. Of a stream that is still to be asked nothing newer
// is remembered, so that what it stores in the meantime does not hide a loss.
//
// While the configured stream cannot be asked, nothing is claimed. Another one holds up
// nobody: it is told, and asked again within seconds, later within a minute, and a recall
// of it that cannot go on is put off until it can. Its new rows flow meanwhile, and so do
// those that another relay has in hand already: they are stored before what is published
// again of their key.
//
// A stream that has removed messages keeps its sequences: that is no loss. One that was
// created anew was a person's doing: it is told, and its rows are published again when
// asked for. What is not retained cannot be; nor is a loss noticed that removed no message
// behind the last one, nor one that others have filled up again before anything made the
// relay ask, where what the relay stored after it is remembered by then.
package relay
