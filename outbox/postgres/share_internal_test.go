package postgres

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

func TestSharesOfAbleRelaysAddUpToTheWholeAndDifferByOneAtMost(t *testing.T) {
	t.Parallel()
	for range 2000 {
		all := 1 + rand.IntN(40)
		members := make([]member, 1+rand.IntN(10))
		able := 0
		for i := range members {
			members[i] = member{owner: fmt.Sprint(i), able: rand.IntN(3) > 0}
			if members[i].able {
				able++
			}
		}
		sum, least, most := 0, all, 0
		for _, m := range members {
			n := share(members, m.owner, all)
			if able > 0 && !m.able {
				if n != 0 {
					t.Fatalf("%+v of %d: %s is not able and gets %d", members, all, m.owner, n)
				}
				continue
			}
			sum, least, most = sum+n, min(least, n), max(most, n)
		}
		if sum != all || most-least > 1 {
			t.Fatalf("%+v of %d: shares add up to %d and are from %d to %d", members, all, sum, least, most)
		}
	}
	if n := share([]member{{owner: "a", able: true}}, "b", 16); n != 0 {
		t.Errorf("who has not announced himself gets %d", n)
	}
}

func TestHandKeepsItsShareAndGivesBackTheRest(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		shards []int16
		share  int
		keeps  int
		whole  bool
	}{
		{nil, 0, 0, false},
		{nil, 3, 0, false},
		{[]int16{0, 1, 2, 3}, 4, 4, true},
		{[]int16{0, 1, 2, 3}, 1, 1, false},
		{[]int16{0, 1, 2, 3}, 0, 0, false},
		{[]int16{1, 3}, 2, 2, false},
		{[]int16{1, 3}, 9, 2, false},
	} {
		h := hand{shards: tt.shards, all: 4, share: tt.share}
		keep, whole := h.keep()
		if len(keep) != tt.keeps || whole != tt.whole || len(keep)+len(h.surplus()) != len(tt.shards) || h.excess() != len(h.surplus()) {
			t.Errorf("%+v keeps %v (whole: %v) and gives back %v, want %d kept, whole: %v", h, keep, whole, h.surplus(), tt.keeps, tt.whole)
		}
	}
}
