package dlq

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/termreason"
)

// advisory is what the server says about a message it will not deliver again.
// It is a hint: sent at most once, forged by anybody who may publish on its
// subject, and said of messages that were merely deleted as well.
type advisory struct {
	Type       string    `json:"type"`
	Timestamp  time.Time `json:"timestamp"`
	Stream     string    `json:"stream"`
	Consumer   string    `json:"consumer"`
	StreamSeq  uint64    `json:"stream_seq"`
	Deliveries uint64    `json:"deliveries"`
	Reason     string    `json:"reason"`
	Domain     string    `json:"domain"`
}

const (
	typeMaxDeliveries = "io.nats.jetstream.advisory.v1.max_deliver"
	typeTerminated    = "io.nats.jetstream.advisory.v1.terminated"
)

// Reasons of MSG_TERMINATED advisories that tell of a deletion, not of a
// failure (nats-server 2.15, server/consumer.go).
var removalReasons = map[string]bool{
	"Unacknowledged message was deleted": true,
	"Message deleted by stream limits":   true,
}

// rejected says why an advisory is about no failure.
type rejected struct{ why string }

func (e *rejected) Error() string { return e.why }

// parseAdvisory reads an advisory and checks that it says the same as its
// subject, which is what permissions and filters go by. Its error is a *rejected.
func (c Config) parseAdvisory(subject string, data []byte) (advisory, error) {
	var a advisory
	if err := json.Unmarshal(data, &a); err != nil {
		return a, &rejected{"it is no JSON: " + err.Error()}
	}
	var base string
	switch a.Type {
	case typeMaxDeliveries:
		base = c.maxDeliveries()
	case typeTerminated:
		base = c.terminated()
	default:
		return a, &rejected{fmt.Sprintf("its type is %q", a.Type)}
	}
	if want := strings.Join([]string{base, a.Stream, a.Consumer}, "."); subject != want {
		return a, &rejected{"it says what belongs on " + want}
	}
	if a.StreamSeq == 0 || a.Timestamp.IsZero() {
		return a, &rejected{"it has no stream sequence or no time"}
	}
	return a, nil
}

// failure is what the advisory alone knows.
func (a advisory) failure() jetbox.Failure {
	f := jetbox.Failure{
		Stream:     a.Stream,
		Consumer:   a.Consumer,
		Seq:        a.StreamSeq,
		Deliveries: a.Deliveries,
		Reason:     jetbox.ReasonMaxDeliveries,
	}
	if a.Type == typeTerminated {
		f.Reason = jetbox.ReasonTerminated
		f.Err, _ = termreason.Split(a.Reason)
	}
	return f
}
