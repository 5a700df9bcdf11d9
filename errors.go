package jetbox

import (
	"errors"

	"github.com/cenkalti/backoff/v4"
)

var (
	// ErrInvalidEvent is wrapped by every error about an event that the wire
	// cannot carry as it is. The text names the field and the rule. Such an
	// event is refused at append, and parked when raw SQL brought it: no retry
	// can help.
	ErrInvalidEvent = errors.New("invalid event")

	// ErrLeaseLost is returned by a source when another relay has taken over
	// since the lease was granted. Nothing was changed. Drop everything in
	// hand and acquire again.
	ErrLeaseLost = errors.New("lease lost to another relay")

	// ErrLetterGone is returned when a dead letter is not, or no longer, in the
	// state the caller expected: somebody else took it, replayed it or
	// discarded it. Look at the letter again.
	ErrLetterGone = errors.New("dead letter is not in the expected state")
)

// Permanent marks err as one no retry can fix. A consumer that gets it stores
// the message as a dead letter at once and terminates it. It is
// [backoff.Permanent] of cenkalti/backoff, so that code which uses that library
// already needs nothing from here. Permanent(nil) is nil.
func Permanent(err error) error { return backoff.Permanent(err) }

// IsPermanent reports whether err, or an error it wraps, was marked by
// [Permanent].
func IsPermanent(err error) (permanent bool) {
	var p *backoff.PermanentError
	return errors.As(err, &p)
}
