package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/dlq"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// staleAfter is how old the oldest due row may be before --check calls it a
// problem.
const staleAfter = 30 * time.Second

// statusReport is what relay status knows. Its JSON keys are used by scripts.
type statusReport struct {
	Table            string        `json:"table"`
	Pending          int64         `json:"pending"`
	Processing       int64         `json:"processing"`
	OldestAgeSeconds float64       `json:"oldest_pending_age_seconds"`
	DeadLetter       int64         `json:"dead_letter"`
	TableBytes       int64         `json:"table_bytes"`
	Shards           int           `json:"shards"`
	Leases           []leaseReport `json:"leases"`
	DLQLetters       *int          `json:"dlq_letters"` // null when the broker did not say
	BrokerError      string        `json:"broker_error,omitempty"`
	Problems         []string      `json:"problems"`
}

// leaseReport is the lease of one relay. It may hold no shard: it stands by.
type leaseReport struct {
	Owner   string `json:"owner"`
	Holder  string `json:"holder"`
	Epoch   int64  `json:"epoch"`
	Shards  int    `json:"shards"`
	Expires string `json:"expires"`
}

func statusCommand() *command {
	var asJSON, check bool
	return &command{
		name:  "status",
		short: "show backlog, dead rows, dead letters and who relays",
		long: `
--check exits with 3 when something needs a person: dead rows or letters, a due
row older than 30s, rows without a relay, or a broker that does not answer.`,
		flags: func(fs *flag.FlagSet) {
			fs.BoolVar(&asJSON, "json", false, "one JSON object")
			fs.BoolVar(&check, "check", false, "exit 3 when something is wrong")
		},
		run: func(ctx context.Context, a *app, _ []string) error {
			r, err := readStatus(ctx, a)
			if err != nil {
				return err
			}
			if asJSON {
				err = writeJSON(a.stdout, r)
			} else {
				err = showStatus(a, r)
			}
			if err == nil && check && len(r.Problems) > 0 {
				return errFound
			}
			return err
		},
	}
}

func readStatus(ctx context.Context, a *app) (r statusReport, err error) {
	store, err := a.openStore(ctx)
	if err != nil {
		return statusReport{}, err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	stats, err := store.Stats(ctx)
	if err != nil {
		return statusReport{}, err
	}
	r = newStatus(store.Table(), stats, time.Now())
	letters, err := a.countLetters(ctx)
	switch {
	case ctx.Err() != nil:
		return statusReport{}, interrupted(ctx)
	case isUsage(err):
		return statusReport{}, err
	case errors.Is(err, jetstream.ErrStreamNotFound):
		r.DLQLetters = new(0)
	case err != nil:
		// The database's half of the answer is worth having without the broker's.
		r.BrokerError = a.secrets.mask(err.Error())
		r.Problems = append(r.Problems, "broker: "+r.BrokerError)
	default:
		r.DLQLetters = &letters
		if letters > 0 {
			r.Problems = append(r.Problems, fmt.Sprintf("%d dead %s in %s", letters, plural(letters, "letter", "letters"), dlqStream))
		}
	}
	return r, nil
}

func newStatus(table string, s outbox.Stats, now time.Time) statusReport {
	r := statusReport{
		Table:      table,
		Pending:    s.Pending,
		Processing: s.Claimed,
		DeadLetter: s.DeadLetter,
		TableBytes: s.TableBytes,
		Shards:     s.Shards,
		Leases:     []leaseReport{},
		Problems:   []string{},
	}
	problem := func(format string, args ...any) { r.Problems = append(r.Problems, fmt.Sprintf(format, args...)) }
	held := 0
	for _, l := range s.Leases {
		held += l.Shards
		r.Leases = append(r.Leases, leaseReport{l.Owner, l.Holder, l.Epoch, l.Shards, timeText(l.Expires)})
	}
	if held == 0 && s.Pending > 0 {
		problem("%d %s pending and no relay holds the lease", s.Pending, plural(int(s.Pending), "row", "rows"))
	}
	if !s.OldestPending.IsZero() {
		age := max(now.Sub(s.OldestPending), 0)
		r.OldestAgeSeconds = age.Seconds()
		if age > staleAfter {
			problem("the oldest due row waits for %v", age.Round(time.Second))
		}
	}
	if s.DeadLetter > 0 {
		problem("%d dead %s in the outbox", s.DeadLetter, plural(int(s.DeadLetter), "row", "rows"))
	}
	return r
}

// countLetters asks the broker, if it is there.
func (a *app) countLetters(ctx context.Context) (int, error) {
	nc, js, err := a.connect("relay status", "_INBOX_relay")
	if err != nil {
		return 0, err
	}
	defer nc.Close()
	letters, err := dlq.New(js, dlq.Config{Logger: a.log})
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*connectTimeout)
	defer cancel()
	return letters.Count(ctx, dlq.Filter{})
}

func isUsage(err error) (usage bool) {
	var u usageError
	return errors.As(err, &u)
}

func showStatus(a *app, r statusReport) error {
	tw := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "outbox\t%s, %s\n", r.Table, sizeText(r.TableBytes))
	fmt.Fprintf(tw, "pending\t%d (%d of them in the hands of a relay)\n", r.Pending, r.Processing)
	if r.OldestAgeSeconds > 0 {
		fmt.Fprintf(tw, "oldest\t%v\n", ageText(r.OldestAgeSeconds))
	}
	fmt.Fprintf(tw, "dead rows\t%d\n", r.DeadLetter)
	if r.DLQLetters != nil {
		fmt.Fprintf(tw, "dead letters\t%d\n", *r.DLQLetters)
	} else {
		fmt.Fprintf(tw, "dead letters\tunknown\n")
	}
	for _, l := range r.Leases {
		fmt.Fprintf(tw, "relay\t%s, epoch %d, %d of %d %s, until %s\n",
			l.Holder, l.Epoch, l.Shards, r.Shards, plural(r.Shards, "shard", "shards"), l.Expires)
	}
	if len(r.Leases) == 0 {
		fmt.Fprintf(tw, "relay\tnone\n")
	}
	for _, p := range r.Problems {
		fmt.Fprintf(tw, "problem\t%s\n", p)
	}
	return tw.Flush()
}

func ageText(seconds float64) string {
	return time.Duration(seconds * float64(time.Second)).Round(time.Millisecond).String()
}

func sizeText(n int64) string {
	const kib = 1 << 10
	switch {
	case n >= kib*kib:
		return fmt.Sprintf("%.1f MiB", float64(n)/(kib*kib))
	case n >= kib:
		return fmt.Sprintf("%.1f KiB", float64(n)/kib)
	}
	return fmt.Sprintf("%d bytes", n)
}
