// Command relay moves events from an outbox to NATS JetStream and looks after
// them: it relays, consumes, lists and replays.
//
// What a user may rely on: a flag beats its environment variable, which beats
// the config file, which beats the default, and what matches no flag is an
// error that names it. Exit status 0 is fine, 1 failed, 2 wrong usage, 3 a
// check that found something. Errors are "relay: cause" on stderr, followed by
// "relay: hint: remedy" where there is one. Passwords and tokens are masked in
// all of it. Payloads go to stdout as they are.
//
// The first SIGINT or SIGTERM stops gracefully: what is on the wire is waited
// for and recorded. The second one ends the process at once, which loses
// nothing: the next relay finds out what was sent.
//
// This package wires the libraries together and holds no logic of theirs. Who
// opens something here closes it here, in the reverse order.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// sameSignal is the time within which a signal that comes again is the same
// request.
const sameSignal = 50 * time.Millisecond

func main() {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		s := <-signals
		cancel(signalError{s})
		for first := time.Now(); ; {
			// timeout(1), go run and a terminal may bring one request to stop twice.
			if s = <-signals; time.Since(first) > sameSignal {
				break
			}
		}
		fmt.Fprintf(os.Stderr, "relay: second signal (%v), ending at once\n", s)
		os.Exit(exitFailed)
	}()
	os.Exit(run(ctx, os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr))
}

// signalError is the cause of a context that a signal canceled.
type signalError struct{ os.Signal }

// Is makes it a plain cancel to the libraries, which call that a clean stop.
func (e signalError) Is(target error) bool { return target == context.Canceled }

func (e signalError) Error() string { return "stopped by signal: " + e.String() }
