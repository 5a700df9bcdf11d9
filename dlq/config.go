package dlq

import (
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// defaultGrace is the ack wait of a consumer that cannot be asked: the server's
// and this library's default.
const defaultGrace = 30 * time.Second

const (
	defaultMaxReplays = 5
	defaultKeepClosed = 30 * 24 * time.Hour
)

// Config names the streams that hold dead letters and advisories. The zero
// value is ready to use.
type Config struct {
	// Stream is the dead-letter stream. Default "DLQ".
	Stream string

	// Prefix is the first part of every letter's subject. It must lie outside
	// the subjects of the event streams, or letters are consumed as events.
	// Default "dlq".
	Prefix string

	// Advisories is the stream that captures what the server says about
	// exhausted and terminated messages. Default "JETBOX_ADVISORIES".
	Advisories string

	// AdvisoryPrefix is what another account puts before the subjects of the
	// advisories it lets this one have: the prefix of their import, without its
	// last dot. Default: none, the advisories of this account.
	AdvisoryPrefix string

	// Events reaches the event streams where they are in another account, which
	// exports its API: see [jetstream.NewWithAPIPrefix]. The caller closes its
	// connection. Default: they are where the letters are.
	Events jetstream.JetStream

	// Replicas is how many servers keep a stream that Setup creates. Default 1.
	Replicas int

	// Grace is how old an intent is when it counts as a letter. Default: the
	// ack wait of its consumer, asked for when it matters, or 30s where the
	// server does not tell.
	Grace time.Duration

	// MaxReplays is how often a letter may be replayed: one that waits again after
	// that many is refused, since its handler is not mended. Replay it through a
	// Letters with a higher one. Default 5.
	MaxReplays int

	// KeepClosed is for how long a letter is kept after it was replayed or
	// discarded: the mark that absorbs late reports of its failure. At least 7
	// days, as long as advisories live, and where the event stream removes its
	// messages by age, 7 days longer than that whatever this says. Default 30
	// days. Where the dead-letter stream takes no message TTL (nats-server before
	// 2.11, or the stream's setting) they stay until Prune.
	KeepClosed time.Duration

	// RoutedFunc is called after a letter became open, with its reason, on the
	// goroutine that reported the failure. Default: nothing.
	RoutedFunc func(reason string)

	// Logger gets what a Router has nobody to return to. Default [slog.Default].
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Stream == "" {
		c.Stream = "DLQ"
	}
	if c.Prefix == "" {
		c.Prefix = "dlq"
	}
	if c.Advisories == "" {
		c.Advisories = "JETBOX_ADVISORIES"
	}
	if c.Replicas == 0 {
		c.Replicas = 1
	}
	if c.MaxReplays == 0 {
		c.MaxReplays = defaultMaxReplays
	}
	if c.KeepClosed == 0 {
		c.KeepClosed = defaultKeepClosed
	}
	if c.RoutedFunc == nil {
		c.RoutedFunc = func(string) {}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func (c Config) validate() error {
	for _, f := range [...]struct{ field, name string }{{"Stream", c.Stream}, {"Advisories", c.Advisories}} {
		if !validName(f.name) {
			return fmt.Errorf("dlq: %s is %q, want a stream name without blanks, dots, wildcards or slashes", f.field, f.name)
		}
	}
	for _, token := range strings.Split(c.Prefix, ".") {
		if !validName(token) {
			return fmt.Errorf("dlq: Prefix is %q, want a subject without blanks, wildcards or empty tokens", c.Prefix)
		}
	}
	if c.AdvisoryPrefix != "" {
		for _, token := range strings.Split(c.AdvisoryPrefix, ".") {
			if !validName(token) || strings.HasPrefix(token, "$") {
				return fmt.Errorf("dlq: AdvisoryPrefix is %q, want a subject without blanks, wildcards, empty tokens or a $", c.AdvisoryPrefix)
			}
		}
	}
	if strings.HasPrefix(c.Prefix, "$") {
		return fmt.Errorf("dlq: Prefix is %q, want one without a leading $, which is the server's", c.Prefix)
	}
	if c.Stream == c.Advisories {
		return fmt.Errorf("dlq: Stream and Advisories are both %q, want two streams", c.Stream)
	}
	if c.Replicas < 0 {
		return fmt.Errorf("dlq: Replicas is %d, want a positive count", c.Replicas)
	}
	if c.Grace < 0 {
		return fmt.Errorf("dlq: Grace is %v, want a positive duration", c.Grace)
	}
	if c.MaxReplays < 0 {
		return fmt.Errorf("dlq: MaxReplays is %d, want a positive count", c.MaxReplays)
	}
	if c.KeepClosed < advisoriesMaxAge {
		return fmt.Errorf("dlq: KeepClosed is %v, want at least the %v that advisories live", c.KeepClosed, advisoriesMaxAge)
	}
	return nil
}

// maxDeliveries and terminated are the subjects of the advisories, without stream
// and consumer.
func (c Config) maxDeliveries() string { return c.advisorySubject(maxDeliveriesSubject) }
func (c Config) terminated() string    { return c.advisorySubject(terminatedSubject) }

func (c Config) advisorySubject(subject string) string {
	if c.AdvisoryPrefix == "" {
		return subject
	}
	return c.AdvisoryPrefix + "." + subject
}

// validName reports whether s can be the name of a stream or consumer, which
// is also what can be one token of a subject.
func validName(s string) (valid bool) {
	return s != "" && !strings.ContainsAny(s, ".*>/\\") && !strings.ContainsFunc(s, func(r rune) bool {
		return r <= ' ' || r == 0x7f
	})
}
