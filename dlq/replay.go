package dlq

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// replayInfix stands between a letter's ID and the number of the replay in the
// replay's message ID. The ID names consumer and original, so the replays of
// two consumers' letters of one message are no duplicates of each other.
const replayInfix = "/replay/"

// maxKeep is a maximum age that nobody will live to see end.
const maxKeep = 100 * 365 * 24 * time.Hour

// ErrReplayedTooOften is returned for a letter that waits again after
// Config.MaxReplays replays, those that the stream refused included. Mend its handler, then replay it through a Letters
// with a higher MaxReplays, or discard it.
var ErrReplayedTooOften = errors.New("dead letter was replayed too often")

func replayID(l Letter) string { return l.ID + replayInfix + strconv.Itoa(l.Replays) }

// Replay publishes a letter's message again on its original subject, for the
// consumer it failed at, and returns the letter as it is then. Its message ID
// is fresh, so that the duplicate window does not swallow it; its
// Idempotency-Key is the same as ever, so that a ledger still knows it: the letter
// of a message whose effect has happened is closed, and the effect not repeated.
//
// All consumers of the stream get the message. Those of package consumer skip it
// when it is not for them. Others must do that themselves: acknowledge what has a
// Jetbox-Replay-For header other than their own "<stream>/<consumer>".
//
// A letter that another replay has left replaying is taken over: its message is
// looked for on the stream and published only when it is not there. Of several
// operators at one letter, one succeeds and the others get an error that wraps
// jetbox.ErrLetterGone, as does everybody for a letter that is closed, and for
// an intent younger than Config.Grace. One that was replayed Config.MaxReplays
// times is refused with [ErrReplayedTooOften].
//
// After any other error call Replay again. A letter whose replay is surely not on
// the stream and cannot get there, because the stream refused it or is gone, is
// open again.
func (s *Letters) Replay(ctx context.Context, id string) (Letter, error) {
	l, err := s.find(ctx, id)
	if err != nil {
		return Letter{}, err
	}
	if grace := s.graceOf(ctx); !l.waits(time.Now(), grace) && l.State != StateReplaying {
		return Letter{}, notNow(l, "replayed", grace)
	}
	if err := s.replayable(l); err != nil {
		return Letter{}, err
	}
	l, err = s.replay(ctx, l)
	if err != nil {
		return Letter{}, fmt.Errorf("replay letter %s: %w", id, err)
	}
	return l, nil
}

// replayable returns the error with which Replay refuses a letter for having been
// replayed too often. A replay that was begun may always be finished.
func (s *Letters) replayable(l Letter) error {
	if l.State == StateReplaying || l.Replays < s.cfg.MaxReplays {
		return nil
	}
	return fmt.Errorf("letter %s waits again after %d replays, at most %d are allowed: %w", l.ID, l.Replays, s.cfg.MaxReplays, ErrReplayedTooOften)
}

func (s *Letters) replay(ctx context.Context, l Letter) (Letter, error) {
	begun := l.State == StateReplaying
	st, err := s.events.js.Stream(ctx, l.Stream)
	if err != nil {
		err = fmt.Errorf("look up stream %s: %w", l.Stream, err)
		if begun && errors.Is(err, jetstream.ErrStreamNotFound) {
			return Letter{}, s.reopen(ctx, l, err) // its message is gone with the stream
		}
		return Letter{}, err
	}
	info := st.CachedInfo()
	absent := time.Now() // when the message was not on the stream
	if begun {
		var seq uint64
		if seq, absent, err = s.findReplay(ctx, l, info.Config.Duplicates); err != nil {
			return Letter{}, err
		}
		if seq > 0 {
			return s.finishReplay(ctx, l, seq)
		}
	} else {
		l.State = StateReplaying
		l.Replays++
		l.replayFrom, l.ReplaySeq = info.State.LastSeq, 0
		l.keep = keepFor(info.Config)
	}
	m, err := s.prepare(ctx, l, info.Config)
	if _, never := errors.AsType[*impossible](err); never && begun {
		return Letter{}, s.reopen(ctx, l, err)
	} else if err != nil {
		return Letter{}, err
	}
	if !begun {
		if l, err = s.put(ctx, l, l.Seq); err != nil {
			return Letter{}, err
		}
		absent = time.Now()
		if err := s.step("replaying stored"); err != nil {
			return Letter{}, err
		}
	}
	seq, err := s.publishReplay(ctx, l, m, absent, info.Config.Duplicates)
	if err != nil {
		return Letter{}, err
	}
	if err := s.step("replay published"); err != nil {
		return Letter{}, err
	}
	return s.finishReplay(ctx, l, seq)
}

// impossible says why the message of a letter cannot be published as things are.
type impossible struct{ error }

// prepare returns the message of a letter's replay.
func (s *Letters) prepare(ctx context.Context, l Letter, events jetstream.StreamConfig) (*nats.Msg, error) {
	if events.SubjectTransform != nil {
		return nil, &impossible{fmt.Errorf("stream %s transforms subjects, and the one that %s was published on is not known", l.Stream, l.Subject)}
	}
	l, err := s.complete(ctx, l)
	if err != nil {
		return nil, err
	}
	m := replayMessage(l)
	size := headerSize(m.Header) + headerSize(nats.Header{jetstream.ExpectedStreamHeader: {l.Stream}}) + len(m.Data)
	if most := s.limits(events.MaxMsgSize).message; size > most {
		return nil, &impossible{fmt.Errorf("the message has %d bytes with its replay headers, the broker takes %d", size, most)}
	}
	return m, nil
}

// finishReplay closes the letter. The message is on the stream by now, so it is
// done even when ctx has just ended.
func (s *Letters) finishReplay(ctx context.Context, l Letter, seq uint64) (Letter, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*askTimeout)
	defer cancel()
	l.State, l.ReplaySeq = StateReplayed, seq
	done, err := s.put(ctx, l, l.Seq)
	conflict, ok := errors.AsType[*conflictError](err)
	if ok && conflict.current != nil && conflict.current.Replays == l.Replays && conflict.current.inHand() {
		// The consumer was faster: it has the message already, and said so.
		return *conflict.current, nil
	}
	return done, err
}

// inHand reports whether a consumer, and no other operator, wrote about the
// last replay: it failed again, or its intent was withdrawn.
func (l Letter) inHand() (by bool) {
	return l.State == StateOpen || l.State == StateIntent || l.State == StateReplayed && l.ReplaySeq == 0
}

// complete returns the letter with what it could not hold, read from the
// original if the stream still has it.
func (s *Letters) complete(ctx context.Context, l Letter) (Letter, error) {
	l, err := s.assemble(ctx, l)
	if err != nil {
		return Letter{}, err
	}
	if !l.PayloadMissing && !l.HeadersTrimmed {
		return l, nil
	}
	m, err := s.events.get(ctx, l.Stream, getRequest{Seq: l.StreamSeq})
	switch {
	case err == nil && m.time.Equal(l.Stored):
		l.Subject, l.Payload, l.Header = m.subject, m.data, traveling(m.header)
		if id := nats.Header(m.header).Get(jetbox.HeaderMsgID); id != "" && len(l.Header[jetbox.HeaderIdempotencyKey]) == 0 {
			l.Header[jetbox.HeaderIdempotencyKey] = []string{wireValue(id)}
		}
		return l, nil
	case err != nil && !errors.Is(err, jetstream.ErrMsgNotFound):
		return Letter{}, fmt.Errorf("read the original: %w", err)
	case l.PayloadMissing:
		return Letter{}, &impossible{errors.New("payload unavailable: neither the letter nor the stream has it")}
	default:
		return l, nil // some application headers are lost, the event is not
	}
}

// replayMessage returns the original message as it is published again.
func replayMessage(l Letter) *nats.Msg {
	m := nats.NewMsg(l.Subject)
	m.Data = l.Payload
	maps.Copy(m.Header, l.Header)
	for name := range m.Header {
		if hasPrefixFold(name, "jetbox-") {
			delete(m.Header, name)
		}
	}
	m.Header.Set(jetbox.HeaderMsgID, replayID(l))
	m.Header.Set(jetbox.HeaderLetter, l.ID)
	m.Header.Set(jetbox.HeaderReplayFor, l.Stream+"/"+l.Consumer)
	return m
}

// publishReplay publishes m and returns its stream sequence. absent is the last time
// at which the message was known not to be there.
func (s *Letters) publishReplay(ctx context.Context, l Letter, m *nats.Msg, absent time.Time, window time.Duration) (uint64, error) {
	var unknown bool // an attempt had no answer: it may have stored the message
	for attempt := 1; ; attempt++ {
		// Whoever else is at the letter publishes under the same message ID.
		// Only within the duplicate window that makes one message of two.
		if since := time.Since(absent); window > 0 && since > window/2 {
			return 0, fmt.Errorf("publishing takes %v, half of stream %s's duplicate window has passed: run it again to look first", since, l.Stream)
		}
		ack, err := s.events.publish(ctx, m, l.Stream)
		switch {
		case err == nil:
			return ack.Sequence, nil
		case !refused(err) && !errors.Is(err, jetstream.ErrNoStreamResponse):
			unknown = true
		case !unknown:
			return 0, s.reopen(ctx, l, fmt.Errorf("publish to %s: %w", l.Subject, err))
		}
		if attempt == askAttempts {
			return 0, fmt.Errorf("publish to %s: %w", l.Subject, err)
		}
		if err := sleep(ctx, askPause<<attempt); err != nil {
			return 0, err
		}
	}
}

// reopen puts a letter back whose replay no stream has. It returns why.
func (s *Letters) reopen(ctx context.Context, l Letter, cause error) error {
	l.State = StateOpen
	if _, err := s.put(ctx, l, l.Seq); err != nil {
		return errors.Join(cause, err)
	}
	return cause
}

// findReplay looks for the message of the letter's last replay. It returns its
// stream sequence, or 0 and a recent time at which it was not there. Where
// reading takes so long that the other operator's message could have come and
// been forgotten meanwhile, it goes on with what came.
func (s *Letters) findReplay(ctx context.Context, l Letter, window time.Duration) (seq uint64, at time.Time, err error) {
	for from := l.replayFrom; ; {
		at = time.Now()
		seq, from, err = s.findReplayAfter(ctx, l, from)
		if err != nil {
			return 0, at, fmt.Errorf("look for message %s: %w", replayID(l), err)
		}
		if err := s.step("replay looked for"); err != nil {
			return 0, at, err
		}
		if seq > 0 || window <= 0 || time.Since(at) < window/4 {
			return seq, at, nil
		}
	}
}

// findReplayAfter looks at what the stream has after sequence from now, and
// returns up to which sequence that is.
func (s *Letters) findReplayAfter(ctx context.Context, l Letter, from uint64) (seq, to uint64, err error) {
	st, err := s.events.js.Stream(ctx, l.Stream)
	if err != nil {
		return 0, 0, err
	}
	info := st.CachedInfo()
	to = info.State.LastSeq
	if from > to {
		from = 0 // created anew since, or restored from a backup
	}
	match := func(m *record) (more bool) {
		if nats.Header(m.header).Get(jetbox.HeaderMsgID) == replayID(l) {
			seq = m.seq
		}
		return seq == 0
	}
	if info.Config.Retention == jetstream.LimitsPolicy && s.events == s {
		err = scan(ctx, st, l.Subject, from+1, true, match)
	} else {
		err = s.events.walk(ctx, l.Stream, l.Subject, from+1, to, match)
	}
	return seq, to, err
}

// walk is scan for streams that a second consumer would disturb: work-queue
// streams refuse it. It costs a round trip per message, of which such streams
// keep only the unhandled. And it is for those in another account, from which a
// consumer's messages would have to be exported too.
func (s *Letters) walk(ctx context.Context, stream, subject string, from, last uint64, fn func(*record) (more bool)) error {
	for from <= last {
		m, err := s.get(ctx, stream, getRequest{Seq: from, NextSubject: subject})
		switch {
		case errors.Is(err, jetstream.ErrMsgNotFound):
			return nil
		case err != nil:
			return err
		case m.seq > last || !fn(m):
			return nil
		}
		from = m.seq + 1
	}
	return nil
}

// Discard closes a letter for good and drops its payload. It returns an error
// that wraps jetbox.ErrLetterGone for a letter that does not wait for a person.
func (s *Letters) Discard(ctx context.Context, id string) (Letter, error) {
	l, err := s.find(ctx, id)
	if err != nil {
		return Letter{}, err
	}
	if grace := s.graceOf(ctx); !l.waits(time.Now(), grace) {
		return Letter{}, notNow(l, "discarded", grace)
	}
	parts, err := s.readParts(ctx, l)
	if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
		return Letter{}, fmt.Errorf("discard letter %s: %w", id, err)
	}
	l.State, l.Header, l.Payload, l.parts = StateDiscarded, nil, nil, ""
	if st, err := s.events.js.Stream(ctx, l.Stream); err == nil { // it may be gone, or not to be asked
		l.keep = keepFor(st.CachedInfo().Config)
	}
	l, err = s.put(ctx, l, l.Seq)
	if err != nil {
		return Letter{}, fmt.Errorf("discard letter %s: %w", id, err)
	}
	s.removeParts(ctx, parts)
	return l, nil
}

// keepFor is for how long a closed letter of a stream's message is needed at
// least: as long as the message lives, and then an advisory about it. A stream
// without a maximum age asks for nothing: what comes back from it after
// Config.KeepClosed is a new failure.
func keepFor(events jetstream.StreamConfig) time.Duration {
	if events.MaxAge <= 0 || events.MaxAge > maxKeep {
		return 0
	}
	return events.MaxAge + advisoriesMaxAge
}

// notNow says why a letter cannot be replayed or discarded.
func notNow(l Letter, verb string, grace func(Letter) time.Duration) error {
	why := "is " + string(l.State)
	switch {
	case l.State == StateIntent:
		why = fmt.Sprintf("is an intent younger than %v: its consumer may be at it", grace(l))
	case l.State == StateReplaying:
		why = "is being replayed: replay it again to finish that"
	case string(l.State) == verb:
		why = "is " + verb + " already"
	}
	return fmt.Errorf("letter %s %s: %w", l.ID, why, jetbox.ErrLetterGone)
}
