package jetbox_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// history is what a random run did and what is there after it.
type history struct {
	committed  map[string][]int // by ordering key, the numbers committed, in commit order
	rolledBack map[string]bool  // "key:n"
	stored     []string         // "key:n" in stream order, replays left out
	effects    []string         // "key:n", one per effect
	deadRows   map[string]string
	letters    map[string]string // "key:n" to reason and error
	pending    int64             // rows neither published nor dead
	claimed    int64
}

// check returns what the history violates. The invariants, by number:
//
//  1. every committed event is on the stream or a dead row, and what is on the
//     stream was handled or is a letter: none lost;
//  2. nothing rolled back is on the stream;
//  3. an event is on the stream once, and its effect is applied once;
//  4. per ordering key, the stream's order is the commit order;
//  5. what is parked has a reason;
//  6. after the drain nothing is claimed and nothing pending.
func (h *history) check() (violations []string) {
	bad := func(invariant int, format string, args ...any) {
		violations = append(violations, fmt.Sprintf("%d: ", invariant)+fmt.Sprintf(format, args...))
	}
	onStream, effect := count(h.stored), count(h.effects)
	for key, numbers := range h.committed {
		for _, n := range numbers {
			id := fmt.Sprintf("%s:%d", key, n)
			_, dead := h.deadRows[id]
			_, letter := h.letters[id]
			if onStream[id] == 0 && !dead {
				bad(1, "%s was committed and is neither on the stream nor dead", id)
			}
			if onStream[id] > 0 && effect[id] == 0 && !letter {
				bad(1, "%s is on the stream and was neither handled nor parked", id)
			}
		}
		var order []int
		for _, id := range h.stored {
			var n int
			if k, number, _ := strings.Cut(id, ":"); k == key {
				if _, err := fmt.Sscan(number, &n); err != nil {
					bad(2, "%s is on the stream, which nobody appended", id)
				}
				order = append(order, n)
			}
		}
		if !slices.IsSorted(order) {
			bad(4, "key %s is on the stream in the order %v", key, order)
		}
	}
	for id, n := range onStream {
		if h.rolledBack[id] {
			bad(2, "%s was rolled back and is on the stream", id)
		}
		if n > 1 {
			bad(3, "%s is on the stream %d times", id, n)
		}
	}
	for id, n := range effect {
		if n > 1 {
			bad(3, "the effect of %s was applied %d times", id, n)
		}
		if h.rolledBack[id] {
			bad(2, "%s was rolled back and handled", id)
		}
	}
	for id, reason := range h.deadRows {
		if reason == "" {
			bad(5, "dead row %s has no reason", id)
		}
	}
	for id, reason := range h.letters {
		if reason == "" {
			bad(5, "letter %s has no reason", id)
		}
	}
	if h.pending != 0 || h.claimed != 0 {
		bad(6, "%d rows pending, %d claimed", h.pending, h.claimed)
	}
	slices.Sort(violations)
	return violations
}

func count(ids []string) map[string]int {
	n := make(map[string]int)
	for _, id := range ids {
		n[id]++
	}
	return n
}

// The checker itself must be able to fail.
func TestCheckerSeesEachViolation(t *testing.T) {
	t.Parallel()
	good := func() *history {
		return &history{
			committed:  map[string][]int{"a": {1, 2, 3}, "b": {1}},
			rolledBack: map[string]bool{"a:9": true},
			stored:     []string{"a:1", "a:2", "b:1"},
			effects:    []string{"a:1", "b:1"},
			deadRows:   map[string]string{"a:3": "no stream"},
			letters:    map[string]string{"a:2": "max_deliveries"},
		}
	}
	if v := good().check(); len(v) != 0 {
		t.Fatalf("a good history violates %q", v)
	}
	for _, tt := range []struct {
		name  string
		spoil func(h *history)
		want  string
	}{
		{"lost row", func(h *history) { delete(h.deadRows, "a:3") }, "1: a:3 was committed"},
		{"lost message", func(h *history) { delete(h.letters, "a:2") }, "1: a:2 is on the stream"},
		{"ghost", func(h *history) { h.stored = append(h.stored, "a:9") }, "2: a:9"},
		{"second copy", func(h *history) { h.stored = append(h.stored, "b:1") }, "3: b:1 is on the stream 2"},
		{"second effect", func(h *history) { h.effects = append(h.effects, "b:1") }, "3: the effect of b:1"},
		{"overtaken", func(h *history) { h.stored = []string{"a:2", "a:1", "b:1"} }, "4: key a"},
		{"no reason", func(h *history) { h.letters["a:2"] = "" }, "5: letter a:2"},
		{"stuck", func(h *history) { h.pending = 1 }, "6: 1 rows pending"},
	} {
		h := good()
		tt.spoil(h)
		if v := h.check(); len(v) != 1 || !strings.HasPrefix(v[0], tt.want) {
			t.Errorf("%s: violations %q, want one that starts with %q", tt.name, v, tt.want)
		}
	}
}
