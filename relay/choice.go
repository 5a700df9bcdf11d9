package relay

import "github.com/nats-io/nats.go/jetstream"

// The engines that publish, as logs and status name them.
const (
	// EngineFast sends batches of rows that were never sent before, and everything
	// else as EnginePubAck does.
	EngineFast = "fast batch"
	// EnginePubAck waits for one PubAck for each message.
	EnginePubAck = "one PubAck for each message"
)

// EngineOf returns the engine that a relay chooses for a stream, by what the server
// says of it, and why if it is the slower one. While a relay publishes it may find that
// batches do not work, or are no use because others publish to the stream too: then it
// does without for some minutes, and logs that.
func EngineOf(info *jetstream.StreamInfo) (engine, reason string) {
	if !info.Config.AllowBatchPublish {
		return EnginePubAck, "the stream or its server has no batch publishing"
	}
	return EngineFast, ""
}
