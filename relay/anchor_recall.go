package relay

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// recallMost is how many rows are looked for at once. Each time, what the stream
// stored since it lost them is read.
const recallMost = 20_000

// recall brings a recall a step further: it looks for some of its rows on the stream,
// and makes those pending that are not there.
func (c *streamCheck) recall(a jetbox.Anchor) error {
	r := *a.Recall
	rows, step, err := c.nextRows(a.Stream, r)
	if err != nil {
		return err
	}
	unverified, err := c.lookForRows(a, rows, &step)
	switch {
	case errors.Is(err, errLostMore): // an errRolledBack, too
		// What earlier steps have found may be gone, too.
		c.watch.forgive(a.Stream)
		step = jetbox.Recalled{Done: math.MinInt64}
	case errors.Is(err, errRecreated), errors.Is(err, errRolledBack):
		// It is not the stream that it was when this began: look at it anew.
		step = jetbox.Recalled{Done: r.Done, End: true}
	case err != nil && a.Stream != c.cfg.Stream && c.maySend():
		return c.putOff(a, err)
	case err != nil:
		return err
	}
	done, err := c.src.Recall(c.ctx, c.share.now(), a.Stream, r, step)
	if err != nil || !done {
		return err // another relay is at it too
	}
	for range unverified {
		c.cfg.Hooks.UnverifiedFunc()
	}
	if n := len(step.Lost); n > 0 {
		c.cfg.Hooks.RepublishedFunc(n)
	}
	if !step.End {
		return nil
	}
	n := r.Rows + len(step.Lost)
	c.cfg.Logger.LogAttrs(c.ctx, slog.LevelWarn, "published rows are published again, for they are not on their stream",
		slog.String("stream", a.Stream), slog.Int("count", n), slog.Bool("recreated", r.Older))
	c.health.note("rows of "+a.Stream, fmt.Sprintf("%d rows of stream %s are published again", n, a.Stream))
	return nil
}

// errLostMore is returned when a stream has lost what was read of it for a recall, but
// not what the recall begins after.
var errLostMore = errors.New("stream has lost more messages meanwhile")

// lostAll is the sequence in the anchor of a stream that is known to have lost
// messages: wherever it ends, that is before it.
const lostAll = math.MaxInt64

// putOff ends a recall of a stream, beside the configured one, that is deleted or cannot
// be read: nothing is claimed while one is under way, and the other streams have no part
// in that. The anchor is one that the stream, should it come back, has lost, so that the
// recall begins anew then.
func (c *streamCheck) putOff(a jetbox.Anchor, why error) error {
	r := *a.Recall
	done, err := c.src.Recall(c.ctx, c.share.now(), a.Stream, r, jetbox.Recalled{Done: r.Done, End: true})
	if err != nil || !done {
		return err
	}
	if a.Recall = nil; r.Older {
		a.Older = true // said by the end of the recall not to be so
	} else {
		a.Seq, a.MsgID = lostAll, ""
	}
	for {
		if err = c.src.SetAnchor(c.ctx, c.share.now(), a.Created, a); err == nil {
			break
		}
		if errors.Is(err, jetbox.ErrLeaseLost) || !c.maySend() {
			return err
		}
		pause(c.ctx, time.Second)
	}
	c.failed(a.Stream, fmt.Sprintf("stream %s has lost messages, and what is retained of them cannot be published again: %v", a.Stream, why))
	c.cfg.Logger.LogAttrs(c.ctx, slog.LevelError, "publishing again what a stream has lost is put off",
		slog.String("stream", a.Stream), slog.Any("err", why))
	return nil
}

func recallFault(a jetbox.Anchor) error {
	if a.Recall.Older {
		return fmt.Errorf("%s was created anew: %d rows are to be published again so far", a.Stream, a.Recall.Rows)
	}
	return fmt.Errorf("%s has lost messages that it had acknowledged: %d rows are to be published again so far", a.Stream, a.Recall.Rows)
}

// nextRows returns the next rows that a recall chooses.
func (c *streamCheck) nextRows(stream string, r jetbox.Recall) (rows []jetbox.PublishedRow, step jetbox.Recalled, err error) {
	step.Done = r.Done
	for len(rows) < recallMost && step.Done < math.MaxInt64 {
		if !c.maySend() {
			return nil, step, errInterrupted
		}
		var page []jetbox.PublishedRow
		if page, step.Done, err = c.src.Recallable(c.ctx, stream, r, step.Done); err != nil {
			return nil, step, err
		}
		rows = append(rows, page...)
	}
	step.End = step.Done == math.MaxInt64
	return rows, step, nil
}

// lookForRows looks for rows on their stream and adds to the step what is to be done
// with them. It returns how many of the lost ones may be there all the same.
func (c *streamCheck) lookForRows(a jetbox.Anchor, rows []jetbox.PublishedRow, step *jetbox.Recalled) (unverified int, err error) {
	if len(rows) == 0 {
		return 0, nil
	}
	looked := make([]wantedEvent, len(rows))
	for i, r := range rows {
		looked[i] = wanted(r, c.cfg.Source)
	}
	var res lookResult
	for at := (position{Stream: a.Stream, Created: a.Created, Seq: a.Recall.After}); !res.done; at = res.next {
		if !c.maySend() {
			return 0, errInterrupted
		}
		res, err = look(c.ctx, c.streams.js, at, looked, lookAtOnce)
		if errors.Is(err, errRolledBack) && res.next.Seq > a.Recall.After {
			return 0, fmt.Errorf("%w: %w", errLostMore, err)
		}
		if err != nil {
			return 0, err
		}
	}
	for i, r := range rows {
		switch w := looked[i]; {
		case w.seq == 0:
			step.Lost = append(step.Lost, r.Pos)
			continue
		case w.seq != r.Seq:
			r.Seq = w.seq
			step.Moved = append(step.Moved, r)
		}
		// The anchor is of what the stream had kept before this.
		c.watch.owe(jetbox.Anchor{Stream: a.Stream, Created: a.Created, Seq: r.Seq, MsgID: r.MsgID, Pos: r.Pos})
	}
	if !res.absent {
		unverified = len(step.Lost)
	}
	return unverified, nil
}
