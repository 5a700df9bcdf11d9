package sqlite

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// record is a row as stored. The table's checks guarantee that it can be
// scanned, whoever wrote it.
type record struct {
	id                                           int64
	eventID, subject, contentType, headers       string
	key, typ, aggType, aggID, schema, lastErr    sql.NullString
	stream                                       sql.NullString
	status                                       string
	attempts, hold                               int
	createdAt                                    int64
	aggSeq, availableAt, publishedAt, streamSeqN sql.NullInt64
	payload                                      []byte
}

// fields are the destinations of columns, in its order.
func (r *record) fields() []any {
	return []any{
		&r.id, &r.eventID, &r.key, &r.subject, &r.typ, &r.aggType, &r.aggID,
		&r.aggSeq, &r.schema, &r.contentType, &r.headers, &r.status, &r.attempts, &r.lastErr, &r.availableAt,
		&r.createdAt, &r.publishedAt, &r.stream, &r.streamSeqN, &r.hold, &r.payload,
	}
}

// eventFields are the destinations of eventColumns, in its order.
func (r *record) eventFields() []any {
	return []any{
		&r.id, &r.eventID, &r.key, &r.subject, &r.typ, &r.aggType, &r.aggID,
		&r.aggSeq, &r.schema, &r.contentType, &r.headers, &r.attempts, &r.availableAt, &r.createdAt, &r.payload,
	}
}

// event returns the row's event with defaults filled, and an error when its
// headers cannot be read.
func (r *record) event() (jetbox.Event, error) {
	ev := jetbox.Event{
		ID:            r.eventID,
		Key:           r.key.String,
		Subject:       r.subject,
		Type:          r.typ.String,
		AggregateType: r.aggType.String,
		AggregateID:   r.aggID.String,
		SchemaVersion: r.schema.String,
		ContentType:   r.contentType,
		Payload:       r.payload,
		Time:          time.UnixMilli(r.createdAt),
	}
	if r.aggSeq.Valid {
		ev.AggregateSeq = &r.aggSeq.Int64
	}
	if r.availableAt.Valid {
		ev.NotBefore = time.UnixMilli(r.availableAt.Int64).UTC()
	}
	ev = ev.WithDefaults(time.Time{})
	if r.eventID == "" {
		// Raw SQL may bring it. A fresh ID each time it is looked at would be
		// taken for the row's own.
		ev.ID, ev.Key = "", r.key.String
	}
	headers, err := parseHeaders(r.headers)
	if err != nil {
		return ev, fmt.Errorf("%w: headers column: %w", jetbox.ErrInvalidEvent, err)
	}
	ev.Headers = headers
	return ev, nil
}

func (r *record) row() jetbox.Row {
	ev, err := r.event()
	if err == nil {
		err = r.fault()
	}
	if err == nil {
		err = ev.Validate()
	}
	return jetbox.Row{Pos: r.id, Event: ev, Attempts: r.attempts, Fault: err}
}

// fault finds what WithDefaults would paper over: an empty text where raw SQL
// meant to give an ID is no ID.
func (r *record) fault() error {
	switch {
	case r.eventID == "":
		return fmt.Errorf("%w: event ID is empty", jetbox.ErrInvalidEvent)
	case r.key.Valid && r.key.String == "":
		return fmt.Errorf("%w: idempotency key is empty, not NULL", jetbox.ErrInvalidEvent)
	}
	return nil
}

func (r *record) entry() outbox.Entry {
	ev, err := r.event()
	e := outbox.Entry{
		ID:        r.id,
		Event:     ev,
		State:     jetbox.State(r.status),
		Attempts:  r.attempts,
		LastError: r.lastErr.String,
		Stream:    r.stream.String,
		StreamSeq: uint64(r.streamSeqN.Int64),
	}
	if err != nil && e.LastError == "" {
		e.LastError = err.Error()
	}
	if r.publishedAt.Valid {
		e.PublishedAt = time.UnixMilli(r.publishedAt.Int64).UTC()
	}
	return e
}

// parseHeaders reads a JSON object whose values are strings or arrays of
// strings. Names that differ in letter case are different headers; the same name
// twice is an error, since one of the two would be lost.
func parseHeaders(text string) (map[string][]string, error) {
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
