package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// Exit statuses, a contract with scripts.
const (
	exitFine   = 0
	exitFailed = 1
	exitUsage  = 2
	exitFound  = 3 // a check ran and found something wrong
)

var (
	// errHelp asks for the help text; it is no failure.
	errHelp = errors.New("help requested")

	// errFound is returned by a check that found something wrong and has said
	// what.
	errFound = errors.New("something is wrong")
)

// usageError is the user's mistake, found before anything was done.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error {
	return usageError{fmt.Errorf(format, args...)}
}

// hintError carries a remedy with an error.
type hintError struct {
	error
	hint string
}

func (e hintError) Unwrap() error { return e.error }

// withHint adds a remedy to err. The innermost hint is the one shown: it knows
// most.
func withHint(err error, hint string) error {
	if err == nil || hintOf(err) != "" {
		return err
	}
	return hintError{err, hint}
}

func hintOf(err error) string {
	var h hintError
	switch {
	case errors.As(err, &h):
		return h.hint
	case errors.Is(err, outbox.ErrNoTables):
		return "relay migrate creates them; so does relay run"
	case errors.Is(err, outbox.ErrSchemaTooNew):
		return "use a newer relay, or another database"
	case errors.Is(err, embedded.ErrListen):
		return "if a broker runs there, --nats URL uses it; --listen HOST:PORT takes another address"
	case errors.Is(err, embedded.ErrDirInUse):
		return "stop the other relay, connect to it with --nats URL, or give this one its own --data-dir"
	}
	return databaseHint(err)
}

// report writes err for a person and returns the exit status.
func report(stderr io.Writer, err error) int {
	if err == nil {
		return exitFine
	}
	if errors.Is(err, errFound) {
		return exitFound
	}
	// One line, whatever the cause looks like: scripts and log collectors read it.
	cause := oneLine(err.Error())
	// Package relay begins its errors with its name, which is also the program's.
	fmt.Fprintf(stderr, "relay: %s\n", strings.TrimPrefix(cause, "relay: "))
	if hint := hintOf(err); hint != "" {
		fmt.Fprintf(stderr, "relay: hint: %s\n", hint)
	}
	var usage usageError
	if errors.As(err, &usage) {
		return exitUsage
	}
	return exitFailed
}

// oneLine makes one line of an error's text. Those of pgx have a line with a tab in
// front for each address tried.
func oneLine(text string) string {
	return strings.NewReplacer(":\n\t", ": ", "\n\t", "; ", "\n", "; ").Replace(strings.TrimSpace(text))
}

// interrupted returns what stopped ctx when it is done, for commands that were
// not finished then.
func interrupted(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return context.Cause(ctx)
}
