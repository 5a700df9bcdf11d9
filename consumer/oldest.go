package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Oldest returns when the stream stored the oldest message that may still be
// delivered to this consumer, or zero when everything there has been settled. A
// ledger must keep the entries that are younger: one that forgot an event
// before its last delivery lets its effect happen again. Dead letters are not
// among them: their replays are new messages with the key of the original.
//
// It may be asked while Run runs, before, and after. A consumer that does not
// exist will begin at the first message.
func (c *Consumer) Oldest(ctx context.Context) (time.Time, error) {
	stream, err := c.js.Stream(ctx, c.cfg.Stream)
	if err != nil {
		return time.Time{}, fmt.Errorf("look up stream %s: %w", c.cfg.Stream, err)
	}
	var settled uint64
	cons, err := stream.Consumer(ctx, c.cfg.Durable)
	switch {
	case err == nil:
		settled = cons.CachedInfo().AckFloor.Stream
	case !errors.Is(err, jetstream.ErrConsumerNotFound):
		return time.Time{}, fmt.Errorf("look up consumer %s/%s: %w", c.cfg.Stream, c.cfg.Durable, err)
	}
	// The next one that is there, whether it is for this consumer or not: no
	// later than the one asked for.
	msg, err := stream.GetMsg(ctx, settled+1, jetstream.WithGetMsgSubject(">"))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, fmt.Errorf("read stream %s after %d: %w", c.cfg.Stream, settled, err)
	}
	return msg.Time.UTC(), nil
}
