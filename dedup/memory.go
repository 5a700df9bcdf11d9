package dedup

import (
	"context"
	"fmt"
	"slices"
	"strings"
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
	ok    bool          // set under the lock, before ended is closed
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
	all, err := m.DoAll(ctx, consumer, []string{key}, func(ctx context.Context, tx struct{}, _ []int) error {
		return apply(ctx, tx)
	})
	return err == nil && all[0], err
}

// DoAll runs apply once for the keys that have no entry yet. fresh are the
// indexes in keys of those, ascending; of equal keys in one call only the first
// is fresh. apply does not run when there are none. seen[i] reports that keys[i]
// had an entry, or is a repeat within the call.
func (m *Memory) DoAll(ctx context.Context, consumer string, keys []string, apply func(ctx context.Context, tx struct{}, fresh []int) error) (seen []bool, err error) {
	order := make([]int, len(keys))
	for i := range keys {
		order[i] = i
	}
	// In the order of the keys, so that two calls cannot wait for each other.
	slices.SortStableFunc(order, func(i, j int) int { return strings.Compare(keys[i], keys[j]) })
	seen = make([]bool, len(keys))
	c := &claims{m: m}
	defer c.settle() // also when apply panics or ends its goroutine
	var fresh []int
	for n, i := range order {
		if n > 0 && keys[order[n-1]] == keys[i] {
			seen[i] = true
			continue
		}
		if seen[i], err = c.take(ctx, entryKey{consumer, keys[i]}); err != nil {
			return nil, err
		}
		if !seen[i] {
			fresh = append(fresh, i)
		}
	}
	if len(fresh) == 0 {
		return seen, nil
	}
	slices.Sort(fresh)
	if err := apply(ctx, struct{}{}, fresh); err != nil {
		return nil, err
	}
	c.succeeded = true
	return seen, nil
}

// Seen reports whether there is an entry of an apply that succeeded.
func (m *Memory) Seen(ctx context.Context, consumer, key string) (seen bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.expire(time.Now())
	e, ok := m.entries[entryKey{consumer, key}]
	return ok && e.ok, nil
}

// claims are the entries one call has made and must settle.
type claims struct {
	m         *Memory
	keys      []entryKey
	entries   []*entry
	succeeded bool
}

// take makes an entry for k, or waits for the fate of the one that is there.
func (c *claims) take(ctx context.Context, k entryKey) (seen bool, err error) {
	for {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		e, mine := c.m.claim(k)
		if mine {
			c.keys, c.entries = append(c.keys, k), append(c.entries, e)
			return false, nil
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

func (c *claims) settle() {
	m := c.m
	m.mu.Lock()
	defer m.mu.Unlock()
	at := time.Now().Add(m.retention)
	for i, e := range c.entries {
		if e.ok = c.succeeded; e.ok {
			m.expiry = append(m.expiry, expiring{c.keys[i], at})
		} else {
			delete(m.entries, c.keys[i])
		}
		close(e.ended)
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
