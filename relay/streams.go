package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

const (
	// lookTimeout bounds one question to the broker about its streams.
	lookTimeout = 3 * time.Second
	// watchEvery is how often the configured stream is looked at, so that an
	// idle relay knows that it could publish.
	watchEvery = 3 * time.Second
	// cacheFor is how long the answer for a subject outside the configured
	// stream is believed, and cacheMost how many are kept. That there is none is
	// believed for less: a person may be creating it.
	cacheFor     = 30 * time.Second
	cacheNoneFor = time.Second
	cacheMost    = 1000
)

// streams knows which stream takes a subject. It is safe for concurrent use.
type streams struct {
	js   jetstream.JetStream
	name string // the configured stream

	mu       sync.Mutex // guards what follows
	info     *jetstream.StreamInfo
	subjects map[string]cached // outside the configured stream
	handles  map[string]jetstream.Stream
	infos    map[string]cachedInfo // of other streams
}

type cached struct {
	stream string // "" when no stream takes the subject
	until  time.Time
}

type cachedInfo struct {
	info  *jetstream.StreamInfo
	until time.Time
}

func newStreams(js jetstream.JetStream, name string) *streams {
	return &streams{
		js:       js,
		name:     name,
		subjects: make(map[string]cached),
		handles:  make(map[string]jetstream.Stream),
		infos:    make(map[string]cachedInfo),
	}
}

// look asks the broker for the configured stream.
func (s *streams) look(ctx context.Context) (*jetstream.StreamInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	st, err := s.js.Stream(ctx, s.name)
	if err != nil {
		return nil, fmt.Errorf("look up stream %s: %w", s.name, err)
	}
	info := st.CachedInfo()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.info = info
	return info, nil
}

// configured returns what is known of the configured stream, asking if nothing
// is.
func (s *streams) configured(ctx context.Context) (*jetstream.StreamInfo, error) {
	s.mu.Lock()
	info := s.info
	s.mu.Unlock()
	if info != nil {
		return info, nil
	}
	return s.look(ctx)
}

// maxMsgSize is the configured stream's limit, 0 when not known.
func (s *streams) maxMsgSize() int32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.info == nil {
		return 0
	}
	return s.info.Config.MaxMsgSize
}

// forget makes the next question go to the broker.
func (s *streams) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.info = nil
	clear(s.subjects)
	clear(s.handles)
	clear(s.infos)
}

// known returns what the server said lately of a stream, asking if that is too
// long ago: how it is set up, not how full it is.
func (s *streams) known(ctx context.Context, stream string) (*jetstream.StreamInfo, error) {
	if stream == s.name {
		return s.configured(ctx)
	}
	s.mu.Lock()
	c := s.infos[stream]
	s.mu.Unlock()
	if c.info != nil && time.Now().Before(c.until) {
		return c.info, nil
	}
	return s.now(ctx, stream)
}

// now asks the leader of a stream for its state.
func (s *streams) now(ctx context.Context, stream string) (*jetstream.StreamInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	st, err := s.js.Stream(ctx, stream)
	if err != nil {
		return nil, fmt.Errorf("look up stream %s: %w", stream, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.infos) >= cacheMost {
		clear(s.infos)
	}
	s.infos[stream] = cachedInfo{st.CachedInfo(), time.Now().Add(cacheFor)}
	return st.CachedInfo(), nil
}

// others returns what the server said lately of the streams beside the configured
// one.
func (s *streams) others() (infos []*jetstream.StreamInfo) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.infos {
		infos = append(infos, c.info)
	}
	return infos
}

// of returns the stream that takes a subject, "" when none does although the
// configured one is there, or an error when the broker cannot be asked or the
// configured stream is missing: then nothing can be said of any row.
func (s *streams) of(ctx context.Context, subject string) (string, error) {
	info, err := s.configured(ctx)
	if err != nil {
		return "", err
	}
	for _, filter := range info.Config.Subjects {
		if matches(filter, subject) {
			return s.name, nil
		}
	}
	s.mu.Lock()
	c, ok := s.subjects[subject]
	s.mu.Unlock()
	if ok && time.Now().Before(c.until) {
		return c.stream, nil
	}
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	name, err := s.js.StreamNameBySubject(ctx, subject)
	if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return "", fmt.Errorf("look up the stream of subject %s: %w", subject, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.subjects) >= cacheMost {
		clear(s.subjects)
	}
	keep := cacheFor
	if name == "" {
		keep = cacheNoneFor
	}
	s.subjects[subject] = cached{stream: name, until: time.Now().Add(keep)}
	return name, nil
}

// storedID returns the event ID of a stored message, "" when it has none or is
// gone.
func (s *streams) storedID(ctx context.Context, stream string, seq uint64) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	s.mu.Lock()
	st := s.handles[stream]
	s.mu.Unlock()
	if st == nil {
		var err error
		if st, err = s.js.Stream(ctx, stream); err != nil {
			return "", fmt.Errorf("look up stream %s: %w", stream, err)
		}
		s.mu.Lock()
		s.handles[stream] = st
		s.mu.Unlock()
	}
	msg, err := st.GetMsg(ctx, seq)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return "", nil
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = cmp.Or(denied(s.js, "STREAM.MSG.GET."+stream), denied(s.js, "DIRECT.GET."+stream), err)
	}
	if err != nil {
		return "", fmt.Errorf("read message %d of stream %s: %w", seq, stream, err)
	}
	return msg.Header.Get(jetbox.HeaderCEID), nil
}

// matches reports whether a subject, which has no wildcards, is one that a
// stream's filter takes.
func matches(filter, subject string) (match bool) {
	for {
		f, restF, moreF := strings.Cut(filter, ".")
		t, restT, moreT := strings.Cut(subject, ".")
		if f == ">" {
			return true
		}
		if f != "*" && f != t || moreF != moreT {
			return false
		}
		if !moreF {
			return true
		}
		filter, subject = restF, restT
	}
}

// watchBroker keeps the broker's part of the health true while nothing is
// published, and ends the run when a setting cannot work with the stream.
func (r *Relay) watchBroker(ctx context.Context, end context.CancelCauseFunc) {
	var created time.Time // the incarnation of the stream that was checked
	for ctx.Err() == nil {
		before := r.watch.of(r.cfg.Stream)
		info, err := r.streams.look(ctx)
		if ctx.Err() != nil {
			return
		}
		r.fault(ctx, partBroker, err)
		if err == nil && r.watch.saw(before, info) {
			r.Wake()
		}
		if err == nil && !info.Created.Equal(created) {
			created = info.Created
			if err := r.checkStream(ctx, info); err != nil {
				end(err)
				return
			}
		}
		pause(ctx, watchEvery)
	}
}

func (r *Relay) checkStream(ctx context.Context, info *jetstream.StreamInfo) error {
	window := info.Config.Duplicates
	if r.cfg.removal() == jetbox.Keep && r.cfg.Retention < window {
		return fmt.Errorf("relay: Retention %v is shorter than the duplicate window %v of stream %s: "+
			"a row's key could be used again while the broker still drops it as a duplicate",
			r.cfg.Retention, window, r.cfg.Stream)
	}
	if r.cfg.Lease > window/2 {
		r.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "lease is more than half of the stream's duplicate window: "+
			"after a takeover a row may be sent again too late to be recognized",
			slog.Duration("lease", r.cfg.Lease), slog.Duration("window", window), slog.String("stream", r.cfg.Stream))
	}
	return nil
}
