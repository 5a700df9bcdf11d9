package dlq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/termreason"
)

// clockSkew is by how much the clocks of a cluster's servers may differ: one stores
// the message, another one sends the advisory about it, at times within the same
// millisecond. Without it a consumer that terminates at once had no letter; with it
// a stale advisory can make one too many of a message that was stored within that
// time after it, and takes nothing from anybody.
const clockSkew = 5 * time.Second

// postponed says that an advisory has its letter, but that its message cannot
// be removed yet. It is no failure.
type postponed struct{ why string }

func (p *postponed) Error() string { return p.why }

// handle parks what one advisory is about and settles the advisory. On an error
// the advisory is still pending.
func (r *Router) handle(ctx context.Context, m jetstream.Msg, log *slog.Logger) error {
	a, err := r.letters.cfg.parseAdvisory(m.Subject(), m.Data())
	if err == nil {
		err = r.park(ctx, a)
	}
	if reject, ok := errors.AsType[*rejected](err); ok {
		log.LogAttrs(ctx, slog.LevelDebug, "advisory ignored", slog.String("subject", m.Subject()), slog.Any("err", reject))
	} else if err != nil {
		return err
	}
	if err := r.letters.step("advisory parked"); err != nil {
		return err
	}
	return m.Ack()
}

// park stores the letter an advisory asks for, if it does.
func (r *Router) park(ctx context.Context, a advisory) error {
	if a.Stream != r.cfg.EventStream {
		return &rejected{"it is about stream " + a.Stream}
	}
	if a.Type == typeTerminated && removalReasons[a.Reason] {
		return &rejected{"the message was removed, not given up"}
	}
	if there, err := r.hasLetter(ctx, a); err != nil || there {
		return err
	}
	// Looked up each time: the answer decides whether a sequence means the
	// message the advisory is about.
	st, err := r.events.js.Stream(ctx, a.Stream)
	if err != nil {
		return fmt.Errorf("look up event stream %s: %w", a.Stream, err)
	}
	info := st.CachedInfo()
	switch {
	case a.Domain != info.Domain:
		return &rejected{fmt.Sprintf("it comes from domain %q, the stream is in %q", a.Domain, info.Domain)}
	case info.Created.After(a.Timestamp.Add(clockSkew)):
		return &rejected{"the stream was created after it"}
	}
	f := a.failure()
	m, err := r.events.get(ctx, a.Stream, getRequest{Seq: a.StreamSeq})
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound) && info.Created.After(a.Timestamp):
		return &rejected{"the stream was created after it"} // no message of it is at stake
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return r.parkGone(ctx, f, info)
	case err != nil:
		return fmt.Errorf("read message %d of stream %s: %w", a.StreamSeq, a.Stream, err)
	case m.time.After(a.Timestamp.Add(clockSkew)):
		return &rejected{"the message was stored after it"}
	}
	return r.parkMessage(ctx, st, f, m)
}

// parkMessage stores the letter of a failed message, then removes the message
// where its stream would keep it for ever.
func (r *Router) parkMessage(ctx context.Context, st jetstream.Stream, f jetbox.Failure, m *record) error {
	f.Stored, f.Subject, f.Header, f.Payload = m.time, m.subject, m.header, m.data
	if len(m.badHeader) > 0 {
		// The letter cannot have it as a header, so that a person has it at least.
		block := m.badHeader[:min(len(m.badHeader), shortError)]
		f.Err = joinError(f.Err, fmt.Sprintf("headers cannot be decoded: %q", block))
	}
	l, _, err := r.letters.report(ctx, f, StateOpen)
	if err != nil {
		return err
	}
	if st.CachedInfo().Config.Retention == jetstream.LimitsPolicy || l.payloadLost() {
		return nil
	}
	return r.removeOriginal(ctx, st, f)
}

// hasLetter reports whether the letter that a consumer of this library has stored
// before its term is there. It names it in its reason: a terminated message may be
// gone, and then nothing else leads to the letter so directly. Who forges a reason
// gains nothing: there is a letter.
func (r *Router) hasLetter(ctx context.Context, a advisory) (there bool, err error) {
	_, name := termreason.Split(a.Reason)
	if a.Type != typeTerminated || name == "" {
		return false, nil
	}
	s := r.letters
	id := strings.Join([]string{s.cfg.Prefix, a.Stream, a.Consumer, name}, ".")
	if strings.Contains(name, ".") {
		id = name // a replay belongs to the letter it came from
	}
	of, err := parseID(s.cfg.Prefix, id)
	if err != nil || of.stream != a.Stream || of.consumer != a.Consumer || id != name && of.seq != a.StreamSeq {
		return false, nil //nolint:nilerr // it names no letter
	}
	l, err := s.last(ctx, id)
	return l != nil && l.State != "" && l.State != StateIntent, err
}

// parkGone deals with a failed message that nobody can read any more. Whoever
// read it in time knows when it was stored, which we do not; so their letter is
// looked for by its sequence, and then the letter of which it was a replay.
func (r *Router) parkGone(ctx context.Context, f jetbox.Failure, info *jetstream.StreamInfo) error {
	s := r.letters
	st, err := s.js.Stream(ctx, s.cfg.Stream)
	if err != nil {
		return fmt.Errorf("look up stream %s: %w", s.cfg.Stream, err)
	}
	// Fresh subjects, all of them: the cached info has none.
	filter := s.listSubject(Filter{Stream: f.Stream, Consumer: f.Consumer})
	letters, err := st.Info(ctx, jetstream.WithSubjectFilter(filter))
	if err != nil {
		return fmt.Errorf("look for a letter of message %d: %w", f.Seq, err)
	}
	f.Stored = info.Created
	for id := range letters.State.Subjects {
		of, err := parseID(s.cfg.Prefix, id)
		// A letter from before the stream was created is about another message.
		if err == nil && of.seq == f.Seq && !of.stored.Before(info.Created) {
			f.Stored = of.stored
			_, _, err = s.report(ctx, f, StateOpen)
			return err
		}
	}
	if len(letters.State.Subjects) > 0 {
		err = scan(ctx, st, filter, 1, true, func(m *record) (more bool) {
			l := newLetter(m, s.cfg.Prefix)
			if l.ReplaySeq != f.Seq || l.Updated.Before(info.Created) {
				return true
			}
			f.Header = replayMessage(l).Header
			return false
		})
		if err != nil {
			return fmt.Errorf("look for a letter that was replayed as message %d: %w", f.Seq, err)
		}
	}
	_, _, err = s.report(ctx, f, StateOpen)
	return err
}

// removeOriginal deletes a parked message from a work-queue or interest stream,
// which would keep it for ever. It never deletes on doubt: an advisory proves
// nothing, so every consumer that wants the subject must be past the message,
// and the one that failed must be among them.
func (r *Router) removeOriginal(ctx context.Context, st jetstream.Stream, f jetbox.Failure) error {
	consumers, err := listConsumers(ctx, st)
	if err != nil {
		return err
	}
	var there bool
	var busy []string
	for _, c := range consumers {
		switch {
		case !wants(c.Config, f.Subject):
		case !past(c, f.Seq):
			busy = append(busy, c.Name)
		case c.Name == f.Consumer:
			there = true
		}
	}
	switch {
	case len(busy) > 0:
		return &postponed{fmt.Sprintf("message %d may still be handled by %s", f.Seq, strings.Join(busy, ", "))}
	case !there:
		return nil // deleted meanwhile: whoever takes its place gets the message
	}
	err = r.events.remove(ctx, f.Stream, f.Seq)
	if err == nil {
		return nil
	}
	_, readErr := r.events.get(ctx, f.Stream, getRequest{Seq: f.Seq})
	if errors.Is(readErr, jetstream.ErrMsgNotFound) {
		return nil // another router was faster
	}
	return fmt.Errorf("remove message %d of stream %s: %w", f.Seq, f.Stream, err)
}

func wants(c jetstream.ConsumerConfig, subject string) (yes bool) {
	return slices.ContainsFunc(filtersOf(c), func(filter string) bool { return covers(filter, subject) })
}

// past reports whether a consumer will not deliver the message any more.
func past(c *jetstream.ConsumerInfo, seq uint64) (done bool) { return doneUpTo(c) >= seq }
