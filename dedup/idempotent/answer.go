package idempotent

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/textproto"
	"strings"
)

// answer is what a handler said.
type answer struct {
	status int
	header http.Header
	body   []byte
}

func (a answer) send(w http.ResponseWriter) {
	for name, values := range a.header {
		w.Header()[name] = values
	}
	w.WriteHeader(a.status)
	_, _ = w.Write(a.body) // a client that is gone may ask again
}

// notKept are headers of one connection, of one moment, or of one person's
// session.
var notKept = []string{
	"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
	"Content-Length", "Date", "Set-Cookie",
}

// keptHeader returns the headers that are given again, as on the wire.
func (a answer) keptHeader() ([]byte, error) {
	h := a.header.Clone()
	for _, list := range a.header.Values("Connection") {
		for name := range strings.SplitSeq(list, ",") {
			h.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range notKept {
		h.Del(name)
	}
	var b bytes.Buffer
	err := h.Write(&b)
	b.WriteString("\r\n")
	return b.Bytes(), err
}

func parseHeader(wire []byte) (http.Header, error) {
	h, err := textproto.NewReader(bufio.NewReader(bytes.NewReader(wire))).ReadMIMEHeader()
	if err != nil {
		return nil, fmt.Errorf("read kept headers: %w", err)
	}
	return http.Header(h), nil
}

// recorder holds an answer until it is kept.
type recorder struct {
	answer

	limit    int
	tooLarge bool
	frozen   http.Header // what WriteHeader found
}

func newRecorder(limit int) *recorder {
	return &recorder{answer: answer{status: http.StatusOK, header: http.Header{}}, limit: limit}
}

func (r *recorder) Header() http.Header { return r.header }

func (r *recorder) WriteHeader(status int) {
	if status < 100 || status > 999 {
		panic(fmt.Sprintf("invalid WriteHeader code %v", status)) // as net/http does
	}
	if r.frozen != nil || status < http.StatusOK {
		return // said already, or informational
	}
	r.status, r.frozen = status, r.header.Clone()
}

// errTooLarge is what a handler's Write returns beyond the limit.
var errTooLarge = errors.New("answer is longer than MaxAnswer of the idempotency middleware")

func (r *recorder) Write(p []byte) (int, error) {
	r.WriteHeader(http.StatusOK)
	if r.status == http.StatusNoContent || r.status == http.StatusNotModified {
		return 0, http.ErrBodyNotAllowed
	}
	if len(r.body)+len(p) > r.limit {
		r.tooLarge = true
		return 0, errTooLarge
	}
	r.body = append(r.body, p...)
	return len(p), nil
}

// end returns the answer as it is when the handler has ended.
func (r *recorder) end() answer {
	r.WriteHeader(http.StatusOK)
	a := r.answer
	a.header = r.frozen
	return a
}

// problem answers as RFC 9457 says.
func problem(w http.ResponseWriter, status int, title, detail string) {
	body, err := json.Marshal(struct {
		Title  string `json:"title"`
		Status int    `json:"status"`
		Detail string `json:"detail,omitempty"`
	}{title, status, detail})
	if err != nil {
		panic(err) // texts and a number
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n'))
}
