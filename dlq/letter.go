package dlq

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/seed-5e04d8fb/jetbox"
)

// Bookkeeping headers of a letter, beside those of the contract.
const (
	// headerReplays counts the replays begun. It is part of their message IDs.
	headerReplays = "Dlq-Replays"

	// headerReplayFrom is the event stream's last sequence before a replay was
	// published: where whoever finds the letter replaying starts to look.
	headerReplayFrom = "Dlq-Replay-From"

	// headerReplaySeq is where the event stream stored the last replay.
	headerReplaySeq = "Dlq-Replay-Seq"

	// headerMissing lists what of the original is not in the letter.
	headerMissing = "Dlq-Missing"

	// headerHistory has the earlier failures, oldest first, each as JSON.
	headerHistory = "Dlq-History"

	// headerKeep is for how long the letter is kept once it is closed, where that
	// is longer than Config.KeepClosed: whoever closes it may not be allowed to
	// ask the event stream.
	headerKeep = "Dlq-Keep"

	missingPayload = "payload"
	missingHeaders = "headers"
)

// State is where a letter is in its life.
type State string

const (
	// StateIntent letters were stored before a last delivery that may be going
	// on right now.
	StateIntent State = "intent"
	// StateOpen letters wait for a person.
	StateOpen State = "open"
	// StateReplaying letters are being published again, or were when somebody
	// died; replaying them once more takes over.
	StateReplaying State = "replaying"
	// StateReplayed letters were published again and have not failed since.
	StateReplayed State = "replayed"
	// StateDiscarded letters were given up. Their payload is gone.
	StateDiscarded State = "discarded"
)

// Letter is a dead letter as it was when it was read. It is a plain value, but
// copies share Header and Payload.
type Letter struct {
	// ID is the letter's subject.
	ID    string
	State State

	// Stream, Consumer, StreamSeq and Stored say which message failed, and for
	// whom. Stored is the stream's creation time when the message was gone
	// before anybody could read it.
	Stream    string
	Consumer  string
	StreamSeq uint64
	Stored    time.Time

	// Subject, Header and Payload are the original's. Header has no Nats-* and
	// no Dlq-* names.
	Subject string
	Header  map[string][]string
	Payload []byte

	// PayloadMissing and HeadersTrimmed report that the letter does not hold all
	// of the original. One that was only too large for the broker has the rest
	// beside it, which Show and Replay put together again and a list does not; of
	// one that was gone, Error says so.
	PayloadMissing bool
	HeadersTrimmed bool

	// Deliveries is how often the message was handed out, replays included.
	Deliveries uint64

	// Reason is one of jetbox's Reason constants, Error the last error known,
	// Time when the last failure was reported.
	Reason string
	Error  string
	Time   time.Time

	// History has the failures before that one, the latest ten, oldest first.
	History []Past

	// Replays is how many were begun, ReplaySeq where the stream stored the
	// last one.
	Replays   int
	ReplaySeq uint64

	// Seq and Updated are sequence and time of this version in the dead-letter
	// stream.
	Seq     uint64
	Updated time.Time

	replayFrom uint64
	parts      string // hash and count of the parts that hold the original
	keep       time.Duration
}

// MarshalJSON writes the fields the command line promises, without header and
// payload.
func (l Letter) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		ID         string    `json:"id"`
		State      State     `json:"state"`
		Stream     string    `json:"stream"`
		Consumer   string    `json:"consumer"`
		StreamSeq  uint64    `json:"stream_seq"`
		Subject    string    `json:"subject"`
		Deliveries uint64    `json:"deliveries"`
		Reason     string    `json:"reason"`
		Error      string    `json:"error"`
		Time       time.Time `json:"time"`
		Replays    int       `json:"replays"`
	}{
		l.ID, l.State, l.Stream, l.Consumer, l.StreamSeq, l.Subject,
		l.Deliveries, l.Reason, l.Error, l.Time, l.Replays,
	})
}

// closed reports whether nobody has to do anything about the letter any more.
func (l Letter) closed() (closed bool) {
	return l.State == StateReplayed || l.State == StateDiscarded
}

// waits reports whether the letter waits for a person, at the time now.
func (l Letter) waits(now time.Time, grace func(Letter) time.Duration) (waits bool) {
	switch l.State {
	case StateOpen:
		return true
	case StateIntent:
		return now.Sub(l.Updated) >= grace(l)
	default:
		return false
	}
}

// message returns the letter on the wire. Its header is the letter's own copy.
func (l Letter) message() *nats.Msg {
	m := nats.NewMsg(l.ID)
	m.Data = l.Payload
	for name, values := range l.Header {
		m.Header[name] = values
	}
	m.Header.Set(jetbox.HeaderDLQState, string(l.State))
	m.Header.Set(jetbox.HeaderDLQStream, l.Stream)
	m.Header.Set(jetbox.HeaderDLQConsumer, l.Consumer)
	m.Header.Set(jetbox.HeaderDLQStreamSeq, strconv.FormatUint(l.StreamSeq, 10))
	m.Header.Set(jetbox.HeaderDLQDeliveries, strconv.FormatUint(l.Deliveries, 10))
	m.Header.Set(jetbox.HeaderDLQReason, l.Reason)
	m.Header.Set(jetbox.HeaderDLQTime, l.Time.UTC().Format(time.RFC3339Nano))
	optional := func(name, value string, set bool) {
		if set {
			m.Header.Set(name, value)
		}
	}
	optional(jetbox.HeaderDLQSubject, l.Subject, l.Subject != "")
	optional(jetbox.HeaderDLQError, l.Error, l.Error != "")
	optional(headerReplays, strconv.Itoa(l.Replays), l.Replays > 0)
	optional(headerReplayFrom, strconv.FormatUint(l.replayFrom, 10), l.State == StateReplaying)
	optional(headerReplaySeq, strconv.FormatUint(l.ReplaySeq, 10), l.ReplaySeq > 0)
	optional(headerKeep, l.keep.String(), l.keep > 0)
	if len(l.History) > 0 {
		m.Header[headerHistory] = historyValues(l.History)
	}
	var missing []string
	if l.PayloadMissing {
		missing = append(missing, missingPayload)
	}
	if l.HeadersTrimmed {
		missing = append(missing, missingHeaders)
	}
	optional(headerParts, l.parts, l.parts != "")
	optional(headerMissing, strings.Join(missing, ", "), len(missing) > 0)
	return m
}

// newLetter reads a letter back. One without a state was put there by somebody
// else and is no letter; it is returned with what it has.
func newLetter(m *record, prefix string) Letter {
	h := nats.Header(m.header)
	l := Letter{
		ID:       m.subject,
		State:    State(h.Get(jetbox.HeaderDLQState)),
		Stream:   h.Get(jetbox.HeaderDLQStream),
		Consumer: h.Get(jetbox.HeaderDLQConsumer),
		Subject:  h.Get(jetbox.HeaderDLQSubject),
		Reason:   h.Get(jetbox.HeaderDLQReason),
		Error:    h.Get(jetbox.HeaderDLQError),
		History:  parseHistory(m.header[headerHistory]),
		Header:   traveling(m.header),
		Payload:  m.data,
		Seq:      m.seq,
		Updated:  m.time,
	}
	l.Deliveries, _ = strconv.ParseUint(h.Get(jetbox.HeaderDLQDeliveries), 10, 64)
	l.StreamSeq, _ = strconv.ParseUint(h.Get(jetbox.HeaderDLQStreamSeq), 10, 64)
	l.Time, _ = time.Parse(time.RFC3339Nano, h.Get(jetbox.HeaderDLQTime))
	l.Replays, _ = strconv.Atoi(h.Get(headerReplays))
	l.replayFrom, _ = strconv.ParseUint(h.Get(headerReplayFrom), 10, 64)
	l.ReplaySeq, _ = strconv.ParseUint(h.Get(headerReplaySeq), 10, 64)
	l.keep, _ = time.ParseDuration(h.Get(headerKeep))
	l.parts = h.Get(headerParts)
	missing := h.Get(headerMissing)
	l.PayloadMissing = strings.Contains(missing, missingPayload)
	l.HeadersTrimmed = strings.Contains(missing, missingHeaders)
	if id, err := parseID(prefix, m.subject); err == nil {
		l.Stored = id.stored
	}
	return l
}

// identity is what a letter's subject says.
type identity struct {
	stream, consumer string
	seq              uint64
	stored           time.Time
}

func (id identity) subject(prefix string) string {
	return fmt.Sprintf("%s.%s.%s.%d-%d", prefix, id.stream, id.consumer, id.seq, id.stored.UnixNano())
}

func (id identity) validate() error {
	switch {
	case !validName(id.stream):
		return fmt.Errorf("stream %q is no stream name", id.stream)
	case !validName(id.consumer):
		return fmt.Errorf("consumer %q is no consumer name", id.consumer)
	case id.seq == 0:
		return fmt.Errorf("stream sequence is 0")
	case id.stored.IsZero():
		return fmt.Errorf("time stored is unknown")
	}
	return nil
}

// parseID reads the subject of a letter.
func parseID(prefix, subject string) (identity, error) {
	bad := fmt.Errorf("%q is not the ID of a letter, want %s.<stream>.<consumer>.<sequence>-<unix ns>", subject, prefix)
	rest, ok := strings.CutPrefix(subject, prefix+".")
	if !ok {
		return identity{}, bad
	}
	tokens := strings.Split(rest, ".")
	if len(tokens) != 3 {
		return identity{}, bad
	}
	seq, stored, ok := strings.Cut(tokens[2], "-")
	if !ok {
		return identity{}, bad
	}
	id := identity{stream: tokens[0], consumer: tokens[1]}
	var err error
	if id.seq, err = strconv.ParseUint(seq, 10, 64); err != nil {
		return identity{}, bad
	}
	ns, err := strconv.ParseInt(stored, 10, 64)
	if err != nil {
		return identity{}, bad
	}
	id.stored = time.Unix(0, ns).UTC()
	// Round trip: "007-1" and "7-1" are two subjects, and only one is a letter's.
	if id.validate() != nil || id.subject(prefix) != subject {
		return identity{}, bad
	}
	return id, nil
}
