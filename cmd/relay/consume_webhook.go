package main

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
)

const (
	headerEventID      = "X-Event-Id"
	headerEventType    = "X-Event-Type"
	headerEventSubject = "X-Event-Subject"
	headerSignature    = "X-Jetbox-Signature"

	// retryAfterMost bounds how long a receiver may ask for silence, and half the
	// time there is for one event does: a wait that uses it up would count as a
	// failed delivery, and nothing was delivered.
	retryAfterMost = time.Minute

	// answerKept is how much of an answer's body goes into an error.
	answerKept = 512
)

func webhookURL(s string) (string, error) {
	u, err := url.Parse(s)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", errors.New("want an http:// or https:// URL")
	}
	return s, nil
}

// webhook posts events. It is safe for concurrent use.
type webhook struct {
	url    string
	key    []byte        // signs, when set
	quiet  time.Duration // the longest silence
	client *http.Client

	mu      sync.Mutex
	silence time.Time // guarded by mu; the receiver wants nothing before
}

func newWebhook(target, keyFile string, timeout time.Duration) (*webhook, error) {
	w := &webhook{url: target, quiet: min(retryAfterMost, timeout/2), client: &http.Client{
		// A redirected POST becomes a GET without the event: not followed.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	if keyFile != "" {
		key, err := os.ReadFile(keyFile)
		if err != nil {
			return nil, usagef("--hmac-key-file: %w", err)
		}
		if w.key = bytes.TrimRight(key, "\r\n"); len(w.key) == 0 {
			return nil, usagef("--hmac-key-file %s is empty", keyFile)
		}
	}
	return w, nil
}

func (w *webhook) handle(ctx context.Context, d *consumer.Delivery) error {
	if err := sleep(ctx, time.Until(w.quietUntil())); err != nil {
		return err
	}
	req, err := w.request(ctx, d, time.Now())
	if err != nil {
		return err
	}
	resp, err := w.client.Do(req)
	if err != nil {
		err = errors.New(mask(err.Error())) // it holds the URL
		if cause := context.Cause(ctx); cause != nil {
			return fmt.Errorf("webhook: %w: %w", cause, err)
		}
		return err
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, answerKept)) // for the error only
	return w.judge(resp, strings.TrimSpace(strings.ToValidUTF8(string(text), "")))
}

func (w *webhook) request(ctx context.Context, d *consumer.Delivery, now time.Time) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url, bytes.NewReader(d.Payload))
	if err != nil {
		return nil, err
	}
	h := req.Header
	set := func(name, value string) {
		if value != "" {
			h.Set(name, value)
		}
	}
	for name, values := range d.RawHeader {
		// The HTTP binding of CloudEvents has the same names. Others could
		// steer the receiver or its proxies.
		lower := strings.ToLower(name)
		if strings.HasPrefix(lower, "ce-") || lower == jetbox.HeaderTraceParent || lower == jetbox.HeaderTraceState {
			h[http.CanonicalHeaderKey(name)] = values
		}
	}
	set("Content-Type", d.ContentType)
	set(jetbox.HeaderIdempotencyKey, d.Key)
	set(headerEventID, d.ID)
	set(headerEventType, d.Type)
	set(headerEventSubject, d.Subject)
	for name, values := range h {
		// The client would refuse it too, on every delivery.
		if slices.ContainsFunc(values, func(v string) bool { return strings.ContainsFunc(v, isControl) }) {
			return nil, jetbox.Permanent(fmt.Errorf("webhook: header %s would have control characters: %.100q", name, values))
		}
	}
	if w.key != nil {
		set(headerSignature, sign(w.key, now, d.Payload))
	}
	return req, nil
}

func isControl(r rune) (control bool) { return r < ' ' && r != '\t' || r == 0x7f }

// sign covers the time too, so that an old request cannot be sent again.
func sign(key []byte, now time.Time, payload []byte) string {
	t := strconv.FormatInt(now.Unix(), 10)
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(t + "."))
	mac.Write(payload)
	return "t=" + t + ",v1=" + hex.EncodeToString(mac.Sum(nil))
}

// judge turns an answer into a verdict.
func (w *webhook) judge(resp *http.Response, text string) error {
	code := resp.StatusCode
	if code >= 200 && code < 300 {
		return nil
	}
	err := fmt.Errorf("webhook answered %s", strings.TrimSpace(resp.Status+" "+text))
	switch {
	case code == http.StatusConflict, code == http.StatusTooManyRequests, code >= 500:
		w.keepQuiet(resp.Header.Get("Retry-After"), time.Now())
		return err
	case code >= 400:
		return jetbox.Permanent(err)
	}
	return err // a redirect: somebody has to change the URL, and no event is to be lost meanwhile
}

// keepQuiet notes a Retry-After: seconds, or a date. It silences this process,
// not one event: whoever is overloaded is so for all of them.
func (w *webhook) keepQuiet(retryAfter string, now time.Time) {
	var until time.Time
	if seconds, err := strconv.Atoi(retryAfter); err == nil && seconds > 0 {
		until = now.Add(time.Duration(min(seconds, int(retryAfterMost/time.Second))) * time.Second)
	} else if t, err := http.ParseTime(retryAfter); err == nil {
		until = t
	}
	if most := now.Add(w.quiet); until.After(most) {
		until = most
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if until.After(w.silence) {
		w.silence = until
	}
}

func (w *webhook) quietUntil() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.silence
}
