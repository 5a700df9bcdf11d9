package relay

import "hash/maphash"

// lateKeys is how many ordering keys a generation of highest remembers: two of
// them take about 2 MiB.
const lateKeys = 1 << 15

// highest remembers the highest row published of each ordering key, to count the
// rows that became visible too late to go before it. It is bounded: keys that had
// nothing published for a while are forgotten, and what another relay published is
// not known, so that the count can be too low. It is not safe for concurrent use.
type highest struct {
	seed       maphash.Seed
	young, old map[uint64]int64 // by hash of the key: keys may be long
}

func newHighest() *highest {
	return &highest{seed: maphash.MakeSeed(), young: make(map[uint64]int64)}
}

// published notes a row of a key, and reports whether a higher one went before.
func (h *highest) published(key string, pos int64) (late bool) {
	hash := maphash.String(h.seed, key)
	most, known := h.young[hash]
	if !known {
		most, known = h.old[hash]
		if len(h.young) >= lateKeys {
			h.old, h.young = h.young, make(map[uint64]int64)
		}
	}
	late = known && pos < most
	if !late {
		most = pos
	}
	h.young[hash] = most
	return late
}
