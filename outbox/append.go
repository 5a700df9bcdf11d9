package outbox

import (
	"fmt"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// Prepare checks events and fills their empty ID, Type, ContentType and Time,
// in place. It is what a store's Append does first: either all events are fit to
// be stored or the error names the first that is not, and none was changed.
// Key stays empty where it is the ID.
func Prepare(now time.Time, events []*jetbox.Event) error {
	for i, ev := range events {
		if ev == nil {
			return fmt.Errorf("append event %d of %d: %w: it is nil", i+1, len(events), jetbox.ErrInvalidEvent)
		}
		if err := ev.WithDefaults(now).Validate(); err != nil {
			return fmt.Errorf("append event %d of %d: %w", i+1, len(events), err)
		}
	}
	for _, ev := range events {
		key := ev.Key
		*ev = ev.WithDefaults(now)
		ev.Key = key
	}
	return nil
}
