package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/outboxrow"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

const (
	// wakeBatch bounds how many sleeping rows one transaction wakes, and
	// sleepBatch how many it puts to sleep: a writer waits for neither long.
	wakeBatch  = 300
	sleepBatch = 1000

	// claimBytes ends a claim early whose payloads are long: a batch is in
	// memory as a whole, some of it twice while it is on its way.
	claimBytes = 16 << 20
)

// Claim returns rows that may go now, lowest id first, and records a claim on those
// that are in none before it returns: PROCESSING is a pending row inside one. The
// claim stays until their outcomes are recorded. None is no error.
//
// Rows met on the way that may not go yet (scheduled for later, or behind an
// earlier row of their key) are put to sleep, out of the index of ready rows, so
// that they cost the next claims nothing; rows whose time has come are woken.
func (s *Store) Claim(ctx context.Context, l jetbox.Lease, ask jetbox.Ask) ([]jetbox.Row, error) {
	if err := s.sweep(ctx, l); err != nil {
		return nil, fmt.Errorf("claim rows of outbox %q: %w", s.table, err)
	}
	if recalling, err := s.recalling(ctx); err != nil || recalling {
		return nil, err
	}
	besides, err := notIn(ask.InHand)
	if err != nil {
		return nil, err
	}
	before, err := json.Marshal(append([]jetbox.Position{}, ask.Before...))
	if err != nil {
		return nil, err
	}
	for {
		c := claim{limit: ask.Limit, now: time.Now().UnixMilli(), besides: besides, before: string(before)}
		simple, err := s.lookAhead(ctx, &c)
		switch {
		case err != nil:
		case simple && len(c.rows) == 0:
			return nil, nil
		case simple:
			err = s.fenced(ctx, l, func(tx *sql.Tx) error { return s.insertClaim(ctx, tx, &c) })
		default:
			err = s.fenced(ctx, l, func(tx *sql.Tx) error { return s.claim(ctx, tx, &c) })
		}
		if err != nil {
			return nil, fmt.Errorf("claim rows of outbox %q: %w", s.table, err)
		}
		// Nothing found but something moved: what may go was hidden behind rows
		// that have now been put to sleep, or is being woken in turns.
		if len(c.rows) > 0 || !c.moved {
			return c.rows, nil
		}
	}
}

// lookAhead reads the next rows without a transaction, so that other writers, and the
// records of this relay, do not wait meanwhile, and a relay with nothing to do takes
// no lock at all. It is simple when they may go as they are: then only the claim is
// left to be written. No other relay changes such rows as long as the lease is the
// caller's; what somebody changes by hand in this moment may still be sent as it was.
func (s *Store) lookAhead(ctx context.Context, c *claim) (simple bool, err error) {
	var due bool
	err = s.reader.QueryRowContext(ctx, s.sql(`SELECT `+someDue), c.now).Scan(&due)
	if err != nil || due {
		return false, noTables(err)
	}
	found, err := s.ready(ctx, s.reader, c)
	if err != nil {
		return false, err
	}
	for _, f := range found {
		if f.hold != holdNone || f.overtakes {
			return false, nil
		}
	}
	return true, c.take(found)
}

// claim is one try: its transaction may run more than once.
type claim struct {
	limit   int
	now     int64
	before  string // where the streams stand, as JSON
	besides except
	rows    []jetbox.Row
	moved   bool // some row was woken or put to sleep

	first, last int64 // of the rows found that are in no claim yet
	earlier     outboxrow.Claims
}

func (s *Store) claim(ctx context.Context, tx *sql.Tx, c *claim) error {
	c.moved = false
	woken, err := s.wakeDue(ctx, tx, c.now)
	if err != nil {
		return err
	}
	found, err := s.ready(ctx, tx, c)
	if err != nil {
		return err
	}
	asleep, err := s.putToSleep(ctx, tx, found)
	if err != nil {
		return err
	}
	if err := c.take(found); err != nil {
		return err
	}
	c.moved = woken || asleep
	if len(c.rows) == 0 {
		if asleep {
			return s.putMoreToSleep(ctx, tx, c.now)
		}
		return nil
	}
	return s.insertClaim(ctx, tx, c)
}

// take keeps the rows of those found that may go.
func (c *claim) take(found []candidate) error {
	c.rows, c.first, c.last = make([]jetbox.Row, 0, len(found)), 0, -1
	for _, f := range found {
		if f.hold != holdNone || f.overtakes {
			continue
		}
		row, err := f.claimed(c)
		if err != nil {
			return err
		}
		c.rows = append(c.rows, row)
	}
	return nil
}

func (s *Store) insertClaim(ctx context.Context, tx *sql.Tx, c *claim) error {
	if c.first > c.last {
		return nil // all of them are in claims already
	}
	_, err := tx.ExecContext(ctx, s.sql(`INSERT INTO "{t}_claim" (first, last, claimed_at, before) VALUES (?, ?, ?, ?)`),
		c.first, c.last, c.now, c.before)
	return err
}

// claimed returns the row for a relay, and notes what is to be recorded of it.
func (f *candidate) claimed(c *claim) (row jetbox.Row, err error) {
	row = f.row()
	row.Fresh, row.InDoubt = f.fresh, f.doubt
	if f.claim == nil {
		if c.first > c.last {
			c.first = f.ID
		}
		c.last = f.ID
		return row, nil
	}
	if f.doubt {
		return row, nil // that claim is not the first it was sent under
	}
	row.Earlier, err = c.earlier.Of(time.Duration(c.now-f.claim.claimedAt)*time.Millisecond, f.claim.before)
	return row, err
}

func (s *Store) wakeDue(ctx context.Context, tx *sql.Tx, now int64) (woken bool, err error) {
	res, err := tx.ExecContext(ctx, s.sql(`UPDATE "{t}" SET hold = 0 WHERE id IN (
		SELECT id FROM "{t}" INDEXED BY "{t}_due" WHERE status = 'PENDING' AND hold IN (1, 2) AND coalesce(available_at, 0) <= ?
		ORDER BY coalesce(available_at, 0) LIMIT ?)`), now, wakeBatch)
	if err != nil {
		return false, err
	}
	k, err := res.RowsAffected()
	return k > 0, err
}

// rowsQueryer is a transaction, or the relay's connection without one.
type rowsQueryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// candidate is a row of the ready index, with what else has to be known of it.
type candidate struct {
	record
	hold      int       // holdNone, or why it goes to sleep
	overtakes bool      // an earlier row of its key is due and about to be woken
	fresh     bool      // it was never claimed before
	doubt     bool      // it may have been sent, in no claim that it lies in
	claim     *standing // the first claim that it lies in, if any
}

// standing is a claim that is in the file.
type standing struct {
	first, last, claimedAt int64
	before                 string
}

const (
	sameKey = `p.aggregate_id = o.aggregate_id AND coalesce(p.aggregate_type, '') = coalesce(o.aggregate_type, '')`

	// someDue says whether the time of some row has come, by ?1.
	someDue = `EXISTS (SELECT 1 FROM "{t}" INDEXED BY "{t}_due"
		WHERE status = 'PENDING' AND hold IN (1, 2) AND coalesce(available_at, 0) <= ?1)`

	// someWait says whether any key waits at all: most outboxes have none, and are
	// spared a look into the indexes for each row.
	someWait = `(SELECT EXISTS (SELECT 1 FROM "{t}" INDEXED BY "{t}_retry" WHERE hold = 2) OR
		EXISTS (SELECT 1 FROM "{t}" INDEXED BY "{t}_behind" WHERE hold = 3))`

	// isBehind says of a row o whether an earlier one of its key holds it.
	isBehind = `o.aggregate_id <> '' AND (
		EXISTS (SELECT 1 FROM "{t}" p INDEXED BY "{t}_retry" WHERE p.hold = 2 AND ` + sameKey + ` AND p.id < o.id) OR
		EXISTS (SELECT 1 FROM "{t}" p INDEXED BY "{t}_behind" WHERE p.hold = 3 AND ` + sameKey + ` AND p.id < o.id))`

	// isOvertaking says whether a scheduled row of its key has become due: it is
	// woken in the order of times, not of ids, so this one could pass it by.
	isOvertaking = `o.aggregate_id <> '' AND
		EXISTS (SELECT 1 FROM "{t}" p INDEXED BY "{t}_later" WHERE p.hold = 1 AND p.aggregate_id <> '' AND ` + sameKey + `
			AND coalesce(p.available_at, 0) <= ?1 AND p.id < o.id)`
)

// ready reads the lowest rows of the ready index. A row may go unless it is
// scheduled for later, or an earlier row of its key waits for a retry, is frozen,
// is itself behind one, or is scheduled and has become due.
func (s *Store) ready(ctx context.Context, q rowsQueryer, c *claim) ([]candidate, error) {
	claims, err := s.standing(ctx, q)
	if err != nil {
		return nil, err
	}
	rows, err := q.QueryContext(ctx, s.sql(`SELECT coalesce(o.available_at > ?1, 0),
		CASE WHEN `+someWait+` THEN coalesce(`+isBehind+`, 0) ELSE 0 END,
		CASE WHEN (SELECT `+someDue+`) THEN coalesce(`+isOvertaking+`, 0) ELSE 0 END,
		o.attempts = 0 AND o.last_error IS NULL, `+isInDoubt+`, `+eventColumns+`
		FROM "{t}" o INDEXED BY "{t}_ready" WHERE o.status = 'PENDING' AND o.hold = 0`+c.besides.sql+`
		ORDER BY o.id LIMIT ?2`), append([]any{c.now, c.limit}, c.besides.args...)...)
	if err != nil {
		return nil, noTables(err)
	}
	defer rows.Close()
	found := make([]candidate, 0, c.limit)
	var (
		f             candidate
		later, behind bool
	)
	into := append([]any{&later, &behind, &f.overtakes, &f.fresh, &f.doubt}, f.eventFields()...)
	for size := 0; size < claimBytes && rows.Next(); {
		f = candidate{}
		if err := rows.Scan(into...); err != nil {
			return nil, err
		}
		switch {
		case later:
			f.hold = holdLater
		case behind:
			f.hold = holdBehind
		}
		f.claim = claims.of(f.ID)
		f.fresh = f.fresh && f.claim == nil
		size += len(f.Payload)
		found = append(found, f)
	}
	return found, rows.Err()
}

// standings are the claims in the file, oldest first.
type standings []standing

func (s standings) of(id int64) *standing {
	for i := range s {
		if s[i].first <= id && id <= s[i].last {
			return &s[i]
		}
	}
	return nil
}

func (s *Store) standing(ctx context.Context, q rowsQueryer) (standings, error) {
	rows, err := q.QueryContext(ctx, s.sql(`SELECT first, last, claimed_at, before FROM "{t}_claim" ORDER BY id`))
	if err != nil {
		return nil, noTables(err)
	}
	defer rows.Close()
	var all standings
	for rows.Next() {
		var c standing
		if err := rows.Scan(&c.first, &c.last, &c.claimedAt, &c.before); err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, rows.Err()
}

// except is a condition that leaves rows out.
type except struct {
	sql  string
	args []any
}

// notIn leaves out the rows with these ids. What a relay has in hand are mostly a few
// runs of ids, and to compare with their ends is cheaper than to look into a list.
func notIn(ids []int64) (except, error) {
	const most = 8
	ids = slices.Sorted(slices.Values(ids))
	var e except
	var b strings.Builder
	for i := 0; i < len(ids); {
		n := 1
		for i+n < len(ids) && ids[i+n] == ids[i]+int64(n) {
			n++
		}
		if len(e.args) == 2*most {
			list, err := jsonIDs(ids)
			return except{` AND o.id NOT IN (SELECT value FROM json_each(?3))`, []any{list}}, err
		}
		fmt.Fprintf(&b, ` AND o.id NOT BETWEEN ?%d AND ?%d`, len(e.args)+3, len(e.args)+4)
		e.args = append(e.args, ids[i], ids[i+n-1])
		i += n
	}
	e.sql = b.String()
	return e, nil
}

// doubted is the last error of a row that may have been sent, and leaves its claim.
// isInDoubt says that of a row.
const (
	doubted = `CASE WHEN ` + isInDoubt + ` THEN last_error
		ELSE '` + outbox.OutcomeUnknown + `' || coalesce(': ' || last_error, '') END`
	isInDoubt = `coalesce(instr(last_error, '` + outbox.OutcomeUnknown + `') = 1, 0)`
)

func (s *Store) putToSleep(ctx context.Context, tx *sql.Tx, found []candidate) (moved bool, err error) {
	for _, f := range found {
		if f.hold == holdNone {
			continue
		}
		// A row that was claimed leaves its claim with this: the next to claim it
		// must not take it for one that was never sent.
		if _, err := tx.ExecContext(ctx, s.sql(`UPDATE "{t}" SET hold = ?,
			last_error = CASE WHEN ? THEN last_error ELSE `+doubted+` END WHERE id = ?`),
			f.hold, f.fresh, f.ID); err != nil {
			return false, err
		}
		moved = true
	}
	return moved, nil
}

// putMoreToSleep does the same to the lowest rows of the ready index without
// reading them, for a claim of few rows that has found only such: it must not
// take a transaction for each few of a hundred thousand. A row that the statement
// itself has put behind its key is behind a row that was there before, so it
// makes no difference whether the others see it.
func (s *Store) putMoreToSleep(ctx context.Context, tx *sql.Tx, now int64) error {
	_, err := tx.ExecContext(ctx, s.sql(`UPDATE "{t}" AS o SET hold = CASE WHEN o.available_at > ?1 THEN 1 ELSE 3 END,
		last_error = CASE WHEN EXISTS (SELECT 1 FROM "{t}_claim" c WHERE o.id BETWEEN c.first AND c.last) THEN `+doubted+` ELSE last_error END
		WHERE o.id IN (SELECT id FROM "{t}" INDEXED BY "{t}_ready" WHERE status = 'PENDING' AND hold = 0 ORDER BY id LIMIT ?2)
			AND (coalesce(o.available_at > ?1, 0) OR (`+isBehind+`))`), now, sleepBatch)
	return err
}
