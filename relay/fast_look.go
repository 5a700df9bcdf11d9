package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

const (
	// lookMost is the most messages of the stream that are read back for one
	// batch.
	lookMost = 5000
	// lookAlive is how long the server keeps a reader that was not taken away.
	lookAlive = 10 * time.Second
)

// errNoLook says that looking for messages is no use.
var errNoLook = errors.New("messages cannot be looked for")

// find returns the sequences of those messages of a batch that the stream stored
// after base, up to and with a sequence, by their IDs. It reads headers only. A
// replica that lags, or a stream that has dropped some, makes it find less, never
// more: same message ID and same event.
func (s *streams) find(ctx context.Context, stream string, base, upTo uint64, batch []message) (map[string]uint64, error) {
	found := make(map[string]uint64, len(batch))
	if upTo <= base {
		return found, nil
	}
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	want := make(map[string]string, len(batch))
	for _, m := range batch {
		want[m.msg.Header.Get(jetbox.HeaderMsgID)] = m.msg.Header.Get(jetbox.HeaderCEID)
	}
	reader, err := s.js.CreateConsumer(ctx, stream, jetstream.ConsumerConfig{
		DeliverPolicy:     jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:       base + 1,
		AckPolicy:         jetstream.AckNonePolicy,
		HeadersOnly:       true,
		MemoryStorage:     true,
		InactiveThreshold: lookAlive,
	})
	if errors.Is(err, context.DeadlineExceeded) {
		err = cmp.Or(denied(s.js, "CONSUMER.CREATE."+stream), err)
	}
	if err != nil {
		return nil, fmt.Errorf("read stream %s from %d: %w", stream, base+1, err)
	}
	defer func() {
		// It would end by itself, and so would the next one.
		_ = s.js.DeleteConsumer(ctx, stream, reader.CachedInfo().Name)
	}()
	// The server answers with less when there is no more.
	msgs, err := reader.FetchNoWait(int(upTo - base))
	if err != nil {
		return nil, fmt.Errorf("read stream %s from %d: %w", stream, base+1, err)
	}
	for msg := range msgs.Messages() {
		meta, err := msg.Metadata()
		if err != nil {
			return nil, fmt.Errorf("read stream %s: %w", stream, err)
		}
		if meta.Sequence.Stream > upTo {
			break
		}
		id, event := msg.Headers().Get(jetbox.HeaderMsgID), msg.Headers().Get(jetbox.HeaderCEID)
		if w, ok := want[id]; ok && w == event {
			found[id] = meta.Sequence.Stream
		}
	}
	if err := msgs.Error(); err != nil {
		return nil, fmt.Errorf("read stream %s: %w", stream, err)
	}
	return found, nil
}
