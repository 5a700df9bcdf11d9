// Package bench measures jetbox on the machine it runs on: a JetStream server in
// this process, outboxes in SQLite files and, where a URL is given, in PostgreSQL.
//
// Figures of one machine mean little on another, so most of them are ratios to
// something measured in the same round: a drain to raw asynchronous publish of
// the same messages, a transaction with an event to the same one without. Rounds
// go through all parts before the next begins, so that a noisy minute does not
// decide about one of them. A line has the median over the rounds, of the figures
// and, separately, of the ratios.
//
// A measurement that did not do what it should have (messages missing on the
// stream, a relay that stopped) is an error, not a figure. An interrupted run
// reports nothing.
//
// Files are below one directory and tables in schemas of their own, named
// jetbox_bench_ and a random number. [Run] removes them before it returns, also
// after an error or a cancel. Only a killed process leaves them behind.
//
// What is in the way of the truth: broker, application, relay and consumer share
// the process, its garbage collector and the cores, in all parts but memory. That
// holds for the yardstick too.
package bench
