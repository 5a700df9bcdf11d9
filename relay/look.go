package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

const (
	// lookPatience is how long a look goes on without reading anything new: time
	// to reconnect and to elect a leader.
	lookPatience = 10 * time.Second
	// lookPause is the pause before what brought nothing is tried again.
	lookPause = 250 * time.Millisecond
)

// position is where a stream stood before any of some rows was sent.
type position struct {
	Stream  string
	Created time.Time // to the nanosecond: it tells incarnations of the stream apart
	Seq     uint64    // the last sequence then

	// Holed is set by look: some message between where it began and Seq is gone.
	Holed bool
}

// wantedEvent is an event that may be on a stream. look fills in what it finds.
type wantedEvent struct {
	msgID, ceID string // as they are on the wire

	seq uint64 // where the stream has stored the event, 0 if not found

	// Another event under the same message ID, the first that was met, and where;
	// 0 if none. The event itself can be on the stream all the same.
	other    string
	otherSeq uint64
}

// lookResult says how far a look has come.
type lookResult struct {
	// next is where to go on. Everything up to its sequence has been read.
	next position
	// done means that nothing is left to read: every event was found, or what the
	// leader had at the time asked has been read to its end.
	done bool
	// absent means that the events not found were proved not to be stored at the
	// time asked. If done without it, they may have been there and been removed.
	absent bool
	// asked is when the leader was asked how far the stream goes.
	asked time.Time
	// read is how many messages were read.
	read int
}

// Reasons for which a look is no use, beside jetstream.ErrStreamNotFound. classify
// takes all of them for outages.
var (
	// errRecreated is returned when the stream is not the one of the position. What
	// was found in that call means nothing.
	errRecreated = errors.New("stream was deleted and created anew")
	// errRolledBack is returned when the stream ends before the position: it has
	// lost what it had acknowledged, and uses the sequences again.
	errRolledBack = errors.New("stream ends before the position: it has lost messages")

	errNoLeader = errors.New("stream has no leader with a quorum")
	errReplica  = errors.New("replica has not what the leader has")
	errSilent   = errors.New("no answer from the stream's consumer")
)

// look finds out which of the wanted events a stream has stored after a position. It
// reads headers only, at most most messages, and stops when every event is found.
// While the result is not done and there is no error, call it again with next and
// the same events: those that have a sequence are not looked for. An error spoils
// nothing of that either; the position has come as far as was read.
//
// The end is the last sequence that the leader had when asked; a replica that lags
// behind it is noticed. Absence is proved by reading every sequence, which is why
// there is no filter: with one, a message that is gone looks like one of another
// subject, and where the stream transforms subjects a filter would miss messages.
// A message that is still on its way can be stored after an absence was proved.
// Therefore send the event under its message ID well within the stream's duplicate
// window after the time asked, or look again.
func look(ctx context.Context, js jetstream.JetStream, from position, wanted []wantedEvent, most int) (lookResult, error) {
	s := &search{js: js, wanted: wanted, byID: make(map[string][]int), at: from, left: most}
	for i, w := range wanted {
		if w.seq == 0 {
			s.byID[w.msgID] = append(s.byID[w.msgID], i)
			s.missing++
		}
	}
	err := s.run(ctx)
	if err != nil {
		err = fmt.Errorf("look for events on stream %s after %d: %w", from.Stream, s.at.Seq, err)
	}
	return lookResult{next: s.at, done: s.done, absent: s.absent, asked: s.asked, read: s.read}, err
}

// search is one call of look.
type search struct {
	js      jetstream.JetStream
	wanted  []wantedEvent
	byID    map[string][]int // message ID to those wanted and not found
	missing int

	at     position // read up to here
	last   uint64   // the leader's last sequence when asked
	asked  time.Time
	left   int  // messages that may still be read
	read   int  // messages read
	walk   bool // read from the leader, message by message
	done   bool
	absent bool
}

func (s *search) run(ctx context.Context) error {
	if s.missing == 0 {
		s.done = true
		return nil
	}
	var info *jetstream.StreamInfo
	if err := s.persist(ctx, func() (err error) {
		s.asked = time.Now()
		info, err = s.identify(ctx)
		return err
	}); err != nil {
		return err
	}
	// A work queue refuses a second consumer, and one more on an interest stream
	// makes it keep messages: these are read without one.
	limits := info.Config.Retention == jetstream.LimitsPolicy
	s.walk = !limits
	s.last = info.State.LastSeq
	if err := s.persist(ctx, func() error { return s.readOn(ctx) }); err != nil {
		return err
	}
	if s.missing > 0 && s.at.Seq < s.last {
		return nil // as many as were allowed
	}
	// What was read is of this stream if it still has the same creation time.
	if err := s.persist(ctx, func() (err error) {
		info, err = s.identify(ctx)
		return err
	}); err != nil {
		return err
	}
	s.done = true
	s.absent = !s.at.Holed && limits && info.Config.Retention == jetstream.LimitsPolicy
	return nil
}

// more reports whether something is to be read.
func (s *search) more() (more bool) {
	return s.missing > 0 && s.at.Seq < s.last && s.left > 0
}

// persist repeats f until it succeeds, it is no use, or lookPatience has passed
// without a message being read.
func (s *search) persist(ctx context.Context, f func() error) error {
	since, seq := time.Now(), s.at.Seq
	for {
		err := f()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, errRecreated), errors.Is(err, errRolledBack), errors.Is(err, jetstream.ErrStreamNotFound),
			errors.Is(err, errUnreadable):
			return err
		case s.at.Seq > seq:
			since, seq = time.Now(), s.at.Seq
			continue
		case time.Since(since) > lookPatience:
			return err
		}
		pause(ctx, lookPause)
	}
}

// identify asks the leader for the stream's state, and whether the position is one
// of this stream.
func (s *search) identify(ctx context.Context) (*jetstream.StreamInfo, error) {
	info, err := leaderInfo(ctx, s.js, s.at.Stream)
	switch {
	case err != nil:
		return nil, err
	case !info.Created.Equal(s.at.Created):
		return nil, errRecreated
	case info.State.LastSeq < s.at.Seq:
		return nil, errRolledBack
	}
	return info, nil
}

// readOn reads while there is more.
func (s *search) readOn(ctx context.Context) error {
	if !s.more() {
		return nil
	}
	if !s.walk {
		return s.follow(ctx)
	}
	for s.more() {
		if err := s.step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// follow reads with a consumer.
func (s *search) follow(ctx context.Context) error {
	r, err := openReader(ctx, s.js, s.at)
	var api *jetstream.APIError
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return err
	case errors.As(err, &api) && api.Code < 500, errors.Is(err, errUnreadable):
		// Not for us: the stream's limit of consumers is reached, or the user may
		// have none.
		s.walk = true
		return s.readOn(ctx)
	case err != nil:
		return err
	}
	defer r.close(ctx)
	for s.more() {
		m, err := r.next(ctx, min(s.last-s.at.Seq, uint64(s.left)))
		switch {
		case errors.Is(err, errUnreadable):
			s.walk = true
			return s.readOn(ctx)
		case err != nil:
			return err
		case m == nil:
			// This replica has no more, but it is not the end: it lags, or the last
			// messages were removed. The leader knows.
			if err := s.step(ctx); err != nil {
				return err
			}
			if s.more() {
				return errReplica
			}
			continue
		case m.seq > s.at.Seq+1 && !s.at.Holed:
			first, err := leaderNext(ctx, s.js, s.at.Stream, s.at.Seq+1)
			if err != nil {
				return err
			}
			if first != nil && first.seq < m.seq {
				s.take(first)
				return errReplica
			}
			s.at.Holed = true
		}
		s.take(m)
	}
	return nil
}

// step reads the next message from the leader.
func (s *search) step(ctx context.Context) error {
	m, err := leaderNext(ctx, s.js, s.at.Stream, s.at.Seq+1)
	if err != nil {
		return err
	}
	if m == nil || m.seq > s.at.Seq+1 {
		s.at.Holed = true
	}
	if m == nil {
		s.at.Seq = s.last
		return nil
	}
	s.take(m)
	return nil
}

// take compares a message with what is wanted.
func (s *search) take(m *storedMsg) {
	s.read++
	s.left--
	s.at.Seq = min(m.seq, s.last)
	id := m.header.Get(jetbox.HeaderMsgID)
	waiting, ok := s.byID[id]
	if !ok {
		return
	}
	event := m.header.Get(jetbox.HeaderCEID)
	rest := waiting[:0]
	for _, i := range waiting {
		w := &s.wanted[i]
		if w.ceID == event {
			w.seq = m.seq
			s.missing--
			continue
		}
		if w.otherSeq == 0 {
			w.other, w.otherSeq = event, m.seq
		}
		rest = append(rest, i)
	}
	if s.byID[id] = rest; len(rest) == 0 {
		delete(s.byID, id)
	}
}

// storedMsg is what is read of a message on a stream.
type storedMsg struct {
	seq    uint64
	time   time.Time // when the stream took it; only as the leader says it
	header nats.Header
}
