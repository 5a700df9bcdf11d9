package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// The tests with a bus have a real server on a fake clock. None is parallel:
// servers with file storage share a goroutine of the process.

const (
	streamName = "EVENTS"
	durable    = "billing"
	// slack is how late the server's timers fire on the fake clock.
	slack = 20 * time.Millisecond
)

// bus is a broker with an event stream, and what was seen on it.
type bus struct {
	*testing.T

	srv *embedded.Server
	nc  *nats.Conn
	js  jetstream.JetStream
	log *logBook

	mu      sync.Mutex
	answers []answer // guarded by mu; every ack, nak, term and in-progress
}

type answer struct {
	text string
	seq  uint64
	at   time.Time
}

func inBubble(t *testing.T, f func(b *bus), adjust ...func(*jetstream.StreamConfig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bus{T: t, srv: embedded.RunTest(t), log: &logBook{}}
		b.nc, b.js = b.connect()
		cfg := jetstream.StreamConfig{Name: streamName, Subjects: []string{"events.>"}}
		for _, a := range adjust {
			a(&cfg)
		}
		if _, err := b.js.CreateStream(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		b.watchAnswers()
		f(b)
	})
}

func (b *bus) connect(opts ...nats.Option) (*nats.Conn, jetstream.JetStream) {
	b.Helper()
	nc, err := b.srv.Connect(append([]nats.Option{nats.MaxReconnects(-1)}, opts...)...)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		b.Fatal(err)
	}
	return nc, js
}

func (b *bus) watchAnswers() {
	nc, _ := b.connect()
	_, err := nc.Subscribe("$JS.ACK."+streamName+".>", func(m *nats.Msg) {
		// $JS.ACK.<stream>.<consumer>.<delivered>.<sseq>.<cseq>.<time>.<pending>
		var seq uint64
		if _, err := fmt.Sscan(strings.Split(m.Subject, ".")[5], &seq); err != nil {
			b.Errorf("answer to %s: %v", m.Subject, err)
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.answers = append(b.answers, answer{string(m.Data), seq, time.Now()})
	})
	if err != nil {
		b.Fatal(err)
	}
	synctest.Wait()
}

// answersLike returns the answers to a message that start with prefix.
func (b *bus) answersLike(seq uint64, prefix string) []answer {
	synctest.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []answer
	for _, a := range b.answers {
		if a.seq == seq && strings.HasPrefix(a.text, prefix) {
			out = append(out, a)
		}
	}
	return out
}

// publish stores events named by their keys, in order.
func (b *bus) publish(keys ...string) {
	b.Helper()
	for _, k := range keys {
		ev := jetbox.Event{Key: k, Subject: "events." + k, Payload: []byte(`{"key":"` + k + `"}`)}.WithDefaults(time.Now())
		b.publishRaw(&nats.Msg{Subject: ev.Subject, Header: ev.Header("test"), Data: ev.Payload})
	}
}

func (b *bus) publishN(n int) (keys []string) {
	b.Helper()
	for i := range n {
		keys = append(keys, fmt.Sprintf("k%03d", i))
	}
	b.publish(keys...)
	return keys
}

func (b *bus) publishRaw(m *nats.Msg) uint64 {
	b.Helper()
	ack, err := b.js.PublishMsg(b.Context(), m)
	if err != nil {
		b.Fatalf("publish to %s: %v", m.Subject, err)
	}
	return ack.Sequence
}

func (b *bus) config(cfg consumer.Config) consumer.Config {
	cfg.Stream, cfg.Durable = streamName, durable
	if cfg.Logger == nil {
		cfg.Logger = slog.New(b.log)
	}
	return cfg
}

// start runs a consumer. stop ends it as a signal would and returns Run's error.
func (b *bus) start(h consumer.Handler, cfg consumer.Config) (stop func() error) {
	b.Helper()
	return b.startOn(b.js, h, cfg)
}

func (b *bus) startOn(js jetstream.JetStream, h consumer.Handler, cfg consumer.Config) (stop func() error) {
	b.Helper()
	c, err := consumer.New(js, h, b.config(cfg))
	if err != nil {
		b.Fatal(err)
	}
	return b.run(c)
}

func (b *bus) run(c *consumer.Consumer) (stop func() error) {
	b.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	var once sync.Once
	stop = func() (err error) {
		once.Do(func() {
			cancel()
			err = <-done
		})
		return err
	}
	b.Cleanup(func() {
		if err := stop(); err != nil {
			b.Errorf("Run: %v", err)
		}
	})
	return stop
}

// pass lets time pass and everything settle that is due by then.
func (b *bus) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// info is what the server knows of the consumer once it has dealt with every
// answer.
func (b *bus) info() *jetstream.ConsumerInfo {
	b.Helper()
	synctest.Wait()
	c, err := b.js.Consumer(b.Context(), streamName, durable)
	if err != nil {
		b.Fatalf("look up consumer: %v", err)
	}
	return c.CachedInfo()
}

// wantSettled checks that the server waits for nothing more.
func (b *bus) wantSettled() {
	b.Helper()
	if i := b.info(); i.NumAckPending != 0 || i.NumPending != 0 {
		b.Errorf("unsettled = %d, undelivered = %d, want none", i.NumAckPending, i.NumPending)
	}
}

// record is what a handler saw.
type record struct {
	mu   sync.Mutex
	seen []sighting // guarded by mu
}

type sighting struct {
	key       string
	seq       uint64
	delivered uint64
	at        time.Time
}

func (r *record) add(d *consumer.Delivery) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen = append(r.seen, sighting{d.Key, d.StreamSeq, d.NumDelivered, time.Now()})
}

func (r *record) all() []sighting {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.seen)
}

func (r *record) keys() (keys []string) {
	for _, s := range r.all() {
		keys = append(keys, s.key)
	}
	return keys
}

func (r *record) of(key string) (out []sighting) {
	for _, s := range r.all() {
		if s.key == key {
			out = append(out, s)
		}
	}
	return out
}

// ok is a handler that records and succeeds.
func (r *record) ok(_ context.Context, d *consumer.Delivery) error {
	r.add(d)
	return nil
}

// letters is a dead-letter queue that remembers, and fails on request.
type letters struct {
	// failFunc, when set, decides about each call of "intend", "park" and
	// "withdraw".
	failFunc func(step string, f jetbox.Failure) error

	mu    sync.Mutex
	steps []step // guarded by mu; successful ones
	tries int    // guarded by mu; all of them
}

type step struct {
	name string
	f    jetbox.Failure
	at   time.Time
}

func (l *letters) call(ctx context.Context, name string, f jetbox.Failure) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	l.mu.Lock()
	l.tries++
	l.mu.Unlock()
	if l.failFunc != nil {
		if err := l.failFunc(name, f); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.steps = append(l.steps, step{name, f, time.Now()})
	return nil
}

func (l *letters) Intend(ctx context.Context, f jetbox.Failure) error {
	return l.call(ctx, "intend", f)
}

func (l *letters) Park(ctx context.Context, f jetbox.Failure) error { return l.call(ctx, "park", f) }

func (l *letters) Withdraw(ctx context.Context, f jetbox.Failure) error {
	return l.call(ctx, "withdraw", f)
}

func (l *letters) named(name string) (out []step) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.steps {
		if s.name == name {
			out = append(out, s)
		}
	}
	return out
}

func (l *letters) attempts() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.tries
}

func (l *letters) names() (out []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.steps {
		out = append(out, s.name)
	}
	return out
}

// logBook is a log a test can read.
type logBook struct {
	mu    sync.Mutex
	lines []string // guarded by mu
}

func (l *logBook) Enabled(context.Context, slog.Level) bool { return true }
func (l *logBook) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logBook) WithGroup(string) slog.Handler            { return l }
func (l *logBook) Handle(_ context.Context, r slog.Record) error {
	line := r.Level.String() + " " + r.Message
	r.Attrs(func(a slog.Attr) bool { line += " " + a.String(); return true })
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, line)
	return nil
}

func (l *logBook) containing(text string) (out []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines {
		if strings.Contains(line, text) {
			out = append(out, line)
		}
	}
	return out
}

var errHandler = errors.New("dependency down")
