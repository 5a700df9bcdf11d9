package jetbox

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Header returns the message headers of e, in the CloudEvents NATS binding's
// binary mode, ready for a nats.Msg. source becomes ce-source. The caller owns
// the map. Fill e with [Event.WithDefaults] first.
func (e Event) Header(source string) map[string][]string {
	// One backing array for all values: half the cost of Header.Set per name
	// on the relay's hot path.
	values := make([]string, 0, mostAttributes)
	h := make(map[string][]string, mostAttributes+len(e.Headers))
	for name, vs := range e.Headers {
		h[name] = vs
	}
	e.attributes(source, func(name, value string) {
		values = append(values, value)
		h[name] = values[len(values)-1 : len(values) : len(values)]
	})
	return h
}

// mostAttributes is how many headers of its own an event has at most.
const mostAttributes = 13

// attributes calls set with each header that jetbox itself gives the event.
func (e Event) attributes(source string, set func(name, value string)) {
	set(HeaderMsgID, e.Key)
	set(HeaderIdempotencyKey, e.Key)
	set(HeaderCESpecVersion, cloudEventsVersion)
	set(HeaderCEID, encodeAttr(e.ID))
	set(HeaderCEType, encodeAttr(e.Type))
	set(HeaderCESource, encodeAttr(source))
	set(HeaderCETime, e.Time.UTC().Format(time.RFC3339Nano))
	set(HeaderCEContentType, encodeAttr(e.ContentType))
	if e.AggregateID != "" {
		set(HeaderCESubject, encodeAttr(e.AggregateID))
		set(HeaderCEPartitionKey, encodeAttr(e.OrderingKey()))
	}
	if e.AggregateSeq != nil {
		set(HeaderCESequence, strconv.FormatInt(*e.AggregateSeq, 10))
	}
	if e.SchemaVersion != "" {
		set(HeaderCESchemaVersion, encodeAttr(e.SchemaVersion))
	}
}

// FromMessage reads an event back from a message: the inverse of
// [Event.Header]. Headers holds what is not an attribute of the event. A
// message written by another program has no event ID and no key; that is no
// error, it is returned with what it has. The error, when some attribute cannot
// be decoded, comes with everything that could.
func FromMessage(subject string, header map[string][]string, payload []byte) (Event, error) {
	var errs []error
	attr := func(name string) string {
		v, err := decodeAttr(first(header[name]))
		if err != nil {
			errs = append(errs, fmt.Errorf("header %s: %w", name, err))
		}
		return v
	}
	e := Event{
		ID:            attr(HeaderCEID),
		Key:           first(header[HeaderIdempotencyKey]),
		Subject:       subject,
		Type:          attr(HeaderCEType),
		AggregateID:   attr(HeaderCESubject),
		SchemaVersion: attr(HeaderCESchemaVersion),
		ContentType:   attr(HeaderCEContentType),
		Payload:       payload,
	}
	if e.Key == "" {
		e.Key = first(header[HeaderMsgID])
	}
	if typ, _, ok := strings.Cut(attr(HeaderCEPartitionKey), "/"); ok {
		e.AggregateType = orderingKeyUnescaper.Replace(typ)
	}
	if v := first(header[HeaderCETime]); v != "" {
		t, err := time.Parse(time.RFC3339Nano, v)
		if err != nil {
			errs = append(errs, fmt.Errorf("header %s: %w", HeaderCETime, err))
		}
		e.Time = t
	}
	if v := first(header[HeaderCESequence]); v != "" {
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			errs = append(errs, fmt.Errorf("header %s: %w", HeaderCESequence, err))
		} else {
			e.AggregateSeq = &n
		}
	}
	for name, vs := range header {
		if ownHeader(name) || reservedHeader(name, vs) != "" {
			continue
		}
		if e.Headers == nil {
			e.Headers = make(map[string][]string)
		}
		e.Headers[name] = vs
	}
	return e, errors.Join(errs...)
}

// ownHeader reports whether a header is reserved, as we write it: most are, and
// a consumer asks for every one of every message.
func ownHeader(name string) (own bool) {
	return strings.HasPrefix(name, "ce-") || strings.HasPrefix(name, "Nats-") || name == HeaderIdempotencyKey
}

var orderingKeyUnescaper = strings.NewReplacer("%25", "%", "%2F", "/")

func first(vs []string) string {
	if len(vs) == 0 {
		return ""
	}
	return vs[0]
}

const upperHex = "0123456789ABCDEF"

// encodeAttr percent-encodes what CloudEvents' bindings ask for: blank, double
// quote, percent, and every byte outside U+0021 to U+007E.
func encodeAttr(s string) string {
	extra := 0
	for i := range len(s) {
		if attrEscaped(s[i]) {
			extra += 2
		}
	}
	if extra == 0 {
		return s
	}
	b := make([]byte, 0, len(s)+extra)
	for i := range len(s) {
		if c := s[i]; attrEscaped(c) {
			b = append(b, '%', upperHex[c>>4], upperHex[c&15])
		} else {
			b = append(b, c)
		}
	}
	return string(b)
}

func attrEscaped(c byte) bool {
	return c <= ' ' || c > '~' || c == '"' || c == '%'
}

// decodeAttr undoes encodeAttr. A percent sign that starts no escape is an
// error; the text is then returned as it came.
func decodeAttr(s string) (string, error) {
	if !strings.Contains(s, "%") {
		return s, nil
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] != '%' {
			b = append(b, s[i])
			continue
		}
		if i+2 >= len(s) {
			return s, fmt.Errorf("%q ends inside a percent escape", s)
		}
		c, err := strconv.ParseUint(s[i+1:i+3], 16, 8)
		if err != nil {
			return s, fmt.Errorf("%q has a bad percent escape at byte %d", s, i)
		}
		b = append(b, byte(c))
		i += 2
	}
	return string(b), nil
}
