package jetbox

import "time"

// Reasons of a dead letter, the values of [HeaderDLQReason].
const (
	// ReasonMaxDeliveries is a failed last delivery, whoever reports it.
	ReasonMaxDeliveries = "max_deliveries"
	// ReasonTerminated is a permanent error, or a term by a foreign consumer.
	ReasonTerminated = "terminated"
)

// Failure is one message that one consumer could not handle: what a dead letter
// is made from. Stream, Consumer, Seq and Stored identify it for good.
type Failure struct {
	Stream   string
	Consumer string

	// Seq is the stream sequence of the message, Stored the time the stream
	// stored it, which tells incarnations of a stream apart.
	Seq    uint64
	Stored time.Time

	// Subject, Header and Payload are the message as it was. They are empty
	// when it is gone from the stream.
	Subject string
	Header  map[string][]string
	Payload []byte

	// Deliveries is how often it was handed out.
	Deliveries uint64

	// Reason is one of the Reason constants, Err the handler's last error text
	// when known.
	Reason string
	Err    string
}
