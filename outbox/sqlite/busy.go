package sqlite

import (
	"context"
	"errors"
	"fmt"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// lockTimeout bounds the wait for SQLite's write lock.
const lockTimeout = 10 * time.Second

// Waits between tries for the lock: short at first, because the relay needs it
// often and for a moment, longer when somebody holds it for long.
const (
	shortWait  = 300 * time.Microsecond
	longWait   = 5 * time.Millisecond
	shortTries = 50
)

// retryBusy calls f until it returns something else than "locked", ctx is done,
// or lockTimeout has passed.
func retryBusy(ctx context.Context, f func(context.Context) error) error {
	deadline := time.Now().Add(lockTimeout)
	for try := 0; ; try++ {
		err := f(ctx)
		if !isBusy(err) {
			return err
		}
		wait := shortWait
		if try >= shortTries {
			wait = longWait
		}
		if time.Now().Add(wait).After(deadline) {
			return fmt.Errorf("locked by another connection for %v: %w", lockTimeout, err)
		}
		if err := sleep(ctx, wait); err != nil {
			return err
		}
	}
}

func isBusy(err error) (busy bool) {
	var se *sqlite.Error
	// The low byte is the primary code; BUSY_RECOVERY, BUSY_SNAPSHOT and
	// LOCKED_SHAREDCACHE are told apart above it.
	return errors.As(err, &se) && (se.Code()&0xff == sqlite3.SQLITE_BUSY || se.Code()&0xff == sqlite3.SQLITE_LOCKED)
}

func isUnique(err error) (unique bool) {
	var se *sqlite.Error
	return errors.As(err, &se) &&
		(se.Code() == sqlite3.SQLITE_CONSTRAINT_UNIQUE || se.Code() == sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY)
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
