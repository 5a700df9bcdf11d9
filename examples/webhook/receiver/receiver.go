// Package receiver is an HTTP service that takes events from "relay consume
// --webhook": each one once, however often it is sent.
//
// What to look at: New is the wiring, receive the handler, and verify what a
// signature is good for. The rest fails on purpose, so that there is something to
// see.
package receiver

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/seed-5e04d8fb/jetbox/dedup/idempotent"
)

const (
	maxBody = 1 << 20
	maxAge  = 5 * time.Minute // of a signature
)

// Receiver keeps the events it is sent. It is safe for concurrent use.
type Receiver struct {
	db      *sql.DB
	handler http.Handler

	// Fail makes the receiver fail on purpose: of the requests for one event it
	// refuses the first (503), handles the second and breaks the connection
	// before the answer is out, and answers the third.
	Fail bool

	mu       sync.Mutex
	requests map[string]int // guarded by mu; by key
}

// New returns a receiver of events that are signed with key. The caller closes
// db, which has to be SQLite.
func New(ctx context.Context, db *sql.DB, key []byte) (*Receiver, error) {
	_, err := db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS received (event_id TEXT NOT NULL, type TEXT NOT NULL, payload BLOB NOT NULL)`)
	if err != nil {
		return nil, err
	}
	once, err := idempotent.New(ctx, db, idempotent.SQLite, idempotent.Config{
		RequireKey: true,
		// The time for which a sender may try again.
		Retention: 7 * 24 * time.Hour,
		MaxBody:   maxBody,
	})
	if err != nil {
		return nil, err
	}
	r := &Receiver{db: db, requests: map[string]int{}}
	// The signature comes first: a key is for those who may send.
	r.handler = verify(key, once.Handler(http.HandlerFunc(receive)))
	return r, nil
}

// receive writes the event. Together with the answer it is one transaction: after
// a crash, or a lost answer, the next request with this key writes nothing.
func receive(w http.ResponseWriter, r *http.Request) {
	payload, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if len(payload) == 0 { // no retry makes it better: 422 ends in a dead letter
		http.Error(w, "an event without a payload", http.StatusUnprocessableEntity)
		return
	}
	tx, err := idempotent.Tx(r.Context())
	if err == nil {
		_, err = tx.ExecContext(r.Context(), `INSERT INTO received VALUES (?, ?, ?)`,
			r.Header.Get("X-Event-Id"), r.Header.Get("X-Event-Type"), payload)
	}
	if err != nil { // 5xx: undone, and sent again
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.WriteHeader(http.StatusAccepted)
}

// ServeHTTP is the service, with its failures.
func (r *Receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	n := r.count(req.Header.Get("Idempotency-Key"))
	switch {
	case r.Fail && n == 1:
		http.Error(w, "on purpose", http.StatusServiceUnavailable)
	case r.Fail && n == 2:
		r.handler.ServeHTTP(httptest.NewRecorder(), req)
		panic(http.ErrAbortHandler) // breaks the connection
	default:
		r.handler.ServeHTTP(w, req)
	}
}

func (r *Receiver) count(key string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests[key]++
	return r.requests[key]
}

// Requests returns how many requests there were.
func (r *Receiver) Requests() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, of := range r.requests {
		n += of
	}
	return n
}

// Received returns how many events are kept, and how many different ones: the
// same number, if every event was received once.
func (r *Receiver) Received(ctx context.Context) (all, different int, err error) {
	err = r.db.QueryRowContext(ctx, `SELECT count(*), count(DISTINCT event_id) FROM received`).Scan(&all, &different)
	return all, different, err
}

// verify lets requests through whose X-Jetbox-Signature is right: t=UNIX,v1=HEX,
// the HMAC-SHA256 of "UNIX.BODY". The time is signed too, so that nobody can send
// an old request again when its answer is forgotten.
func verify(key []byte, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
		if err != nil {
			http.Error(w, err.Error(), http.StatusRequestEntityTooLarge)
			return
		}
		if err := checkSignature(key, r.Header.Get("X-Jetbox-Signature"), body, time.Now()); err != nil {
			http.Error(w, err.Error(), http.StatusUnauthorized)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		next.ServeHTTP(w, r)
	})
}

func checkSignature(key []byte, signature string, body []byte, now time.Time) error {
	t, v1, ok := strings.Cut(strings.TrimPrefix(signature, "t="), ",v1=")
	unix, err := strconv.ParseInt(t, 10, 64)
	if !ok || err != nil {
		return fmt.Errorf("signature %q, want t=UNIX,v1=HEX", signature)
	}
	if age := now.Sub(time.Unix(unix, 0)).Abs(); age > maxAge {
		return fmt.Errorf("signature is %v old, want at most %v", age, maxAge)
	}
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(t + "."))
	mac.Write(body)
	if got, err := hex.DecodeString(v1); err != nil || !hmac.Equal(got, mac.Sum(nil)) {
		return fmt.Errorf("signature %q does not fit", signature)
	}
	return nil
}
