package postgres

import (
	"context"
	"time"
)

const (
	// vacuumRows is after how many rows that have left the queue it is vacuumed.
	vacuumRows = 20_000

	// vacuumShare is how much longer than a vacuum took the next one waits.
	vacuumShare = 30

	vacuumTimeout = 30 * time.Second
)

// vacuumed is what is known of the queue's dead entries.
type vacuumed struct {
	rows int       // that have left it since the last vacuum
	next time.Time // not before this
}

// tidy vacuums the queue, and the small tables that each claim changes, when many rows
// have left it. A claim starts at the
// queue's lowest entry and steps over the dead ones before it: the server's own
// vacuum comes once a minute at best, after a million of them. Only the owner of
// the table may; for others the server warns, does nothing, and it stays with its
// own vacuum.
func (s *Store) tidy(ctx context.Context) {
	s.mu.Lock()
	v := &s.vacuumed
	now := time.Now()
	due := v.rows >= vacuumRows && now.After(v.next)
	if due {
		v.rows = 0
	}
	s.mu.Unlock()
	if !due {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, vacuumTimeout)
	defer cancel()
	// SKIP_LOCKED: not while the server does it. Truncation would lock out
	// the writers. Whatever goes wrong, nothing depends on it.
	_, _ = s.pool.Exec(ctx, s.sql(`VACUUM (SKIP_LOCKED, INDEX_CLEANUP ON, TRUNCATE OFF) {queue}, {claim}, {relay}`))
	s.mu.Lock()
	v.next = time.Now().Add(vacuumShare * time.Since(now))
	s.mu.Unlock()
}

// left notes how many rows have left the queue.
func (s *Store) left(rows int) {
	s.mu.Lock()
	s.vacuumed.rows += rows
	s.mu.Unlock()
}
