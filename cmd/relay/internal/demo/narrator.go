package demo

import (
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// narrator writes the story, for people or for programs. What cannot be
// written is not worth stopping for.
type narrator struct {
	w      io.Writer
	json   bool
	began  time.Time
	number int
	title  string
	claims int
}

// line is one line of the story for programs.
type line struct {
	Cycle   int            `json:"cycle,omitempty"`
	Title   string         `json:"title,omitempty"`
	Claim   string         `json:"claim,omitempty"`
	Holds   *bool          `json:"holds,omitempty"`
	Facts   map[string]any `json:"facts,omitempty"`
	Error   string         `json:"error,omitempty"`
	Claims  int            `json:"claims,omitempty"`
	Elapsed int64          `json:"elapsed_ms"`
}

func (n *narrator) write(l line) {
	l.Elapsed = time.Since(n.began).Milliseconds()
	enc := json.NewEncoder(n.w)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(l)
}

func (n *narrator) begin(dir string) {
	if !n.json {
		fmt.Fprintf(n.w, "jetbox demo: outbox, relay, broker, consumer and dead letters, all real, in %s\n", dir)
	}
}

func (n *narrator) cycle(number int, title string) {
	n.number, n.title = number, title
	if !n.json {
		fmt.Fprintf(n.w, "\n%d. %s\n", number, title)
	}
}

// holds says something that was just checked. facts are pairs of a name and a
// value, for programs; the text has them too.
func (n *narrator) holds(claim string, facts ...any) {
	n.claims++
	if !n.json {
		fmt.Fprintf(n.w, "   ok  %s\n", claim)
		return
	}
	l := line{Cycle: n.number, Title: n.title, Claim: claim, Holds: new(true), Facts: map[string]any{}}
	for i := 0; i+1 < len(facts); i += 2 {
		l.Facts[fmt.Sprint(facts[i])] = facts[i+1]
	}
	n.write(l)
}

func (n *narrator) failed(err error) {
	if !n.json {
		fmt.Fprintf(n.w, "   FAILED  %v\n", err)
		return
	}
	n.write(line{Cycle: n.number, Title: n.title, Holds: new(false), Error: err.Error()})
}

func (n *narrator) end() {
	if !n.json {
		fmt.Fprintf(n.w, "\nAll %d claims were checked and hold, in %.1fs. Next: relay run, then relay emit events.hello '{\"x\":1}'.\n",
			n.claims, time.Since(n.began).Seconds())
		return
	}
	n.write(line{Claim: "all claims hold", Holds: new(true), Claims: n.claims})
}
