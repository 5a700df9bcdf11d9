package outboxrow

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// EncodeHeaders writes headers as the column holds them.
func EncodeHeaders(headers map[string][]string) (string, error) {
	if len(headers) == 0 {
		return "{}", nil
	}
	b, err := json.Marshal(headers)
	return string(b), err
}

// ParseHeaders reads a JSON object whose values are strings or arrays of
// strings. Names that differ in letter case are different headers; the same name
// twice is an error, since one of the two would be lost.
func ParseHeaders(text string) (map[string][]string, error) {
	if text == "{}" || text == "" {
		return nil, nil
	}
	switch {
	case !utf8.ValidString(text):
		return nil, errors.New("not valid UTF-8")
	case loneSurrogate(text):
		return nil, errors.New("has a lone surrogate")
	}
	dec := json.NewDecoder(strings.NewReader(text))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, errors.New("not a JSON object")
	}
	headers := make(map[string][]string)
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return nil, fmt.Errorf("not a JSON object: %w", err)
		}
		name, _ := t.(string)
		if _, twice := headers[name]; twice {
			return nil, fmt.Errorf("header %q stands there twice", name)
		}
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return nil, fmt.Errorf("header %q: %w", name, err)
		}
		values, err := parseHeaderValue(raw)
		if err != nil {
			return nil, fmt.Errorf("header %q: %w", name, err)
		}
		headers[name] = values
	}
	if _, err := dec.Token(); err != nil {
		return nil, fmt.Errorf("not a JSON object: %w", err)
	}
	// Not More: that is false before a closing bracket too.
	if _, err := dec.Token(); err != io.EOF { //nolint:errorlint // Token returns it bare
		return nil, errors.New("text after the JSON object")
	}
	return headers, nil
}

// loneSurrogate reports whether JSON has an escape that is half of a UTF-16
// pair: encoding/json decodes it to U+FFFD, so that the value on the wire would
// not be the one in the row.
func loneSurrogate(raw string) (lone bool) {
	unit := func(i int) rune { // of an escape at i, or 0
		if i+6 > len(raw) || raw[i] != '\\' || raw[i+1] != 'u' {
			return 0
		}
		n, err := strconv.ParseUint(raw[i+2:i+6], 16, 16)
		if err != nil {
			return 0
		}
		return rune(n)
	}
	for i := 0; i < len(raw); i++ {
		if raw[i] != '\\' {
			continue
		}
		if u := unit(i); utf16.IsSurrogate(u) {
			if utf16.DecodeRune(u, unit(i+6)) == utf8.RuneError {
				return true
			}
			i += 6
		}
		i++ // the escaped character may be a backslash
	}
	return false
}

func parseHeaderValue(raw json.RawMessage) ([]string, error) {
	if len(raw) > 0 && raw[0] == '"' {
		var one string
		err := json.Unmarshal(raw, &one)
		return []string{one}, err
	}
	var many []*string
	if err := json.Unmarshal(raw, &many); err != nil || many == nil {
		return nil, fmt.Errorf("value %s is neither a string nor an array of strings", raw)
	}
	values := make([]string, len(many))
	for i, v := range many {
		if v == nil {
			return nil, fmt.Errorf("value %s is neither a string nor an array of strings", raw)
		}
		values[i] = *v
	}
	return values, nil
}
