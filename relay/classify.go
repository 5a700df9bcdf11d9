package relay

import (
	"errors"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Classes of failures; see the package comment. They are the values of the
// label reason of jetbox_relay_publish_failures_total.
const (
	classOutage    = "outage"
	classRow       = "row"
	classPermanent = "permanent"
	classRecord    = "record"
)

// Error codes of the JetStream API that jetstream has no name for, as of
// nats-server 2.15.3. Package embedded pins what the server really says.
const (
	codeMessageTooLong = 10054 // the stream's max_msg_size
	codeStoreFailed    = 10077 // several causes, told apart by their words
	codeHeaderTooLong  = 10097
	codeNoTTL          = 10165
	codeTTLDisabled    = 10166
)

// subjectFull is what the server says with codeStoreFailed when the limit of one
// subject is reached, and not the stream's.
const subjectFull = "maximum messages per subject exceeded"

// classify says whose failure a failed publish is. Everything not known to be
// the row's own is an outage: waiting costs time, parking costs a person.
func classify(err error) string {
	var api *jetstream.APIError
	switch {
	case errors.Is(err, nats.ErrMaxPayload),
		errors.Is(err, nats.ErrBadSubject),
		errors.Is(err, nats.ErrBadHeaderMsg),
		errors.Is(err, nats.ErrInvalidMsg):
		return classPermanent
	case errors.Is(err, errNoStream):
		return classRow
	case !errors.As(err, &api):
		return classOutage
	}
	switch api.ErrorCode {
	case codeMessageTooLong, codeHeaderTooLong, codeNoTTL, codeTTLDisabled:
		return classPermanent
	case codeStoreFailed:
		if strings.Contains(api.Description, subjectFull) {
			return classRow
		}
	}
	return classOutage
}

// errNoStream is a subject that no stream takes although the configured one is
// there.
var errNoStream = errors.New("no stream takes this subject")

// errDenied is a publish the server refused to this user.
var errDenied = errors.New("permission to publish refused")

// explain adds to the error what the reader of a row's last_error needs: sizes
// where the size is the matter, and the permission behind a mere timeout.
func (r *Relay) explain(m message, err error) error {
	var api *jetstream.APIError
	switch {
	case errors.Is(err, nats.ErrMaxPayload):
		headers, payload := sizes(m.msg)
		return fmt.Errorf("%w: %d bytes of headers and %d of payload, the broker takes %d together",
			err, headers, payload, r.streams.js.Conn().MaxPayload())
	case errors.As(err, &api) && api.ErrorCode == codeMessageTooLong:
		headers, payload := sizes(m.msg)
		return fmt.Errorf("%w: %d bytes of headers and %d of payload, stream %s takes %d together",
			err, headers, payload, m.stream, r.streams.maxMsgSize())
	case classify(err) == classOutage && !errors.Is(err, errDenied):
		// A denied publish has no answer at all: it shows as a timeout, and on
		// the connection (nats-server 2.15).
		last := r.streams.js.Conn().LastError()
		if errors.Is(last, nats.ErrPermissionViolation) && strings.Contains(last.Error(), `"`+m.msg.Subject+`"`) {
			return fmt.Errorf("%w for subject %s: %w", errDenied, m.msg.Subject, err)
		}
	}
	return err
}

// sizes is what a message takes on the wire, as max_payload counts it.
func sizes(m *nats.Msg) (headers, payload int) {
	const line, perValue = len("NATS/1.0\r\n\r\n"), len(": \r\n")
	headers = line
	for name, values := range m.Header {
		for _, v := range values {
			headers += len(name) + len(v) + perValue
		}
	}
	return headers, len(m.Data)
}
