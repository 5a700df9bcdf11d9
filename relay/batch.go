package relay

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// outbound is a row that is about to be published.
type outbound struct {
	message
	row jetbox.Row
}

// prepare turns rows into messages, and decides at once what needs no broker: rows
// that are no events, and subjects no stream takes. The error is an outage: then
// nothing can be sent at all.
func (s *session) prepare(rows []jetbox.Row) (batch []outbound, outcomes []jetbox.Outcome, outage error) {
	held := make(map[string]bool) // keys that may not go on behind a row of this batch
	batch = make([]outbound, 0, len(rows))
	for _, row := range rows {
		key := row.Event.OrderingKey()
		if held[key] {
			outcomes = append(outcomes, s.unsent(row)...)
			continue
		}
		if row.Fault != nil {
			outcomes = append(outcomes, s.parked(row, row.Fault, false))
			held[key] = key != "" && s.cfg.OnDead == Freeze
			continue
		}
		stream, err := s.streams.of(s.ctx, row.Event.Subject)
		if err != nil {
			return nil, outcomes, err
		}
		if stream == "" {
			err := fmt.Errorf("%w: %s", errNoStream, row.Event.Subject)
			outcomes = append(outcomes, s.failed(row, err, s.fallsAsleep(row, err)))
			held[key] = key != ""
			continue
		}
		batch = append(batch, outbound{message{
			key:    key,
			stream: stream,
			fresh:  row.Fresh,
			msg: &nats.Msg{
				Subject: row.Event.Subject,
				Header:  row.Event.Header(s.cfg.Source),
				Data:    row.Event.Payload,
			},
		}, row})
	}
	return batch, outcomes, nil
}

// publish sends the batch and says what became of each row. The error is an
// outage, of which only the first cause is told.
func (s *session) publish(batch []outbound) (outcomes []jetbox.Outcome, outage error) {
	messages := make([]message, len(batch))
	for i, b := range batch {
		messages[i] = b.message
	}
	// One key over a slow link takes a round trip for each of its rows. What is
	// acknowledged must be recorded long before the broker forgets its ID, or a
	// crash at the end of the batch leaves a second copy of its beginning.
	enough := time.Now().Add(s.cfg.Lease)
	maySend := func() bool { return s.maySend() && time.Now().Before(enough) }
	born := s.born(batch)
	t := tally{outcomes: make([]jetbox.Outcome, 0, len(batch))}
	for i, res := range s.engine.publish(s.hard, messages, maySend) {
		s.judge(&t, batch[i], res)
	}
	if t.outage != nil {
		s.watch.suspect() // a broker that comes back may have lost something
	}
	s.remember(t.outcomes, t.duplicates > 0, born)
	if t.outage != nil {
		s.streams.forget()
	}
	if t.duplicates > 0 {
		s.cfg.Logger.LogAttrs(s.ctx, slog.LevelInfo, "broker had events already", slog.Int("count", t.duplicates))
	}
	if t.late > 0 {
		s.cfg.Logger.LogAttrs(s.ctx, slog.LevelInfo, "events published after later ones of their ordering key: "+
			"their transactions ended too late", slog.Int("count", t.late))
	}
	s.rested(t.resting, t.acked)
	s.asleep.settle(t.outcomes)
	return t.outcomes, t.outage
}

// tally is what became of a batch.
type tally struct {
	outcomes   []jetbox.Outcome
	outage     error // why the relay as a whole must wait
	unread     error // why it cannot be told of what a message is a duplicate
	resting    error // why rows sleep in an outage of their own
	acked      bool  // some row got its PubAck
	duplicates int
	late       int // rows published after a higher one of their key
}

// judge turns the result of one message into an outcome or an outage.
func (s *session) judge(t *tally, b outbound, res result) {
	if res.ack != nil {
		if res.ack.Duplicate && t.unread != nil {
			return // each question would cost its whole wait
		}
		o, err := s.stored(b, res)
		if err != nil {
			t.outage, t.unread = cmp.Or(t.outage, err), err
			return
		}
		t.acked = true
		if res.ack.Duplicate {
			t.duplicates++
		}
		if o.State == jetbox.Published && s.cameLate(b, res.ack.Duplicate) {
			t.late++
			s.cfg.Hooks.LateFunc()
		}
		t.outcomes = append(t.outcomes, o)
		return
	}
	if res.err == nil {
		t.outcomes = append(t.outcomes, s.unsent(b.row)...)
		return
	}
	err := s.explain(b.message, res.err)
	if classify(res.err) != classOutage {
		// A stream that refuses a row does not have it, as far as it remembers its ID.
		var api *jetstream.APIError
		inDoubt := s.unverified[b.row.Pos] || !errors.As(err, &api) && s.inDoubt(b.row)
		t.outcomes = append(t.outcomes, s.failed(b.row, err, inDoubt))
		return
	}
	s.cfg.Hooks.FailedFunc(classOutage)
	if b.stream != s.cfg.Stream || errors.Is(err, errDenied) {
		// Not the relay's business as a whole: the row sleeps, its key with it,
		// and everything else goes on.
		if !errors.Is(err, errDenied) {
			s.watch.doubt(b.stream)
		}
		t.outcomes = append(t.outcomes, s.delayed(b.row, err, s.fallsAsleep(b.row, err)))
		t.resting = err
		return
	}
	t.outage = cmp.Or(t.outage, fmt.Errorf("publish %s to %s: %w", b.row.Event.ID, b.row.Event.Subject, err))
}

// stored is the outcome of a row with a PubAck.
func (s *session) stored(b outbound, res result) (jetbox.Outcome, error) {
	if res.ack.Duplicate {
		id, err := s.streams.storedID(s.hard, res.ack.Stream, res.ack.Sequence)
		if err != nil {
			return jetbox.Outcome{}, err
		}
		// The broker drops by message ID alone, whatever the content. Another
		// event under our key means that ours is not on the stream and never
		// will be.
		if want := b.msg.Header.Get(jetbox.HeaderCEID); id != "" && id != want {
			return s.parked(b.row, fmt.Errorf("idempotency key %q is taken: message %d of stream %s carries event %s",
				b.row.Event.Key, res.ack.Sequence, res.ack.Stream, id), true), nil
		}
	}
	s.at.acked(res.ack.Stream, res.ack.Sequence)
	if s.unverified[b.row.Pos] && !res.ack.Duplicate {
		s.cfg.Hooks.UnverifiedFunc()
	}
	s.cfg.Hooks.PublishedFunc(res.took, time.Since(b.row.Event.Time), res.ack.Duplicate)
	return jetbox.Outcome{
		Pos:       b.row.Pos,
		State:     jetbox.Published,
		Stream:    res.ack.Stream,
		StreamSeq: res.ack.Sequence,
		MsgID:     b.row.Event.Key,
		Remove:    s.cfg.removal(),
	}, nil
}

// cameLate notes that a row is on the stream, and reports whether it became visible
// only after a higher one of its key was published. A row that was scheduled came
// when it should, and of one that the broker had already this is not known.
func (s *session) cameLate(b outbound, duplicate bool) (late bool) {
	if b.key == "" {
		return false
	}
	late = s.late.published(b.key, b.row.Pos)
	return late && !duplicate && b.row.Event.NotBefore.IsZero()
}

// failed is the outcome of a row that was refused for itself, and may be on the stream
// from an earlier send even so.
func (s *session) failed(row jetbox.Row, err error, inDoubt bool) (o jetbox.Outcome) {
	defer func() { o.InDoubt = inDoubt }()
	if classify(err) == classPermanent {
		return s.parked(row, err, true)
	}
	attempt := row.Attempts + 1
	if attempt >= s.cfg.MaxAttempts {
		return s.parked(row, fmt.Errorf("gave up after %d attempts: %w", attempt, err), true)
	}
	s.cfg.Hooks.FailedFunc(classRow)
	return jetbox.Outcome{
		Pos:       row.Pos,
		State:     jetbox.Pending,
		Reason:    err.Error(),
		Attempted: true,
		Delay:     s.retry.After(attempt),
	}
}

// restAttempt paces the next try of a row whose own stream, or permission, is
// missing: as after this many failures, since each try costs a whole ackTimeout.
const restAttempt = 4

// flowQuiet is how long nothing may have been stored before rows that sleep for an
// outage of their own make the relay not ready: less than the 30 s in which
// trouble must be visible, and long enough not to change with every batch.
const flowQuiet = 20 * time.Second

// rested notes whether rows of a batch were put to sleep for an outage of their
// own, and whether others flow. The first is believed until they have had their
// next try.
func (s *session) rested(err error, flows bool) {
	if flows {
		s.flowed = time.Now()
	}
	if err != nil {
		s.resting, s.restingUntil = err, time.Now().Add(2*s.retry.After(restAttempt)+ackTimeout)
	}
}

// publishFault notes what keeps rows from being published: an outage, or what
// puts them to sleep while nothing flows beside them.
func (s *session) publishFault(outage error) {
	now := time.Now()
	if outage == nil && now.Before(s.restingUntil) && now.Sub(s.flowed) > flowQuiet {
		outage = s.resting
	}
	s.fault(s.ctx, partPublish, outage)
}

// delayed is the outcome of a row that an outage concerns and not the others, and that may
// have been stored for all that.
func (s *session) delayed(row jetbox.Row, err error, inDoubt bool) jetbox.Outcome {
	return jetbox.Outcome{
		Pos:     row.Pos,
		State:   jetbox.Pending,
		InDoubt: inDoubt,
		Reason:  err.Error(),
		Delay:   s.retry.After(restAttempt),
	}
}

// parked is the outcome of a row that cannot be published.
func (s *session) parked(row jetbox.Row, err error, attempted bool) jetbox.Outcome {
	s.cfg.Hooks.FailedFunc(classPermanent)
	s.cfg.Logger.LogAttrs(s.ctx, slog.LevelWarn, "event parked",
		slog.String("event", row.Event.ID), slog.Int64("row", row.Pos), slog.Any("err", err))
	return jetbox.Outcome{
		Pos:       row.Pos,
		State:     jetbox.DeadLetter,
		Reason:    err.Error(),
		Attempted: attempted,
		Freeze:    s.cfg.OnDead == Freeze && row.Event.OrderingKey() != "",
	}
}
