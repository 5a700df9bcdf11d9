package dlq

import (
	"cmp"
	"slices"
	"strings"
	"unicode"

	"github.com/nats-io/nats.go"

	"github.com/seed-5e04d8fb/jetbox"
)

const (
	// maxError is the longest error text kept, shortError what is left of it
	// when the letter is too large.
	maxError   = 2048
	shortError = 256

	// conditions is room for what a publish adds to the header block:
	// Nats-Expected-Stream and Nats-Expected-Last-Subject-Sequence.
	conditions = 512
)

// traveling returns the headers of a message that go with it into a letter and
// out again. Nats-* headers command the server: a copied Nats-Rollup purged the
// dead-letter stream, a copied Nats-TTL or Nats-Batch-Id is refused (nats-server
// 2.15). The server's match is by exact case, ours is not, since other versions
// and proxies differ. Names that the client refuses to send are dropped too.
func traveling(header map[string][]string) map[string][]string {
	out := make(map[string][]string, len(header))
	for name, values := range header {
		if hasPrefixFold(name, "nats-") || hasPrefixFold(name, "dlq-") || !sendable(name) || len(values) == 0 {
			continue
		}
		clean := make([]string, len(values))
		for i, v := range values {
			clean[i] = wireValue(v)
		}
		out[name] = clean
	}
	return out
}

// dropped reports whether traveling loses application headers of the message.
func dropped(header map[string][]string) (lost bool) {
	for name := range header {
		if !sendable(name) {
			return true
		}
	}
	return false
}

func hasPrefixFold(s, lower string) (has bool) {
	return len(s) >= len(lower) && strings.EqualFold(s[:len(lower)], lower)
}

// sendable is nats.go's own rule for header names (1.55): an RFC 9110 token.
func sendable(name string) (ok bool) {
	for i := range len(name) {
		c := name[i]
		if c <= ' ' || c > '~' || strings.IndexByte(`"(),/:;<=>?@[\]{}`, c) >= 0 {
			return false
		}
	}
	return name != ""
}

// wireValue is what nats.go makes of a header value. Doing it first lets a
// letter be compared with what was stored.
func wireValue(v string) string {
	return newlines.Replace(strings.Trim(v, " \t\r\n"))
}

var newlines = strings.NewReplacer("\r", " ", "\n", " ")

// errorText makes one printable line of any error text, at most limit bytes.
func errorText(s string, limit int) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
	s = strings.TrimSpace(s)
	if len(s) <= limit {
		return s
	}
	const more = "..."
	s = s[:limit-len(more)]
	return strings.TrimSpace(strings.ToValidUTF8(s, "")) + more
}

// limits are what the broker takes.
type limits struct {
	message int // header and payload
	header  int
}

func (m limits) takes(l Letter) (fits bool) {
	msg := l.message()
	h := headerSize(msg.Header) + conditions
	return h <= m.header && h+len(msg.Data) <= m.message
}

func headerSize(h nats.Header) int {
	n := len("NATS/1.0\r\n\r\n")
	for name, values := range h {
		for _, v := range values {
			n += len(name) + len(v) + len(": \r\n")
		}
	}
	return n
}

// fit returns the letter with as much of the original as the broker takes: all
// of it, or without some headers, or without the payload. A letter is never
// refused for its size, because then nobody would ever hear of the failure. What
// does not fit lies beside it: see fitWhole.
func fit(l Letter, m limits) Letter {
	l.Error = errorText(l.Error, maxError)
	if m.takes(l) {
		return l
	}
	l.Error = errorText(l.Error, shortError)
	if m.takes(l) {
		return l
	}
	l.History = nil // the least that anybody will miss
	if t := trimHeaders(l, m); m.takes(t) {
		return t
	}
	l.Payload, l.PayloadMissing = nil, true
	return trimHeaders(l, m)
}

// trimHeaders drops headers, largest first, until the letter fits. The event's
// own attributes go last: without its key and ID a replay is another event.
func trimHeaders(l Letter, m limits) Letter {
	if m.takes(l) {
		return l
	}
	type size struct {
		name  string
		bytes int
		ours  int
	}
	sizes := make([]size, 0, len(l.Header))
	kept := make(map[string][]string, len(l.Header))
	for name, values := range l.Header {
		kept[name] = values
		s := size{name: name, bytes: headerSize(nats.Header{name: values})}
		if hasPrefixFold(name, "ce-") || name == jetbox.HeaderTraceParent {
			s.ours = 1
		}
		if name == jetbox.HeaderIdempotencyKey {
			s.ours = 2
		}
		sizes = append(sizes, s)
	}
	slices.SortFunc(sizes, func(a, b size) int {
		return cmp.Or(cmp.Compare(a.ours, b.ours), cmp.Compare(b.bytes, a.bytes), cmp.Compare(a.name, b.name))
	})
	l.Header = kept
	l.HeadersTrimmed = true
	for _, s := range sizes {
		delete(kept, s.name)
		if m.takes(l) {
			break
		}
	}
	return l
}

// joinError adds a note to an error text that does not have it yet.
func joinError(err, note string) string {
	switch {
	case err == "":
		return note
	case strings.Contains(err, note):
		return err
	default:
		return err + "; " + note
	}
}
