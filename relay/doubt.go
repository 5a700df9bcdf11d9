package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// lookAtOnce is how many messages are read before the relay asks again whether it
// may go on.
const lookAtOnce = 50_000

// doubt is what is to be looked for on one stream before it is sent again: rows that
// an earlier claim has covered, too long ago for the broker to drop a second copy.
type doubt struct {
	at    position  // from where; without a time of creation where no claim says it
	since time.Time // or from when, by the broker's clock
	rows  []jetbox.Row

	// guessed means that since is by the clock of who wrote the rows.
	guessed bool
}

// verify settles rows that may be on their streams already, where the broker would
// not drop a second copy: it looks for them first. It returns the rows that are to
// be sent, with those whose first copy is not there, and the outcomes of those
// found, and of those that sleep because their own stream is in an outage. The error
// is an outage of the configured one: nothing is known of the rest.
func (s *session) verify(rows []jetbox.Row) (send []jetbox.Row, outcomes []jetbox.Outcome, err error) {
	clear(s.unverified)
	clear(s.absent)
	for {
		v := verdicts{session: s, down: make(map[string]error)}
		if err := v.sort(rows); err != nil {
			return nil, outcomes, err
		}
		if len(v.doubts)+len(v.down) == 0 {
			return rows, outcomes, nil
		}
		for _, d := range v.doubts {
			if err := v.settle(d); err != nil {
				return nil, append(outcomes, v.outcomes...), err
			}
		}
		// A look can take longer than the window is: what was left to the broker may
		// have to be looked for by now.
		rows = v.rest(rows)
		outcomes = append(outcomes, v.outcomes...)
	}
}

// verdicts is what becomes of rows in doubt.
type verdicts struct {
	*session
	doubts   map[doubtKey]*doubt
	down     map[string]error // streams of which nothing can be found out, beside the configured one
	sleepers map[int64]error  // rows that have to wait for those
	outcomes []jetbox.Outcome
}

// fails notes that nothing can be found out about a stream, for rows of it. The error is
// one of the relay as a whole.
func (v *verdicts) fails(stream string, err error, rows ...jetbox.Row) error {
	if stream == v.cfg.Stream || !v.maySend() {
		return err
	}
	v.down[stream] = err
	if v.sleepers == nil {
		v.sleepers = make(map[int64]error)
	}
	for _, r := range rows {
		v.sleepers[r.Pos] = err
	}
	return nil
}

// settle looks for the rows of a doubt.
func (v *verdicts) settle(d *doubt) error {
	found, err := v.lookFor(d)
	v.outcomes = append(v.outcomes, found...)
	v.asleep.settle(found)
	if err != nil {
		return v.fails(d.at.Stream, err, d.rows...)
	}
	return nil
}

// rest returns the rows that have no outcome and may go on.
func (v *verdicts) rest(rows []jetbox.Row) (left []jetbox.Row) {
	settled := make(map[int64]bool, len(v.outcomes))
	for _, o := range v.outcomes {
		settled[o.Pos] = true
	}
	held := make(map[string]bool)
	for _, r := range rows {
		key := r.Event.OrderingKey()
		err, rests := v.sleepers[r.Pos]
		switch {
		case settled[r.Pos]:
		case key != "" && held[key]:
			v.outcomes = append(v.outcomes, v.unsent(r)...)
		case rests:
			held[key] = true
			if r.Earlier != nil {
				v.asleep.note(r.Pos, r.Earlier)
			}
			v.outcomes = append(v.outcomes, v.delayed(r, err, true))
			v.rested(err, false)
		default:
			left = append(left, r)
		}
	}
	return left
}

// sort sorts the rows to look for by stream and place.
func (v *verdicts) sort(rows []jetbox.Row) error {
	infos := make(map[string]*jetstream.StreamInfo)
	for _, r := range rows {
		if r.Fresh || r.Fault != nil || !v.inDoubt(r) || v.unverified[r.Pos] {
			continue
		}
		if earlier := v.asleep[r.Pos]; earlier != nil {
			r.Earlier = earlier
		}
		stream, err := v.streams.of(v.ctx, r.Event.Subject)
		if err != nil {
			return err
		}
		if stream == "" {
			continue
		}
		if err := v.down[stream]; err != nil {
			v.sleepers[r.Pos] = err
			continue
		}
		info := infos[stream]
		if info == nil {
			if info, err = leaderInfo(v.ctx, v.streams.js, stream); err != nil {
				if err := v.fails(stream, fmt.Errorf("look up stream %s: %w", stream, err), r); err != nil {
					return err
				}
				continue
			}
			infos[stream] = info
		}
		// The batch may be on the wire for as long as a lease.
		if r.Earlier == nil || !trusted(info, told(r.Earlier.Before), r.Earlier.Age, v.cfg.Lease) {
			v.add(stream, r)
		}
	}
	return nil
}

// guessMargin is how far the clock of who wrote a row may be from the broker's, where a
// row is looked for from the time on in which it was written; guessMost is how many
// messages are worth a look that proves little.
const (
	guessMargin = time.Hour
	guessMost   = 1_000_000
)

// add adds a row to what is looked for.
func (v *verdicts) add(stream string, r jetbox.Row) {
	if v.doubts == nil {
		v.doubts = make(map[doubtKey]*doubt)
	}
	// It has left its claim, and was put to sleep by another relay.
	key, since := doubtKey{stream: stream, guessed: true}, r.Event.Time.Add(-guessMargin)
	var at jetbox.Position
	if r.Earlier != nil {
		at, _ = positionOf(r.Earlier.Before, stream)
		key, since = doubtKey{stream: stream, created: at.Created}, told(r.Earlier.Before)
	}
	d := v.doubts[key]
	if d == nil {
		d = &doubt{at: position{Stream: stream, Created: at.Created, Seq: at.Seq}, since: since, guessed: key.guessed}
		v.doubts[key] = d
	}
	d.at.Seq = min(d.at.Seq, at.Seq)
	if since.Before(d.since) {
		d.since = since
	}
	d.rows = append(d.rows, r)
}

// doubtKey says which rows are looked for together.
type doubtKey struct {
	stream  string
	created time.Time // its incarnation, zero where no claim tells
	guessed bool
}

// lookFor looks for rows on their stream and returns the outcomes of those that need
// not be sent.
func (s *session) lookFor(d *doubt) (outcomes []jetbox.Outcome, err error) {
	wanted := make([]wantedEvent, len(d.rows))
	for i, r := range d.rows {
		h := nats.Header(r.Event.Header(s.cfg.Source))
		wanted[i] = wantedEvent{msgID: h.Get(jetbox.HeaderMsgID), ceID: h.Get(jetbox.HeaderCEID)}
	}
	began, read := time.Now(), 0
	at, same := d.at, true
	if at.Created.IsZero() {
		if at, err = placeOf(s.ctx, s.streams.js, at.Stream, d.since); err != nil {
			return nil, err
		}
		same = !d.guessed || at.Seq == 0 // the whole of the stream
	}
	var res lookResult
	for !res.done && (!d.guessed || read < guessMost) {
		if !s.maySend() {
			return nil, errors.New("looking for events on the stream was interrupted")
		}
		res, err = look(s.ctx, s.streams.js, at, wanted, lookAtOnce)
		read += res.read
		at = res.next
		switch {
		case errors.Is(err, errRecreated), errors.Is(err, errRolledBack):
			// What the claim says of another stream, or of messages that are lost,
			// means nothing. But the rows may have been stored since.
			s.cfg.Logger.LogAttrs(s.ctx, slog.LevelWarn, "events of unknown outcome may have been stored and lost",
				slog.String("stream", at.Stream), slog.Int("count", len(d.rows)), slog.Any("err", err))
			forget(wanted)
			same, res.done = false, false
			if at, err = placeOf(s.ctx, s.streams.js, at.Stream, d.since); err != nil {
				return nil, err
			}
		case err != nil:
			return nil, err
		}
	}
	for i, r := range d.rows {
		if o, settled := s.looked(r, wanted[i], d.at.Stream); settled {
			outcomes = append(outcomes, o)
		} else if res.absent && same {
			s.absent[r.Pos] = true
			delete(s.asleep, r.Pos)
		} else {
			s.unverified[r.Pos] = true
		}
	}
	s.cfg.Logger.LogAttrs(s.ctx, slog.LevelInfo, "looked on the stream for events of unknown outcome",
		slog.String("stream", d.at.Stream), slog.Int("events", len(d.rows)), slog.Int("settled", len(outcomes)),
		slog.Int("messages", read), slog.Duration("took", time.Since(began)))
	return outcomes, nil
}

// forget makes what was found on a stream that is gone unfound.
func forget(wanted []wantedEvent) {
	for i, w := range wanted {
		wanted[i] = wantedEvent{msgID: w.msgID, ceID: w.ceID}
	}
}

// looked is the outcome of a row that was looked for, if that settles it.
func (s *session) looked(r jetbox.Row, w wantedEvent, stream string) (o jetbox.Outcome, settled bool) {
	switch {
	case w.seq > 0:
		s.cfg.Hooks.PublishedFunc(0, time.Since(r.Event.Time), true)
		return jetbox.Outcome{
			Pos: r.Pos, State: jetbox.Published, Stream: stream, StreamSeq: w.seq, MsgID: r.Event.Key, Remove: s.cfg.removal(),
		}, true
	case w.otherSeq > 0:
		return s.parked(r, fmt.Errorf("idempotency key %q is taken: message %d of stream %s carries event %s",
			r.Event.Key, w.otherSeq, stream, w.other), true), true
	}
	return jetbox.Outcome{}, false
}

// positions returns where the streams stand, for a claim.
func (s *session) positions(ctx context.Context) []jetbox.Position {
	// An outage is met by who publishes; a claim is worth having without.
	if info, err := s.streams.configured(ctx); err == nil {
		s.at.seen(info)
	}
	for _, info := range s.streams.others() {
		s.at.seen(info)
	}
	return s.at.all()
}
