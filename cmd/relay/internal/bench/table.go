package bench

import (
	"bytes"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// WriteTable writes the report for a person.
func (rep *Report) WriteTable(w io.Writer) error {
	var b bytes.Buffer
	rep.writeFacts(&b)
	part := ""
	for _, l := range rep.Results {
		if l.Part != part {
			part = l.Part
			fmt.Fprintf(&b, "\n%s: %s\n", part, l.about)
		}
		b.WriteString(l.row())
	}
	_, err := w.Write(b.Bytes())
	return err
}

func (rep *Report) writeFacts(b *bytes.Buffer) {
	gogc := strconv.Itoa(rep.GOGC)
	if rep.GOGC < 0 {
		gogc = "off"
	}
	fmt.Fprintf(b, "relay %s, %s %s, %d cores, GOGC %s\n", rep.Version, rep.Go, rep.Platform, rep.Cores, gogc)
	fmt.Fprintf(b, "nats-server %s in this process, nats.go %s, SQLite %s", rep.NATS, rep.NATSGo, rep.SQLite)
	if rep.Postgres != "" {
		fmt.Fprintf(b, ", PostgreSQL %s", rep.Postgres)
	}
	fmt.Fprintf(b, "\n%s rows, payloads of %d bytes, all headers; %d events/s; median of %d; %.0f s in %s\n",
		digits(float64(rep.Rows)), rep.Payload, rep.Rate, rep.Rounds, rep.Seconds, rep.Dir)
	d := rep.Durability
	fmt.Fprintf(b, "durability: broker syncs every %s; SQLite synchronous=%s for the relay, %s for writers",
		d.BrokerSync, d.SQLiteRelay, d.SQLiteWriters)
	if rep.Postgres != "" {
		fmt.Fprintf(b, "; PostgreSQL fsync=%s, synchronous_commit=%s, full_page_writes=%s",
			d.PostgresFsync, d.PostgresCommit, d.PostgresFullPage)
	}
	b.WriteByte('\n')
}

// row is what was measured, how much, the ratio, to what, and all rounds.
func (l *Line) row() string {
	ratio, beside, rounds := "", "", ""
	if l.Beside != "" {
		ratio, beside = digits(l.Ratio), "of "+digits(l.BesideMedian)+" "+l.Beside
	}
	if len(l.Values) > 1 {
		rounds = "[" + list(l.Values) + "]"
	}
	text := fmt.Sprintf("  %-26s %9s %-11s %7s %-29s %s", strings.TrimPrefix(l.ID, l.Part+"/"), digits(l.Median), l.Unit, ratio, beside, rounds)
	return strings.TrimRight(text, " ") + "\n"
}

func list(values []float64) string {
	var out []string
	for _, v := range values {
		out = append(out, digits(v))
	}
	return strings.Join(out, " ")
}
