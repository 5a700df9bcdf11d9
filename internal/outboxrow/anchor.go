package outboxrow

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// Last returns, of the published outcomes that may be remembered as anchors, the one
// with the highest sequence on each stream, in the order of their names: relays that
// share a database change these rows in one order.
func Last(outcomes []jetbox.Outcome) (last []jetbox.Outcome) {
next:
	for i := range outcomes { // on the hot path: nothing is copied
		o := &outcomes[i]
		if o.State != jetbox.Published || o.Created.IsZero() || o.StreamSeq == 0 {
			continue
		}
		for k := range last {
			if l := &last[k]; l.Stream == o.Stream && l.Created.Equal(o.Created) {
				if o.StreamSeq > l.StreamSeq {
					*l = *o
				}
				continue next
			}
		}
		last = append(last, *o)
	}
	slices.SortStableFunc(last, func(a, b jetbox.Outcome) int { return cmp.Compare(a.Stream, b.Stream) })
	return last
}

// FormatCreated is the time of a stream's creation as stores keep it: exactly.
func FormatCreated(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) }

// ParseCreated is its inverse.
func ParseCreated(text string) (time.Time, error) {
	t, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return time.Time{}, fmt.Errorf("time of a stream's creation: %w", err)
	}
	return t, nil
}
