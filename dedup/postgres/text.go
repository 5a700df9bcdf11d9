package postgres

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"
)

// PostgreSQL stores no NUL and no invalid UTF-8. Texts with either are written in
// hexadecimal behind a byte that no sensible text begins with, and so are texts
// that do begin with it: no two texts become one.
const escape = "\x01"

func storable(s string) string {
	if utf8.ValidString(s) && !strings.Contains(s, "\x00") && !strings.HasPrefix(s, escape) {
		return s
	}
	return escape + hex.EncodeToString([]byte(s))
}

// original undoes storable.
func original(s string) string {
	if h, escaped := strings.CutPrefix(s, escape); escaped {
		if b, err := hex.DecodeString(h); err == nil {
			return string(b)
		}
	}
	return s
}

// maxText is the longest key and the longest consumer name: together they must
// fit in an entry of an index, a third of a page.
const maxText = 1200

// keyList returns the keys as a JSON array.
func keyList(consumer string, keys []string) (string, error) {
	if n := len(storable(consumer)); n > maxText {
		return "", fmt.Errorf("dedup/postgres: the consumer's name takes %d bytes, want at most %d", n, maxText)
	}
	stored := make([]string, len(keys))
	for i, key := range keys {
		if stored[i] = storable(key); len(stored[i]) > maxText {
			return "", fmt.Errorf("dedup/postgres: the key %.40q... takes %d bytes, want at most %d", key, len(stored[i]), maxText)
		}
	}
	b, err := json.Marshal(stored)
	return string(b), err
}
