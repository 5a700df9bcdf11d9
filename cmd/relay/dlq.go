package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/dlq"
)

// letterFlags choose dead letters.
type letterFlags struct {
	consumer string
	subject  string
	reason   string
	since    moment
	ids      []string
	states   []string
	limit    int

	json       bool
	summary    bool
	all        bool
	dryRun     bool
	rate       float64
	maxReplays int
}

func (f *letterFlags) define(fs *flag.FlagSet) {
	define(fs, &f.consumer, "consumer", "", someText, "only letters of this `CONSUMER`")
	define(fs, &f.subject, "subject", "", streamSubject, "only letters whose message had this `SUBJECT`; * and > match")
	define(fs, &f.reason, "reason", "", oneOf(jetbox.ReasonMaxDeliveries, jetbox.ReasonTerminated), "only letters with this `REASON`: max_deliveries or terminated")
	define(fs, &f.since, "since", moment{}, parseMoment, "only letters from this `TIME` on: RFC 3339, or a duration ago")
	defineEach(fs, &f.ids, "id", letterID, "only the letter with this `ID`, as list shows it; may be repeated")
	define(fs, &f.limit, "limit", 0, positiveInt, "at most `NUMBER` letters (default all)")
}

// letterID checks only what a misplaced word would not have.
func letterID(s string) (string, error) {
	if !strings.HasPrefix(s, "dlq.") || strings.Count(s, ".") != 3 {
		return "", errors.New("want the ID of a letter, as relay dlq list shows it")
	}
	return s, nil
}

// add takes the arguments of a command for IDs.
func (f *letterFlags) add(args []string) error {
	for _, arg := range args {
		id, err := letterID(arg)
		if err != nil {
			return usagef("argument %q: %w", arg, err)
		}
		f.ids = append(f.ids, id)
	}
	return nil
}

// sayUnmatched says that no letter was chosen, or which of those named were not.
func (f *letterFlags) sayUnmatched(a *app, n int, chosen []string) {
	switch {
	case len(f.ids) == 0 && n == 0:
		a.say("no letter matches")
	case f.limit == 0 || n < f.limit:
		for _, id := range f.ids {
			if !slices.Contains(chosen, id) {
				a.say("no letter matches " + id)
			}
		}
	}
}

// filters returns one filter per letter named, or one for all.
func (f *letterFlags) filters(now time.Time) []dlq.Filter {
	base := dlq.Filter{
		Consumer: f.consumer,
		Subject:  f.subject,
		Reason:   f.reason,
		Since:    f.since.before(now),
		Limit:    f.limit,
	}
	for _, s := range f.states {
		base.States = append(base.States, dlq.State(s))
	}
	if len(f.ids) == 0 {
		return []dlq.Filter{base}
	}
	var out []dlq.Filter
	for _, id := range f.ids {
		one := base
		one.ID = id
		out = append(out, one)
	}
	return out
}

// withLetters connects and opens the dead letters for f.
func (a *app) withLetters(cfg dlq.Config, f func(*dlq.Letters) error) error {
	nc, js, err := a.connect("relay dlq", "_INBOX_relay")
	if err != nil {
		return err
	}
	defer nc.Close()
	cfg.Logger = a.log
	letters, err := dlq.New(js, cfg)
	if err != nil {
		return err
	}
	err = f(letters)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return withHint(err, "relay run creates the dead-letter stream")
	}
	if errors.Is(err, nats.ErrNoResponders) || errors.Is(err, jetstream.ErrNoStreamResponse) {
		return withHint(err, "does this server have JetStream?")
	}
	return err
}

func dlqListCommand() *command {
	var f letterFlags
	return &command{
		name:    "dlq list",
		args:    "[ID...]",
		maxArgs: -1,
		short:   "list dead letters",
		long: `
Lists open letters, and intents (stored before a last delivery) older than the
ack wait. --state shows letters in other states. --summary counts them instead,
by consumer, reason and state.`,
		flags: func(fs *flag.FlagSet) {
			f.define(fs)
			defineList(fs, &f.states, "state", "", oneOf("intent", "open", "replaying", "replayed", "discarded"),
				"only letters in these `STATES`: intent, open, replaying, replayed, discarded")
			fs.BoolVar(&f.summary, "summary", false, "count letters instead, by consumer, reason and state")
			fs.BoolVar(&f.json, "json", false, "one JSON object per letter")
		},
		run: func(ctx context.Context, a *app, args []string) error {
			if err := f.add(args); err != nil {
				return err
			}
			if f.summary && (len(f.ids) > 0 || f.limit > 0) {
				return withHint(usagef("--summary counts all letters that match, it takes no ID and no --limit"), "choose by --consumer, --subject, --reason, --since and --state")
			}
			return a.withLetters(dlq.Config{}, func(letters *dlq.Letters) error {
				if f.summary {
					return summarizeLetters(ctx, a, letters, f)
				}
				return listLetters(ctx, a, letters, f)
			})
		},
	}
}

func listLetters(ctx context.Context, a *app, letters *dlq.Letters, f letterFlags) error {
	tw := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
	n := 0
	var named []string
	for l, err := range selectLetters(ctx, letters, f, true) {
		if err != nil {
			return errors.Join(tw.Flush(), err)
		}
		n++
		if len(f.ids) > 0 {
			named = append(named, l.ID)
		}
		if f.json {
			if err := writeJSON(a.stdout, l); err != nil {
				return err
			}
			continue
		}
		if n == 1 {
			fmt.Fprintln(tw, "ID\tSTATE\tDELIVERIES\tREASON\tSUBJECT\tTIME\tERROR")
		}
		fmt.Fprintf(tw, "%s\t%s\t%d\t%s\t%s\t%s\t%s\n", l.ID, l.State, l.Deliveries, l.Reason,
			printable(l.Subject), l.Time.UTC().Format(timeLayout), printable(firstLine(l.Error)))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	f.sayUnmatched(a, n, named)
	return nil
}

func summarizeLetters(ctx context.Context, a *app, letters *dlq.Letters, f letterFlags) error {
	groups, err := letters.Groups(ctx, f.filters(time.Now())[0])
	if err != nil {
		return err
	}
	f.sayUnmatched(a, len(groups), nil)
	tw := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
	for i, g := range groups {
		if f.json {
			if err := writeJSON(a.stdout, g); err != nil {
				return err
			}
			continue
		}
		if i == 0 {
			fmt.Fprintln(tw, "STREAM\tCONSUMER\tREASON\tSTATE\tLETTERS\tOLDEST")
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%d\t%s\n", printable(g.Stream), printable(g.Consumer), printable(g.Reason), g.State,
			g.Letters, g.Oldest.UTC().Format(timeLayout))
	}
	return tw.Flush()
}
