package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// errInterrupted ends what a stop, or the end of the lease, has interrupted.
var errInterrupted = errors.New("looking at the streams was interrupted")

// checkStreams finds out whether the streams have what they acknowledged, if there is
// reason to ask, and publishes again what they have lost. The caller has nothing in
// hand that is not recorded. Until it returns nil nothing may be claimed.
func (s *session) checkStreams() error {
	if !s.watch.suspected(s.streams.js.Conn()) {
		return nil
	}
	s.watch.begin(s.streams.js.Conn())
	src, ok := s.src.(Recaller)
	if !ok {
		return nil
	}
	c := &streamCheck{session: s, src: src, skip: make(map[string]bool)}
	defer func() { s.watch.end(len(c.skip) == 0) }()
	for {
		changed, err := c.step()
		if err != nil {
			s.watch.suspect()
			if s.ctx.Err() == nil && !errors.Is(err, jetbox.ErrLeaseLost) && !errors.Is(err, errInterrupted) {
				s.fault(s.ctx, partStream, err)
			}
			return err
		}
		if !changed {
			s.fault(s.ctx, partStream, nil)
			return nil
		}
	}
}

// streamCheck is one call of checkStreams.
type streamCheck struct {
	*session
	src  Recaller
	skip map[string]bool // streams, beside the configured one, that could not be asked

	// others ends when enough time was spent on those.
	others context.Context
}

// othersMost is how long one check waits for the streams beside the configured one:
// nothing is published meanwhile, and all of them may be out of reach.
const othersMost = 4 * time.Second

// step brings a recall that is under way a step further, or looks at each stream. It
// reports whether that has changed what is known of them.
func (c *streamCheck) step() (changed bool, err error) {
	if !c.maySend() {
		return false, errInterrupted
	}
	anchors, err := c.src.Anchors(c.ctx)
	if err != nil {
		return false, err
	}
	for _, a := range anchors {
		if a.Recall == nil {
			continue
		}
		why := recallFault(a)
		c.fault(c.ctx, partStream, why)
		if err := c.recall(a); err != nil {
			return false, fmt.Errorf("%w: %w", why, err)
		}
		return true, nil
	}
	byStream := make(map[string][]jetbox.Anchor)
	for _, a := range anchors {
		byStream[a.Stream] = append(byStream[a.Stream], a)
	}
	ctx, cancel := context.WithTimeout(c.ctx, othersMost)
	defer cancel()
	c.others = ctx
	for _, stream := range c.watch.expect(slices.Collect(maps.Keys(byStream))) {
		if c.skip[stream] {
			continue
		}
		if ctx.Err() != nil && stream != c.cfg.Stream {
			c.skip[stream] = true // it comes before those that were asked, the next time
			continue
		}
		if changed, err := c.look(byStream[stream]); err != nil || changed {
			return changed, err
		}
	}
	return false, nil
}

// failed notes that nothing can be found out about a stream beside the configured one,
// or done about it: not the relay's business as a whole. It is asked again.
func (c *streamCheck) failed(stream, what string) {
	c.skip[stream] = true
	c.watch.failed(stream)
	c.health.note("reading "+stream, what)
}

// look looks at one stream, for each of the messages that it should have.
func (c *streamCheck) look(group []jetbox.Anchor) (changed bool, err error) {
	var lost []jetbox.Anchor
	highest, unread := group[0], ""
	owed, owes := c.watch.owes(highest.Stream, highest.Created)
	if owes {
		owed.At, owed.Shared, owed.Older = highest.At, highest.Shared, highest.Older
		group = append(group, owed)
	}
	ctx, other := c.ctx, highest.Stream != c.cfg.Stream
	if other {
		ctx = c.others
	}
	for _, a := range group {
		v, info, err := checkAnchor(ctx, c.streams.js, a)
		switch {
		case err != nil && other && c.ctx.Err() == nil:
			c.failed(a.Stream, fmt.Sprintf("whether stream %s has lost messages cannot be told: %v", a.Stream, err))
			return false, nil
		case err != nil:
			return false, err
		case v == anchorMissing:
			// Whoever publishes to it says so. Should it come back, it is looked at
			// before anything of it is remembered.
			c.watch.failed(a.Stream)
			return false, nil
		case v == anchorRecreated:
			return true, c.recreated(a, info)
		case v == anchorLost:
			lost = append(lost, a)
		case v == anchorUnread:
			unread = fmt.Sprintf("whether stream %s has lost messages cannot be told: the relay's user may not read it", a.Stream)
		}
		if a.Seq > highest.Seq {
			highest = a
		}
	}
	if len(lost) > 0 {
		err := c.lost(lost)
		if errors.Is(err, errUnfound) && other && c.maySend() {
			c.failed(highest.Stream, fmt.Sprintf("stream %s has lost messages that it had acknowledged: %v", highest.Stream, err))
			return false, nil
		}
		return true, err
	}
	c.health.note("reading "+highest.Stream, unread)
	switch {
	case highest.Older && c.cfg.OnRecreated == Republish:
		highest.Recall = older()
		return true, c.src.SetAnchor(c.ctx, c.share.now(), highest.Created, highest)
	case len(group) > manyAnchors, owes && highest.Seq == owed.Seq:
		// Of relays that are gone, or not remembered yet. They were all looked at.
		if err := c.src.SetAnchor(c.ctx, c.share.now(), highest.Created, highest); err != nil {
			return false, err
		}
	}
	c.watch.verified(highest.Stream, highest.Created, highest.Seq)
	return false, nil
}

// manyAnchors is how many anchors of a stream are made one when all of them hold.
const manyAnchors = 8

// older is a recall of what was published to an older stream of the name.
func older() *jetbox.Recall {
	return &jetbox.Recall{Number: rand.Int64(), Older: true, Done: math.MinInt64}
}

// recreated notes that a stream was created anew. That was a person, who may have
// meant to be rid of what was there: the rows of the old one are recalled only when
// asked for.
func (c *streamCheck) recreated(a jetbox.Anchor, info *jetstream.StreamInfo) error {
	next := jetbox.Anchor{Stream: a.Stream, Created: info.Created, Older: true}
	what := "rows published to the old one are left as they are, --on-recreated republish publishes the retained ones again"
	if c.cfg.OnRecreated == Republish {
		next.Recall, what = older(), "retained rows published to the old one are published again"
	}
	c.cfg.Logger.LogAttrs(c.ctx, slog.LevelWarn, "stream was created anew", slog.String("action", what), slog.String("stream", a.Stream),
		slog.Time("created", info.Created), slog.Time("before", a.Created), slog.Uint64("acknowledged", a.Seq))
	c.health.note(a.Stream, fmt.Sprintf("stream %s was created anew at %s: %s", a.Stream, info.Created.UTC().Format(time.RFC3339), what))
	return c.restart(a, next)
}

// errUnfound is returned when it cannot be found out what a stream has lost.
var errUnfound = errors.New("what it has kept cannot be found out")

// lost begins to recall what a stream has lost.
func (c *streamCheck) lost(lost []jetbox.Anchor) error {
	last := lost[0]
	latest := last.At // up to here rows were recorded before it happened
	for _, a := range lost {
		if a.Seq > last.Seq {
			last = a
		}
		if a.At.Before(latest) {
			latest = a.At
		}
	}
	if last.Shared {
		// Another relay may have published since it happened, and recorded that
		// before this one's last rows were, but not by more than a lease.
		latest = latest.Add(-2 * c.cfg.Lease)
	}
	f := &survivors{ctx: c.ctx, src: c.src, js: c.streams.js, source: c.cfg.Source, last: last, latest: latest}
	if err := f.find(); err != nil {
		return fmt.Errorf("%w: %w", errUnfound, err)
	}
	next := jetbox.Anchor{
		Stream: last.Stream, Created: last.Created, Seq: f.after(), MsgID: f.best.MsgID, Pos: f.best.Pos, At: f.best.At, Older: last.Older,
		Recall: &jetbox.Recall{Number: rand.Int64(), After: f.after(), AfterTime: f.best.At, Done: math.MinInt64},
	}
	what := "what is retained of them is published again"
	if f.best.Pos == 0 || c.cfg.removal() != jetbox.Keep {
		what += ", rows that are not retained any more may be lost"
	}
	c.cfg.Logger.LogAttrs(c.ctx, slog.LevelError, "stream has lost messages that it had acknowledged", slog.String("action", what),
		slog.String("stream", last.Stream), slog.Uint64("acknowledged", last.Seq), slog.String("msg_id", last.MsgID),
		slog.Uint64("kept", next.Seq), slog.Uint64("last", f.info.State.LastSeq))
	c.health.note(last.Stream, fmt.Sprintf("stream %s has lost messages that it had acknowledged after %d: %s", last.Stream, next.Seq, what))
	return c.restart(last, next)
}

// restart replaces an anchor, and forgets what was known of the stream's sequences.
func (c *streamCheck) restart(was, next jetbox.Anchor) error {
	c.streams.forget()
	c.at.forget(next.Stream)
	c.watch.forgive(next.Stream)
	c.late = newHighest() // rows that go a second time are not late
	return c.src.SetAnchor(c.ctx, c.share.now(), was.Created, next)
}

// forget drops what is known of a stream.
func (p *positions) forget(stream string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.at, stream)
}
