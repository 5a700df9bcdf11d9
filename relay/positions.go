package relay

import (
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// positions knows, for each stream in use, a sequence that it has reached. A claim
// is told of them: its rows are sent later, so they are stored after that. It is
// safe for concurrent use.
type positions struct {
	mu sync.Mutex // guards at
	at map[string]jetbox.Position
}

// seen notes what the broker says of a stream.
func (p *positions) seen(info *jetstream.StreamInfo) {
	p.mu.Lock()
	defer p.mu.Unlock()
	name := info.Config.Name
	if at := p.at[name]; at.Created.Equal(info.Created) && at.Seq >= info.State.LastSeq {
		return
	}
	if p.at == nil || len(p.at) >= cacheMost {
		p.at = make(map[string]jetbox.Position)
	}
	p.at[name] = jetbox.Position{Stream: name, Created: info.Created, Seq: info.State.LastSeq}
}

// acked notes a PubAck. That of a stream which was created anew since it was seen
// last raises nothing that a claim is told: its sequences begin again.
func (p *positions) acked(stream string, seq uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if at, ok := p.at[stream]; ok && seq > at.Seq {
		at.Seq = seq
		p.at[stream] = at
	}
}

// all returns the positions.
func (p *positions) all() []jetbox.Position {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]jetbox.Position, 0, len(p.at))
	for _, at := range p.at {
		all = append(all, at)
	}
	return all
}

// windowMargin is how long before the end of the duplicate window it is no longer
// trusted: for the way to the broker and back, and for clocks that do not run alike.
func windowMargin(window time.Duration) time.Duration { return ackTimeout + window/10 }

// trusted reports whether the broker would drop a second copy of a row that was first
// claimed so long ago, so that it may be sent again without looking for it. A stream
// that was created anew meanwhile has no first copy.
func trusted(info *jetstream.StreamInfo, age time.Duration) (ok bool) {
	window := info.Config.Duplicates
	return info.Config.Retention == jetstream.LimitsPolicy && age < window-windowMargin(window)
}

func positionOf(all []jetbox.Position, stream string) (at jetbox.Position, known bool) {
	for _, p := range all {
		if p.Stream == stream {
			return p, true
		}
	}
	return jetbox.Position{}, false
}
