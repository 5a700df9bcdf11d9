package postgres

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/seed-5e04d8fb/jetbox/dedup"
)

// SQLSTATE codes, PostgreSQL appendix A.
const (
	codeIdleInTransaction = "25P03"
	codeInvalidSchema     = "3F000"
	codeSerialization     = "40001"
	codeDeadlock          = "40P01"
	codeUndefinedTable    = "42P01"
	codeLockTimeout       = "55P03"
)

// hasCode recognizes errors of any driver: they share the method that pgx's and
// lib/pq's have.
func hasCode(err error, codes ...string) (has bool) {
	var coded interface{ SQLState() string }
	return errors.As(err, &coded) && slices.Contains(codes, coded.SQLState())
}

// noTables is for errors of the ledger's own statements: those of apply and of
// KeepFunc may be about other tables.
func noTables(err error) error {
	if hasCode(err, codeUndefinedTable, codeInvalidSchema) {
		return fmt.Errorf("%w: %w", dedup.ErrNoTables, err)
	}
	return err
}

// waitingError says that another transaction has made the same entry and is
// still open.
type waitingError struct{ error }

func (e *waitingError) Unwrap() error { return e.error }

// mostRetries is how often a transaction is repeated that the database gave up
// for the sake of another: some ten seconds.
const mostRetries = 20

// retry repeats f in place, so that it costs no delivery: for as long as ctx
// lives while somebody else has the key, and a bounded number of times when the
// database asks for it.
func retry(ctx context.Context, f func() error) error {
	const shortest, longest = 5 * time.Millisecond, time.Second
	given := 0
	for wait := shortest; ; wait = min(2*wait, longest) {
		err := f()
		var waiting *waitingError
		switch {
		case errors.As(err, &waiting):
		case hasCode(err, codeSerialization, codeDeadlock) && given < mostRetries:
			given++
		default:
			return err
		}
		// Half of it by chance: those who got into each other's way come back
		// at different times.
		t := time.NewTimer(wait/2 + rand.N(wait/2+1))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return errors.Join(ctx.Err(), err)
		}
	}
}
