package relay

import (
	"fmt"
	"testing"
)

// What is remembered is bounded, and a key is remembered while it is in use, and for
// a whole generation after.
func TestHighestForgetsOnlyKeysThatWereLongUnused(t *testing.T) {
	t.Parallel()
	h := newHighest()
	h.published("busy", 5)
	h.published("quiet", 5)
	for i := range 5 * lateKeys {
		if h.published(fmt.Sprint("k", i), int64(i)) {
			t.Fatalf("new key %d is late", i)
		}
		if n := len(h.young) + len(h.old); n > 2*lateKeys {
			t.Fatalf("%d keys are remembered, want at most %d", n, 2*lateKeys)
		}
		if i%(lateKeys/2) == 0 && !h.published("busy", 4) {
			t.Fatalf("a key in use is forgotten after %d others", i)
		}
		if i == lateKeys && !h.published("quiet", 4) {
			t.Fatalf("a key is forgotten after one generation of %d others", i)
		}
	}
	if h.published("quiet", 4) {
		t.Error("a key that was not used for generations is remembered")
	}
}

func TestRowPublishedAgainIsNotLate(t *testing.T) {
	t.Parallel()
	h := newHighest()
	for i, tt := range []struct {
		pos  int64
		late bool
	}{{5, false}, {5, false}, {4, true}, {4, true}, {5, false}, {6, false}, {5, true}} {
		if late := h.published("key", tt.pos); late != tt.late {
			t.Errorf("step %d, row %d: late %v, want %v", i, tt.pos, late, tt.late)
		}
	}
}

func TestHighestDoesNotAllocatePerRow(t *testing.T) {
	h := newHighest() // not parallel: AllocsPerRun counts what others do, too
	h.published("key", 1)
	pos := int64(1)
	if n := testing.AllocsPerRun(1000, func() { pos++; h.published("key", pos) }); n != 0 {
		t.Errorf("%v allocations per row of a known key, want none", n)
	}
}
