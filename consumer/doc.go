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
// the effect happen once: see [Once] and package dedup.
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
// A delivery counts against MaxDeliver whether a handler saw it or not. So
// nothing is pulled without a free worker, everything in hand is kept alive with
// in-progress signals for up to HandleTimeout, and while messages come back that
// another process, or this one before a restart, took and never settled, they
// are handled one at a time: a message that crashes the process cannot take its
// neighbors along to the dead letters.
//
// # What happens when
//
// Run stops: nothing more is pulled, messages no handler saw go back to the
// server at once, handlers in hand finish within DrainTimeout and are
// acknowledged, and the acks are flushed. The next instance starts at once.
//
// The broker goes away: Run waits and resumes. Handlers go on; what they
// finished is acknowledged when the connection is back, or delivered again.
//
// The consumer is deleted: it is created again as configured, and starts at the
// first message of the stream: its position was in what was deleted. A ledger
// skips what was handled. The stream is deleted: Run waits for half a minute,
// then returns an error.
//
// # What it does not do yet
//
// It keeps no order per ordering key. With one worker, messages are handled in
// stream order, except that a message being retried is overtaken by later ones;
// several workers or instances order nothing. It does not pull ahead of its
// workers, which costs a round trip per message and worker. It does not read
// MaxDeliver again until it reconnects. It supports no priority groups, and has
// no batches, middleware or sequence-gap detection.
package consumer
