package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strconv"
	"text/tabwriter"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// rowFlags choose rows of the outbox.
type rowFlags struct {
	status  string
	subject string
	reason  string
	limit   int
	all     bool
	json    bool
}

func parseState(s string) (string, error) {
	return oneOf(string(jetbox.Pending), string(jetbox.Processing), string(jetbox.Published), string(jetbox.DeadLetter))(s)
}

func (f *rowFlags) define(fs *flag.FlagSet) {
	define(fs, &f.subject, "subject", "", someText, "only rows with exactly this `SUBJECT`")
	define(fs, &f.reason, "reason", "", someText, "only rows whose last error contains `TEXT`")
	define(fs, &f.limit, "limit", 0, positiveInt, "at most `NUMBER` rows")
}

func (f *rowFlags) filter(ids []int64) outbox.Filter {
	return outbox.Filter{State: jetbox.State(f.status), IDs: ids, Subject: f.subject, Reason: f.reason, Limit: f.limit}
}

func outboxListCommand() *command {
	var f rowFlags
	return &command{
		name:    "outbox list",
		args:    "[ID...]",
		maxArgs: -1,
		short:   "list rows of the outbox",
		flags: func(fs *flag.FlagSet) {
			f.define(fs)
			define(fs, &f.status, "status", "", parseState, "only rows in `STATE`: PENDING, PROCESSING, PUBLISHED or DEAD_LETTER")
			fs.BoolVar(&f.json, "json", false, "one JSON object per row")
		},
		run: func(ctx context.Context, a *app, args []string) error {
			return a.withRows(ctx, args, func(store outboxStore, ids []int64) error {
				return listRows(ctx, a, store, f.filter(ids), f.json)
			})
		},
	}
}

// withRows opens the outbox for f, with the row numbers among the arguments.
func (a *app) withRows(ctx context.Context, args []string, f func(outboxStore, []int64) error) (err error) {
	var ids []int64
	for _, arg := range args {
		id, err := rowID(arg)
		if err != nil {
			return usagef("argument %q: %w", arg, err)
		}
		ids = append(ids, id)
	}
	store, err := a.openStore(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	return f(store, ids)
}

func listRows(ctx context.Context, a *app, store outboxStore, filter outbox.Filter, asJSON bool) error {
	tw := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
	n := 0
	for e, err := range store.List(ctx, filter) {
		if err != nil {
			return errors.Join(tw.Flush(), err)
		}
		n++
		if asJSON {
			if err := writeJSON(a.stdout, rowJSON(e, false)); err != nil {
				return err
			}
			continue
		}
		if n == 1 {
			fmt.Fprintln(tw, "ID\tSTATE\tATTEMPTS\tSUBJECT\tCREATED\tLAST ERROR")
		}
		fmt.Fprintf(tw, "%d\t%s\t%d\t%s\t%s\t%s\n",
			e.ID, e.State, e.Attempts, printable(e.Event.Subject), e.Event.Time.Format(timeLayout), printable(e.LastError))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if n == 0 {
		a.say("no row matches")
	}
	return nil
}

func outboxShowCommand() *command {
	var (
		asJSON bool
		format string
	)
	return &command{
		name:    "outbox show",
		args:    "ID",
		minArgs: 1,
		maxArgs: 1,
		short:   "show one row with its payload",
		flags: func(fs *flag.FlagSet) {
			definePayload(fs, &format)
			fs.BoolVar(&asJSON, "json", false, "one JSON object")
		},
		run: func(ctx context.Context, a *app, args []string) error {
			return a.withRows(ctx, args, func(store outboxStore, ids []int64) error {
				e, err := store.Show(ctx, ids[0])
				if err != nil {
					return withHint(err, "relay outbox list shows the rows there are")
				}
				if asJSON {
					return writeJSON(a.stdout, rowJSON(e, true))
				}
				return showRow(a, e, format)
			})
		},
	}
}

func showRow(a *app, e outbox.Entry, format string) error {
	ev := e.Event
	tw := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
	line := func(name, value string) {
		if value != "" {
			fmt.Fprintf(tw, "%s\t%s\n", name, printable(value))
		}
	}
	line("id", strconv.FormatInt(e.ID, 10))
	line("status", string(e.State))
	line("event_id", ev.ID)
	line("idempotency_key", ev.Key)
	line("subject", ev.Subject)
	line("event_type", ev.Type)
	line("ordering_key", ev.OrderingKey())
	if ev.AggregateSeq != nil {
		line("aggregate_seq", strconv.FormatInt(*ev.AggregateSeq, 10))
	}
	line("schema_version", ev.SchemaVersion)
	line("content_type", ev.ContentType)
	line("attempts", strconv.Itoa(e.Attempts))
	line("last_error", e.LastError)
	line("created_at", timeText(ev.Time))
	line("available_at", timeText(ev.NotBefore))
	line("published_at", timeText(e.PublishedAt))
	if e.Stream != "" {
		line("stored", fmt.Sprintf("%s sequence %d", e.Stream, e.StreamSeq))
	}
	for name, values := range sortedHeaders(ev.Headers) {
		for _, v := range values {
			line("header", name+": "+v)
		}
	}
	line("payload", fmt.Sprintf("%d bytes", len(ev.Payload)))
	if err := tw.Flush(); err != nil {
		return err
	}
	text, err := payloadAs(format, ev.Payload)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(a.stdout, "\n%s\n", text)
	return err
}

func outboxRetryCommand() *command {
	return changeRowsCommand("retry", "retried", `
Retried rows are PENDING again, with no attempts and the same idempotency key.
Rows that wait behind a frozen one follow it; where the key has gone on (--on-dead
skip), the retried row comes late. Without a choice all dead rows are retried.`, outboxStore.Retry)
}

func outboxDiscardCommand() *command {
	return changeRowsCommand("discard", "discarded", `
Discarded rows are deleted, with their copies. A key that was frozen for one
goes on. All of them only with --all.`, outboxStore.Discard)
}

// changeRowsCommand makes the command for one thing to do with dead rows.
// Deleting all of them is never the default.
func changeRowsCommand(verb, done, long string, change func(outboxStore, context.Context, outbox.Filter) (int, error)) *command {
	var f rowFlags
	return &command{
		name:    "outbox " + verb,
		args:    "[ID...]",
		maxArgs: -1,
		short:   verb + " rows that are DEAD_LETTER",
		long:    long,
		flags: func(fs *flag.FlagSet) {
			f.define(fs)
			fs.BoolVar(&f.all, "all", false, "all dead rows")
		},
		run: func(ctx context.Context, a *app, args []string) error {
			if verb == "discard" && len(args) == 0 && !f.all && f.subject == "" && f.reason == "" {
				return withHint(usagef("outbox %s: which rows?", verb), "name their IDs, or give --subject, --reason or --all")
			}
			return a.withRows(ctx, args, func(store outboxStore, ids []int64) error {
				n, err := change(store, ctx, f.filter(ids))
				if err != nil {
					return err
				}
				if n == 0 {
					a.say("no dead row matches")
					return nil
				}
				_, err = fmt.Fprintf(a.stdout, "%d %s %s\n", n, plural(n, "row", "rows"), done)
				return err
			})
		},
	}
}
