package postgres

import "slices"

// member is a relay that has announced itself.
type member struct {
	owner  string
	able   bool // it renews in time, and says that it can publish
	shards []int16
}

// share returns how many of all shards owner should have. Members are in the
// order of their arrival: when the shards do not divide evenly, who came first
// has one more. Those that are not able get nothing as long as others are.
func share(members []member, owner string, all int) int {
	able := slices.DeleteFunc(slices.Clone(members), func(m member) bool { return !m.able })
	if len(able) == 0 {
		able = members
	}
	rank := slices.IndexFunc(able, func(m member) bool { return m.owner == owner })
	if rank < 0 {
		return 0
	}
	n := all / len(able)
	if rank < all%len(able) {
		n++
	}
	return n
}

// hand is what this process knows of the shards its relay holds. The database
// decides: a claim gets no row of a shard that is not the relay's there.
type hand struct {
	owner  string
	epoch  int64
	shards []int16 // sorted
	all    int     // how many the outbox has
	share  int     // how many of them are this relay's due
}

func (h hand) excess() int { return max(0, len(h.shards)-h.share) }

// keep returns the shards to claim from, and whether that is the whole outbox.
func (h hand) keep() (shards []int16, all bool) {
	shards = h.shards[:len(h.shards)-h.excess()]
	return shards, len(shards) == h.all
}

// surplus returns the shards to give back.
func (h hand) surplus() []int16 { return h.shards[len(h.shards)-h.excess():] }
