package jetbox

import (
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	// MaxSubject is the longest subject, in bytes. A subject beyond about 4 kB
	// makes nats-server 2.15 answer "maximum control line exceeded" and nats.go
	// 1.55 close the connection for good.
	MaxSubject = 1024

	// MaxID is the longest event ID or idempotency key, in bytes: the broker
	// keeps each in memory for the whole duplicate window.
	MaxID = 512

	// MaxHeader is the largest header block JetStream stores, in bytes (error
	// 10097 beyond it, nats-server 2.15).
	MaxHeader = 65535
)

// Validate returns an error that wraps [ErrInvalidEvent] and names the field
// when the wire cannot carry e exactly as it is. Empty ID, Key and Type are
// fine: they have defaults. The payload and its content type are never looked
// into.
//
// A header name must be printable ASCII without separators and may not start
// with Nats-, ce-, Dlq- or Jetbox-, in any letter case, nor be Idempotency-Key;
// Content-Type may not announce a CloudEvents envelope. A header value may not
// hold CR, LF, NUL or invalid UTF-8, nor blanks at its ends: the client would
// change them silently. All headers together, jetbox's own included, must fit
// in [MaxHeader].
func (e Event) Validate() error {
	if err := validSubject(e.Subject); err != nil {
		return err
	}
	if e.ID != "" {
		if err := validID("event ID", e.ID); err != nil {
			return err
		}
	}
	if e.Key != "" {
		if err := validID("idempotency key", e.Key); err != nil {
			return err
		}
	}
	for _, f := range [...]struct{ name, value string }{
		{"event type", e.Type},
		{"aggregate type", e.AggregateType},
		{"aggregate ID", e.AggregateID},
		{"schema version", e.SchemaVersion},
		{"content type", e.ContentType},
	} {
		if !utf8.ValidString(f.value) {
			return invalid(f.name, f.value, "is not valid UTF-8")
		}
	}
	for _, at := range [...]time.Time{e.Time, e.NotBefore} {
		if y := at.UTC().Year(); y < 0 || y > 9999 {
			return fmt.Errorf("%w: time %v: RFC 3339 has no year %d", ErrInvalidEvent, at, y)
		}
	}
	for name, values := range e.Headers {
		if err := validHeader(name, values); err != nil {
			return err
		}
	}
	if n := e.headerSize(); n > MaxHeader {
		return fmt.Errorf("%w: headers: %d bytes with jetbox's own, the broker stores at most %d",
			ErrInvalidEvent, n, MaxHeader)
	}
	return nil
}

// headerSize is the size of the header block on the wire, with 1 kB left for a
// source the writer does not know. Far below the limit it is only an upper bound,
// which costs a relay nothing to find.
func (e Event) headerSize() int {
	const (
		fixed, perLine, forSource = len("NATS/1.0\r\n\r\n"), len(": \r\n"), 1024
		names                     = mostAttributes * 32 // more than each of ours with its time or number
		escaped                   = 5                   // "/" becomes "%252F" in the partition key
	)
	n := fixed + forSource
	for name, values := range e.Headers {
		for _, v := range values {
			n += len(name) + len(v) + perLine
		}
	}
	own := 2*len(e.Key) + len(e.ID) + len(e.Type) + len(e.ContentType) + len(e.SchemaVersion) + len(e.AggregateType) + 2*len(e.AggregateID)
	if bound := n + names + escaped*own; bound <= MaxHeader {
		return bound
	}
	e.attributes("", func(name, value string) { n += len(name) + len(value) + perLine })
	return n
}

func invalid(field, value, rule string) error {
	const most = 80
	if len(value) > most {
		value = value[:most] + "..."
	}
	return fmt.Errorf("%w: %s %q: %s", ErrInvalidEvent, field, value, rule)
}

func validSubject(s string) error {
	switch {
	case s == "":
		return fmt.Errorf("%w: subject is empty", ErrInvalidEvent)
	case len(s) > MaxSubject:
		return invalid("subject", s, fmt.Sprintf("has %d bytes, at most %d", len(s), MaxSubject))
	case !utf8.ValidString(s):
		return invalid("subject", s, "is not valid UTF-8")
	case s[0] == '$':
		return invalid("subject", s, "starts with $, which is the server's")
	case s[0] == '.' || s[len(s)-1] == '.' || strings.Contains(s, ".."):
		return invalid("subject", s, "has an empty token")
	}
	for _, r := range s {
		switch {
		case r == '*' || r == '>':
			return invalid("subject", s, fmt.Sprintf("has the wildcard %q", r))
		case unicode.IsSpace(r):
			return invalid("subject", s, fmt.Sprintf("has white space %q", r))
		case unicode.IsControl(r):
			return invalid("subject", s, fmt.Sprintf("has the control character %q", r))
		}
	}
	return nil
}

// validID refuses what would not survive as Nats-Msg-Id: the client trims
// values and turns CR and LF into blanks, so two different IDs could become one.
func validID(field, s string) error {
	switch {
	case len(s) > MaxID:
		return invalid(field, s, fmt.Sprintf("has %d bytes, at most %d", len(s), MaxID))
	case !utf8.ValidString(s):
		return invalid(field, s, "is not valid UTF-8")
	case s == "" || strings.TrimSpace(s) != s:
		return invalid(field, s, "is empty or has blanks at its ends")
	}
	for _, r := range s {
		if !unicode.IsPrint(r) {
			return invalid(field, s, fmt.Sprintf("has the unprintable character %q", r))
		}
	}
	return nil
}

func validHeader(name string, values []string) error {
	if !headerToken(name) {
		return invalid("header", name, "is not a name of printable ASCII without separators")
	}
	if rule := reservedHeader(name, values); rule != "" {
		return invalid("header", name, rule)
	}
	if len(values) == 0 {
		return invalid("header", name, "has no value: it would vanish on the wire")
	}
	for _, v := range values {
		switch {
		case !utf8.ValidString(v):
			return invalid("header "+name, v, "is not valid UTF-8")
		case strings.ContainsAny(v, "\r\n\x00"):
			return invalid("header "+name, v, "has CR, LF or NUL")
		case strings.Trim(v, " \t") != v:
			return invalid("header "+name, v, "has blanks at its ends")
		}
	}
	return nil
}

// headerToken is nats.go's own rule for header names (1.55): an RFC 9110 token.
func headerToken(name string) bool {
	for i := range len(name) {
		c := name[i]
		if c <= ' ' || c > '~' || strings.IndexByte(`"(),/:;<=>?@[\]{}`, c) >= 0 {
			return false
		}
	}
	return name != ""
}

// reservedHeader returns why an application may not use the header, or "".
func reservedHeader(name string, values []string) string {
	lower := strings.ToLower(name)
	for _, p := range reservedPrefixes {
		if strings.HasPrefix(lower, p) {
			return "starts with the reserved prefix " + p
		}
	}
	if lower == "idempotency-key" {
		return "is reserved for the event's own key"
	}
	if lower == "content-type" {
		for _, v := range values {
			v = strings.ToLower(strings.TrimSpace(v))
			if strings.HasPrefix(v, "application/cloudevents") {
				return "announces a CloudEvents envelope, but the payload is sent as it is"
			}
		}
	}
	return ""
}
