package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// httpStop bounds how long an answer in progress may take when stopping.
const httpStop = 2 * time.Second

func newMux(h *health, registry *prometheus.Registry, secrets *redactor) *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", serveAlive)
	mux.HandleFunc("GET /readyz", h.serveReady(secrets))
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		// What one collector cannot say must not hide the rest.
		ErrorHandling: promhttp.ContinueOnError,
	}))
	return mux
}

// httpServer serves until it is closed.
type httpServer struct {
	server *http.Server
	done   chan struct{}
}

// startHTTP listens on addr and serves handler. It returns when connections
// are taken.
func startHTTP(ctx context.Context, addr string, handler http.Handler, log *slog.Logger) (*httpServer, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, withHint(fmt.Errorf("serve HTTP: %w", err), "another relay run may have it: --http takes another address, or off")
	}
	s := &httpServer{
		server: &http.Server{
			Handler:           handler,
			ReadHeaderTimeout: 5 * time.Second,
			ReadTimeout:       10 * time.Second,
			WriteTimeout:      30 * time.Second,
			IdleTimeout:       time.Minute,
			MaxHeaderBytes:    64 << 10,
			ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		},
		done: make(chan struct{}),
	}
	go func() {
		defer close(s.done)
		if err := s.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.LogAttrs(ctx, slog.LevelError, "HTTP server ended", slog.Any("err", err))
		}
	}()
	log.LogAttrs(ctx, slog.LevelInfo, "serving HTTP", slog.String("address", l.Addr().String()))
	return s, nil
}

// close finishes the answers in progress and ends the server.
func (s *httpServer) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), httpStop)
	defer cancel()
	err := s.server.Shutdown(ctx)
	if err != nil {
		err = s.server.Close()
	}
	<-s.done
	return err
}
