package dedup

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Memory remembers handled events only as long as this process lives, and knows
// nothing of other instances: an event delivered again after a restart, or to
// somebody else, happens again.
//
// Use it where the effect is elsewhere, such as a call to another service, and
// a rare repeat does no harm. It is safe for concurrent use.
type Memory struct {
	retention time.Duration

	mu      sync.Mutex
	entries map[entryKey]*entry // guarded by mu
	expiry  []expiring          // guarded by mu; oldest first
}

type entryKey struct{ consumer, key string }

// entry is a key whose apply runs or has succeeded.
type entry struct {
	ended chan struct{} // closed when its fate is known
	ok    bool          // set before ended is closed
}

type expiring struct {
	key entryKey
	at  time.Time
}

// NewMemory returns an empty ledger that forgets an entry after the retention,
// or after [DefaultRetention] if that is 0. Its size is what arrives in that
// time: about 200 bytes for each event.
func NewMemory(retention time.Duration) (*Memory, error) {
	if retention < 0 {
		return nil, fmt.Errorf("dedup: retention is %v, want a positive duration, or 0 for %v", retention, DefaultRetention)
	}
	if retention == 0 {
		retention = DefaultRetention
	}
	return &Memory{retention: retention, entries: make(map[entryKey]*entry)}, nil
}

// Do runs apply unless an earlier call with this consumer and key succeeded
// within the retention, which it reports as seen. While another call's apply
// runs, it waits for that one's fate or for ctx. The second argument of apply
// means nothing: there is no transaction.
func (m *Memory) Do(ctx context.Context, consumer, key string, apply func(ctx context.Context, tx struct{}) error) (seen bool, err error) {
	k := entryKey{consumer, key}
	for {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		e, mine := m.claim(k)
		if mine {
			return false, m.apply(ctx, k, e, apply)
		}
		select {
		case <-e.ended:
		case <-ctx.Done():
			return false, ctx.Err()
		}
		if e.ok {
			return true, nil
		}
		// The other one failed and is gone: try to be the one.
	}
}

// claim returns the entry of k and whether the caller made it and must settle it.
func (m *Memory) claim(k entryKey) (e *entry, mine bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.expire(time.Now())
	if e, ok := m.entries[k]; ok {
		return e, false
	}
	e = &entry{ended: make(chan struct{})}
	m.entries[k] = e
	return e, true
}

// apply settles e also when apply panics or ends its goroutine.
func (m *Memory) apply(ctx context.Context, k entryKey, e *entry, apply func(context.Context, struct{}) error) (err error) {
	returned := false
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if e.ok = returned && err == nil; e.ok {
			m.expiry = append(m.expiry, expiring{k, time.Now().Add(m.retention)})
		} else {
			delete(m.entries, k)
		}
		close(e.ended)
	}()
	err = apply(ctx, struct{}{})
	returned = true
	return err
}

// expire forgets what is old enough. All entries live equally long, so the
// oldest stand first and each is looked at once.
func (m *Memory) expire(now time.Time) {
	n := 0
	for n < len(m.expiry) && !m.expiry[n].at.After(now) {
		delete(m.entries, m.expiry[n].key)
		n++
	}
	m.expiry = m.expiry[n:]
}

// Len returns how many entries there are.
func (m *Memory) Len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.expire(time.Now())
	return len(m.entries)
}
