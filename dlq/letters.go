package dlq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

const (
	// askTimeout bounds one request to the broker, inside the caller's context.
	askTimeout = 5 * time.Second

	// askAttempts is how often a write of unknown outcome is settled here
	// before it is the caller's turn to repeat the whole operation.
	askAttempts = 4
	askPause    = 50 * time.Millisecond

	// maxHeader is the largest header block JetStream stores (10097 beyond it).
	maxHeader = jetbox.MaxHeader
)

// Error codes of the server that nats.go has no name for.
const (
	codeSubjectOverlap   jetstream.ErrorCode = 10065
	codeInvalidJSON      jetstream.ErrorCode = 10025
	codeInvalidConfig    jetstream.ErrorCode = 10052
	codeHeaderTooLarge   jetstream.ErrorCode = 10097
	codeDuplicatePending jetstream.ErrorCode = 10158
	codeNoSuchSequence   jetstream.ErrorCode = 10043
	codeNoMessageTTL     jetstream.ErrorCode = 10166
)

// Letters is the dead-letter stream. It is safe for concurrent use, by any
// number of processes.
type Letters struct {
	js  jetstream.JetStream
	cfg Config

	// events makes the same requests about event streams: itself, unless those
	// are in another account.
	events *Letters

	// testOnlyCrash, when set, is asked at each named step of a replay or
	// router; an error from it stops the work there, as a kill would.
	testOnlyCrash func(step string) error
}

// New returns the dead letters kept on js. It asks the broker nothing, and it
// does not close the connection.
func New(js jetstream.JetStream, cfg Config) (*Letters, error) {
	if js == nil {
		return nil, errors.New("dlq: no JetStream given")
	}
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Letters{js: js, cfg: cfg}
	s.events = s
	if cfg.Events != nil {
		s.events = &Letters{js: cfg.Events, cfg: cfg}
	}
	return s, nil
}

func (s *Letters) step(name string) error {
	if s.testOnlyCrash == nil {
		return nil
	}
	return s.testOnlyCrash(name)
}

// record is a stored message, as the stream's leader returns it.
type record struct {
	subject string
	seq     uint64
	time    time.Time
	header  map[string][]string
	data    []byte

	// badHeader is the header block when it cannot be decoded.
	badHeader []byte
}

type getRequest struct {
	Seq         uint64 `json:"seq,omitempty"`
	LastFor     string `json:"last_by_subj,omitempty"`
	NextSubject string `json:"next_by_subj,omitempty"`
}

// get reads one message from the leader of a stream, or returns
// jetstream.ErrMsgNotFound. nats.go's GetMsg asks any replica when the stream
// allows direct gets, and a follower may not have the message yet; and it
// returns nothing of a message whose headers it cannot decode.
func (s *Letters) get(ctx context.Context, stream string, req getRequest) (*record, error) {
	var resp struct {
		Error   *jetstream.APIError `json:"error"`
		Message *struct {
			Subject string    `json:"subject"`
			Seq     uint64    `json:"seq"`
			Header  []byte    `json:"hdrs"`
			Data    []byte    `json:"data"`
			Time    time.Time `json:"time"`
		} `json:"message"`
	}
	if err := s.ask(ctx, "STREAM.MSG.GET."+stream, req, &resp); err != nil {
		return nil, err
	}
	switch {
	case resp.Error != nil && resp.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound:
		return nil, jetstream.ErrMsgNotFound
	case resp.Error != nil:
		return nil, resp.Error
	case resp.Message == nil:
		return nil, jetstream.ErrInvalidJetStreamResponse
	}
	m := resp.Message
	r := &record{subject: m.Subject, seq: m.Seq, time: m.Time, data: m.Data}
	if len(m.Header) > 0 {
		h, err := nats.DecodeHeadersMsg(m.Header)
		if err != nil {
			r.badHeader = m.Header
		} else {
			r.header = h
		}
	}
	return r, nil
}

// remove deletes exactly one stored message.
func (s *Letters) remove(ctx context.Context, stream string, seq uint64) error {
	var resp struct {
		Error *jetstream.APIError `json:"error"`
	}
	req := struct {
		Seq     uint64 `json:"seq"`
		NoErase bool   `json:"no_erase"`
	}{seq, true}
	if err := s.ask(ctx, "STREAM.MSG.DELETE."+stream, req, &resp); err != nil {
		return err
	}
	if resp.Error != nil {
		return resp.Error
	}
	return nil
}

// ask sends one request to the JetStream API.
func (s *Letters) ask(ctx context.Context, op string, req, resp any) error {
	data, err := json.Marshal(req)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	m, err := s.js.Conn().RequestWithContext(ctx, s.apiPrefix()+op, data)
	if err != nil {
		return err
	}
	return json.Unmarshal(m.Data, resp)
}

func (s *Letters) apiPrefix() string {
	opts := s.js.Options()
	switch {
	case opts.Domain != "":
		return "$JS." + opts.Domain + ".API."
	case opts.APIPrefix != "":
		return strings.TrimSuffix(opts.APIPrefix, ".") + "."
	default:
		return jetstream.DefaultAPIPrefix
	}
}

// last returns the current version of a letter, nil when there is none.
func (s *Letters) last(ctx context.Context, id string) (*Letter, error) {
	m, err := s.get(ctx, s.cfg.Stream, getRequest{LastFor: id})
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read letter %s: %w", id, err)
	}
	l := newLetter(m, s.cfg.Prefix)
	return &l, nil
}

// conflictError says that a letter is not in the version a write expected.
type conflictError struct {
	id      string
	current *Letter // nil when there is none
}

func (e *conflictError) Error() string {
	if e.current == nil {
		return fmt.Sprintf("letter %s is gone", e.id)
	}
	return fmt.Sprintf("letter %s was changed: it is %s", e.id, e.current.State)
}

func (e *conflictError) Unwrap() error { return jetbox.ErrLetterGone }

// put stores next, provided the last message on its subject still has the
// sequence expect; 0 means that there is none. It returns next with its new
// sequence, or a *conflictError.
//
// There is no Nats-Msg-Id: the condition on the subject outlives any duplicate
// window. An answer lost on the way is settled by reading back. Only after an
// attempt of ours of unknown outcome is equal content taken for our own write:
// two operators who start the same replay write equal messages.
func (s *Letters) put(ctx context.Context, next Letter, expect uint64) (Letter, error) {
	var parts []*record
	if next.closed() {
		parts, _ = s.readParts(ctx, next) // what cannot be read now stays until Prune
	}
	l, err := s.putMessage(ctx, next, expect)
	if err == nil {
		s.expireParts(ctx, l, parts)
	}
	return l, err
}

// keepClosed is for how long a closed letter is kept.
func (s *Letters) keepClosed(l Letter) time.Duration { return max(s.cfg.KeepClosed, l.keep) }

func (s *Letters) putMessage(ctx context.Context, next Letter, expect uint64) (Letter, error) {
	m := next.message()
	opts := []jetstream.PublishOpt{jetstream.WithExpectLastSequencePerSubject(expect)}
	if next.closed() {
		opts = append(opts, jetstream.WithMsgTTL(s.keepClosed(next)))
	}
	var unknown bool
	for attempt := 1; ; attempt++ {
		ack, err := s.publish(ctx, m, s.cfg.Stream, opts...)
		if hasCode(err, codeNoMessageTTL) {
			opts = opts[:1] // it stays until Prune
			ack, err = s.publish(ctx, m, s.cfg.Stream, opts...)
		}
		if err == nil {
			next.Seq, next.Updated = ack.Sequence, time.Now()
			return next, nil
		}
		if !unsettled(err) {
			return Letter{}, fmt.Errorf("store letter %s: %w", next.ID, err)
		}
		unknown = unknown || !refused(err)
		current, readErr := s.last(ctx, next.ID)
		if readErr != nil {
			return Letter{}, fmt.Errorf("store letter %s: %w", next.ID, errors.Join(err, readErr))
		}
		switch {
		case current == nil && expect == 0, current != nil && current.Seq == expect:
			// Not stored so far. If that attempt still comes through, the
			// condition refuses one of the two.
		case current != nil && unknown && sameMessage(current.message(), m):
			return *current, nil
		default:
			return Letter{}, &conflictError{next.ID, current}
		}
		if attempt == askAttempts {
			return Letter{}, fmt.Errorf("store letter %s: %w", next.ID, err)
		}
		if err := sleep(ctx, askPause<<attempt); err != nil {
			return Letter{}, fmt.Errorf("store letter %s: %w", next.ID, err)
		}
	}
}

// publish sends m and checks that it was the right stream that stored it.
func (s *Letters) publish(ctx context.Context, m *nats.Msg, stream string, opts ...jetstream.PublishOpt) (*jetstream.PubAck, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	// The options write into the header: keep the caller's clean.
	sent := &nats.Msg{Subject: m.Subject, Header: maps.Clone(m.Header), Data: m.Data}
	ack, err := s.js.PublishMsg(ctx, sent, append(opts, jetstream.WithExpectStream(stream))...)
	if err != nil {
		return nil, err
	}
	// Anybody subscribed to the subject can answer; only the stream can prove.
	if ack.Stream != stream || ack.Sequence == 0 {
		return nil, fmt.Errorf("answer from stream %q, sequence %d: %w", ack.Stream, ack.Sequence, jetstream.ErrInvalidJSAck)
	}
	return ack, nil
}

// unsettled reports whether reading back can settle a failed conditional write:
// it was refused for the condition (10071; 10164 on replicas, which can also
// mean that another write is on its way), or no answer came.
func unsettled(err error) (settle bool) {
	return conditionFailed(err) || !refused(err) && !errors.Is(err, jetstream.ErrNoStreamResponse)
}

func conditionFailed(err error) (failed bool) {
	return hasCode(err, jetstream.JSErrCodeStreamWrongLastSequence) || hasCode(err, jetstream.JSErrCodeStreamWrongLastSequenceConstant)
}

func hasCode(err error, code jetstream.ErrorCode) (has bool) {
	var api *jetstream.APIError
	return errors.As(err, &api) && api.ErrorCode == code
}

// refused reports whether err proves that a message was not stored: the server
// said so, or the client never sent it.
func refused(err error) (proven bool) {
	var api *jetstream.APIError
	if errors.As(err, &api) {
		return api.ErrorCode != codeDuplicatePending
	}
	return errors.Is(err, nats.ErrMaxPayload) || errors.Is(err, nats.ErrBadSubject) ||
		errors.Is(err, nats.ErrBadHeaderMsg) || errors.Is(err, nats.ErrReconnectBufExceeded)
}

func sameMessage(a, b *nats.Msg) (same bool) {
	return a.Subject == b.Subject && string(a.Data) == string(b.Data) &&
		maps.EqualFunc(a.Header, b.Header, func(x, y []string) bool { return slices.Equal(x, y) })
}

// limits returns what the broker takes on the dead-letter stream.
func (s *Letters) limits(maxMsgSize int32) limits {
	m := limits{message: int(s.js.Conn().MaxPayload()), header: maxHeader}
	if maxMsgSize > 0 {
		m.message = min(m.message, int(maxMsgSize))
	}
	return m
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
