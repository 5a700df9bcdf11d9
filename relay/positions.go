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
	at := jetbox.Position{Stream: info.Config.Name, Created: info.Created, Seq: info.State.LastSeq, At: info.TimeStamp}
	if was := p.at[at.Stream]; was.Created.Equal(at.Created) {
		// Both were reached, so the later of each was.
		at.Seq = max(at.Seq, was.Seq)
		if was.At.After(at.At) {
			at.At = was.At
		}
	}
	if p.at == nil || len(p.at) >= cacheMost {
		p.at = make(map[string]jetbox.Position)
	}
	p.at[at.Stream] = at
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
// claimed after a time of the broker's and so long ago by the source's clock, if it
// comes within a time from now. So it may be sent again without looking for it. The
// window is by the broker's clock; the source's is asked too because either may have
// been set back. A stream that was created anew meanwhile has no first copy.
func trusted(info *jetstream.StreamInfo, after time.Time, age, within time.Duration) (ok bool) {
	if after.IsZero() || info.TimeStamp.IsZero() {
		return false
	}
	window := info.Config.Duplicates
	age = max(age, info.TimeStamp.Sub(after))
	return info.Config.Retention == jetstream.LimitsPolicy && age+within < window-windowMargin(window)
}

// told returns the broker's time before a claim, as far as the claim tells.
func told(before []jetbox.Position) (at time.Time) {
	for _, p := range before {
		if p.At.After(at) {
			at = p.At
		}
	}
	return at
}

func positionOf(all []jetbox.Position, stream string) (at jetbox.Position, known bool) {
	for _, p := range all {
		if p.Stream == stream {
			return p, true
		}
	}
	return jetbox.Position{}, false
}
