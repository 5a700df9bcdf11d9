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
// roll back tx. An error of the commit itself leaves the outcome unknown; doing
// it again settles it.
func (l *Ledger) Do(ctx context.Context, consumer, key string, apply func(ctx context.Context, tx *sql.Tx) error) (seen bool, err error) {
	seen, err = l.do(ctx, consumer, key, apply)
	if err == nil && l.calls.Add(1)%pruneEvery == 0 {
		// What fails here is tried again in the next round.
		_, _ = l.pruneSome(ctx)
	}
	return seen, err
}

func (l *Ledger) do(ctx context.Context, consumer, key string, apply func(ctx context.Context, tx *sql.Tx) error) (seen bool, err error) {
	// One connection throughout: a commit that fails leaves the transaction
	// open, and database/sql would put the connection back into the pool so.
	conn, err := l.db.Conn(ctx)
	if err != nil {
		return false, fmt.Errorf("connect to the ledger: %w", err)
	}
	defer conn.Close()

	tx, entered, err := l.enter(ctx, conn, consumer, key)
	if err != nil {
		return false, fmt.Errorf("enter %q in the ledger: %w", key, err)
	}
	ended := false
	defer func() {
		if !ended { // an error, a panic, runtime.Goexit
			_ = tx.Rollback()
		}
	}()
	if !entered {
		return true, nil
	}
	if err := apply(ctx, tx); err != nil {
		return false, err
	}
	ended = true
	if err := commit(ctx, conn, tx); err != nil {
		return false, fmt.Errorf("commit %q with its effect: %w", key, err)
	}
	return false, nil
}

// enter begins a transaction whose first statement is the entry. So it holds
// the write lock from the start, also where the application's transactions are
// deferred: one that reads first and writes later fails at once when another
// connection wrote in between. Holding the lock, a key that is there is
// committed.
func (l *Ledger) enter(ctx context.Context, conn *sql.Conn, consumer, key string) (tx *sql.Tx, entered bool, err error) {
	err = retryBusy(ctx, func() error {
		tx, err = conn.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		var res sql.Result
		res, err = tx.ExecContext(ctx, l.insert, consumer, key, time.Now().UnixMilli())
		if err != nil {
			_ = tx.Rollback()
			return err
		}
		var n int64
		n, err = res.RowsAffected()
		entered = n > 0
		return err
	})
	return tx, entered, err
}

// commit ends the transaction one way or the other.
func commit(ctx context.Context, conn *sql.Conn, tx *sql.Tx) error {
	err := tx.Commit()
	if isBusy(err) {
		// Without WAL a reader holds a commit up; the transaction stays open.
		err = retryBusy(ctx, func() error {
			_, err := conn.ExecContext(ctx, "COMMIT")
			return err
		})
	}
	if err != nil {
		// Whatever is left open must not go back to the pool. Usually nothing
		// is, which is the error ignored here.
		_, _ = conn.ExecContext(context.WithoutCancel(ctx), "ROLLBACK")
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
