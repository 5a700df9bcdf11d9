package main

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// Names of the metrics, a contract with dashboards. No label has a value that
// comes from an event: the number of series stays small.
const (
	metricPending       = "jetbox_outbox_pending_rows"
	metricOldestPending = "jetbox_outbox_oldest_pending_age_seconds"
	metricDeadLetter    = "jetbox_outbox_dead_letter_rows"
	metricTableBytes    = "jetbox_outbox_table_bytes"
	metricPublished     = "jetbox_relay_published_total"
	metricDuplicates    = "jetbox_relay_duplicates_total"
	metricFailures      = "jetbox_relay_publish_failures_total"
	metricAckLatency    = "jetbox_relay_ack_latency_seconds"
	metricPublishLag    = "jetbox_relay_publish_lag_seconds"
	metricShards        = "jetbox_relay_shards"
	metricLateRows      = "jetbox_relay_late_rows_total"
	metricUnverified    = "jetbox_relay_resent_unverified_total"
	metricRepublished   = "jetbox_relay_republished_total"
	metricLetters       = "jetbox_dlq_letters"
	metricOldestLetter  = "jetbox_dlq_oldest_letter_age_seconds"
	metricRouted        = "jetbox_dlq_routed_total"

	labelOutbox = "outbox"
	labelReason = "reason"
)

var (
	// From a broker in this process to one in trouble.
	ackBuckets = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
	// From a wake-up in time to an outage of hours.
	lagBuckets = []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200}
)

// metrics are what happens in this process. Gauges of the backlog are not among
// them: the database tells those.
type metrics struct {
	registry   *prometheus.Registry
	published  prometheus.Counter
	duplicates prometheus.Counter
	failures   *prometheus.CounterVec
	lateRows   prometheus.Counter
	unverified prometheus.Counter
	repeated   prometheus.Counter
	ackLatency prometheus.Histogram
	publishLag prometheus.Histogram
	routed     *prometheus.CounterVec
}

func newMetrics(table string, h *health) *metrics {
	outbox := prometheus.Labels{labelOutbox: table}
	m := &metrics{
		registry: prometheus.NewRegistry(),
		published: prometheus.NewCounter(prometheus.CounterOpts{
			Name: metricPublished, ConstLabels: outbox,
			Help: "Rows the stream has acknowledged, duplicates included.",
		}),
		duplicates: prometheus.NewCounter(prometheus.CounterOpts{
			Name: metricDuplicates, ConstLabels: outbox,
			Help: "Acknowledged rows that the stream had already.",
		}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: metricFailures, ConstLabels: outbox,
			Help: "Publishes that failed, by class of failure.",
		}, []string{labelReason}),
		unverified: prometheus.NewCounter(prometheus.CounterOpts{
			Name: metricUnverified, ConstLabels: outbox,
			Help: "Rows stored after an attempt of unknown outcome, without proof that it had not stored them.",
		}),
		repeated: prometheus.NewCounter(prometheus.CounterOpts{
			Name: metricRepublished, ConstLabels: outbox,
			Help: "Published rows that are pending again, because their stream has lost them or was created anew.",
		}),
		lateRows: prometheus.NewCounter(prometheus.CounterOpts{
			Name: metricLateRows, ConstLabels: outbox,
			Help: "Rows published after a higher row of their key, because they became visible later.",
		}),
		ackLatency: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: metricAckLatency, ConstLabels: outbox, Buckets: ackBuckets,
			Help: "Time from publish to PubAck.",
		}),
		publishLag: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: metricPublishLag, ConstLabels: outbox, Buckets: lagBuckets,
			Help: "Time from created_at to PubAck.",
		}),
		routed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: metricRouted,
			Help: "Dead letters opened by this process, by reason.",
		}, []string{labelReason}),
	}
	// At 0 from the start: rate() does not see the first failure of a series
	// that begins with it.
	for _, class := range [...]string{"outage", "row", "permanent", "record"} { // of relay.Hooks
		m.failures.WithLabelValues(class)
	}
	for _, reason := range [...]string{jetbox.ReasonMaxDeliveries, jetbox.ReasonTerminated} {
		m.routed.WithLabelValues(reason)
	}
	shards := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: metricShards, ConstLabels: outbox,
		Help: "Shards of keys this relay holds now.",
	}, func() float64 { return float64(h.now().Shards) })
	m.registry.MustRegister(m.published, m.duplicates, m.failures, m.lateRows, m.unverified, m.repeated, m.ackLatency, m.publishLag, m.routed, shards,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// hooks count what the relay reports.
func (m *metrics) hooks() relay.Hooks {
	return relay.Hooks{
		PublishedFunc: func(ack, lag time.Duration, duplicate bool) {
			m.published.Inc()
			if duplicate {
				m.duplicates.Inc()
			}
			if ack > 0 { // 0: found on the stream, nothing was sent
				m.ackLatency.Observe(ack.Seconds())
			}
			m.publishLag.Observe(lag.Seconds())
		},
		FailedFunc:      func(class string) { m.failures.WithLabelValues(class).Inc() },
		LateFunc:        m.lateRows.Inc,
		UnverifiedFunc:  m.unverified.Inc,
		RepublishedFunc: func(rows int) { m.repeated.Add(float64(rows)) },
	}
}

// letterRouted counts an opened letter. Reasons other than jetbox's own share
// one label.
func (m *metrics) letterRouted(reason string) {
	m.routed.WithLabelValues(knownReason(reason)).Inc()
}
