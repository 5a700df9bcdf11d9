package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/dlq"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// staleAfter is how old the oldest due row may be before --check calls it a
// problem.
const staleAfter = 30 * time.Second

// statusReport is what relay status knows. Its JSON keys are used by scripts.
type statusReport struct {
	Table            string         `json:"table"`
	Pending          int64          `json:"pending"`
	Processing       int64          `json:"processing"`
	OldestAgeSeconds float64        `json:"oldest_pending_age_seconds"`
	DeadLetter       int64          `json:"dead_letter"`
	TableBytes       int64          `json:"table_bytes"`
	Shards           int            `json:"shards"`
	Leases           []leaseReport  `json:"leases"`
	Streams          []streamReport `json:"streams"`     // without an engine when the broker did not say
	DLQLetters       *int           `json:"dlq_letters"` // null when the broker did not say
	OldestLetter     *float64       `json:"dlq_oldest_letter_age_seconds"`
	BrokerError      string         `json:"broker_error,omitempty"`
	Problems         []string       `json:"problems"`
}

// leaseReport is the lease of one relay. It may hold no shard: it stands by.
type leaseReport struct {
	Owner   string `json:"owner"`
	Holder  string `json:"holder"`
	Epoch   int64  `json:"epoch"`
	Shards  int    `json:"shards"`
	Expires string `json:"expires"`
}

// streamReport is a stream that the outbox publishes to, and how.
type streamReport struct {
	Stream string `json:"stream"`
	Engine string `json:"engine,omitempty"`
	Reason string `json:"reason,omitempty"` // why not the faster engine, or why none is known
}

func statusCommand() *command {
	var asJSON, check bool
	return &command{
		name:  "status",
		short: "show backlog, dead rows, dead letters, who relays and how",
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
	streams, err := a.streamsOf(ctx, store)
	if err != nil {
		return statusReport{}, err
	}
	letters, err := a.askBroker(ctx, streams)
	r.Streams = streams
	switch {
	case ctx.Err() != nil:
		return statusReport{}, interrupted(ctx)
	case isUsage(err):
		return statusReport{}, err
	case errors.Is(err, jetstream.ErrStreamNotFound):
		r.DLQLetters, r.OldestLetter = new(0), new(0.0)
	case err != nil:
		// The database's half of the answer is worth having without the broker's.
		r.BrokerError = a.secrets.mask(err.Error())
		r.Problems = append(r.Problems, "broker: "+r.BrokerError)
	default:
		age := letters.age(time.Now())
		r.DLQLetters, r.OldestLetter = &letters.letters, new(age.Seconds())
		if n := letters.letters; n > 0 {
			r.Problems = append(r.Problems, fmt.Sprintf("%d dead %s in %s, the oldest waits for %v",
				n, plural(n, "letter", "letters"), dlqStream, age.Round(time.Second)))
		}
		if n := letters.interrupted; n > 0 {
			r.Problems = append(r.Problems, fmt.Sprintf("the replay of %d of them was interrupted: relay dlq replay finishes it", n))
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
		Streams:    []streamReport{},
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

// streamsOf returns the streams of an outbox: the configured one, and those that its
// rows were published to.
func (a *app) streamsOf(ctx context.Context, store outboxStore) ([]streamReport, error) {
	streams := []streamReport{{Stream: a.global.stream}}
	anchored, ok := store.(interface {
		Anchors(ctx context.Context) ([]jetbox.Anchor, error)
	})
	if !ok {
		return streams, nil
	}
	anchors, err := anchored.Anchors(ctx)
	for _, anchor := range anchors {
		if anchor.Stream != a.global.stream {
			streams = append(streams, streamReport{Stream: anchor.Stream})
		}
	}
	return streams, err
}

// askBroker asks the broker, if it is there, how a relay publishes to the streams,
// and for the dead letters that wait.
func (a *app) askBroker(ctx context.Context, streams []streamReport) (letters waiting, err error) {
	nc, js, err := a.connect("relay status", "_INBOX_relay")
	if err != nil {
		return waiting{}, err
	}
	defer nc.Close()
	ctx, cancel := context.WithTimeout(ctx, 2*connectTimeout)
	defer cancel()
	for i, s := range streams {
		st, err := js.Stream(ctx, s.Stream)
		if err != nil {
			streams[i].Reason = a.secrets.mask(err.Error())
			continue
		}
		streams[i].Engine, streams[i].Reason = relay.EngineOf(st.CachedInfo())
	}
	dead, err := dlq.New(js, dlq.Config{Logger: a.log})
	if err != nil {
		return waiting{}, err
	}
	return countWaiting(ctx, dead)
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
	for _, s := range r.Streams {
		fmt.Fprintf(tw, "stream\t%s\n", s)
	}
	fmt.Fprintf(tw, "dead rows\t%d\n", r.DeadLetter)
	if r.DLQLetters != nil {
		fmt.Fprintf(tw, "dead letters\t%d\n", *r.DLQLetters)
		if *r.DLQLetters > 0 {
			fmt.Fprintf(tw, "oldest letter\t%v\n", ageText(*r.OldestLetter))
		}
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

// String is what a person reads of the stream.
func (s streamReport) String() string {
	text := s.Stream + ", " + cmp.Or(s.Engine, "unknown engine")
	if s.Reason != "" {
		text += " (" + s.Reason + ")"
	}
	return text
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
