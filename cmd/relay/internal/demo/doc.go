// Package demo tells the whole story of an event on real parts: a JetStream
// server in this process, outbox and ledger in SQLite files, a relay, a consumer
// and a dead-letter router, all in a temporary directory.
//
// What it says is checked first. [Run] returns an error as soon as a claim does
// not hold, so that exit status 0 means that all of them did.
//
// The crash in it is one: a relay in a child process is killed with SIGKILL
// after the broker acknowledged its message and before the database knew. A
// trigger in the outbox table keeps that moment open; the relay has no hook for
// it.
//
// Nothing is left behind, and nothing outside the directory is touched but a
// random port of the loopback interface.
package demo
