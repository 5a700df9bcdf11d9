package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/dlq"
)

func dlqShowCommand() *command {
	var (
		asJSON bool
		format string
	)
	return &command{
		name:    "dlq show",
		args:    "ID",
		minArgs: 1,
		maxArgs: 1,
		short:   "show one dead letter with its payload and all its errors",
		long: `
The payload is shown as what it is: JSON, indented and otherwise as it was sent;
text; or a hex dump. --payload decides otherwise.`,
		flags: func(fs *flag.FlagSet) {
			definePayload(fs, &format)
			fs.BoolVar(&asJSON, "json", false, "one JSON object, with history, headers and payload")
		},
		run: func(ctx context.Context, a *app, args []string) error {
			id, err := letterID(args[0])
			if err != nil {
				return usagef("argument %q: %w", args[0], err)
			}
			return a.withLetters(dlq.Config{}, func(letters *dlq.Letters) error {
				l, err := letters.Show(ctx, id)
				if errors.Is(err, jetbox.ErrLetterGone) {
					return withHint(fmt.Errorf("there is no letter %s", id), "relay dlq list shows the letters there are")
				}
				if err != nil {
					return err
				}
				if asJSON {
					text, err := letterInFull(l)
					if err != nil {
						return err
					}
					return writeJSON(a.stdout, text)
				}
				return showLetter(a.stdout, l, format)
			})
		},
	}
}

func showLetter(w io.Writer, l dlq.Letter, format string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, line := range [][2]string{
		{"id", l.ID},
		{"state", string(l.State)},
		{"stream", l.Stream},
		{"consumer", l.Consumer},
		{"stream_seq", fmt.Sprint(l.StreamSeq)},
		{"subject", l.Subject},
		{"deliveries", fmt.Sprint(l.Deliveries)},
		{"reason", l.Reason},
		{"error", l.Error},
		{"time", timeText(l.Time)},
		{"replays", fmt.Sprint(l.Replays)},
	} {
		fmt.Fprintf(tw, "%s\t%s\n", line[0], printable(line[1]))
	}
	for _, p := range l.History {
		fmt.Fprintf(tw, "before\t%s\n", printable(fmt.Sprintf("%s, %d deliveries, %s: %s", timeText(p.Time), p.Deliveries, p.Reason, p.Error)))
	}
	for name, values := range sortedHeaders(l.Header) {
		for _, v := range values {
			fmt.Fprintf(tw, "header\t%s\n", printable(name+": "+v))
		}
	}
	payload := fmt.Sprintf("%d bytes", len(l.Payload))
	if l.PayloadMissing {
		payload = "not in the letter, see error"
	}
	fmt.Fprintf(tw, "payload\t%s\n", payload)
	if err := tw.Flush(); err != nil || l.PayloadMissing {
		return err
	}
	text, err := payloadAs(format, l.Payload)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "\n%s\n", text)
	return err
}

// letterInFull adds to what a list shows of a letter its history, headers and
// payload, and what the letter could not hold.
func letterInFull(l dlq.Letter) (json.RawMessage, error) {
	head, err := json.Marshal(l)
	if err != nil {
		return nil, err
	}
	if l.History == nil {
		l.History = []dlq.Past{}
	}
	tail, err := json.Marshal(struct {
		History        []dlq.Past          `json:"history"`
		Headers        map[string][]string `json:"headers"`
		PayloadMissing bool                `json:"payload_missing,omitempty"`
		HeadersTrimmed bool                `json:"headers_trimmed,omitempty"`
		payloadJSON
	}{l.History, l.Header, l.PayloadMissing, l.HeadersTrimmed, payloadOf(l.Payload)})
	if err != nil {
		return nil, err
	}
	head[len(head)-1] = ','
	return append(head, tail[1:]...), nil
}
