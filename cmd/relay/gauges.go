package main

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/dlq"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

const (
	// gaugeWait is how long a scrape waits for a slow answer. Then it goes
	// without: a gauge that is not there is seen, an old value is believed.
	gaugeWait = 2 * time.Second

	// gaugeFresh spares database and broker several scrapers; counting letters
	// reads the headers of all of them.
	gaugeFresh   = time.Second
	lettersFresh = 15 * time.Second

	// gaugeTimeout ends a question nobody waits for any more.
	gaugeTimeout = 30 * time.Second
)

// cached asks at most one question at a time and keeps the answer for a while.
type cached[T any] struct {
	fresh time.Duration
	ask   func(context.Context) (T, error)

	mu      sync.Mutex // guards what follows
	running chan struct{}
	value   T
	err     error
	at      time.Time
}

// get returns an answer not older than fresh, or ok false when none comes in
// time. A question that hangs is not asked again before it has ended.
func (c *cached[T]) get(ctx context.Context, wait time.Duration) (value T, err error, ok bool) {
	c.mu.Lock()
	if c.running == nil {
		if !c.at.IsZero() && time.Since(c.at) < c.fresh {
			defer c.mu.Unlock()
			return c.value, c.err, true
		}
		c.running = make(chan struct{})
		go c.refresh(ctx, c.running)
	}
	running := c.running
	c.mu.Unlock()
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-running:
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.value, c.err, true
	case <-timer.C:
		return value, nil, false
	}
}

func (c *cached[T]) refresh(ctx context.Context, running chan struct{}) {
	ctx, cancel := context.WithTimeout(ctx, gaugeTimeout)
	defer cancel()
	v, err := c.ask(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.value, c.err, c.at, c.running = v, err, time.Now(), nil
	close(running)
}

// waiting are the dead letters that wait for a person: how many, how many of them
// because a replay was interrupted, and since when the oldest does. The time is zero
// without one.
type waiting struct {
	letters     int
	interrupted int
	since       time.Time
}

// replayPatience is how long a letter may be replaying before somebody must have
// been interrupted.
const replayPatience = time.Minute

// age is how long the oldest letter waits, 0 without one.
func (w waiting) age(now time.Time) time.Duration {
	if w.since.IsZero() {
		return 0
	}
	return max(now.Sub(w.since), 0)
}

func countWaiting(ctx context.Context, letters *dlq.Letters) (w waiting, err error) {
	now := time.Now()
	for l, err := range letters.List(ctx, dlq.Filter{Interrupted: true, HeadersOnly: true}) {
		if err != nil {
			return waiting{}, err
		}
		if l.State == dlq.StateReplaying {
			if now.Sub(l.Updated) < replayPatience {
				continue
			}
			w.interrupted++
		}
		w.letters++
		if w.since.IsZero() || l.Time.Before(w.since) {
			w.since = l.Time
		}
	}
	return w, nil
}

// gauges reads the backlog where it is: so it is true also while the relay is
// stuck, stands by or looks at another table.
type gauges struct {
	ctx     context.Context // of the process: scrapes have none
	log     *slog.Logger
	stats   cached[outbox.Stats]
	letters cached[waiting]

	pending, oldest, dead, bytes, dlqLetters, dlqOldest *prometheus.Desc
}

func newGauges(ctx context.Context, table string, stats func(context.Context) (outbox.Stats, error),
	letters func(context.Context) (waiting, error), log *slog.Logger,
) *gauges {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, nil, prometheus.Labels{labelOutbox: table})
	}
	return &gauges{
		ctx:        ctx,
		log:        log,
		stats:      cached[outbox.Stats]{fresh: gaugeFresh, ask: stats},
		letters:    cached[waiting]{fresh: lettersFresh, ask: letters},
		pending:    desc(metricPending, "Committed rows not yet published."),
		oldest:     desc(metricOldestPending, "Age of the oldest row that is due, 0 without one."),
		dead:       desc(metricDeadLetter, "Rows parked in the outbox."),
		bytes:      desc(metricTableBytes, "Space the outbox takes in the database; on SQLite, the whole file."),
		dlqLetters: prometheus.NewDesc(metricLetters, "Dead letters that wait for a person.", nil, nil),
		dlqOldest:  prometheus.NewDesc(metricOldestLetter, "Age of the dead letter that waits longest for a person, 0 without one.", nil, nil),
	}
}

func (g *gauges) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{g.pending, g.oldest, g.dead, g.bytes, g.dlqLetters, g.dlqOldest} {
		ch <- d
	}
}

func (g *gauges) Collect(ch chan<- prometheus.Metric) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		s, err, ok := g.stats.get(g.ctx, gaugeWait)
		if !g.answered("database", err, ok) {
			return
		}
		gauge := func(d *prometheus.Desc, v float64) { ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v) }
		gauge(g.pending, float64(s.Pending))
		gauge(g.dead, float64(s.DeadLetter))
		gauge(g.bytes, float64(s.TableBytes))
		age := 0.0
		if !s.OldestPending.IsZero() {
			age = max(time.Since(s.OldestPending).Seconds(), 0)
		}
		gauge(g.oldest, age)
	})
	wg.Go(func() {
		w, err, ok := g.letters.get(g.ctx, gaugeWait)
		if g.answered("broker", err, ok) {
			ch <- prometheus.MustNewConstMetric(g.dlqLetters, prometheus.GaugeValue, float64(w.letters))
			ch <- prometheus.MustNewConstMetric(g.dlqOldest, prometheus.GaugeValue, w.age(time.Now()).Seconds())
		}
	})
}

func (g *gauges) answered(part string, err error, ok bool) (answered bool) {
	if ok && err == nil {
		return true
	}
	g.log.LogAttrs(g.ctx, slog.LevelDebug, "scrape without some gauges",
		slog.String("part", part), slog.Bool("timeout", !ok), slog.Any("err", err))
	return false
}

// letterCounter returns the question for the dead letters. letters returns nil
// before there is a connection.
func letterCounter(letters func() *dlq.Letters) func(context.Context) (waiting, error) {
	return func(ctx context.Context) (waiting, error) {
		l := letters()
		if l == nil {
			return waiting{}, jetstream.ErrStreamNotFound
		}
		return countWaiting(ctx, l)
	}
}

func knownReason(reason string) string {
	switch reason {
	case jetbox.ReasonMaxDeliveries, jetbox.ReasonTerminated:
		return reason
	}
	return "other"
}
