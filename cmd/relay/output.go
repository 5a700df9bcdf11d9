package main

import (
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/seed-5e04d8fb/jetbox/outbox"
)

const timeLayout = "2006-01-02 15:04:05Z"

// say tells a person something that is no data, on stderr: stdout may be read
// by a program.
func (a *app) say(text string) { fmt.Fprintln(a.stderr, text) }

func plural(n int, one, more string) string {
	if n == 1 {
		return one
	}
	return more
}

func timeText(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

// printable returns s with what would move a terminal's cursor, and what is no
// text, escaped.
func printable(s string) string {
	if utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) && r != ' ' }) {
		return s
	}
	q := strconv.Quote(s)
	return strings.ReplaceAll(q[1:len(q)-1], `\"`, `"`)
}

func sortedHeaders(h map[string][]string) iter.Seq2[string, []string] {
	return func(yield func(string, []string) bool) {
		for _, name := range slices.Sorted(maps.Keys(h)) {
			if !yield(name, h[name]) {
				return
			}
		}
	}
}

// writeJSON writes v as one line.
func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// payloadJSON is how bytes travel in JSON: as text where they are text.
type payloadJSON struct {
	Payload       *string `json:"payload,omitempty"`
	PayloadBase64 []byte  `json:"payload_base64,omitempty"`
}

func payloadOf(b []byte) payloadJSON {
	if utf8.Valid(b) {
		s := string(b)
		return payloadJSON{Payload: &s}
	}
	return payloadJSON{PayloadBase64: b}
}

// row is a row of the outbox in JSON: its columns, by their names.
type row struct {
	ID             int64               `json:"id"`
	EventID        string              `json:"event_id"`
	IdempotencyKey string              `json:"idempotency_key"`
	Subject        string              `json:"subject"`
	EventType      string              `json:"event_type"`
	AggregateType  string              `json:"aggregate_type,omitempty"`
	AggregateID    string              `json:"aggregate_id,omitempty"`
	AggregateSeq   *int64              `json:"aggregate_seq,omitempty"`
	SchemaVersion  string              `json:"schema_version,omitempty"`
	ContentType    string              `json:"content_type"`
	Headers        map[string][]string `json:"headers,omitempty"`
	Status         string              `json:"status"`
	Attempts       int                 `json:"attempts"`
	LastError      string              `json:"last_error,omitempty"`
	AvailableAt    string              `json:"available_at,omitempty"`
	CreatedAt      string              `json:"created_at"`
	PublishedAt    string              `json:"published_at,omitempty"`
	Stream         string              `json:"stream,omitempty"`
	StreamSeq      uint64              `json:"stream_seq,omitempty"`
	payloadJSON
}

func rowJSON(e outbox.Entry, withPayload bool) row {
	ev := e.Event
	r := row{
		ID:             e.ID,
		EventID:        ev.ID,
		IdempotencyKey: ev.Key,
		Subject:        ev.Subject,
		EventType:      ev.Type,
		AggregateType:  ev.AggregateType,
		AggregateID:    ev.AggregateID,
		AggregateSeq:   ev.AggregateSeq,
		SchemaVersion:  ev.SchemaVersion,
		ContentType:    ev.ContentType,
		Headers:        ev.Headers,
		Status:         string(e.State),
		Attempts:       e.Attempts,
		LastError:      e.LastError,
		AvailableAt:    timeText(ev.NotBefore),
		CreatedAt:      timeText(ev.Time),
		PublishedAt:    timeText(e.PublishedAt),
		Stream:         e.Stream,
		StreamSeq:      e.StreamSeq,
	}
	if withPayload {
		r.payloadJSON = payloadOf(ev.Payload)
	}
	return r
}
