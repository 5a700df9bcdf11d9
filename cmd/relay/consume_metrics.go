package main

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/seed-5e04d8fb/jetbox/consumer"
)

// Names of a consumer's metrics, a contract with dashboards.
const (
	metricHandled            = "jetbox_consumer_handled_total"
	metricConsumerDuplicates = "jetbox_consumer_duplicates_total"
	metricSequenceGaps       = "jetbox_consumer_sequence_gaps_total"
	metricHandleTime         = "jetbox_consumer_handle_seconds"

	labelConsumer = "consumer"
	labelVerdict  = "verdict"
)

// handleBuckets are from a write to a database to a slow command.
var handleBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}

// consumerMetrics are what a consumer did in this process. It is safe for
// concurrent use.
type consumerMetrics struct {
	registry   *prometheus.Registry
	handled    map[consumer.Verdict]prometheus.Counter
	duplicates prometheus.Counter
	gaps       prometheus.Counter
	took       prometheus.Histogram
}

func newConsumerMetrics(durable string) *consumerMetrics {
	of := prometheus.Labels{labelConsumer: durable}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: of})
	}
	handled := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: metricHandled, Help: "Deliveries settled, by what became of them.", ConstLabels: of,
	}, []string{labelVerdict})
	m := &consumerMetrics{
		registry:   prometheus.NewRegistry(),
		handled:    map[consumer.Verdict]prometheus.Counter{},
		duplicates: counter(metricConsumerDuplicates, "Deliveries of events that the ledger had seen."),
		gaps:       counter(metricSequenceGaps, "Deliveries with events missing between them and the last one of their aggregate."),
		took: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: metricHandleTime, Help: "Time from the start of a handler to its verdict.", ConstLabels: of, Buckets: handleBuckets,
		}),
	}
	for _, v := range []consumer.Verdict{consumer.Ack, consumer.Nak, consumer.Term, consumer.Skip} {
		m.handled[v] = handled.WithLabelValues(string(v)) // there from the start, at 0
	}
	m.registry.MustRegister(handled, m.duplicates, m.gaps, m.took,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *consumerMetrics) onHandled(_ *consumer.Delivery, v consumer.Verdict, took time.Duration) {
	m.handled[v].Inc()
	if v != consumer.Skip { // no handler saw it
		m.took.Observe(took.Seconds())
	}
}

func (m *consumerMetrics) onDuplicate(*consumer.Delivery) { m.duplicates.Inc() }

func (m *consumerMetrics) onGap(*consumer.Delivery, int64) { m.gaps.Inc() }

// serve serves them at the address until the returned stop is called.
func (m *consumerMetrics) serve(ctx context.Context, address string, nc *nats.Conn, log *slog.Logger) (stop func() error, err error) {
	if address == listenOff {
		return func() error { return nil }, nil
	}
	srv, err := startHTTP(ctx, address, m.handler(nc), log)
	var of hintError // its remedy is for relay run
	if errors.As(err, &of) {
		err = withHint(of.error, "--metrics takes another address, or off")
	}
	if err != nil {
		return nil, err
	}
	return srv.close, nil
}

// handler serves them. Ready is who has a connection to the broker.
func (m *consumerMetrics) handler(nc *nats.Conn) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", serveAlive)
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		r := struct {
			Ready  bool   `json:"ready"`
			Reason string `json:"reason,omitempty"`
		}{Ready: nc.IsConnected()}
		status := http.StatusOK
		if !r.Ready {
			r.Reason, status = "the connection to NATS is "+nc.Status().String(), http.StatusServiceUnavailable
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(status)
		_ = writeJSON(w, r)
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{}))
	return mux
}
