package idempotent

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/http"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	headerKey = "Idempotency-Key"

	maxKey = 512
)

// keyOf returns the key, or what is wrong with it, or neither where there is
// none. It is a string as the draft has it (RFC 8941), in quotes, or plain text,
// which most clients send. "x" and x are the same key.
func keyOf(h http.Header) (key, complaint string) {
	values := h.Values(headerKey)
	switch len(values) {
	case 0:
		return "", ""
	case 1:
	default:
		return "", fmt.Sprintf("The header is there %d times.", len(values))
	}
	if key = strings.TrimSpace(values[0]); strings.HasPrefix(key, `"`) {
		var ok bool
		if key, ok = unquote(key); !ok {
			return "", "The quoted string does not end, or has characters it may not have."
		}
	}
	printable := utf8.ValidString(key) && !strings.ContainsFunc(key, func(r rune) bool { return !unicode.IsPrint(r) })
	if key == "" || len(key) > maxKey || !printable {
		return "", fmt.Sprintf("A key has 1 to %d bytes of printable text.", maxKey)
	}
	return key, ""
}

// unquote reads an RFC 8941 string. Parameters may follow, and mean nothing.
func unquote(s string) (text string, ok bool) {
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			rest := strings.TrimLeft(s[i+1:], " ")
			return b.String(), rest == "" || rest[0] == ';'
		case c == '\\':
			if i++; i == len(s) || s[i] != '"' && s[i] != '\\' {
				return "", false
			}
			b.WriteByte(s[i])
		case c < ' ' || c > '~':
			return "", false
		default:
			b.WriteByte(c)
		}
	}
	return "", false
}

// record is a row: a request, and its answer when it is done.
type record struct {
	id          string // of key, caller, method and path
	request     string // for people
	fingerprint string // of query and body
	owner       string // who has it in hand, or had
	done        bool
	answer      answer
}

func newRecord(caller string, r *http.Request, key string, body []byte) *record {
	path := r.URL.EscapedPath()
	return &record{
		id:          digest([]byte(caller), []byte(r.Method), []byte(path), []byte(key)),
		request:     r.Method + " " + path,
		fingerprint: digest([]byte(r.URL.RawQuery), body),
		owner:       newOwner(),
	}
}

// digest hashes the parts so that none can be moved from one to the next.
func digest(parts ...[]byte) string {
	h := sha256.New()
	for _, p := range parts {
		h.Write(binary.AppendUvarint(nil, uint64(len(p))))
		h.Write(p)
	}
	return hex.EncodeToString(h.Sum(nil))
}
