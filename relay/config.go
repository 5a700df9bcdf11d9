package relay

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// DeleteAtOnce as Config.Retention deletes rows as soon as they are recorded.
const DeleteAtOnce time.Duration = -1

// OnDead says what happens to an ordering key whose row was parked.
type OnDead string

const (
	// Skip lets the key go on without the row.
	Skip OnDead = "skip"
	// Freeze keeps the key waiting until a person retries or discards the row.
	Freeze OnDead = "freeze"
)

// OnRecreated says what happens to published rows whose stream was deleted and
// created anew.
type OnRecreated string

const (
	// Leave leaves them as they are, and says so.
	Leave OnRecreated = "leave"
	// Republish publishes those that are retained again.
	Republish OnRecreated = "republish"
)

// Config tunes a [Relay]. The zero value is ready to use.
type Config struct {
	// Stream is the stream the events go to. Default "EVENTS". Rows whose
	// subject another stream takes are published there.
	Stream string

	// Source is the ce-source of every message. Outboxes that publish to one
	// stream need different ones. Default "jetbox".
	Source string

	// Batch is the most rows claimed at once. Default: 500, and up to 2,000 while
	// there is a backlog.
	Batch int
	most  int // Batch, or more by default

	// PollInterval is the longest an idle relay takes to find a row. Default
	// 500ms.
	PollInterval time.Duration

	// Lease is how long a silent relay keeps its rows. It is renewed at a third
	// of this. More than half of the stream's duplicate window is risky and
	// logged. Default 10s.
	Lease time.Duration

	// MaxAttempts is how often a row may be refused for itself before it is
	// parked. Outages do not count. Default 10.
	MaxAttempts int

	// Backoff is the wait after a row's first refusal; it doubles up to
	// MaxBackoff. Defaults 1s and 1m.
	Backoff    time.Duration
	MaxBackoff time.Duration

	// OnDead says what happens to the key of a parked row. Default Skip.
	OnDead OnDead

	// OnRecreated says what happens to rows that were published to a stream which a
	// person has created anew since. Default Leave.
	OnRecreated OnRecreated

	// Retention is how long published rows are kept, or [DeleteAtOnce].
	// Default 24h. It may not be shorter than the stream's duplicate window or
	// BrokerSync: a row that is gone cannot be published again when the broker
	// loses it.
	Retention time.Duration

	// Archive moves published rows to the archive, as soon as they are recorded,
	// instead of deleting them after Retention.
	Archive bool

	// BrokerSync is how long the broker may take to sync what it acknowledged.
	// Default 2m, the server's own default (nats-server 2.15).
	BrokerSync time.Duration

	// DrainTimeout bounds how long Run takes to stop: to wait for PubAcks and to
	// record them. Default 10s.
	DrainTimeout time.Duration

	// Logger takes what Run has nobody to return to. Default [slog.Default].
	Logger *slog.Logger

	// Hooks are told what happens.
	Hooks Hooks
}

// Hooks are functions that Run calls from its own goroutines, one at a time.
// They must return quickly and may not call the Relay. Nil ones are skipped.
type Hooks struct {
	// PublishedFunc is called for each PubAck: how long it took, how long ago the
	// event was recorded by its writer, and whether the broker took the message
	// for a duplicate.
	PublishedFunc func(ack, lag time.Duration, duplicate bool)

	// FailedFunc is called for each publish that failed, with its class: one of
	// "outage", "row", "permanent", "record".
	FailedFunc func(class string)

	// UnverifiedFunc is called for each row that was stored after an earlier attempt
	// of unknown outcome, too long ago for the broker to drop a second copy, and
	// without proof that the first one was not stored: the stream had dropped
	// messages, or was created anew.
	UnverifiedFunc func()

	// RepublishedFunc is called with the number of rows, recorded as published, that
	// are pending again because their stream has lost them, or was created anew.
	RepublishedFunc func(rows int)

	// LateFunc is called for each row that was published although a higher one of
	// its ordering key was published before: its transaction had not ended by
	// then. What this relay does not remember, or did not publish itself, is not
	// counted.
	LateFunc func()
}

func (c Config) withDefaults() Config {
	set(&c.Stream, "EVENTS")
	set(&c.Source, "jetbox")
	const batch, backlog = 500, 2_000
	if c.most = c.Batch; c.Batch == 0 {
		c.Batch, c.most = batch, backlog
	}
	set(&c.PollInterval, 500*time.Millisecond)
	set(&c.Lease, 10*time.Second)
	set(&c.MaxAttempts, 10)
	set(&c.Backoff, time.Second)
	set(&c.MaxBackoff, time.Minute)
	set(&c.OnDead, Skip)
	set(&c.OnRecreated, Leave)
	set(&c.Retention, 24*time.Hour)
	set(&c.BrokerSync, 2*time.Minute)
	set(&c.DrainTimeout, 10*time.Second)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Hooks.PublishedFunc == nil {
		c.Hooks.PublishedFunc = func(time.Duration, time.Duration, bool) {}
	}
	if c.Hooks.FailedFunc == nil {
		c.Hooks.FailedFunc = func(string) {}
	}
	if c.Hooks.UnverifiedFunc == nil {
		c.Hooks.UnverifiedFunc = func() {}
	}
	if c.Hooks.RepublishedFunc == nil {
		c.Hooks.RepublishedFunc = func(int) {}
	}
	if c.Hooks.LateFunc == nil {
		c.Hooks.LateFunc = func() {}
	}
	return c
}

func set[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// maxSource leaves the rest of the header block to the event, see
// jetbox.MaxHeader.
const maxSource = 256

func (c Config) validate() error {
	for _, f := range [...]struct {
		name  string
		value time.Duration
		least time.Duration
	}{
		{"PollInterval", c.PollInterval, time.Millisecond},
		{"Lease", c.Lease, 100 * time.Millisecond},
		{"Backoff", c.Backoff, time.Millisecond},
		{"MaxBackoff", c.MaxBackoff, c.Backoff},
		{"DrainTimeout", c.DrainTimeout, time.Millisecond},
		{"BrokerSync", c.BrokerSync, 0},
	} {
		if f.value < f.least {
			return fmt.Errorf("relay: %s is %v, want at least %v", f.name, f.value, f.least)
		}
	}
	floor := c.removal() == jetbox.Keep // the others are explicit decisions
	switch {
	case c.Batch < 0:
		return fmt.Errorf("relay: Batch is %d, want a positive count", c.Batch)
	case c.MaxAttempts < 0:
		return fmt.Errorf("relay: MaxAttempts is %d, want a positive count", c.MaxAttempts)
	case c.OnDead != Skip && c.OnDead != Freeze:
		return fmt.Errorf("relay: OnDead is %q, want %q or %q", c.OnDead, Skip, Freeze)
	case c.OnRecreated != Leave && c.OnRecreated != Republish:
		return fmt.Errorf("relay: OnRecreated is %q, want %q or %q", c.OnRecreated, Leave, Republish)
	case c.Retention < 0 && c.Retention != DeleteAtOnce:
		return fmt.Errorf("relay: Retention is %v, want a positive duration or DeleteAtOnce", c.Retention)
	case len(c.Source) > maxSource:
		return fmt.Errorf("relay: Source has %d bytes, want at most %d", len(c.Source), maxSource)
	case floor && c.Retention < c.BrokerSync:
		return fmt.Errorf("relay: Retention %v is shorter than BrokerSync %v: "+
			"rows would be gone before the broker has synced their messages", c.Retention, c.BrokerSync)
	}
	return nil
}

// removal is how rows leave the table as they are recorded.
func (c Config) removal() jetbox.Removal {
	switch {
	case c.Archive:
		return jetbox.Archive
	case c.Retention == DeleteAtOnce:
		return jetbox.Delete
	default:
		return jetbox.Keep
	}
}
