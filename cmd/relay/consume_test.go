package main

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/examples/webhook/receiver"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
)

func delivery(payload string) *consumer.Delivery {
	return &consumer.Delivery{
		Event:        jetbox.Event{ID: "e1", Key: "k1", Subject: "events.a", Type: "a.done", ContentType: "text/plain", Payload: []byte(payload)},
		Stream:       "EVENTS",
		Consumer:     "d",
		StreamSeq:    7,
		NumDelivered: 2,
		RawHeader:    map[string][]string{"ce-id": {"e1"}, "x-Multi": {"1", "2"}, "traceparent": {"00-1"}, "Nul": {"a\x00b"}},
	}
}

func needShell(t *testing.T) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("the commands of this test are for /bin/sh")
	}
}

// verdictOf names what a handler's error means.
func verdictOf(err error) string {
	switch {
	case err == nil:
		return "ack"
	case jetbox.IsPermanent(err):
		return "permanent"
	}
	return "retry"
}

func TestExecTurnsExitStatusIntoVerdict(t *testing.T) {
	t.Parallel()
	needShell(t)
	tests := []struct {
		name, command, want, wantText string
	}{
		{"success", "exit 0", "ack", ""},
		{"permanent", "echo no such customer >&2; exit 65", "permanent", "command: exit status 65: no such customer"},
		{"failure", "echo busy >&2; exit 1", "retry", "command: exit status 1: busy"},
		{"not found", "/no/such/command", "retry", "exit status 127"},
		{"killed", "kill -9 $$", "retry", "signal: killed"},
		{"stdin unread", "exec <&-; exit 0", "ack", ""},
		{"only the end of stderr", "for i in 1 2 3; do head -c 3000 /dev/zero | tr '\\0' $i >&2; done; exit 1", "retry", ": 3333"},
		{"children keep its streams", "sleep 60 & exit 0", "ack", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := &execHandler{command: tt.command, stdout: io.Discard, stderr: io.Discard}
			err := h.handle(t.Context(), delivery(strings.Repeat("x", 1<<17)))
			if got := verdictOf(err); got != tt.want {
				t.Fatalf("verdict %s (%v), want %s", got, err, tt.want)
			}
			if err != nil && !strings.Contains(err.Error(), tt.wantText) {
				t.Errorf("error %q, want it to contain %q", err, tt.wantText)
			}
			if err != nil && len(err.Error()) > stderrKept+100 {
				t.Errorf("error has %d bytes", len(err.Error()))
			}
		})
	}
}

func TestExecGetsPayloadAndEnvironment(t *testing.T) {
	t.Parallel()
	needShell(t)
	var out strings.Builder
	h := &execHandler{
		command: "env | sort | grep ^JETBOX_; env | grep -c '^ce-id'; cat",
		environ: append(os.Environ(), "JETBOX_H_OLD=other event"),
		stdout:  &out,
		stderr:  io.Discard,
	}
	if err := h.handle(t.Context(), delivery("line 1\nline 2\x01\xff")); err != nil {
		t.Fatal(err)
	}
	want := "JETBOX_DELIVERED=2\nJETBOX_H_CE_ID=e1\nJETBOX_H_NUL=ab\nJETBOX_H_TRACEPARENT=00-1\nJETBOX_H_X_MULTI=1\n" +
		"JETBOX_SEQUENCE=7\nJETBOX_STREAM=EVENTS\nJETBOX_SUBJECT=events.a\n0\nline 1\nline 2\x01\xff"
	if out.String() != want {
		t.Errorf("the command saw\n%q\nwant\n%q", out.String(), want)
	}
	if env := eventEnv(delivery("")); !slices.Contains(env, "JETBOX_H_X_MULTI=1\n2") {
		t.Errorf("environment %q, want both values of x-Multi joined by a newline", env)
	}
}

// A command that takes too long is killed with its children.
func TestExecIsKilledWithItsChildrenAtTimeout(t *testing.T) {
	t.Parallel()
	needShell(t)
	file := filepath.Join(t.TempDir(), "alive")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 200*time.Millisecond, consumer.ErrHandleTimeout)
	defer cancel()
	h := &execHandler{command: "(sleep 1; touch " + file + ") & sleep 60", stdout: io.Discard, stderr: io.Discard}
	began := time.Now()
	err := h.handle(ctx, delivery(""))
	if verdictOf(err) != "retry" || !errors.Is(err, consumer.ErrHandleTimeout) {
		t.Errorf("error %v, want a retry for the timeout", err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("took %v", took)
	}
	time.Sleep(1200 * time.Millisecond) // a real wait: for what must not happen
	if _, err := os.Stat(file); err == nil {
		t.Error("a child of the command lived on")
	}
}

func TestWebhookTurnsStatusIntoVerdict(t *testing.T) {
	t.Parallel()
	for code, want := range map[int]string{
		200: "ack", 201: "ack", 204: "ack", 302: "retry", 400: "permanent", 404: "permanent", 409: "retry",
		410: "permanent", 422: "permanent", 429: "retry", 500: "retry", 503: "retry",
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if code == http.StatusFound {
				w.Header().Set("Location", "/elsewhere")
			}
			w.WriteHeader(code)
			if code >= 300 {
				_, _ = io.WriteString(w, "because")
			}
		}))
		w, err := newWebhook(srv.URL, "", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		err = w.handle(t.Context(), delivery("x"))
		if got := verdictOf(err); got != want {
			t.Errorf("%d: verdict %s (%v), want %s", code, got, err, want)
		}
		if err != nil && !strings.Contains(err.Error(), fmt.Sprint(code)) {
			t.Errorf("%d: error %q does not name it", code, err)
		}
		srv.Close()
		if err := w.handle(t.Context(), delivery("x")); verdictOf(err) != "retry" {
			t.Errorf("no answer: %v, want a retry", err)
		}
	}
}

func TestWebhookSendsEventAndSignature(t *testing.T) {
	t.Parallel()
	keyFile := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(keyFile, []byte("s3cret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	requests := make(chan *http.Request, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(strings.NewReader(string(body)))
		requests <- r
	}))
	defer srv.Close()
	w, err := newWebhook(srv.URL, keyFile, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.handle(t.Context(), delivery("body \x00")); err != nil {
		t.Fatal(err)
	}
	r := <-requests
	body, _ := io.ReadAll(r.Body)
	for name, want := range map[string]string{
		"Idempotency-Key": "k1", "X-Event-Id": "e1", "X-Event-Type": "a.done", "X-Event-Subject": "events.a",
		"Content-Type": "text/plain", "Ce-Id": "e1", "Traceparent": "00-1", "X-Multi": "",
	} {
		if got := r.Header.Get(name); got != want {
			t.Errorf("header %s is %q, want %q", name, got, want)
		}
	}
	if r.Method != http.MethodPost || string(body) != "body \x00" {
		t.Errorf("got %s with %q", r.Method, body)
	}
	unix, signature, _ := strings.Cut(strings.TrimPrefix(r.Header.Get("X-Jetbox-Signature"), "t="), ",v1=")
	mac := hmac.New(sha256.New, []byte("s3cret"))
	mac.Write([]byte(unix + ".body \x00"))
	if want := hex.EncodeToString(mac.Sum(nil)); signature != want {
		t.Errorf("signature %q, want %q", signature, want)
	}
	if _, err := newWebhook(srv.URL, keyFile+"x", time.Minute); err == nil {
		t.Error("a missing key file is accepted")
	}
}

func TestWebhookHonorsRetryAfter(t *testing.T) {
	t.Parallel()
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	for value, want := range map[string]time.Duration{
		"": 0, "0": 0, "-5": 0, "soon": 0, "7": 7 * time.Second, "9999999": retryAfterMost, "9223372036854775807": retryAfterMost,
		now.Add(20 * time.Second).Format(http.TimeFormat): 20 * time.Second,
		now.Add(-time.Hour).Format(http.TimeFormat):       -time.Hour,
		now.Add(time.Hour).Format(http.TimeFormat):        retryAfterMost,
	} {
		for timeout, most := range map[time.Duration]time.Duration{time.Hour: retryAfterMost, 20 * time.Second: 10 * time.Second} {
			w, err := newWebhook("http://x.example", "", timeout)
			if err != nil {
				t.Fatal(err)
			}
			w.keepQuiet(value, now)
			want := min(want, most)
			if got := w.quietUntil(); want == 0 && !got.IsZero() || want > 0 && !got.Equal(now.Add(want)) {
				t.Errorf("Retry-After %q, --timeout %v: quiet until %v, want now + %v", value, timeout, got, want)
			}
		}
	}
}

// An event that succeeded is not run again, also by the next process; one that
// failed is. What fails for good is a dead letter with the command's last words,
// and can be replayed.
func TestConsumeExecWithLedger(t *testing.T) {
	t.Parallel()
	needShell(t)
	r := startRun(t)
	consume := func(durable string) *proc {
		return start(t, r.dir, "consume", "--durable", durable, "--nats", r.nats, "--ledger", "sqlite:ledger.db",
			"--backoff", "50ms", "--max-deliver", "3", "--workers", "2",
			"--exec", `p=$(cat); echo "$p $JETBOX_DELIVERED" >> log; case $p in poison) test -f mended || { echo no rate >&2; exit 1; };; esac`)
	}
	log := func() string {
		b, _ := os.ReadFile(filepath.Join(r.dir, "log")) // not there yet
		return string(b)
	}
	first := consume("d")
	once(t, r.dir, "emit", "events.a", "good", "--key", "k1")
	once(t, r.dir, "emit", "events.a", "poison", "--key", "k2")
	once(t, r.dir, "emit", "events.a", "later", "--key", "k3")
	var letters string
	eventually(t, "one dead letter", func() (bool, string) {
		letters = once(t, r.dir, "dlq", "list", "--json", "--nats", r.nats)
		return strings.Count(letters, "\n") == 1, log()
	})
	var letter struct {
		ID         string `json:"id"`
		Reason     string `json:"reason"`
		Error      string `json:"error"`
		Deliveries int    `json:"deliveries"`
	}
	if err := json.Unmarshal([]byte(letters), &letter); err != nil {
		t.Fatal(err)
	}
	if letter.Reason != "max_deliveries" || letter.Deliveries != 3 || !strings.Contains(letter.Error, "no rate") {
		t.Errorf("letter %+v", letter)
	}
	first.signal(t, syscall.SIGTERM)
	if code := first.wait(t); code != exitFine {
		t.Errorf("consume ended with %d", code)
	}

	// A letter asked for by name is shown or said to be missing; the limit counts
	// over all names.
	none := "dlq.EVENTS.d.999-1"
	ask := start(t, r.dir, "dlq", "list", letter.ID, none, "--json", "--nats", r.nats)
	ask.stderr.line(t, "no letter matches "+none)
	if code := ask.wait(t); code != exitFine {
		t.Errorf("dlq list of a missing letter ended with %d", code)
	}
	if out := once(t, r.dir, "dlq", "list", letter.ID, "--id", letter.ID, "--limit", "1", "--json", "--nats", r.nats); out != letters {
		t.Errorf("dlq list --limit 1 printed %s", out)
	}
	show := start(t, r.dir, "dlq", "show", none, "--nats", r.nats)
	show.stderr.line(t, "relay: there is no letter "+none)
	if code := show.wait(t); code != exitFailed {
		t.Errorf("dlq show of no letter ended with %d", code)
	}

	// The same messages again, with the same keys: as after a lost ack.
	js := connectJS(t, r.nats)
	if err := js.DeleteConsumer(t.Context(), "EVENTS", "d"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.dir, "mended"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	consume("d")
	eventually(t, "poison handled", func() (bool, string) { return strings.Count(log(), "poison") == 4, log() })
	if out := once(t, r.dir, "dlq", "replay", "--id", letter.ID, "--json", "--nats", r.nats); !strings.Contains(out, `"state":"replayed"`) {
		t.Errorf("dlq replay printed %s", out)
	}
	once(t, r.dir, "emit", "events.a", "last", "--key", "k4")
	eventually(t, "the last event", func() (bool, string) { return strings.Contains(log(), "last"), log() })
	got := log()
	for word, want := range map[string]int{"good": 1, "later": 1, "last": 1, "poison": 4} {
		if n := strings.Count(got, word); n != want {
			t.Errorf("%s was run %d times, want %d:\n%s", word, n, want, got)
		}
	}
}

// The webhook as a process: the headers arrive, a failure is tried again.
func TestConsumeWebhookRetries(t *testing.T) {
	t.Parallel()
	r := startRun(t)
	var mu sync.Mutex
	var seen []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		body, _ := io.ReadAll(req.Body)
		seen = append(seen, req.Header.Get("Idempotency-Key")+":"+string(body))
		if len(seen) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	t.Cleanup(srv.Close)
	start(t, r.dir, "consume", "--durable", "w", "--nats", r.nats, "--backoff", "20ms", "--webhook", srv.URL)
	once(t, r.dir, "emit", "events.w", "hi", "--key", "k1")
	eventually(t, "two requests", func() (bool, string) {
		mu.Lock()
		defer mu.Unlock()
		return slices.Equal(seen, []string{"k1:hi", "k1:hi"}), fmt.Sprint(seen)
	})
}

// The webhook into the receiver of the examples, which checks signatures, refuses
// the first request for each event and breaks the connection after handling the
// second: each event is received once. One that it will never take is a dead
// letter with its words.
func TestConsumeWebhookIntoAReceiverThatFails(t *testing.T) {
	t.Parallel()
	r := startRun(t)
	db, err := sqlite.OpenDB(t.Context(), filepath.Join(r.dir, "received.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	into, err := receiver.New(t.Context(), db, []byte("s3cret"))
	if err != nil {
		t.Fatal(err)
	}
	into.Fail = true
	srv := httptest.NewUnstartedServer(into)
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.Start()
	t.Cleanup(srv.Close)
	if err := os.WriteFile(filepath.Join(r.dir, "key"), []byte("s3cret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := start(t, r.dir, "consume", "--durable", "w", "--nats", r.nats, "--backoff", "20ms", "--workers", "3",
		"--webhook", srv.URL, "--hmac-key-file", "key", "--ledger", "sqlite:ledger.db", "--metrics", "127.0.0.1:0", "--log-format", "json")
	for i := range 3 {
		once(t, r.dir, "emit", "events.w", fmt.Sprint("event ", i))
	}
	once(t, r.dir, "emit", "events.w", "")
	eventually(t, "a dead letter, and three events received", func() (bool, string) {
		letters := once(t, r.dir, "dlq", "list", "--json", "--nats", r.nats)
		all, _, err := into.Received(t.Context())
		entries := 0
		if err == nil {
			entries, err = ledgerEntries(t.Context(), r.dir)
		}
		return err == nil && all == 3 && entries == 3 && strings.Contains(letters, "an event without a payload") &&
			strings.Contains(letters, `"reason":"terminated"`), fmt.Sprintf("%d received, %d entries, %v\n%s", all, entries, err, letters)
	})
	if all, different, err := into.Received(t.Context()); all != 3 || different != 3 || err != nil {
		t.Errorf("received %d, %d different, %v, want 3 and 3", all, different, err)
	}

	// What the metrics say of it, and the others that have not happened.
	url := "http://" + c.field(t, "serving HTTP", "address")
	for _, want := range []string{
		`jetbox_consumer_handled_total{consumer="w",verdict="ack"} 3`,
		`jetbox_consumer_handled_total{consumer="w",verdict="term"} 1`,
		`jetbox_consumer_handled_total{consumer="w",verdict="skip"} 0`,
		`jetbox_consumer_duplicates_total{consumer="w"} 0`,
		`jetbox_consumer_sequence_gaps_total{consumer="w"} 0`,
		`jetbox_consumer_handle_seconds_count{consumer="w"}`,
	} {
		eventually(t, want, func() (bool, string) {
			_, body := get(t, url+"/metrics")
			return strings.Contains(body, want), body
		})
	}
	if status, body := get(t, url+"/readyz"); status != http.StatusOK || !strings.Contains(body, `"ready":true`) {
		t.Errorf("/readyz: %d %s", status, body)
	}
}

func ledgerEntries(ctx context.Context, dir string) (n int, err error) {
	db, err := sqlite.OpenDB(ctx, filepath.Join(dir, "ledger.db"))
	if err != nil {
		return 0, err
	}
	defer db.Close()
	err = db.QueryRowContext(ctx, `SELECT count(*) FROM jetbox_ledger`).Scan(&n)
	return n, err
}

// What no HTTP header can hold is nothing a retry mends.
func TestWebhookOfAnEventThatFitsNoHeaderIsPermanent(t *testing.T) {
	t.Parallel()
	w, err := newWebhook("http://127.0.0.1:1", "", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	d := delivery("x")
	d.Type = "two\nlines"
	if err := w.handle(t.Context(), d); verdictOf(err) != "permanent" || !strings.Contains(err.Error(), headerEventType) {
		t.Errorf("error %v, want a permanent one that names %s", err, headerEventType)
	}
}

// A letter says why there was no answer.
func TestWebhookThatIsGivenUpSaysWhy(t *testing.T) {
	t.Parallel()
	end := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-end }))
	defer srv.Close()
	defer close(end)
	w, err := newWebhook(strings.Replace(srv.URL, "http://", "http://me:s3cret@", 1), "", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	for _, cause := range []error{consumer.ErrHandleTimeout, consumer.ErrStopping} {
		ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, cause)
		err := w.handle(ctx, delivery("x"))
		cancel()
		if !errors.Is(err, cause) || !strings.Contains(err.Error(), "127.0.0.1") || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("error %v, want %v, the host, and no password", err, cause)
		}
	}
}
