package relay

import (
	"context"
	"fmt"
	"sort"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// placeMargin is how much earlier than asked a place is: the leaders of two streams
// may be on hosts whose clocks differ.
const placeMargin = time.Minute

// placeOf returns where a stream stood at a time of the broker's, or before: its
// beginning for the zero time.
func placeOf(ctx context.Context, js jetstream.JetStream, stream string, at time.Time) (position, error) {
	info, err := leaderInfo(ctx, js, stream)
	if err != nil {
		return position{}, fmt.Errorf("look up stream %s: %w", stream, err)
	}
	pos := position{Stream: stream, Created: info.Created}
	first, last := info.State.FirstSeq, info.State.LastSeq
	if at.IsZero() || first == 0 {
		pos.Holed = first > 1
		return pos, nil
	}
	at = at.Add(-placeMargin)
	// Sequences and times grow together, so the last message before that time can be
	// found by halves.
	n := sort.Search(int(last-first)+1, func(i int) bool {
		if err != nil {
			return true
		}
		var m *storedMsg
		m, err = leaderNext(ctx, js, stream, first+uint64(i))
		return err != nil || m == nil || !m.time.Before(at)
	})
	if err != nil {
		return position{}, fmt.Errorf("find where stream %s stood at %v: %w", stream, at, err)
	}
	pos.Seq = first + uint64(n) - 1
	// What was before the first message may have been later than that time.
	pos.Holed = n == 0 && first > 1
	return pos, nil
}
