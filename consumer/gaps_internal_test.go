package consumer

import (
	"strconv"
	"testing"
)

// The memory for gaps is bounded, and what was seen lately is remembered.
func TestGapMemoryIsBounded(t *testing.T) {
	t.Parallel()
	var g gaps
	const aggregates = 5 * gapsKept
	for i := range aggregates {
		g.see(strconv.Itoa(i), 1)
		if n := len(g.young) + len(g.old); n > 2*gapsKept {
			t.Fatalf("%d aggregates remembered, want at most %d", n, 2*gapsKept)
		}
	}
	for i := aggregates - gapsKept; i < aggregates; i++ {
		if last, gap := g.see(strconv.Itoa(i), 3); !gap || last != 1 {
			t.Fatalf("aggregate %d of the last %d is forgotten", i, gapsKept)
		}
	}
}
