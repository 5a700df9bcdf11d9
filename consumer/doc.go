// Package consumer runs a handler for every message of a durable pull consumer
// and turns the handler's verdict into ack, nak or term.
//
// # Promises
//
// A message is acknowledged only after its handler returned nil. An error, a
// panic, runtime.Goexit, a crash and a lost connection all end in another
// delivery, after a delay that grows with the number of deliveries. So a handler
// runs at least once for every message, and may run again after it succeeded:
// acks are sent without waiting for an answer, and the server itself may forget
// an ack when it is killed. Only a ledger in the transaction of the effect makes
// the effect happen once: see [Once], [OncePrepared] and, for many messages in
// one transaction, [NewBatch] with [OnceAll]; and package dedup.
//
// A message that cannot be handled ends where a person can see it. Permanent
// errors of package jetbox, and errors on the last of MaxDeliver deliveries, are
// stored as a dead letter before the message is terminated. Before the last
// delivery is handed to the handler, an intent letter is stored, so that a
// handler that kills the process does not lose the message either. While letters
// cannot be stored, the messages that need one are neither acknowledged nor
// terminated and wait aside; the others go on, as long as no more than
// [Config.MaxHeld] wait.
//
// Without [Config.DeadLetters] nothing is stored here. A permanent error is
// terminated with its text, and the last failed delivery is a nak, so that the
// server sends its MSG_TERMINATED and MAX_DELIVERIES advisories, which a router
// turns into letters. With work-queue and interest retention the term deletes
// the message, so there the letter of a permanent error holds no payload:
// use DeadLetters.
//
// A delivery counts against MaxDeliver whether a handler saw it or not. So no
// more is pulled than the workers have, and what quick ones start on within 50
// ms; everything in hand is kept alive with in-progress signals, a running
// handler for up to HandleTimeout; and while messages come back that another
// process, or this one before a restart, took and never settled, they are
// handled one at a time: a message that crashes the process cannot take its
// neighbors along to the dead letters.
//
// # Order
//
// Messages with the same ordering key (the header ce-partitionkey) are handled
// in stream order, one after the other, however many workers there are; see
// [Config.Unordered]. One that is being retried holds up the later ones of its
// key, which wait in hand and cost no deliveries, and nobody else. It does so
// until it comes back; when it does not, because another instance got it, until
// the server reports it settled, and no longer than its delay and an ack wait,
// not counting the time when nothing is pulled because a message that somebody
// may have died of is in hand. When it becomes a dead letter, its key goes on.
// Messages without a key are ordered with nothing.
//
// Two bounds: at most [Config.MaxBehindKey] and [Config.MaxBehind] messages wait
// behind others, then nothing new is pulled and the log says so. And a process
// knows only its own: several instances of one durable order nothing between
// them, and after a stop or a crash the next process may get newer messages of
// a key before those that were out or in backoff come back.
//
// Where that matters there are two strict ways. With [Config.SingleActive], one
// instance is active, and one that takes over first gathers what was out, for at
// most 2s more than the longer of AckWait and MaxBackoff. It holds the order
// across a stop and a crash, except that a message on its last two deliveries
// does not wait, and that an instance which lost its place alive (it was paused
// or cut off for longer than an ack wait, or an operator unpinned it) may still
// be at work on what its workers have, and on last deliveries. The rest it lets
// go of within 2s of hearing of that, at the price of a delivery each.
//
// To have several active instances, partition: let the stream add a partition
// number to the subject (a subject transform), and give each partition a durable
// of its own. See examples/singleactive and examples/partitions. Package
// pcgroups of orbit.go does the same with members that come and go.
//
// # What happens when
//
// Run stops: nothing more is pulled, messages no handler saw go back to the
// server, handlers in hand finish within DrainTimeout and are acknowledged, and
// the acks are flushed. The next instance starts at once.
//
// The broker goes away: Run waits and resumes. Handlers go on; what they
// finished is acknowledged when the connection is back, or delivered again.
//
// The consumer is deleted: it is created again as configured, and starts at the
// first message of the stream: its position was in what was deleted. A ledger
// skips what it remembers as handled: what its retention has pruned, and the
// stream still has, takes effect again. The stream is deleted: Run waits for
// half a minute, then returns an error.
//
// A process dies with messages in hand: each of them has one delivery less. How
// many that are is bounded by workers and by 50 ms of work, and by what waits
// behind other messages of its key.
//
// # What it does not do
//
// It does not read MaxDeliver again until it looks the consumer up, as it does
// after a reconnect. It uses no priority groups but its own.
package consumer
