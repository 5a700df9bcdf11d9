// Package delay says how long to wait before the next attempt.
//
// It promises growing, capped, jittered delays computed from the attempt's
// number alone, so that a process that restarts goes on where the last one was.
// It keeps no state and never waits itself.
package delay

import (
	"time"

	"github.com/cenkalti/backoff/v4"
)

// jitter is the share by which a delay varies both ways: enough that a fleet
// does not come back in step, little enough that an operator recognizes the
// configured numbers.
const jitter = 0.1

// Policy doubles the delay from Initial up to Max.
type Policy struct {
	Initial time.Duration
	Max     time.Duration
}

// After returns how long to wait after the given failed attempt, counted from
// 1. Smaller numbers count as 1.
func (p Policy) After(attempt int) time.Duration {
	b := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(p.Initial),
		backoff.WithMultiplier(2),
		backoff.WithRandomizationFactor(jitter),
		backoff.WithMaxInterval(p.Max),
		backoff.WithMaxElapsedTime(0),
	)
	d := b.NextBackOff()
	// The interval stops growing at Max, so a few dozen doublings reach it from
	// any start.
	for i := 1; i < min(attempt, 64); i++ {
		d = b.NextBackOff()
	}
	return min(d, p.Max)
}
