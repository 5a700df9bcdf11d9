package consumer

import (
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/seed-5e04d8fb/jetbox"
)

// headerMarker is on messages the server itself puts in a stream in place of
// expired or deleted ones. They have no payload and no event.
const headerMarker = "Nats-Marker-Reason"

// Delivery is one message in a handler's hands. It belongs to that one call of
// the handler, which must not keep it or change its maps.
type Delivery struct {
	// Event is what the headers say. A message of another program has no ID and
	// maybe no key, and is handled as what it is.
	jetbox.Event

	// Malformed says which of the event's headers cannot be decoded. The rest
	// of the event is filled. A handler that needs them returns it as permanent.
	Malformed error

	// Stream, Consumer and StreamSeq say where the message came from, Stored
	// when the stream took it.
	Stream    string
	Consumer  string
	StreamSeq uint64
	Stored    time.Time

	// NumDelivered is how often the message was handed out, 1 the first time.
	// Last reports that there will be no other delivery.
	NumDelivered uint64
	Last         bool

	// RawHeader is every header as it arrived. Nil when there was none or the
	// header block is not decodable.
	RawHeader map[string][]string

	// Letter is the subject of the dead letter this message is a replay of,
	// and ReplayFor the "<stream>/<consumer>" it is meant for. Empty for
	// everything else.
	Letter    string
	ReplayFor string

	duplicate bool // set by Once: a ledger had seen it
}

func newDelivery(msg *nats.Msg, md *nats.MsgMetadata) *Delivery {
	d := &Delivery{
		Stream:       md.Stream,
		Consumer:     md.Consumer,
		StreamSeq:    md.Sequence.Stream,
		Stored:       md.Timestamp.UTC(),
		NumDelivered: md.NumDelivered,
		RawHeader:    msg.Header,
		Letter:       msg.Header.Get(jetbox.HeaderLetter),
		ReplayFor:    msg.Header.Get(jetbox.HeaderReplayFor),
	}
	return d
}

// decode fills in the event. Workers do it: there are several.
func (d *Delivery) decode(msg *nats.Msg) {
	if d.Subject == "" {
		d.Event, d.Malformed = jetbox.FromMessage(msg.Subject, msg.Header, msg.Data)
	}
}

// OrderingKey is what the header says: events that share it are stored in
// order. Empty: ordered with nothing.
func (d *Delivery) OrderingKey() string {
	if key := d.lane(); !strings.Contains(key, "%") {
		return key
	}
	if key := d.Event.OrderingKey(); key != "" {
		return key
	}
	return d.lane()
}

// lane is the ordering key as it was sent.
func (d *Delivery) lane() string { return d.header(jetbox.HeaderCEPartitionKey) }

// header is a header as it was sent.
func (d *Delivery) header(name string) string {
	if v := d.RawHeader[name]; len(v) > 0 {
		return v[0]
	}
	return ""
}

// TraceContext returns the W3C trace context of whoever wrote the event: the
// headers traceparent and tracestate, both empty when there was none.
func (d *Delivery) TraceContext() (parent, state string) {
	h := nats.Header(d.RawHeader)
	return h.Get(jetbox.HeaderTraceParent), h.Get(jetbox.HeaderTraceState)
}

// skip reports that the message is not for this consumer's handler.
func (d *Delivery) skip() (skip bool) {
	if d.ReplayFor != "" && d.ReplayFor != d.Stream+"/"+d.Consumer {
		return true
	}
	return len(d.RawHeader[headerMarker]) > 0 && len(d.Payload) == 0
}

// failure is the dead letter's content. All headers travel, so that the letter
// a replay came from is known to whoever stores it.
func (d *Delivery) failure(reason, text string) jetbox.Failure {
	return jetbox.Failure{
		Stream:     d.Stream,
		Consumer:   d.Consumer,
		Seq:        d.StreamSeq,
		Stored:     d.Stored,
		Subject:    d.Subject,
		Header:     d.RawHeader,
		Payload:    d.Payload,
		Deliveries: d.NumDelivered,
		Reason:     reason,
		Err:        text,
	}
}

// letterName is how a term names the dead letter that was stored before it: see
// package termreason.
func (d *Delivery) letterName() string {
	if d.Letter != "" && d.ReplayFor == d.Stream+"/"+d.Consumer {
		return d.Letter
	}
	return fmt.Sprintf("%d-%d", d.StreamSeq, d.Stored.UnixNano())
}

// where names the message in errors and logs.
func (d *Delivery) where() string {
	return fmt.Sprintf("%s/%s %d", d.Stream, d.Consumer, d.StreamSeq)
}
