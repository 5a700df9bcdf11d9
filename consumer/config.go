package consumer

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Config names the durable consumer and tunes how its messages are handled.
// Stream and Durable are mandatory, the rest has defaults.
type Config struct {
	// Stream is the stream to consume, Durable the fixed name of the consumer
	// on it. Instances that share both share the work. Once a message was
	// handled under a name, renaming means starting at the first message.
	Stream  string
	Durable string

	// FilterSubjects select messages, wildcards allowed. Default: all.
	FilterSubjects []string

	// MaxDeliver is how often a message is delivered before it becomes a dead
	// letter, and AckWait how long the server waits for a sign of life. They
	// are used when the consumer is created; on an existing one its own
	// settings decide, and a difference is logged. Default 5 and 30s.
	MaxDeliver int
	AckWait    time.Duration

	// Workers is how many handlers run at the same time. Default 1.
	Workers int

	// Batch is how many messages a [BatchHandler] gets at most. Default 100.
	Batch int

	// Unordered gives up the order of messages with the same ordering key: no
	// message waits for another. Without it they are handled in stream order,
	// one after the other, and one being retried holds up the later ones.
	Unordered bool

	// SingleActive creates the consumer so that of all instances one gets the
	// messages; another one takes over when it stops, or is silent for AckWait
	// (at least 5s). So the order per key holds however many instances run.
	// Needs nats-server 2.11. A consumer that exists must have been created so.
	SingleActive bool

	// MaxBehindKey is how many messages may wait behind others of one ordering
	// key, and MaxBehind how many of all keys: at most half of the consumer's
	// MaxAckPending, which is twice this when it is created, and 64 MiB. With
	// that many, nothing new is pulled until one of those they wait for is
	// settled. On top comes what was pulled already, now and then something new
	// in place of a retry that another instance has, and with SingleActive what
	// is gathered when this instance takes over. Default 2500 and 5000.
	MaxBehindKey int
	MaxBehind    int

	// Backoff is the delay after the first failed delivery; it doubles up to
	// MaxBackoff, with a tenth of jitter. Default 1s and 1m.
	Backoff    time.Duration
	MaxBackoff time.Duration

	// HandleTimeout is how long a handler may take. Then its context is
	// canceled. A handler that still does not return keeps its worker, but the
	// server is told no more that somebody works on the message, and delivers
	// it again. Default 5m.
	HandleTimeout time.Duration

	// DrainTimeout is how long handlers may go on after Run was told to stop.
	// Then their contexts are canceled. What comes of them is still sent, dead
	// letters for up to 5s. Default 10s.
	DrainTimeout time.Duration

	// DeadLetters stores what cannot be handled. Nil leaves it to a router of
	// advisories: see the package comment for what that loses.
	DeadLetters DeadLetters

	// MaxHeld is how many messages may wait at once for DeadLetters to store
	// them. With that many, nothing more is pulled; what was pulled already comes
	// on top. Default 128.
	MaxHeld int

	// Logger receives changes of state and failed attempts. Default
	// [slog.Default].
	Logger *slog.Logger

	// HandledFunc is called for every delivery that was settled, with the time
	// the handler took. DuplicateFunc is called for every delivery whose effect
	// a ledger had seen already. GapFunc is called for a delivery whose
	// aggregate has events between it and the last one that arrived here, of
	// which last is the sequence: they were lost, or another instance has them.
	// The first event of an aggregate after a start is no gap, and the last
	// 8,192 aggregates at least are remembered. All run on goroutines of Run,
	// the first two several at the same time, and must not block. Optional.
	HandledFunc   func(d *Delivery, v Verdict, took time.Duration)
	DuplicateFunc func(d *Delivery)
	GapFunc       func(d *Delivery, last int64)
}

// Verdict is what became of one delivery: a label for metrics.
type Verdict string

const (
	// Ack means handled, or seen by a ledger before.
	Ack Verdict = "ack"
	// Nak means failed, to be delivered again.
	Nak Verdict = "nak"
	// Term means failed for good, parked as a dead letter where there are any.
	Term Verdict = "term"
	// Skip means not for this consumer and acknowledged without a handler: the
	// replay of another consumer's dead letter, or a marker of the server.
	Skip Verdict = "skip"
)

func (c Config) withDefaults() Config {
	set(&c.MaxDeliver, 5)
	set(&c.AckWait, 30*time.Second)
	set(&c.Workers, 1)
	set(&c.Batch, 100)
	set(&c.Backoff, time.Second)
	set(&c.MaxBackoff, max(time.Minute, c.Backoff))
	set(&c.HandleTimeout, 5*time.Minute)
	set(&c.DrainTimeout, 10*time.Second)
	set(&c.MaxHeld, 128)
	set(&c.MaxBehindKey, 2500)
	set(&c.MaxBehind, max(5000, c.MaxBehindKey))
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func set[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// validate is called on a Config with its defaults.
func (c Config) validate() error {
	for _, f := range []struct{ name, value string }{{"Stream", c.Stream}, {"Durable", c.Durable}} {
		if f.value == "" || strings.ContainsAny(f.value, " \t\r\n.*>/\\") {
			return fmt.Errorf("consumer: %s is %q, want a name without blanks, dots, slashes and wildcards", f.name, f.value)
		}
	}
	if i := slices.Index(c.FilterSubjects, ""); i >= 0 {
		return fmt.Errorf("consumer: FilterSubjects[%d] is empty, want a subject", i)
	}
	for _, f := range []struct {
		name  string
		value int
	}{
		{"MaxDeliver", c.MaxDeliver},
		{"Workers", c.Workers},
		{"Batch", c.Batch},
		{"MaxHeld", c.MaxHeld},
		{"MaxBehindKey", c.MaxBehindKey},
		{"MaxBehind", c.MaxBehind},
	} {
		if f.value < 1 {
			return fmt.Errorf("consumer: %s is %d, want a positive count", f.name, f.value)
		}
	}
	for _, f := range []struct {
		name  string
		value time.Duration
	}{
		{"AckWait", c.AckWait},
		{"Backoff", c.Backoff},
		{"MaxBackoff", c.MaxBackoff},
		{"HandleTimeout", c.HandleTimeout},
		{"DrainTimeout", c.DrainTimeout},
	} {
		if f.value <= 0 {
			return fmt.Errorf("consumer: %s is %v, want a positive duration", f.name, f.value)
		}
	}
	if c.MaxBackoff < c.Backoff {
		return fmt.Errorf("consumer: MaxBackoff is %v, want at least Backoff (%v)", c.MaxBackoff, c.Backoff)
	}
	return nil
}

// priorityGroup is the one group of a single-active consumer.
const priorityGroup = "jetbox"

// minPinnedTTL leaves the active instance time for a sign of life.
const minPinnedTTL = 5 * time.Second

// server is the consumer to create. BackOff stays empty: the delays are ours,
// and the server's would replace AckWait and add up with them. InactiveThreshold
// stays 0: it deletes durable consumers too, with their position.
func (c Config) server() jetstream.ConsumerConfig {
	s := jetstream.ConsumerConfig{
		Durable:        c.Durable,
		DeliverPolicy:  jetstream.DeliverAllPolicy,
		AckPolicy:      jetstream.AckExplicitPolicy,
		AckWait:        c.AckWait,
		MaxDeliver:     c.MaxDeliver,
		MaxAckPending:  2 * c.MaxBehind, // one instance's fill half of it
		FilterSubjects: c.FilterSubjects,
	}
	if c.SingleActive {
		s.PriorityPolicy = jetstream.PriorityPolicyPinned
		s.PriorityGroups = []string{priorityGroup}
		s.PinnedTTL = max(c.AckWait, minPinnedTTL)
	}
	return s
}
