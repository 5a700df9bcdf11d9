package relay

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

const (
	// lastFor is how long the last sequence of a stream is believed without
	// asking: the range that a batch may have to be looked for in stays short.
	lastFor = time.Second
	// sharedFor is how long a stream is taken for one that others publish to.
	sharedFor = 2 * time.Minute

	// How long no fast batch is tried after one showed that it does not work.
	offDisabled   = 5 * time.Minute
	offSilent     = time.Minute
	offUnreadable = 10 * time.Minute
	offNoStream   = 10 * time.Second
)

// Error codes of the fast batch as the server numbers them (nats-server 2.15).
const (
	codeBatchDisabled = 10205
	codeBatchPattern  = 10206
	codeBatchID       = 10207
	codeBatchTooMany  = 10211
)

// unusable says why fast batches do not work with a stream, if they do not, and
// for how long that is to be believed.
func (e *batchEnd) unusable() (why string, pause time.Duration) {
	var api *jetstream.APIError
	switch {
	case e.sent == 0:
		return "", 0
	case errors.As(e.err, &api):
		switch api.ErrorCode {
		case codeBatchDisabled, codeBatchPattern, codeBatchID, codeBatchTooMany:
			return api.Description, offDisabled
		}
	case errors.Is(e.err, jetstream.ErrNoStreamResponse):
		return "no stream answers", offNoStream
	case errors.Is(e.err, errNoAck) && !e.heard && !errors.Is(e.err, context.Canceled):
		return "no answer to a batch", offSilent
	}
	return "", 0
}

// check drops a receipt that is none of the stream's.
func (e *batchEnd) check(stream string) {
	if f := e.final; f != nil && (f.Stream != stream || f.Count > e.sent) {
		e.final, e.err, e.refused = nil, errWrongAck, -1
	}
}

// fastStates are what the engine knows of each stream. It is safe for concurrent
// use.
type fastStates struct {
	mu sync.Mutex // guards by
	by map[string]*fastState
}

func (s *fastStates) of(stream string) *fastState {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.by[stream]
	if st == nil {
		if s.by == nil || len(s.by) >= cacheMost {
			s.by = make(map[string]*fastState)
		}
		st = new(fastState)
		s.by[stream] = st
	}
	return st
}

// mode is the engine that serves a stream, and why; "" before the first batch.
func (s *fastStates) mode(stream string) string {
	st := s.of(stream)
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.mode
}

// fastState is what the engine knows of one stream. That the sequence grew by the
// size of a batch proves nothing if as many messages of others came in between as
// ours were dropped. So growth is believed only while nobody else publishes to the
// stream: every message since a batch that was read back is one of ours.
type fastState struct {
	mu          sync.Mutex // guards what follows
	mode        string     // the engine in use, and why; "" before the first batch
	offUntil    time.Time
	sharedUntil time.Time
	created     time.Time // the incarnation of the stream
	seq         uint64    // its last sequence, when we knew it
	at          time.Time // when that was; zero when it is not known
	proven      bool      // all up to seq is accounted for
}

const (
	modeFast   = EngineFast
	modePubAck = EnginePubAck
)

// usable reports whether batches may be sent to the stream.
func (s *fastState) usable(info *jetstream.StreamInfo, log *slog.Logger) (ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	engine, why := EngineOf(info)
	switch {
	case engine != modeFast:
		s.set(info.Config.Name, engine, why, log)
		return false
	case now.Before(s.offUntil):
		return false
	case now.Before(s.sharedUntil):
		return true // for long chains only
	}
	s.set(info.Config.Name, modeFast, "", log)
	return true
}

// set notes the engine in use and tells of a change. Callers hold mu.
func (s *fastState) set(stream, mode, why string, log *slog.Logger) {
	full := mode
	if why != "" {
		full += ": " + why
	}
	if s.mode == full {
		return
	}
	s.mode = full
	log.LogAttrs(context.Background(), slog.LevelInfo, "publishing engine chosen", slog.String("stream", stream),
		slog.String("engine", mode), slog.String("reason", why))
}

// turnOff keeps batches from the stream for a while.
func (s *fastState) turnOff(stream, why string, pause time.Duration, log *slog.Logger) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.offUntil = time.Now().Add(pause)
	s.set(stream, modePubAck, why, log)
}

// share notes that others publish to the stream.
func (s *fastState) share(stream string, log *slog.Logger) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shareLocked(stream, log)
}

func (s *fastState) shareLocked(stream string, log *slog.Logger) {
	s.sharedUntil = time.Now().Add(sharedFor)
	s.at, s.proven = time.Time{}, false
	s.set(stream, modePubAck, "others publish to the stream", log)
}

func (s *fastState) isShared() (shared bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Now().Before(s.sharedUntil)
}

func (s *fastState) isProven() (proven bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proven
}

// last returns the stream's last sequence, if that is known.
func (s *fastState) last(created time.Time) (seq uint64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at.IsZero() || time.Since(s.at) > lastFor || !s.created.Equal(created) {
		return 0, false
	}
	return s.seq, true
}

// resume takes the last sequence from the server. If it is not the one we knew,
// others publish.
func (s *fastState) resume(stream string, info *jetstream.StreamInfo, log *slog.Logger) {
	s.mu.Lock()
	defer s.mu.Unlock()
	same := s.created.Equal(info.Created)
	if same && !s.at.IsZero() && s.seq != info.State.LastSeq {
		s.shareLocked(stream, log)
	}
	if !same || s.at.IsZero() {
		s.proven = false
	}
	s.created, s.seq, s.at = info.Created, info.State.LastSeq, time.Now()
}

// reach notes the last sequence after a batch.
func (s *fastState) reach(seq uint64, proven bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seq, s.at = seq, time.Now()
	s.proven = s.proven || proven
}

// lose forgets the last sequence: messages of ours may be stored that we do not
// know of.
func (s *fastState) lose() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at, s.proven = time.Time{}, false
}

// advance takes into account what the other engine has stored.
func (s *fastState) advance(stream string, part []message, results []result, log *slog.Logger) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at.IsZero() {
		return
	}
	last, n := s.seq, uint64(0)
	for i, r := range results {
		if part[i].stream != stream {
			continue
		}
		if r.ack == nil && r.err != nil && classify(r.err) == classOutage {
			s.at, s.proven = time.Time{}, false // perhaps it is stored after all
			return
		}
		if r.ack != nil && !r.ack.Duplicate {
			last, n = max(last, r.ack.Sequence), n+1
		}
	}
	switch {
	case n == 0:
	case last == s.seq+n:
		s.seq, s.at = last, time.Now()
	default:
		s.shareLocked(stream, log)
	}
}
