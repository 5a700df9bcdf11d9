package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/dlq"
)

func dlqReplayCommand() *command {
	var f letterFlags
	return &command{
		name:    "dlq replay",
		args:    "[ID...]",
		maxArgs: -1,
		short:   "put dead letters back on their subjects",
		long: `
Each message is published again for the consumer it failed at, with a fresh
message ID and the same idempotency key. It can be interrupted and run again: a
letter left replaying is taken over at once, and published only if it was not.
Without a choice all letters that wait are replayed. Never asks. A letter that waits
again after --max-replays replays is refused: a higher number lets it go.`,
		flags: func(fs *flag.FlagSet) {
			f.define(fs)
			fs.BoolVar(&f.dryRun, "dry-run", false, "say what would be replayed and change nothing")
			define(fs, &f.rate, "rate", 0, positiveFloat, "at most `NUMBER` letters a second (default no limit)")
			define(fs, &f.maxReplays, "max-replays", 5, positiveInt, "replay no letter more than `NUMBER` times")
			fs.BoolVar(&f.json, "json", false, "one JSON object per letter")
		},
		run: func(ctx context.Context, a *app, args []string) error {
			if err := f.add(args); err != nil {
				return err
			}
			return a.withLetters(dlq.Config{MaxReplays: f.maxReplays}, func(letters *dlq.Letters) error {
				return changeLetters(ctx, a, letters, f, true, "replayed", letters.Replay)
			})
		},
	}
}

func dlqDiscardCommand() *command {
	var f letterFlags
	return &command{
		name:    "dlq discard",
		args:    "[ID...]",
		maxArgs: -1,
		short:   "give dead letters up",
		long: `
A discarded letter loses its payload and stays as a mark. Never asks.`,
		flags: func(fs *flag.FlagSet) {
			f.define(fs)
			fs.BoolVar(&f.all, "all", false, "all letters that wait")
			fs.BoolVar(&f.dryRun, "dry-run", false, "say what would be discarded and change nothing")
			define(fs, &f.rate, "rate", 0, positiveFloat, "at most `NUMBER` letters a second (default no limit)")
			fs.BoolVar(&f.json, "json", false, "one JSON object per letter")
		},
		run: func(ctx context.Context, a *app, args []string) error {
			if err := f.add(args); err != nil {
				return err
			}
			if !f.all && f.consumer == "" && f.subject == "" && f.reason == "" && f.since == (moment{}) && len(f.ids) == 0 {
				return withHint(usagef("dlq discard: which letters?"), "name their IDs, or give --consumer, --subject, --reason, --since or --all")
			}
			return a.withLetters(dlq.Config{}, func(letters *dlq.Letters) error {
				return changeLetters(ctx, a, letters, f, false, "discarded", letters.Discard)
			})
		},
	}
}

func dlqPruneCommand() *command {
	var olderThan time.Duration
	return &command{
		name:  "dlq prune",
		short: "remove the marks of letters closed long ago",
		long: `
Replayed and discarded letters stay as marks, which absorb late reports of their
failure, and expire after 30 days. Where the dead-letter stream takes no message
TTL, or they were closed by an older version, this removes them.`,
		flags: func(fs *flag.FlagSet) {
			define(fs, &olderThan, "older-than", 30*24*time.Hour, atLeast(7*24*time.Hour), "only letters closed longer than `TIME` ago, at least 168h")
		},
		run: func(ctx context.Context, a *app, _ []string) error {
			return a.withLetters(dlq.Config{}, func(letters *dlq.Letters) error {
				n, err := letters.Prune(ctx, time.Now().Add(-olderThan))
				if err == nil {
					_, err = fmt.Fprintf(a.stdout, "%d %s removed\n", n, plural(n, "letter", "letters"))
				}
				return err
			})
		},
	}
}

// selectLetters iterates over the letters the flags choose.
func selectLetters(ctx context.Context, letters *dlq.Letters, f letterFlags, headersOnly bool, adjust ...func(*dlq.Filter)) iter.Seq2[dlq.Letter, error] {
	return func(yield func(dlq.Letter, error) bool) {
		n := 0
		for _, filter := range f.filters(time.Now()) {
			filter.HeadersOnly = headersOnly
			for _, adj := range adjust {
				adj(&filter)
			}
			for l, err := range letters.List(ctx, filter) {
				n++
				if !yield(l, err) || n == f.limit {
					return
				}
			}
		}
	}
}

// changeLetters does one thing with every letter chosen. A letter that somebody
// else took meanwhile is said and skipped; any other failure is said, the rest
// goes on, and the command fails in the end.
func changeLetters(ctx context.Context, a *app, letters *dlq.Letters, f letterFlags, interrupted bool, done string,
	change func(context.Context, string) (dlq.Letter, error),
) error {
	chosen, err := chooseLetters(ctx, a, letters, f, interrupted)
	if err != nil || len(chosen) == 0 {
		return err
	}
	if f.dryRun {
		return tryLetters(a, chosen, f, done)
	}
	pace := newPace(f.rate)
	var changed, failed int
	var stuck bool
	for _, l := range chosen {
		if err := pace.wait(ctx); err != nil {
			return withHint(fmt.Errorf("%w; %d of %d letters %s", err, changed, len(chosen), done), "run it again for the rest")
		}
		after, err := change(ctx, l.ID)
		switch {
		case ctx.Err() != nil && err != nil:
			return withHint(fmt.Errorf("%w; %d of %d letters %s", context.Cause(ctx), changed, len(chosen), done), "run it again for the rest")
		case errors.Is(err, jetbox.ErrLetterGone):
			a.say(fmt.Sprintf("%s: skipped: %v", l.ID, err))
		case err != nil:
			failed++
			stuck = stuck || errors.Is(err, dlq.ErrReplayedTooOften)
			a.say(fmt.Sprintf("%s: %v", l.ID, err))
		default:
			changed++
			if err := sayLetter(a, after, f.json, done); err != nil {
				return err
			}
		}
	}
	if failed == 0 {
		a.say(fmt.Sprintf("%d %s %s", changed, plural(changed, "letter", "letters"), done))
		return nil
	}
	err = fmt.Errorf("%d of %d letters could not be %s", failed, len(chosen), done)
	if stuck {
		err = withHint(err, "relay dlq show tells why a letter keeps failing; a higher --max-replays lets it go again")
	}
	return err
}

// chooseLetters reads the list first: changing letters moves them to the end of the
// stream, and a replay may fail and come back while we read.
func chooseLetters(ctx context.Context, a *app, letters *dlq.Letters, f letterFlags, interrupted bool) ([]dlq.Letter, error) {
	var chosen []dlq.Letter
	var ids []string
	for l, err := range selectLetters(ctx, letters, f, true, func(fl *dlq.Filter) { fl.Interrupted = interrupted }) {
		if err != nil {
			return nil, err
		}
		l.Header, l.Payload, l.History = nil, nil, nil // there may be many
		chosen = append(chosen, l)
		ids = append(ids, l.ID)
	}
	f.sayUnmatched(a, len(chosen), ids)
	return chosen, nil
}

// tryLetters says what would be done with the letters.
func tryLetters(a *app, chosen []dlq.Letter, f letterFlags, done string) error {
	n := 0
	for _, l := range chosen {
		if f.maxReplays > 0 && l.State != dlq.StateReplaying && l.Replays >= f.maxReplays {
			a.say(fmt.Sprintf("%s: would be refused: replayed %d times", l.ID, l.Replays))
			continue
		}
		n++
		if err := sayLetter(a, l, f.json, "would be "+done); err != nil {
			return err
		}
	}
	a.say(fmt.Sprintf("%d %s would be %s", n, plural(n, "letter", "letters"), done))
	return nil
}

func sayLetter(a *app, l dlq.Letter, asJSON bool, what string) error {
	if asJSON {
		return writeJSON(a.stdout, l)
	}
	if what == "replayed" && l.State != dlq.StateReplayed {
		what = "replayed, and failed again" // faster than we could say it
	}
	_, err := fmt.Fprintf(a.stdout, "%s %s\n", l.ID, what)
	return err
}

// pace spaces out letters.
type pace struct {
	gap  time.Duration
	next time.Time
}

func newPace(rate float64) *pace {
	if rate == 0 {
		return &pace{}
	}
	return &pace{gap: time.Duration(float64(time.Second) / rate)}
}

func (p *pace) wait(ctx context.Context) error {
	if p.gap == 0 || p.next.IsZero() {
		p.next = time.Now().Add(p.gap)
		return interrupted(ctx)
	}
	err := sleep(ctx, time.Until(p.next))
	p.next = time.Now().Add(p.gap)
	return err
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}
