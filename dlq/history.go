package dlq

import (
	"encoding/json"
	"slices"
	"time"
)

// maxHistory is how many earlier failures a letter keeps. With [shortError] of
// text each, they fit beside any header block of the application.
const maxHistory = 10

// Past is an earlier failure of a letter, before a replay of it failed too.
type Past struct {
	// Time is when the failure was reported, Deliveries how often the message
	// had been handed out by then, replays included.
	Time       time.Time `json:"time"`
	Deliveries uint64    `json:"deliveries"`

	// Reason and Error are those of the letter then, the error cut to 256 bytes.
	Reason string `json:"reason"`
	Error  string `json:"error"`
}

// remember adds the letter's last failure to its history: call it before another
// one takes its place.
func (l *Letter) remember() {
	last := Past{Time: l.Time, Deliveries: l.Deliveries, Reason: l.Reason, Error: errorText(l.Error, shortError)}
	l.History = append(slices.Clone(l.History), last)
	l.History = l.History[max(0, len(l.History)-maxHistory):]
}

// recall undoes remember, for a failure that was none after all.
func (l *Letter) recall() {
	if n := len(l.History); n > 0 {
		last := l.History[n-1]
		l.Time, l.Reason, l.Error = last.Time, last.Reason, last.Error
		l.History = slices.Clone(l.History[:n-1])
	}
}

// historyValues is the history on the wire: one value for each failure.
func historyValues(history []Past) []string {
	values := make([]string, 0, len(history))
	for _, p := range history {
		text, err := json.Marshal(p)
		if err != nil {
			continue // a year beyond 9999: no clock of a broker
		}
		values = append(values, string(text))
	}
	return values
}

// parseHistory reads it back. What cannot be read is left out: the history is for
// people, and a letter without it is still a letter.
func parseHistory(values []string) []Past {
	var history []Past
	for _, v := range values {
		var p Past
		if json.Unmarshal([]byte(v), &p) == nil {
			history = append(history, p)
		}
	}
	return history
}
