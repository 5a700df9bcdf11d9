package main

import (
	"context"
	"database/sql"
	"errors"
	"sync"

	"github.com/seed-5e04d8fb/jetbox/consumer"
)

// errUnseen rolls back the question whether an event was handled.
var errUnseen = errors.New("not handled yet")

// remember returns a handler that does not call h again for an event it
// succeeded with.
//
// What h does is outside the database, so it cannot share a transaction with
// the entry, and a transaction around it would hold SQLite's only write lock
// while a command runs. So the ledger is asked before and told afterwards: a
// crash in between handles the event again.
func remember(ledger consumer.Ledger[*sql.Tx], h consumer.Handler) consumer.Handler {
	ask := consumer.Once(ledger, func(context.Context, *sql.Tx, *consumer.Delivery) error { return errUnseen })
	tell := consumer.Once(ledger, func(context.Context, *sql.Tx, *consumer.Delivery) error { return nil })
	var inHand keyLocks
	return func(ctx context.Context, d *consumer.Delivery) error {
		// Two copies of one event in this process wait for each other.
		unlock, err := inHand.lock(ctx, d.Key)
		if err != nil {
			return err
		}
		defer unlock()
		if err := ask(ctx, d); !errors.Is(err, errUnseen) {
			return err // nil: seen
		}
		if err := h(ctx, d); err != nil {
			return err
		}
		// It has happened: that must be remembered even when time is up.
		return tell(context.WithoutCancel(ctx), d)
	}
}

// keyLocks is a lock per key. The zero value is ready to use.
type keyLocks struct {
	mu   sync.Mutex
	held map[string]chan struct{} // guarded by mu; closed when released
}

func (l *keyLocks) lock(ctx context.Context, key string) (unlock func(), err error) {
	if key == "" {
		return func() {}, nil
	}
	for {
		l.mu.Lock()
		other, busy := l.held[key]
		if !busy {
			if l.held == nil {
				l.held = map[string]chan struct{}{}
			}
			mine := make(chan struct{})
			l.held[key] = mine
			l.mu.Unlock()
			return func() {
				l.mu.Lock()
				delete(l.held, key)
				l.mu.Unlock()
				close(mine)
			}, nil
		}
		l.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}
