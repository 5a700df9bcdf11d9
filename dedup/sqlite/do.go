package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/seed-5e04d8fb/jetbox/dedup"
)

// Do runs apply in a transaction that also enters the key for the consumer, and
// commits both. seen reports that the key was there, committed by an earlier
// call; then apply does not run.
//
// When apply returns an error, panics or ends its goroutine, or when ctx or
// MaxHold ends before the commit, everything is rolled back. apply must neither
// commit nor roll back tx, and may run again after a rollback: when a reader
// holds the commit up, which WAL mode rules out. An error of the commit itself
// leaves the outcome unknown; doing it again settles it.
func (l *Ledger) Do(ctx context.Context, consumer, key string, apply func(ctx context.Context, tx *sql.Tx) error) (seen bool, err error) {
	all, err := l.DoAll(ctx, consumer, []string{key}, func(ctx context.Context, tx *sql.Tx, _ []int) error {
		return apply(ctx, tx)
	})
	return err == nil && all[0], err
}

// DoAll runs apply once, in one transaction with entries for the keys that have
// none yet. fresh are the indexes in keys of those, ascending; of equal keys in
// one call only the first is fresh. apply does not run when there are none.
// seen[i] reports that keys[i] had an entry, or is a repeat within the call.
// Everything else is as for [Ledger.Do].
func (l *Ledger) DoAll(ctx context.Context, consumer string, keys []string, apply func(ctx context.Context, tx *sql.Tx, fresh []int) error) (seen []bool, err error) {
	var a *attempt
	err = retryBusy(ctx, func() error {
		a = &attempt{l: l, consumer: consumer, keys: keys, seen: make([]bool, len(keys))}
		return a.run(ctx, apply)
	})
	if err == nil {
		err = a.applied
	}
	if err != nil {
		return nil, err
	}
	l.sweeper.Passing(ctx, len(a.fresh))
	return a.seen, nil
}

// attempt is one transaction.
type attempt struct {
	l        *Ledger
	consumer string
	keys     []string

	seen    []bool
	fresh   []int
	applied error // apply's own, which is not looked into
}

// run returns the database's errors: BUSY means that nothing happened.
func (a *attempt) run(ctx context.Context, apply func(ctx context.Context, tx *sql.Tx, fresh []int) error) error {
	// database/sql rolls back when the context of the transaction ends, whatever
	// apply is doing.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	tx, err := a.l.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("begin with the ledger: %w", err)
	}
	committing := false
	defer func() {
		if !committing { // seen, an error, a panic, runtime.Goexit
			_ = tx.Rollback()
		}
	}()
	// The entries come first. So the write lock is held from the start, also
	// where the application's transactions are deferred: one that reads first and
	// writes later fails at once when another connection wrote in between. And
	// with the lock, a key that is there is committed.
	if err := a.enter(ctx, tx); err != nil || len(a.fresh) == 0 {
		return err
	}
	hold := time.AfterFunc(a.l.cfg.MaxHold, func() { cancel(dedup.ErrHeldTooLong) })
	defer hold.Stop()
	if err := apply(ctx, tx, a.fresh); err != nil {
		a.applied = heldTooLong(ctx, err)
		return nil
	}
	committing = true
	// After a commit that fails with BUSY the driver has rolled back
	// (modernc.org/sqlite 1.62): database/sql is done with the transaction.
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit %s with the effect: %w", a.name(), heldTooLong(ctx, err))
	}
	return nil
}

// enter makes the entries and finds out which are new.
func (a *attempt) enter(ctx context.Context, tx *sql.Tx) error {
	exec := func(key string, now int64) (sql.Result, error) {
		return tx.ExecContext(ctx, a.l.insert, a.consumer, key, now)
	}
	if len(a.keys) > 1 {
		stmt, err := tx.PrepareContext(ctx, a.l.insert)
		if err != nil {
			return fmt.Errorf("enter %s in the ledger: %w", a.name(), err)
		}
		defer stmt.Close()
		exec = func(key string, now int64) (sql.Result, error) { return stmt.ExecContext(ctx, a.consumer, key, now) }
	}
	now := time.Now().UnixMilli()
	for i, key := range a.keys {
		res, err := exec(key, now)
		if err != nil {
			return fmt.Errorf("enter %q in the ledger: %w", key, err)
		}
		entered, err := res.RowsAffected()
		if err != nil {
			return fmt.Errorf("enter %q in the ledger: %w", key, err)
		}
		if entered == 0 {
			a.seen[i] = true
		} else {
			a.fresh = append(a.fresh, i)
		}
	}
	return nil
}

// name is what the keys are called in an error.
func (a *attempt) name() string {
	if len(a.keys) == 1 {
		return fmt.Sprintf("%q", a.keys[0])
	}
	return fmt.Sprintf("%d keys", len(a.keys))
}

// heldTooLong says why the context of the transaction ended, if it did for that.
func heldTooLong(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); errors.Is(cause, dedup.ErrHeldTooLong) && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
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
