package idempotent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
)

// headerReplayed marks an answer that is given again.
const headerReplayed = "Idempotency-Replayed"

// Handler returns next with the promises of the package comment.
func (m *Middleware) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Method {
		case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
			next.ServeHTTP(w, r)
			return
		}
		key, complaint := keyOf(r.Header)
		switch {
		case complaint != "":
			problem(w, http.StatusBadRequest, "Idempotency-Key is malformed", complaint)
			return
		case key == "" && m.mustHaveKey(r):
			problem(w, http.StatusBadRequest, "Idempotency-Key is missing", "This operation is idempotent and needs a key that is unique for it.")
			return
		case key == "":
			m.handle(w, r, next, &attempt{m: m})
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, m.cfg.MaxBody))
		if err != nil {
			refuseBody(w, err)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		m.answer(w, r, next, newRecord(m.cfg.CallerFunc(r), r, key, body))
	})
}

func (m *Middleware) mustHaveKey(r *http.Request) (must bool) {
	return m.cfg.RequireKey && (r.Method == http.MethodPost || r.Method == http.MethodPatch)
}

func refuseBody(w http.ResponseWriter, err error) {
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		problem(w, http.StatusRequestEntityTooLarge, "The request is too large", fmt.Sprintf("A request with an Idempotency-Key may have %d bytes.", tooLarge.Limit))
		return
	}
	problem(w, http.StatusBadRequest, "The request's body cannot be read", "")
}

// answer takes the key, or answers for the one who has it.
func (m *Middleware) answer(w http.ResponseWriter, r *http.Request, next http.Handler, mine *record) {
	there, err := m.store.take(r.Context(), mine)
	switch {
	case err != nil:
		m.unavailable(w, r, "take the key", err)
	case there == nil:
		m.handle(w, r, next, &attempt{m: m, record: mine})
	case there.fingerprint != mine.fingerprint:
		problem(w, http.StatusUnprocessableEntity, "Idempotency-Key is already used", "It was used for another request. A new request needs a new key.")
	case !there.done:
		w.Header().Set("Retry-After", "1")
		problem(w, http.StatusConflict, "A request is outstanding for this Idempotency-Key", "The first request with this key has not been answered yet.")
	default:
		w.Header().Set(headerReplayed, "true")
		there.answer.send(w)
	}
}

// handle runs the handler and keeps its answer, together with what it wrote.
func (m *Middleware) handle(w http.ResponseWriter, r *http.Request, next http.Handler, a *attempt) {
	ctx, cancel := context.WithTimeout(r.Context(), m.cfg.MaxTime)
	defer cancel()
	// The transaction does not end because the client has hung up: what its
	// handler then does is its own decision.
	txCtx, cancelTx := context.WithTimeout(context.WithoutCancel(r.Context()), m.cfg.MaxTime)
	defer cancelTx()
	a.ctx = txCtx
	rec := newRecorder(m.cfg.MaxAnswer)
	ended := false
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), settleTimeout)
		defer cancel()
		if ended {
			m.settle(ctx, w, r, a, rec)
		} else { // a panic, runtime.Goexit
			a.giveUp(ctx)
		}
	}()
	next.ServeHTTP(rec, r.WithContext(context.WithValue(ctx, attemptKey{}, a)))
	ended = true
}

// settle gives the answer, and keeps it if it is one to keep.
func (m *Middleware) settle(ctx context.Context, w http.ResponseWriter, r *http.Request, a *attempt, rec *recorder) {
	if rec.tooLarge {
		a.giveUp(ctx)
		m.cfg.Logger.LogAttrs(ctx, slog.LevelError, "answer is too large to be kept, request undone",
			slog.String("request", r.Method+" "+r.URL.EscapedPath()), slog.Int("limit", m.cfg.MaxAnswer))
		problem(w, http.StatusInternalServerError, "The answer is too large", "")
		return
	}
	answer := rec.end()
	if again(answer.status) {
		a.giveUp(ctx)
		answer.send(w)
		return
	}
	switch err := a.finish(ctx, answer); {
	case errors.Is(err, errTaken):
		w.Header().Set("Retry-After", "1")
		problem(w, http.StatusConflict, "A request is outstanding for this Idempotency-Key", "This one took too long, and another took over.")
		return
	case err != nil:
		m.unavailable(w, r, "keep the answer", err)
		return
	}
	answer.send(w)
	if a.record != nil {
		m.sweeper.Passing(ctx, 1)
	}
}

// again reports whether an answer asks to send the request again.
func again(status int) (ask bool) {
	switch status {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return true
	}
	return status >= http.StatusInternalServerError
}

func (m *Middleware) unavailable(w http.ResponseWriter, r *http.Request, what string, err error) {
	m.cfg.Logger.LogAttrs(r.Context(), slog.LevelError, "idempotency: database failed",
		slog.String("request", r.Method+" "+r.URL.EscapedPath()), slog.String("step", what), slog.Any("err", err))
	w.Header().Set("Retry-After", "1")
	problem(w, http.StatusServiceUnavailable, "The request cannot be handled now", "Send it again, with the same key.")
}
