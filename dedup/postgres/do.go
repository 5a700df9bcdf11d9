package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/seed-5e04d8fb/jetbox/dedup"
)

// blocked is how long a call waits for another's transaction while it holds a
// connection of its own.
const blocked = 200 * time.Millisecond

// enterSQL makes the entries and returns the keys of those that are new. They
// are made in the order of the keys, so that two calls with several in common
// cannot wait for each other. The wait for somebody else's entry is bounded, and
// after that the session's own bound is back: apply's statements are none of our
// business. The idle bound stays for the transaction.
const enterSQL = `WITH before AS MATERIALIZED (
	SELECT current_setting('lock_timeout') AS lock_timeout, current_setting('idle_in_transaction_session_timeout')::interval AS idle
), bounded AS MATERIALIZED (
	SELECT set_config('lock_timeout', $3::text, true) AS lock_timeout,
		CASE WHEN idle > '0' AND idle < ($4::text || ' ms')::interval THEN ''
			ELSE set_config('idle_in_transaction_session_timeout', $4::text, true) END AS idle
	FROM before
), entered AS (
	INSERT INTO {ledger} (consumer, key, handled_at)
	SELECT $1::text, k.key, clock_timestamp()
	FROM bounded CROSS JOIN jsonb_array_elements_text($2::text::jsonb) AS k(key)
	WHERE bounded.lock_timeout IS NOT NULL AND bounded.idle IS NOT NULL
	ORDER BY k.key COLLATE "C"
	ON CONFLICT DO NOTHING RETURNING key
), made AS MATERIALIZED (
	SELECT coalesce(jsonb_agg(key), '[]')::text AS keys FROM entered
)
SELECT made.keys, set_config('lock_timeout', before.lock_timeout, true) FROM made, before`

// Do runs apply in a transaction that also enters the key for the consumer, and
// commits both. seen reports that the key was there, committed by an earlier
// call; then apply does not run.
//
// When apply returns an error, panics or ends its goroutine, or when ctx or
// MaxHold ends before the commit, everything is rolled back. apply must neither
// commit nor roll back tx. It may run again after a rollback, when the database
// gave up a transaction for the sake of another. An error of the commit itself
// leaves the outcome unknown; doing it again settles it.
func (l *Ledger[Tx]) Do(ctx context.Context, consumer, key string, apply func(ctx context.Context, tx Tx) error) (seen bool, err error) {
	all, err := l.DoAll(ctx, consumer, []string{key}, func(ctx context.Context, tx Tx, _ []int) error {
		return apply(ctx, tx)
	})
	return err == nil && all[0], err
}

// DoAll runs apply once, in one transaction with entries for the keys that have
// none yet. fresh are the indexes in keys of those, ascending; of equal keys in
// one call only the first is fresh. apply does not run when there are none.
// seen[i] reports that keys[i] had an entry, or is a repeat within the call.
// Everything else is as for [Ledger.Do].
func (l *Ledger[Tx]) DoAll(ctx context.Context, consumer string, keys []string, apply func(ctx context.Context, tx Tx, fresh []int) error) (seen []bool, err error) {
	if len(keys) == 0 {
		return nil, ctx.Err()
	}
	if err := l.ready(ctx); err != nil {
		return nil, err
	}
	list, err := keyList(consumer, keys)
	if err != nil {
		return nil, err
	}
	a := &attempt[Tx]{l: l, consumer: storable(consumer), keys: keys, list: list, apply: apply}
	if err := retry(ctx, func() error { return a.run(ctx) }); err != nil {
		return nil, err
	}
	l.sweeper.Passing(ctx, len(a.fresh))
	return a.seen, nil
}

// attempt is one call of DoAll and what its last transaction found.
type attempt[Tx any] struct {
	l        *Ledger[Tx]
	consumer string
	keys     []string
	list     string // of the keys, as JSON
	apply    func(ctx context.Context, tx Tx, fresh []int) error

	seen  []bool
	fresh []int
}

func (a *attempt[Tx]) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	tx, err := a.l.access.begin(ctx)
	if err != nil {
		return fmt.Errorf("begin with the ledger: %w", err)
	}
	defer a.l.access.rollback(tx) // after a commit it does nothing
	if err := a.enter(ctx, tx); err != nil {
		return fmt.Errorf("enter %s in the ledger: %w", a.name(), noTables(err))
	}
	if len(a.fresh) == 0 {
		return nil
	}
	hold := time.AfterFunc(a.l.cfg.MaxHold, func() { cancel(dedup.ErrHeldTooLong) })
	defer hold.Stop()
	if err := a.apply(ctx, tx, a.fresh); err != nil {
		return heldTooLong(ctx, err)
	}
	if err := a.l.access.commit(ctx, tx); err != nil {
		return fmt.Errorf("commit %s with the effect: %w", a.name(), heldTooLong(ctx, err))
	}
	return nil
}

// enter makes the entries and finds out which are new.
func (a *attempt[Tx]) enter(ctx context.Context, tx Tx) error {
	var text, rest string
	err := a.l.access.queryIn(ctx, tx, a.l.names.sql(enterSQL),
		[]any{a.consumer, a.list, millis(blocked), millis(a.l.cfg.MaxHold)}, &text, &rest)
	if hasCode(err, codeLockTimeout) {
		return &waitingError{err}
	}
	if err != nil {
		return err
	}
	var made []string
	if err := json.Unmarshal([]byte(text), &made); err != nil {
		return err
	}
	entered := make(map[string]bool, len(made))
	for _, key := range made {
		entered[key] = true
	}
	a.seen, a.fresh = make([]bool, len(a.keys)), nil
	for i, key := range a.keys {
		k := storable(key)
		if !entered[k] {
			a.seen[i] = true
			continue
		}
		a.fresh = append(a.fresh, i)
		delete(entered, k) // the next one is a repeat
	}
	return nil
}

func (a *attempt[Tx]) name() string {
	if len(a.keys) == 1 {
		return fmt.Sprintf("%q", a.keys[0])
	}
	return fmt.Sprintf("%d keys", len(a.keys))
}

// heldTooLong says that it was MaxHold, by our clock or the server's, if it was.
func heldTooLong(ctx context.Context, err error) error {
	if errors.Is(err, dedup.ErrHeldTooLong) {
		return err
	}
	if errors.Is(context.Cause(ctx), dedup.ErrHeldTooLong) || hasCode(err, codeIdleInTransaction) {
		return fmt.Errorf("%w: %w", dedup.ErrHeldTooLong, err)
	}
	return err
}
