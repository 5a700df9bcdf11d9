package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// anchorPause is the pause between two looks at an anchor that must agree before it
// is taken for lost.
const anchorPause = time.Second

// anchor is a message that a stream has acknowledged.
type anchor struct {
	Stream  string
	Created time.Time // of the stream, to the nanosecond
	Seq     uint64
	MsgID   string
}

// verdict says what became of an anchor.
type verdict string

const (
	// anchorIntact: the message is where it was.
	anchorIntact verdict = "intact"
	// anchorRemoved: the stream has gone past its sequence and has no message there:
	// purged, aged, deleted, handled. A sequence is given once, so somebody or a
	// limit removed it; a stream that lost its end would have ended before it, or
	// have another message there.
	anchorRemoved verdict = "removed"
	// anchorLost: the stream ends before it, or has another message there.
	anchorLost verdict = "lost"
	// anchorRecreated: the stream was deleted and created anew, by a person.
	anchorRecreated verdict = "recreated"
	// anchorMissing: there is no such stream.
	anchorMissing verdict = "missing"
)

// errUnsettled is returned when what was seen of an anchor keeps changing.
var errUnsettled = errors.New("stream changes while it is looked at")

// checkAnchor finds out whether a stream still has what it has acknowledged. What is
// bad news must be seen twice in succession, with a pause between.
//
// It cannot tell a removed message from a lost one once the stream has grown past
// its sequence again and the other message there has been removed too, nor where the
// server has dropped a damaged part from the middle of its files.
func checkAnchor(ctx context.Context, js jetstream.JetStream, a anchor) (verdict, error) {
	const attempts = 4
	var before verdict
	for range attempts {
		v, err := seeAnchor(ctx, js, a)
		switch {
		case err != nil:
			return "", fmt.Errorf("look for message %s at %d of stream %s: %w", a.MsgID, a.Seq, a.Stream, err)
		case v == anchorIntact, v == anchorRemoved, v == before:
			return v, nil
		}
		before = v
		pause(ctx, anchorPause)
	}
	return "", fmt.Errorf("look for message %s at %d of stream %s: %w", a.MsgID, a.Seq, a.Stream, errUnsettled)
}

func seeAnchor(ctx context.Context, js jetstream.JetStream, a anchor) (verdict, error) {
	info, err := leaderInfo(ctx, js, a.Stream)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return anchorMissing, nil
	case err != nil:
		return "", err
	case !info.Created.Equal(a.Created):
		return anchorRecreated, nil
	}
	// After the state, not before: a sequence the stream has passed by then and that
	// is not there now was removed, whatever is stored meanwhile.
	m, err := leaderAt(ctx, js, a.Stream, a.Seq)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return anchorMissing, nil
	case err != nil:
		return "", err
	case m == nil && info.State.LastSeq >= a.Seq:
		return anchorRemoved, nil
	case m == nil || m.header.Get(jetbox.HeaderMsgID) != a.MsgID:
		return anchorLost, nil
	}
	return anchorIntact, nil
}
