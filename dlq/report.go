package dlq

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// currentReplay stands for "the last replay, whichever that is" where a message
// does not say which one it came from.
const currentReplay = -1

// Intend stores the letter of a failure that has not happened yet: call it
// before the last delivery is handled. Repeating it is harmless. It changes
// nothing when the failure has been reported already.
func (s *Letters) Intend(ctx context.Context, f jetbox.Failure) error {
	_, _, err := s.report(ctx, f, StateIntent)
	return err
}

// Park stores the letter of a failure, or opens its intent, or reopens the
// letter whose replay failed. Nil means that the broker has an open letter for
// it, or one that somebody has dealt with since: the message may be settled
// now. Repeating it is harmless.
func (s *Letters) Park(ctx context.Context, f jetbox.Failure) error {
	_, _, err := s.report(ctx, f, StateOpen)
	return err
}

// Withdraw takes an intent back after its delivery was handled after all. A
// letter that somebody has opened meanwhile stays as it is.
func (s *Letters) Withdraw(ctx context.Context, f jetbox.Failure) error {
	id, replay, err := s.target(f)
	if err != nil {
		return fmt.Errorf("withdraw intent: %w", err)
	}
	l, err := s.last(ctx, id)
	if err != nil {
		return err
	}
	if l == nil || l.State != StateIntent {
		return nil
	}
	if l.Replays > 0 {
		if replay == currentReplay || replay == l.Replays {
			l.State = StateReplayed
			l.recall()
			_, err = s.put(ctx, *l, l.Seq)
		}
		if _, conflict := errors.AsType[*conflictError](err); conflict {
			return nil
		}
		return err
	}
	// Deleting that one sequence, not the subject: a letter opened since then
	// has another.
	err = s.removeLetter(ctx, *l)
	if err == nil {
		return nil
	}
	now, readErr := s.last(ctx, id)
	if readErr == nil && (now == nil || now.Seq != l.Seq) {
		return nil
	}
	return fmt.Errorf("withdraw letter %s: %w", id, errors.Join(err, readErr))
}

// report creates or changes the letter of a failure. It returns the letter as
// it is now.
func (s *Letters) report(ctx context.Context, f jetbox.Failure, state State) (l Letter, changed bool, err error) {
	id, replay, err := s.target(f)
	if err != nil {
		return Letter{}, false, fmt.Errorf("report failure: %w", err)
	}
	fresh, size := s.letter(f, id, state), int32(0)
	if fresh.Replays = replay; replay == currentReplay {
		fresh.Replays = 1
	}
	var current *Letter
	if replay != 0 {
		if current, err = s.last(ctx, id); err != nil {
			return Letter{}, false, err
		}
	}
	for range askAttempts {
		next, change := merge(current, fresh, replay)
		if !change {
			return *current, false, nil
		}
		l, err = s.putWhole(ctx, next, current, size)
		conflict, ok := errors.AsType[*conflictError](err)
		switch {
		case err == nil:
			if state == StateOpen && (current == nil || current.State != StateOpen) {
				s.cfg.RoutedFunc(l.Reason)
			}
			return l, true, nil
		case ok:
			current = conflict.current
		case tooLarge(err) && size == 0:
			// The stream's own limit is lower than the connection's.
			stream, infoErr := s.js.Stream(ctx, s.cfg.Stream)
			if infoErr != nil {
				return Letter{}, false, errors.Join(err, infoErr)
			}
			size = stream.CachedInfo().Config.MaxMsgSize
		default:
			return Letter{}, false, err
		}
	}
	return Letter{}, false, err
}

// putWhole stores what current, if there is one, becomes, with its original in
// parts where it is too large. The parts come first: a letter that is there is
// whole.
func (s *Letters) putWhole(ctx context.Context, next Letter, current *Letter, maxMsgSize int32) (Letter, error) {
	if next.payloadLost() {
		next.Error = joinError(next.Error, fmt.Sprintf("payload unavailable: message %d is gone from stream %s", next.StreamSeq, next.Stream))
	}
	next, parts := fitWhole(next, s.limits(maxMsgSize))
	if err := s.storeParts(ctx, next, parts); err != nil {
		return Letter{}, err
	}
	if current == nil {
		return s.put(ctx, next, 0)
	}
	if current.closed() && next.parts == current.parts && len(parts) == 0 {
		if err := s.reopenParts(ctx, next); err != nil { // they were to expire with the closed letter
			return Letter{}, err
		}
	}
	return s.put(ctx, next, current.Seq)
}

func tooLarge(err error) (large bool) {
	var api *jetstream.APIError
	return errors.As(err, &api) && (api.ErrorCode == jetstream.JSErrCodeStreamMessageExceedsMaximum ||
		api.ErrorCode == codeHeaderTooLarge)
}

// target returns the letter a failure belongs to, and which replay failed; 0
// stands for the original.
func (s *Letters) target(f jetbox.Failure) (id string, replay int, err error) {
	own := identity{stream: f.Stream, consumer: f.Consumer, seq: f.Seq, stored: f.Stored}
	if err := own.validate(); err != nil {
		return "", 0, err
	}
	h := nats.Header(f.Header)
	id = h.Get(jetbox.HeaderLetter)
	// A replay meant for another consumer, which this one did not skip, is a
	// message like any other here.
	if id == "" || h.Get(jetbox.HeaderReplayFor) != f.Stream+"/"+f.Consumer {
		return own.subject(s.cfg.Prefix), 0, nil
	}
	of, bad := parseID(s.cfg.Prefix, id)
	if bad == nil && of.stream == f.Stream && of.consumer == f.Consumer {
		return id, replayNumber(id, h.Get(jetbox.HeaderMsgID)), nil
	}
	return own.subject(s.cfg.Prefix), 0, nil
}

// replayNumber reads which replay of a letter a message ID names.
func replayNumber(id, msgID string) int {
	number, ok := strings.CutPrefix(msgID, id+replayInfix)
	n, err := strconv.Atoi(number)
	if !ok || err != nil || n < 1 {
		return currentReplay
	}
	return n
}

// letter returns a letter of the failure as if there were none yet.
func (s *Letters) letter(f jetbox.Failure, id string, state State) Letter {
	of, _ := parseID(s.cfg.Prefix, id)
	l := Letter{
		ID:         id,
		State:      state,
		Stream:     of.stream,
		Consumer:   of.consumer,
		StreamSeq:  of.seq,
		Stored:     of.stored,
		Subject:    wireValue(f.Subject),
		Header:     traveling(f.Header),
		Payload:    f.Payload,
		Deliveries: f.Deliveries,
		Reason:     f.Reason,
		Error:      errorText(f.Err, maxError),
		Time:       time.Now().UTC(),
	}
	delete(l.Header, jetbox.HeaderLetter)
	delete(l.Header, jetbox.HeaderReplayFor)
	if id := nats.Header(f.Header).Get(jetbox.HeaderMsgID); id != "" && len(l.Header[jetbox.HeaderIdempotencyKey]) == 0 {
		l.Header[jetbox.HeaderIdempotencyKey] = []string{wireValue(id)}
	}
	if dropped(f.Header) {
		l.HeadersTrimmed = true
		l.Error = joinError(l.Error, "some headers left out: no client can send their names")
	}
	if f.Subject == "" {
		l.PayloadMissing = true
	}
	return l
}

// merge returns what the current letter becomes when fresh is reported for the
// given replay, and whether that changes anything.
func merge(current *Letter, fresh Letter, replay int) (next Letter, change bool) {
	if current == nil || current.State == "" {
		return fresh, true // what is no letter may not hide one
	}
	next = *current
	if replay == currentReplay {
		replay = current.Replays
	}
	if replay < current.Replays {
		// A late report of a delivery that somebody has replayed since, such as
		// an advisory a router finds an hour later.
		return next, false
	}
	next.Replays = replay
	switch {
	case current.State == StateIntent && fresh.State == StateOpen:
		next.Deliveries = max(current.Deliveries, fresh.Deliveries)
	case replay > 0 && (current.State == StateReplaying || current.State == StateReplayed):
		next.remember()
		next.Deliveries += fresh.Deliveries
	case current.State == StateOpen && fresh.State == StateOpen && improves(fresh, *current):
		// The router was first and knew less.
		fresh.Time = current.Time
	default:
		return next, false
	}
	next.State, next.Reason, next.Time = fresh.State, fresh.Reason, fresh.Time
	next.Error = fresh.Error
	if current.payloadLost() && !fresh.PayloadMissing {
		next.Subject, next.Header, next.Payload = fresh.Subject, fresh.Header, fresh.Payload
		next.PayloadMissing, next.HeadersTrimmed = false, fresh.HeadersTrimmed
	}
	return next, true
}

func improves(fresh, current Letter) (better bool) {
	return current.Error == "" && fresh.Error != "" || current.payloadLost() && !fresh.PayloadMissing
}
