package receiver

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
)

func sign(key string, at time.Time, body string) string {
	mac := hmac.New(sha256.New, []byte(key))
	fmt.Fprintf(mac, "%d.%s", at.Unix(), body)
	return fmt.Sprintf("t=%d,v1=%s", at.Unix(), hex.EncodeToString(mac.Sum(nil)))
}

// Only what was signed with the key, and lately, is received, and each key once.
func TestRequestsWithoutAGoodSignatureAreRefused(t *testing.T) {
	db, err := sqlite.OpenDB(t.Context(), filepath.Join(t.TempDir(), "received.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	r, err := New(t.Context(), db, []byte("secret"))
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for _, tt := range []struct {
		name, key, body, signature string
		want                       int
	}{
		{"good", "k1", "x", sign("secret", now, "x"), http.StatusAccepted},
		{"sent again", "k1", "x", sign("secret", now, "x"), http.StatusAccepted},
		{"none", "k2", "x", "", http.StatusUnauthorized},
		{"no signature", "k2", "x", "t=1", http.StatusUnauthorized},
		{"another key", "k2", "x", sign("guess", now, "x"), http.StatusUnauthorized},
		{"another body", "k2", "y", sign("secret", now, "x"), http.StatusUnauthorized},
		{"old", "k2", "x", sign("secret", now.Add(-time.Hour), "x"), http.StatusUnauthorized},
		{"no payload", "k2", "", sign("secret", now, ""), http.StatusUnprocessableEntity},
		{"no key", "", "x", sign("secret", now, "x"), http.StatusBadRequest},
	} {
		req := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(tt.body))
		req.Header.Set("X-Jetbox-Signature", tt.signature)
		if tt.key != "" {
			req.Header.Set("Idempotency-Key", tt.key)
		}
		w := httptest.NewRecorder()
		r.ServeHTTP(w, req)
		if w.Code != tt.want {
			t.Errorf("%s: %d %s, want %d", tt.name, w.Code, w.Body, tt.want)
		}
	}
	if all, _, err := r.Received(t.Context()); all != 1 || err != nil {
		t.Errorf("%d received, %v, want 1", all, err)
	}
}
