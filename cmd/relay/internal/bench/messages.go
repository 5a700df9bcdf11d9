package bench

import (
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/seed-5e04d8fb/jetbox"
)

const (
	payloadBytes = 512
	source       = "jetbox" // the relay's default

	// noKey and oneKey are numbers of ordering keys.
	noKey  = 0
	oneKey = 1
)

// sample is a number of events that are the same whoever makes them from it, so
// that raw publish sends what the relay sends. The texts that would cost to make
// are made beforehand: the relay reads them from the database.
type sample struct {
	ids     []string
	keys    []string
	payload []byte
	time    time.Time
}

// newSample returns n events of so many ordering keys, recorded at a time.
func newSample(n, keys int, at time.Time) sample {
	s := sample{payload: []byte(strings.Repeat("x", payloadBytes)), time: at.UTC().Truncate(time.Millisecond)}
	for i := range n {
		s.ids = append(s.ids, eventID(s.time, i))
	}
	for i := range keys {
		s.keys = append(s.keys, fmt.Sprintf("order-%06d", i))
	}
	return s
}

func (s sample) len() int { return len(s.ids) }

func (s sample) event(i int) jetbox.Event {
	ev := jetbox.Event{ID: s.ids[i], Subject: Subject, Type: "order.placed", AggregateType: "order", Payload: s.payload, Time: s.time}
	if len(s.keys) > 0 {
		ev.AggregateID = s.keys[i%len(s.keys)]
	}
	return ev
}

// message is what the relay publishes for an event.
func (s sample) message(i int) *nats.Msg {
	ev := s.event(i).WithDefaults(s.time)
	return &nats.Msg{Subject: ev.Subject, Header: ev.Header(source), Data: ev.Payload}
}

// eventID returns an ID like those of jetbox.NewID, some fifty of each millisecond:
// time first, so that a database's index grows at its end, and then random.
func eventID(at time.Time, i int) string {
	ms := uint64(at.UnixMilli()) + uint64(i/50)
	r := scatter(uint64(i))
	return fmt.Sprintf("%08x-%04x-7%03x-8%03x-%012x", ms>>16, ms&0xffff, r>>52, r>>40&0xfff, r&(1<<40-1))
}

// scatter maps different numbers to different ones that look random (splitmix64).
func scatter(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
