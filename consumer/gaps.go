package consumer

import (
	"strconv"

	"github.com/seed-5e04d8fb/jetbox"
)

// gapsKept is how many aggregates are remembered at least, and half of how many
// at most: about 1 MiB.
const gapsKept = 8192

// gaps remembers the last sequence of each aggregate. The zero value is ready
// to use. It belongs to the run's loop.
type gaps struct {
	young, old map[string]int64
}

// see notes a sequence. gap reports that the last one, which it returns, is not
// the one before it.
func (g *gaps) see(aggregate string, seq int64) (last int64, gap bool) {
	last, known := g.young[aggregate]
	if !known {
		last, known = g.old[aggregate]
	}
	if known && seq <= last {
		return last, false // a redelivery, or a replay
	}
	if g.young == nil || len(g.young) >= gapsKept {
		g.young, g.old = make(map[string]int64), g.young
	}
	g.young[aggregate] = seq
	return last, known && seq > last+1
}

// lookForGap tells GapFunc of a gap before d.
func (r *run) lookForGap(m *message) {
	v := m.d.RawHeader[jetbox.HeaderCESequence]
	key := m.d.lane()
	if key == "" || len(v) == 0 || m.d.skip() {
		return
	}
	seq, err := strconv.ParseInt(v[0], 10, 64)
	if err != nil {
		return // the handler hears of it in Malformed
	}
	if last, gap := r.gaps.see(key, seq); gap {
		m.d.decode(m.msg)
		r.cfg.GapFunc(m.d, last)
	}
}
