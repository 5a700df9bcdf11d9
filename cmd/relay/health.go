package main

import (
	"encoding/json"
	"net/http"
	"sync"

	"github.com/seed-5e04d8fb/jetbox/relay"
)

// health is what /readyz answers: starting until there is a relay to ask,
// stopping from the first signal on. It is safe for concurrent use.
type health struct {
	mu       sync.Mutex // guards what follows
	reason   string     // why it is still starting
	ask      func() relay.Health
	stopping bool
}

// readiness is the body of /readyz.
type readiness struct {
	Ready  bool   `json:"ready"`
	Role   string `json:"role"`             // starting, active, standby, stopping or stopped
	Reason string `json:"reason,omitempty"` // what is wrong, or whom it stands by for
	Shards int    `json:"shards"`           // held now, also while what is in hand is finished
}

func (h *health) starting(reason string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reason = reason
}

func (h *health) running(ask func() relay.Health) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ask = ask
}

// stop makes it not ready for good: a load balancer or an orchestrator looks
// elsewhere while what is in hand is finished.
func (h *health) stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopping = true
}

func (h *health) now() readiness {
	h.mu.Lock()
	ask, reason, stopping := h.ask, h.reason, h.stopping
	h.mu.Unlock()
	r := readiness{Role: "starting", Reason: reason}
	if ask != nil {
		is := ask()
		r = readiness{Ready: is.Ready, Role: string(is.Role), Reason: is.Reason, Shards: is.Shards}
	}
	if stopping {
		r.Ready, r.Role, r.Reason = false, "stopping", "asked to stop"
	}
	return r
}

// serveReady answers 200 while rows can flow, through this relay or the one it
// stands by for.
func (h *health) serveReady(secrets *redactor) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		r := h.now()
		r.Reason = oneLine(secrets.mask(r.Reason))
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if !r.Ready {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(r) // the client went away
	}
}

func serveAlive(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write([]byte("{\"alive\":true}\n"))
}
