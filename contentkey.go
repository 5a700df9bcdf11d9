package jetbox

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/gowebpki/jcs"
)

// Limits of [ContentKey]. They bound what a payload from outside can cost: the
// depth bounds the stack, the number of values the parse tree, which takes
// some 100 to 200 bytes per value whatever the value's own size.
const (
	maxContentBytes  = 16 << 20
	maxContentDepth  = 1000
	maxContentValues = 1 << 20
)

// ErrNoCanonicalForm is returned when [ContentKey] is given a payload it
// cannot derive a key from. Trying again does not help: change the payload
// (the error says what is wrong and where), or give the event a key of your
// own, or none, which makes its event ID the key.
var ErrNoCanonicalForm = errors.New("payload has no canonical JSON form")

// ContentKey derives an idempotency key from what a JSON payload says. The key
// is the SHA-256 of the payload's canonical form (RFC 8785), written as 64
// lower-case hexadecimal digits. White space, the order of object members, the
// way a string is escaped and the way a number is written (1, 1.0 and 1e0; 0
// and -0) do not change it. Everything else does; text is not normalized, so a
// composed and a decomposed é are different content.
//
// The key covers the payload and nothing else: not the subject, the event type,
// the aggregate or the headers. A stream compares message IDs across all of its
// subjects, and the outbox holds a key once. So two events with equal payloads
// are taken for one, also when the first says that an order was created and the
// second that it was canceled: the outbox refuses the second or, once the row of
// the first is gone, the stream drops it inside its duplicate window. Put in
// front of the key what tells your events apart:
//
//	ev.Key = "order-created:" + key
//
// And when the same thing may truly happen twice, do not use ContentKey: the
// default key, the event ID, is right.
//
// The same content gives the same key on every platform and in every version of
// this package. An error wraps [ErrNoCanonicalForm] and says what was found at
// which byte offset, counted from 0; a duplicate key is named instead. Refused
// are:
//
//   - an empty payload, and anything that is not one JSON value (RFC 8259):
//     a byte order mark, comments, NaN, 01, more data after the value
//   - what I-JSON (RFC 7493) forbids and parsers disagree about: two members of
//     one object with the same name, escapes resolved; invalid UTF-8; lone
//     surrogates
//   - a number that RFC 8785 would change into another number. It reads numbers
//     as IEEE 754 doubles, so 9007199254740993 would become 9007199254740992 and
//     share its key. A number is accepted if it equals the shortest decimal that
//     identifies its double, which is how most languages print a double. This is
//     stricter than RFC 8785: it refuses 2^53+1, but also 2^60 written in full
//     (its double is written 1152921504606847000), 0.10000000000000001, 1e400 and
//     1e-400. Send such numbers as strings, as RFC 7493 section 2.2 recommends.
//   - more than 16 MiB, arrays and objects nested more than 1,000 deep, or more
//     than 1,048,576 values
//
// The payload is only read. What is published is the payload as it is, never
// its canonical form.
func ContentKey(payload []byte) (string, error) {
	canonical, err := canonicalJSON(payload)
	if err != nil {
		return "", fmt.Errorf("derive content key: %w: %w", ErrNoCanonicalForm, err)
	}
	sum := sha256.Sum256(canonical)
	return hex.EncodeToString(sum[:]), nil
}

// canonicalJSON returns the RFC 8785 form of data. It checks before it
// transforms: jcs rounds numbers without a word, does not say where an error
// is, and builds its whole tree before anybody can object to the size.
func canonicalJSON(data []byte) ([]byte, error) {
	if len(data) == 0 {
		return nil, errors.New("it is empty")
	}
	if len(data) > maxContentBytes {
		return nil, fmt.Errorf("%d bytes, want at most %d", len(data), maxContentBytes)
	}
	s := jsonScan{data: data}
	if err := s.document(); err != nil {
		return nil, err
	}
	// Two parsers must agree that this is JSON. Only duplicate keys are left to
	// jcs, which sorts the keys anyway.
	return jcs.Transform(data)
}
