package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
)

// Do runs apply in a transaction that also enters the key for the consumer, and
// commits both. seen reports that the key was there, committed by an earlier
// call; then apply does not run.
//
// When apply returns an error, panics or ends its goroutine, or when ctx ends
// before the commit, everything is rolled back. apply must neither commit nor
// roll back tx, and may run again after a rollback: when a reader holds the
// commit up, which WAL mode rules out. An error of the commit itself leaves the
// outcome unknown; doing it again settles it.
func (l *Ledger) Do(ctx context.Context, consumer, key string, apply func(ctx context.Context, tx *sql.Tx) error) (seen bool, err error) {
	var applied error
	err = retryBusy(ctx, func() error {
		seen, applied, err = l.try(ctx, consumer, key, apply)
		return err
	})
	if err == nil {
		err = applied
	}
	if err == nil && l.calls.Add(1)%pruneEvery == 0 {
		// What fails here is tried again in the next round.
		_, _ = l.pruneSome(ctx)
	}
	return seen, err
}

// try makes one transaction. err is the database's: BUSY means that nothing
// happened. applied is apply's own error, which is not looked into.
func (l *Ledger) try(ctx context.Context, consumer, key string, apply func(ctx context.Context, tx *sql.Tx) error) (seen bool, applied, err error) {
	tx, err := l.db.BeginTx(ctx, nil)
	if err != nil {
		return false, nil, fmt.Errorf("begin with the ledger: %w", err)
	}
	committing := false
	defer func() {
		if !committing { // seen, an error, a panic, runtime.Goexit
			_ = tx.Rollback()
		}
	}()
	// The entry is the first statement. So the write lock is held from the
	// start, also where the application's transactions are deferred: one that
	// reads first and writes later fails at once when another connection wrote
	// in between. And with the lock, a key that is there is committed.
	res, err := tx.ExecContext(ctx, l.insert, consumer, key, time.Now().UnixMilli())
	if err != nil {
		return false, nil, fmt.Errorf("enter %q in the ledger: %w", key, err)
	}
	entered, err := res.RowsAffected()
	if err != nil {
		return false, nil, fmt.Errorf("enter %q in the ledger: %w", key, err)
	}
	if entered == 0 {
		return true, nil, nil
	}
	if err := apply(ctx, tx); err != nil {
		return false, err, nil
	}
	committing = true
	// After a commit that fails with BUSY the driver has rolled back
	// (modernc.org/sqlite 1.62): database/sql is done with the transaction.
	if err := tx.Commit(); err != nil {
		return false, nil, fmt.Errorf("commit %q with its effect: %w", key, err)
	}
	return false, nil, nil
}

// Result codes of SQLite in the lowest byte: another connection, or one that
// shares this one's cache, has the lock.
const (
	codeBusy   = 5
	codeLocked = 6
)

func isBusy(err error) (busy bool) {
	var coded interface{ Code() int }
	if !errors.As(err, &coded) {
		return false
	}
	c := coded.Code() & 0xff
	return c == codeBusy || c == codeLocked
}

// retryBusy runs f until it fails for another reason than the lock, or ctx
// ends. The database's own busy_timeout comes first; this goes on after it, so
// that a handler waiting for another attempt's fate costs no delivery.
func retryBusy(ctx context.Context, f func() error) error {
	const longest = 100 * time.Millisecond
	for wait := time.Millisecond; ; wait = min(2*wait, longest) {
		err := f()
		if !isBusy(err) {
			return err
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return errors.Join(ctx.Err(), err)
		}
	}
}
