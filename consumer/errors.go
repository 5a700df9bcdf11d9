package consumer

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

var (
	// ErrRunning is returned by Run when the Consumer runs already. Make
	// another Consumer with the same durable name, or use more workers.
	ErrRunning = errors.New("consumer: runs already")

	// ErrUnusable is returned by Run when a consumer of that name exists and
	// cannot do this job. The text says what is wrong. Delete it, which loses
	// its position, or choose another durable name.
	ErrUnusable = errors.New("existing consumer cannot be used")

	// ErrGoexit is the error of a handler that called runtime.Goexit, as
	// testing.T.FailNow does.
	ErrGoexit = errors.New("handler called runtime.Goexit")

	// ErrHandleTimeout is the cause of the cancel of a handler's context after
	// HandleTimeout.
	ErrHandleTimeout = errors.New("handler took too long")

	// ErrStopping is the cause of the cancel of a handler's context when Run
	// was told to stop and DrainTimeout has passed.
	ErrStopping = errors.New("consumer is stopping")
)

// PanicError is the error of a handler that panicked.
type PanicError struct {
	Value any
	Stack []byte
}

// Error returns the value and the stack: it is what a person finds in the dead
// letter.
func (e *PanicError) Error() string {
	return fmt.Sprintf("handler panicked: %v\n%s", e.Value, e.Stack)
}

// Unwrap returns the value if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

const (
	maxErrText = 4096 // of a dead letter: stacks fit, headers stay small
	maxReason  = 256  // of a term, which travels in an advisory
)

// clip cuts s to at most n bytes without splitting a character.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// termReason is the first line of an error's text.
func termReason(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return clip(strings.TrimSpace(line), maxReason)
}
