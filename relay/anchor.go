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
	// anchorUnread: the stream has gone past its sequence, and the user may not read
	// what is there.
	anchorUnread verdict = "unread"
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
// bad news must be seen twice in succession, with a pause between, except that the
// stream is missing: of that nothing follows. info is how the stream stood, nil if it is
// missing.
//
// It cannot tell a removed message from a lost one once the stream has grown past
// its sequence again and the other message there has been removed too, nor where the
// server has dropped a damaged part from the middle of its files.
func checkAnchor(ctx context.Context, js jetstream.JetStream, a jetbox.Anchor) (v verdict, info *jetstream.StreamInfo, err error) {
	const attempts = 4
	var before verdict
	for range attempts {
		v, info, err = seeAnchor(ctx, js, a)
		switch {
		case err != nil:
			return "", nil, fmt.Errorf("look for message %s at %d of stream %s: %w", a.MsgID, a.Seq, a.Stream, err)
		case v == anchorIntact, v == anchorRemoved, v == anchorUnread, v == anchorMissing, v == before:
			return v, info, nil
		}
		before = v
		pause(ctx, anchorPause)
	}
	return "", nil, fmt.Errorf("look for message %s at %d of stream %s: %w", a.MsgID, a.Seq, a.Stream, errUnsettled)
}

func seeAnchor(ctx context.Context, js jetstream.JetStream, a jetbox.Anchor) (verdict, *jetstream.StreamInfo, error) {
	info, err := leaderInfo(ctx, js, a.Stream)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return anchorMissing, nil, nil
	case err != nil:
		return "", nil, err
	case !info.Created.Equal(a.Created):
		return anchorRecreated, info, nil
	case info.State.LastSeq < a.Seq:
		return anchorLost, info, nil
	case a.MsgID == "":
		return anchorIntact, info, nil
	}
	// After the state, not before: a sequence the stream has passed by then and that
	// is not there now was removed, whatever is stored meanwhile.
	m, err := leaderGet(ctx, js, a.Stream, getRequest{Seq: a.Seq})
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return anchorMissing, nil, nil
	case errors.Is(err, errUnreadable):
		return anchorUnread, info, nil
	case err != nil:
		return "", nil, err
	case m == nil:
		return anchorRemoved, info, nil
	case m.header.Get(jetbox.HeaderMsgID) != a.MsgID:
		return anchorLost, info, nil
	}
	return anchorIntact, info, nil
}
