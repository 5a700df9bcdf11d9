package jetbox

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"unicode/utf16"
	"unicode/utf8"
)

// A jsonScan walks over a JSON text once and stops at the first byte that has
// no place in it. Its recursion is bounded by maxContentDepth.
type jsonScan struct {
	data   []byte
	pos    int
	values int
}

func (s *jsonScan) document() error {
	if err := s.value(0); err != nil {
		return err
	}
	if s.next(); s.pos < len(s.data) {
		return s.unexpected("nothing after the value")
	}
	return nil
}

// value scans one value that lies inside depth arrays and objects.
func (s *jsonScan) value(depth int) error {
	c := s.next()
	if s.values++; s.values > maxContentValues {
		return fmt.Errorf("more than %d values at offset %d", maxContentValues, s.pos)
	}
	switch {
	case c == '{':
		return s.container(depth+1, '}')
	case c == '[':
		return s.container(depth+1, ']')
	case c == '"':
		return s.text()
	case c == '-' || isDigit(c):
		return s.number()
	}
	for _, word := range []string{"true", "false", "null"} {
		if bytes.HasPrefix(s.data[s.pos:], []byte(word)) {
			s.pos += len(word)
			return nil
		}
	}
	return s.unexpected("a value")
}

// container scans an array or object, whose closing bracket is end.
func (s *jsonScan) container(depth int, end byte) error {
	if depth > maxContentDepth {
		return fmt.Errorf("more than %d nested arrays and objects at offset %d", maxContentDepth, s.pos)
	}
	s.pos++
	if s.next() == end {
		s.pos++
		return nil
	}
	for {
		if end == '}' {
			if s.next() != '"' {
				return s.unexpected("a key")
			}
			if err := s.text(); err != nil {
				return err
			}
			if s.next() != ':' {
				return s.unexpected("':'")
			}
			s.pos++
		}
		if err := s.value(depth); err != nil {
			return err
		}
		switch s.next() {
		case ',':
			s.pos++
		case end:
			s.pos++
			return nil
		default:
			return s.unexpected("',' or '" + string(rune(end)) + "'")
		}
	}
}

// text scans a string or a key, from its opening quote.
func (s *jsonScan) text() error {
	start := s.pos
	s.pos++
	for s.pos < len(s.data) {
		switch c := s.data[s.pos]; {
		case c == '"':
			s.pos++
			return nil
		case c == '\\':
			if err := s.escape(); err != nil {
				return err
			}
		case c < ' ':
			return fmt.Errorf("control character 0x%02x at offset %d, want it escaped", c, s.pos)
		case c < utf8.RuneSelf:
			s.pos++
		default:
			r, size := utf8.DecodeRune(s.data[s.pos:])
			if r == utf8.RuneError && size == 1 {
				return fmt.Errorf("invalid UTF-8 (byte 0x%02x) at offset %d", c, s.pos)
			}
			s.pos += size
		}
	}
	return fmt.Errorf("string at offset %d has no end", start)
}

// escape scans a backslash and what belongs to it, both halves of a surrogate
// pair included.
func (s *jsonScan) escape() error {
	if rest := s.data[s.pos+1:]; len(rest) > 0 && bytes.IndexByte([]byte(`"\/bfnrt`), rest[0]) >= 0 {
		s.pos += 2
		return nil
	}
	first, ok := s.codeUnit(s.pos)
	switch {
	case !ok:
		return fmt.Errorf("invalid escape at offset %d", s.pos)
	case !utf16.IsSurrogate(first):
		s.pos += 6
		return nil
	}
	second, ok := s.codeUnit(s.pos + 6)
	if !ok || utf16.DecodeRune(first, second) == utf8.RuneError {
		return fmt.Errorf(`lone surrogate \u%04x at offset %d`, first, s.pos)
	}
	s.pos += 12
	return nil
}

// codeUnit returns the UTF-16 code unit whose escape is at offset at.
func (s *jsonScan) codeUnit(at int) (unit rune, ok bool) {
	if len(s.data)-at < 6 || s.data[at] != '\\' || s.data[at+1] != 'u' {
		return 0, false
	}
	var b [2]byte
	if _, err := hex.Decode(b[:], s.data[at+2:at+6]); err != nil {
		return 0, false
	}
	return rune(b[0])<<8 | rune(b[1]), true
}

func (s *jsonScan) number() error {
	start := s.pos
	if s.data[s.pos] == '-' {
		s.pos++
	}
	if s.pos < len(s.data) && s.data[s.pos] == '0' {
		s.pos++ // no digit may follow
	} else if !s.digits() {
		return s.unexpected("a digit")
	}
	if s.pos < len(s.data) && s.data[s.pos] == '.' {
		s.pos++
		if !s.digits() {
			return s.unexpected("a digit")
		}
	}
	if s.pos < len(s.data) && s.data[s.pos]|0x20 == 'e' {
		s.pos++
		if s.pos < len(s.data) && (s.data[s.pos] == '+' || s.data[s.pos] == '-') {
			s.pos++
		}
		if !s.digits() {
			return s.unexpected("a digit")
		}
	}
	literal := s.data[start:s.pos]
	if into, changed := changedNumber(literal); changed {
		const most = 40 // of a literal that may be as long as the payload
		shown := string(literal)
		if len(shown) > most {
			shown = shown[:most] + "..."
		}
		return fmt.Errorf("number %s at offset %d would become %s, send it as a string", shown, start, into)
	}
	return nil
}

// digits scans as many digits as there are.
func (s *jsonScan) digits() (found bool) {
	for s.pos < len(s.data) && isDigit(s.data[s.pos]) {
		s.pos++
		found = true
	}
	return found
}

// next skips white space and returns the byte it stops at, or 0 at the end. A
// NUL in the data needs no other answer: it has no place between tokens.
func (s *jsonScan) next() byte {
	for s.pos < len(s.data) {
		switch c := s.data[s.pos]; c {
		case ' ', '\t', '\n', '\r':
			s.pos++
		default:
			return c
		}
	}
	return 0
}

func (s *jsonScan) unexpected(want string) error {
	if s.pos >= len(s.data) {
		return fmt.Errorf("unexpected end at offset %d, want %s", s.pos, want)
	}
	r, _ := utf8.DecodeRune(s.data[s.pos:])
	return fmt.Errorf("unexpected %q at offset %d, want %s", r, s.pos, want)
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }
