package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

func TestReadyTellsRoleAndReason(t *testing.T) {
	t.Parallel()
	h := &health{reason: "opening the database"}
	check := func(when string, wantStatus int, wantBody string) {
		t.Helper()
		w := httptest.NewRecorder()
		h.serveReady(&redactor{})(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/readyz", http.NoBody))
		if w.Code != wantStatus || strings.TrimSpace(w.Body.String()) != wantBody {
			t.Errorf("%s: %d %s, want %d %s", when, w.Code, w.Body, wantStatus, wantBody)
		}
	}
	check("at first", 503, `{"ready":false,"role":"starting","reason":"opening the database","shards":0}`)
	h.starting("waiting for NATS: dial nats://u:hunter22@h")
	check("waiting", 503, `{"ready":false,"role":"starting","reason":"waiting for NATS: dial nats://u:*****@h","shards":0}`)
	state := relay.Health{Role: relay.RoleActive, Ready: true, Shards: 3}
	h.running(func() relay.Health { return state })
	check("active", 200, `{"ready":true,"role":"active","shards":3}`)
	state = relay.Health{Role: relay.RoleStandby, Ready: true, Reason: "standing by for a"}
	check("standing by", 200, `{"ready":true,"role":"standby","reason":"standing by for a","shards":0}`)
	state = relay.Health{Role: relay.RoleActive, Reason: "broker: gone", Shards: 2}
	check("broken", 503, `{"ready":false,"role":"active","reason":"broker: gone","shards":2}`)
	state.Ready = true
	h.stop()
	check("stopping", 503, `{"ready":false,"role":"stopping","reason":"asked to stop","shards":2}`)
}

func testMux(t *testing.T, stats func(context.Context) (outbox.Stats, error), letters func(context.Context) (waiting, error)) (*metrics, http.Handler) {
	t.Helper()
	h := &health{}
	m := newMetrics("outbox", h)
	m.registry.MustRegister(newGauges(t.Context(), "outbox", stats, letters, slog.New(slog.DiscardHandler)))
	return m, newMux(h, m.registry, &redactor{})
}

func scrape(t *testing.T, h http.Handler) string {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody))
	if w.Code != http.StatusOK {
		t.Fatalf("/metrics: %d %s", w.Code, w.Body)
	}
	return w.Body.String()
}

// Names and labels are a contract with dashboards.
func TestMetricsHaveTheirNames(t *testing.T) {
	t.Parallel()
	m, mux := testMux(t,
		func(context.Context) (outbox.Stats, error) {
			return outbox.Stats{Pending: 3, OldestPending: time.Now().Add(-time.Hour), DeadLetter: 2, TableBytes: 4096}, nil
		},
		func(context.Context) (waiting, error) {
			return waiting{letters: 7, since: time.Now().Add(-time.Hour)}, nil
		})
	hooks := m.hooks()
	hooks.PublishedFunc(time.Millisecond, time.Second, false)
	hooks.PublishedFunc(time.Millisecond, time.Second, true)
	hooks.FailedFunc("outage")
	hooks.LateFunc()
	m.letterRouted(jetbox.ReasonTerminated)
	text := scrape(t, mux)
	for _, line := range []string{
		`jetbox_outbox_pending_rows{outbox="outbox"} 3`,
		`jetbox_outbox_oldest_pending_age_seconds{outbox="outbox"} 36`,
		`jetbox_outbox_dead_letter_rows{outbox="outbox"} 2`,
		`jetbox_outbox_table_bytes{outbox="outbox"} 4096`,
		`jetbox_relay_published_total{outbox="outbox"} 2`,
		`jetbox_relay_duplicates_total{outbox="outbox"} 1`,
		`jetbox_relay_late_rows_total{outbox="outbox"} 1`,
		`jetbox_relay_publish_failures_total{outbox="outbox",reason="outage"} 1`,
		`jetbox_relay_publish_failures_total{outbox="outbox",reason="permanent"} 0`,
		`jetbox_relay_publish_failures_total{outbox="outbox",reason="record"} 0`,
		`jetbox_relay_publish_failures_total{outbox="outbox",reason="row"} 0`,
		`jetbox_relay_ack_latency_seconds_count{outbox="outbox"} 2`,
		`jetbox_relay_publish_lag_seconds_count{outbox="outbox"} 2`,
		`jetbox_relay_shards{outbox="outbox"} 0`,
		`jetbox_dlq_letters 7`,
		`jetbox_dlq_oldest_letter_age_seconds 36`,
		`jetbox_dlq_routed_total{reason="max_deliveries"} 0`,
		`jetbox_dlq_routed_total{reason="terminated"} 1`,
	} {
		if !strings.Contains(text, "\n"+line) {
			t.Errorf("no %s", line)
		}
	}
}

func TestShardsMetricFollowsTheRelay(t *testing.T) {
	t.Parallel()
	h := &health{}
	mux := newMux(h, newMetrics("outbox", h).registry, &redactor{})
	for _, held := range []int{3, 16, 0} {
		h.running(func() relay.Health { return relay.Health{Role: relay.RoleActive, Shards: held} })
		if want := fmt.Sprintf("\njetbox_relay_shards{outbox=\"outbox\"} %d\n", held); !strings.Contains(scrape(t, mux), want) {
			t.Errorf("with %d shards held: no line%s", held, want)
		}
	}
}

// BR-69: 2,000 reasons made of error texts stay a handful of series.
func TestMetricSeriesDoNotGrowWithReasons(t *testing.T) {
	t.Parallel()
	m, mux := testMux(t, func(context.Context) (outbox.Stats, error) { return outbox.Stats{}, nil },
		func(context.Context) (waiting, error) { return waiting{}, nil })
	for i := range 2000 {
		m.letterRouted(strings.Repeat("x", i))
	}
	series := 0
	for line := range strings.Lines(scrape(t, mux)) {
		if !strings.HasPrefix(line, "#") {
			series++
		}
	}
	if series > 300 {
		t.Errorf("%d series", series)
	}
}

// A database that hangs delays a scrape for two seconds and takes only its own
// gauges away; it is asked once, not once per scrape.
func TestScrapeAnswersWhileDatabaseHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		var asked atomic.Int32
		_, mux := testMux(t,
			func(ctx context.Context) (outbox.Stats, error) {
				asked.Add(1)
				select {
				case <-release:
					return outbox.Stats{Pending: 5}, nil
				case <-ctx.Done():
					return outbox.Stats{}, ctx.Err()
				}
			},
			func(context.Context) (waiting, error) {
				return waiting{letters: 7, since: time.Now().Add(-time.Hour)}, nil
			})
		for range 3 {
			began := time.Now()
			text := scrape(t, mux)
			if took := time.Since(began); took != gaugeWait {
				t.Errorf("a scrape took %v, want %v", took, gaugeWait)
			}
			if strings.Contains(text, "jetbox_outbox_pending_rows{") || !strings.Contains(text, "jetbox_dlq_letters 7") {
				t.Error("want the letters and no rows")
			}
		}
		if n := asked.Load(); n != 1 {
			t.Errorf("the database was asked %d times while it hung, want once", n)
		}
		close(release)
		synctest.Wait()
		if text := scrape(t, mux); !strings.Contains(text, `jetbox_outbox_pending_rows{outbox="outbox"} 5`) {
			t.Error("the rows are not back")
		}
	})
}

func TestGaugesAreGoneWhenTheirQuestionFails(t *testing.T) {
	t.Parallel()
	broken := errors.New("disk I/O error")
	_, mux := testMux(t, func(context.Context) (outbox.Stats, error) { return outbox.Stats{}, broken },
		func(context.Context) (waiting, error) { return waiting{}, broken })
	if text := scrape(t, mux); strings.Contains(text, "jetbox_outbox_") || strings.Contains(text, "jetbox_dlq_letters") ||
		strings.Contains(text, "jetbox_dlq_oldest") {
		t.Error("values without an answer")
	}
}

func TestHTTPServesWhatItShouldAndNothingElse(t *testing.T) {
	t.Parallel()
	_, mux := testMux(t, func(context.Context) (outbox.Stats, error) { return outbox.Stats{}, nil },
		func(context.Context) (waiting, error) { return waiting{}, nil })
	for _, tt := range []struct {
		method, path string
		want         int
	}{
		{http.MethodGet, "/livez", 200},
		{http.MethodHead, "/livez", 200},
		{http.MethodGet, "/readyz", 503},
		{http.MethodGet, "/metrics", 200},
		{http.MethodPost, "/livez", 405},
		{http.MethodGet, "/", 404},
		{http.MethodGet, "/debug/pprof/", 404},
	} {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), tt.method, tt.path, http.NoBody))
		if w.Code != tt.want {
			t.Errorf("%s %s: %d, want %d", tt.method, tt.path, w.Code, tt.want)
		}
	}
}

// A client that never finishes its request does not hold a connection for ever,
// nor the end of the process.
func TestSlowClientDoesNotHoldServer(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	s, err := startHTTP(t.Context(), "127.0.0.1:0", http.NotFoundHandler(), slog.New(slog.NewJSONHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	if s.server.ReadHeaderTimeout == 0 || s.server.ReadTimeout == 0 || s.server.WriteTimeout == 0 || s.server.IdleTimeout == 0 {
		t.Error("a timeout is not set")
	}
	_, addr, _ := strings.Cut(log.String(), `"address":"`)
	addr, _, _ = strings.Cut(addr, `"`)
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET / HT"); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := s.close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > httpStop+2*time.Second {
		t.Errorf("closing took %v", took)
	}
}
