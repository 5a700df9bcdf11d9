package jetbox

// The names on the wire. Changing one is a breaking change for consumers in
// every language; testdata/headers.golden shows them all in use.
const (
	// HeaderMsgID carries the idempotency key. JetStream drops a repeat it sees
	// inside the stream's duplicate window. A replay gets a fresh one.
	HeaderMsgID = "Nats-Msg-Id"

	// HeaderIdempotencyKey carries the idempotency key always, replays included:
	// what a consumer's ledger remembers.
	HeaderIdempotencyKey = "Idempotency-Key"

	// HeaderReplayFor names the one consumer a replayed message is meant for, as
	// "<stream>/<consumer>". Others skip the message with an ack.
	HeaderReplayFor = "Jetbox-Replay-For"

	// HeaderLetter is the subject of the dead letter a replay came from.
	HeaderLetter = "Jetbox-Letter"

	// HeaderTraceParent and HeaderTraceState are W3C Trace Context, passed on
	// from the writer untouched.
	HeaderTraceParent = "traceparent"
	HeaderTraceState  = "tracestate"
)

// CloudEvents 1.0 attributes in the binary mode of its NATS binding.
const (
	HeaderCESpecVersion   = "ce-specversion"
	HeaderCEID            = "ce-id"
	HeaderCEType          = "ce-type"
	HeaderCESource        = "ce-source"
	HeaderCETime          = "ce-time"
	HeaderCESubject       = "ce-subject"
	HeaderCEContentType   = "ce-datacontenttype"
	HeaderCEPartitionKey  = "ce-partitionkey"
	HeaderCESequence      = "ce-sequence"
	HeaderCESchemaVersion = "ce-schemaversion"
)

// Headers of a dead letter, beside those of the original message.
const (
	HeaderDLQStream     = "Dlq-Stream"
	HeaderDLQConsumer   = "Dlq-Consumer"
	HeaderDLQStreamSeq  = "Dlq-Stream-Seq"
	HeaderDLQSubject    = "Dlq-Subject"
	HeaderDLQDeliveries = "Dlq-Deliveries"
	HeaderDLQReason     = "Dlq-Reason"
	HeaderDLQError      = "Dlq-Error"
	HeaderDLQTime       = "Dlq-Time"
	HeaderDLQState      = "Dlq-State"
)

// cloudEventsVersion is the only version of CloudEvents there is a NATS
// binding for.
const cloudEventsVersion = "1.0"

// reservedPrefixes may not start the name of an application's header, in any
// letter case: Nats- headers are commands to the server, the others are ours.
var reservedPrefixes = []string{"nats-", "ce-", "dlq-", "jetbox-"}
