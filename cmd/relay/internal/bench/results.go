package bench

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// Report is what a complete run has measured. Its JSON is documented in the help
// of relay bench.
type Report struct {
	Version  string  `json:"version"`
	Go       string  `json:"go"`
	Platform string  `json:"platform"`
	NATS     string  `json:"nats_server"`
	NATSGo   string  `json:"nats_go"`
	SQLite   string  `json:"sqlite"`
	Postgres string  `json:"postgres,omitempty"`
	Cores    int     `json:"cores"`
	GOGC     int     `json:"gogc"` // -1 is off
	Dir      string  `json:"dir"`
	Rows     int     `json:"rows"`
	Rounds   int     `json:"rounds"`
	Rate     int     `json:"rate"`
	Payload  int     `json:"payload_bytes"`
	Seconds  float64 `json:"elapsed_s"`

	Durability Durability `json:"durability"`

	Results []*Line `json:"results"`
}

// Durability says what a commit and a PubAck wait for.
type Durability struct {
	BrokerSync       string `json:"broker_sync"`
	SQLiteRelay      string `json:"sqlite_relay_synchronous"`
	SQLiteWriters    string `json:"sqlite_writers_synchronous"`
	PostgresFsync    string `json:"postgres_fsync,omitempty"`
	PostgresCommit   string `json:"postgres_synchronous_commit,omitempty"`
	PostgresFullPage string `json:"postgres_full_page_writes,omitempty"`
}

// Line is one figure, of every round.
type Line struct {
	Part   string    `json:"part"`
	ID     string    `json:"id"`
	Unit   string    `json:"unit"`
	Median float64   `json:"median"`
	Values []float64 `json:"rounds"`

	// Beside is what the figure is compared with, in the same unit and the same
	// round. Ratio is the median of the rounds' ratios.
	Beside       string    `json:"beside,omitempty"`
	BesideMedian float64   `json:"beside_median,omitempty"`
	BesideValues []float64 `json:"beside_rounds,omitempty"`
	Ratio        float64   `json:"ratio,omitempty"`
	Ratios       []float64 `json:"ratio_rounds,omitempty"`

	about string // of the part
}

// Units of figures.
const (
	rowsPerSecond     = "rows/s"
	messagesPerSecond = "msgs/s"
	eventsPerSecond   = "events/s"
	txPerSecond       = "tx/s"
	millis            = "ms"
	megabytes         = "MB"
	percentOfCore     = "% of a core"
)

// results collects the lines. It belongs to one goroutine.
type results struct {
	lines    []*Line
	progress io.Writer
	part     part
	round    string
}

func (s *results) begin(p part, round string) { s.part, s.round = p, round }

// add adds a figure of this round. id says what it is, within the part.
func (s *results) add(id, unit string, value float64) *Line {
	l := s.line(s.part.name+"/"+id, unit)
	l.Values = append(l.Values, value)
	l.Median = median(l.Values)
	return l
}

// say tells of a figure that is complete in this round.
func (s *results) say(l *Line) {
	text := fmt.Sprintf("%s: %s %s %s", s.round, l.ID, digits(l.Values[len(l.Values)-1]), l.Unit)
	if l.Beside != "" {
		last := len(l.Ratios) - 1
		text += fmt.Sprintf(", %s of %s (%s)", digits(l.Ratios[last]), digits(l.BesideValues[last]), l.Beside)
	}
	fmt.Fprintln(s.progress, text)
}

func (s *results) figure(id, unit string, value float64) { s.say(s.add(id, unit, value)) }

// compare adds a figure and what it is compared with.
func (s *results) compare(id, unit string, value float64, beside string, yardstick float64) {
	l := s.add(id, unit, value)
	l.Beside = beside
	l.BesideValues = append(l.BesideValues, yardstick)
	l.BesideMedian = median(l.BesideValues)
	ratio := 0.0 // an idle broker may use less CPU than the system can tell
	if yardstick > 0 {
		ratio = value / yardstick
	}
	l.Ratios = append(l.Ratios, ratio)
	l.Ratio = median(l.Ratios)
	s.say(l)
}

// times adds the p50 and the p99 of what was measured.
func (s *results) times(id string, times []time.Duration) {
	for _, p := range []float64{50, 99} {
		s.figure(fmt.Sprintf("%s/p%g", id, p), millis, milliseconds(percentile(times, p)))
	}
}

// compareTimes adds p50 and p99 beside those of other times.
func (s *results) compareTimes(id string, times []time.Duration, beside string, others []time.Duration) {
	for _, p := range []float64{50, 99} {
		s.compare(fmt.Sprintf("%s/p%g", id, p), millis, milliseconds(percentile(times, p)),
			beside, milliseconds(percentile(others, p)))
	}
}

func (s *results) line(id, unit string) *Line {
	for _, l := range s.lines {
		if l.ID == id {
			return l
		}
	}
	l := &Line{Part: s.part.name, ID: id, Unit: unit, about: s.part.about}
	s.lines = append(s.lines, l)
	return l
}

// digits writes a number with three significant digits at least, thousands apart.
func digits(x float64) string {
	switch {
	case x >= 100 || x <= -100:
		whole := fmt.Sprintf("%.0f", x)
		var b strings.Builder
		for i, c := range whole {
			if left := len(whole) - i; i > 0 && left%3 == 0 && whole[i-1] != '-' {
				b.WriteByte(',')
			}
			b.WriteRune(c)
		}
		return b.String()
	case x >= 10:
		return fmt.Sprintf("%.1f", x)
	case x >= 0.1 || x == 0:
		return fmt.Sprintf("%.2f", x)
	}
	return fmt.Sprintf("%.3f", x)
}
