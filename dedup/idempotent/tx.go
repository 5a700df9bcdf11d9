package idempotent

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
)

// ErrNoMiddleware is returned by Tx for a context that does not come from a
// request a [Middleware] has passed on, or from one it does not look at.
var ErrNoMiddleware = errors.New("request has not come through the idempotency middleware")

// errTaken says that another request took over a key.
var errTaken = errors.New("another request has taken over the key")

type attemptKey struct{}

// Tx returns the transaction that is committed together with the answer, and
// rolled back with one that is not kept. It is begun by the first call, so a
// handler can prepare what is slow before: SQLite has one writer, and from here
// to the end this is it. The handler must neither commit nor roll it back. A
// request that is passed through for want of a key has one too.
//
// ctx is the request's. It is safe for concurrent use.
func Tx(ctx context.Context) (*sql.Tx, error) {
	a, ok := ctx.Value(attemptKey{}).(*attempt)
	if !ok {
		return nil, ErrNoMiddleware
	}
	return a.begin()
}

// attempt is one run of a handler.
type attempt struct {
	m      *Middleware
	record *record         // nil without a key
	ctx    context.Context // of the transaction

	mu    sync.Mutex
	tx    *sql.Tx // guarded by mu; nil until asked for
	ended bool    // guarded by mu
}

func (a *attempt) begin() (*sql.Tx, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.ended:
		return nil, sql.ErrTxDone
	case a.tx != nil:
		return a.tx, nil
	}
	tx, err := a.m.store.begin(a.ctx, a.record, a.m.cfg.MaxTime)
	if err != nil {
		return nil, fmt.Errorf("begin with the idempotency key: %w", err)
	}
	a.tx = tx
	return tx, nil
}

// end returns the transaction, if there is one; nobody gets it any more.
func (a *attempt) end() *sql.Tx {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = true
	return a.tx
}

// finish commits what the handler wrote and its answer.
func (a *attempt) finish(ctx context.Context, ans answer) error {
	tx := a.end()
	if a.record == nil {
		if tx == nil {
			return nil
		}
		return tx.Commit()
	}
	if tx == nil {
		err := a.m.store.keep(ctx, a.m.store.db, a.record, ans)
		if err != nil && !errors.Is(err, errTaken) {
			return errors.Join(err, a.m.store.release(ctx, a.record))
		}
		return err
	}
	defer tx.Rollback() // after a commit it does nothing
	if err := a.m.store.keep(ctx, tx, a.record, ans); err != nil {
		if errors.Is(err, errTaken) {
			return err
		}
		return errors.Join(err, tx.Rollback(), a.m.store.release(ctx, a.record))
	}
	err := tx.Commit()
	if undone(err) {
		return errors.Join(err, a.m.store.release(ctx, a.record))
	}
	// Another commit that failed may have happened: the key stays taken until its
	// time is up, and then it is known.
	return err
}

// giveUp undoes everything; the key is free at once. If that fails it is when its
// time is up.
func (a *attempt) giveUp(ctx context.Context) {
	if tx := a.end(); tx != nil {
		_ = tx.Rollback()
	}
	if a.record != nil {
		_ = a.m.store.release(ctx, a.record)
	}
}
