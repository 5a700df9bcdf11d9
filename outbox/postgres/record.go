package postgres

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// recordBatch is how many outcomes one transaction records.
const recordBatch = 2000

// Record writes what became of claimed rows, and shrinks the claims to
// what is unresolved. Only rows that are still pending change, so repeating it is
// harmless. No row is touched that no outcome names.
//
// It waits for no sync of its own. A crash of the server that takes a record back
// leaves the rows in their claim, of unknown outcome, as a crash before it would; the
// next claim is synced, and with it all records before.
func (s *Store) Record(ctx context.Context, l jetbox.Lease, outcomes []jetbox.Outcome) error {
	outcomes, unsent := outbox.SplitUnsent(outcomes)
	for len(outcomes)+len(unsent) > 0 {
		n := min(recordBatch, len(outcomes))
		back := []int64{} // with the last of them: a claim has two ends
		if n == len(outcomes) {
			back, unsent = append(back, unsent...), nil
		}
		if err := s.record(ctx, l, outcomes[:n], back); err != nil {
			return fmt.Errorf("record outcomes in outbox %q: %w", s.cfg.Table, err)
		}
		s.left(n)
		outcomes = outcomes[n:]
	}
	return nil
}

// group is where published rows were stored and what happens to them.
type group struct {
	stream string
	remove jetbox.Removal
}

// sorted is a batch of outcomes by what has to be done.
type sorted struct {
	published map[group][]jetbox.Outcome
	retry     []jetbox.Outcome
	dead      []jetbox.Outcome
}

func sortOut(outcomes []jetbox.Outcome) (sorted, error) {
	s := sorted{published: make(map[group][]jetbox.Outcome)}
	for _, o := range outcomes {
		switch o.State {
		case jetbox.Published:
			g := group{o.Stream, o.Remove}
			s.published[g] = append(s.published[g], o)
		case jetbox.Pending:
			s.retry = append(s.retry, o)
		case jetbox.DeadLetter:
			s.dead = append(s.dead, o)
		default:
			return s, fmt.Errorf("outcome of row %d: state %q is not one a publish ends in", o.Pos, o.State)
		}
	}
	return s, nil
}

func (s *Store) record(ctx context.Context, l jetbox.Lease, outcomes []jetbox.Outcome, unsent []int64) error {
	sorted, err := sortOut(outcomes)
	if err != nil {
		return err
	}
	b := newUnsyncedBatch()
	s.fence(b, l)
	for g, outcomes := range sorted.published {
		s.queuePublished(b, l, g, outcomes)
	}
	s.queueAnchors(b, l, outcomes)
	if len(sorted.retry) > 0 {
		s.queueRetry(b, l, sorted.retry)
	}
	if len(sorted.dead) > 0 {
		s.queueDead(b, l, sorted.dead)
	}
	b.Queue(s.sql(shrinkSQL), l.Owner, l.Epoch, unsent)
	return s.send(ctx, b)
}

// leaveSQL begins a statement that settles the rows in $3.
const leaveSQL = `WITH gone AS (DELETE FROM {queue} WHERE id = ANY($3::bigint[]) AND ` + fenced + ` RETURNING id), `

// wakeKeysSQL ends a statement whose part "settled" has the rows that no longer
// hold their keys, and "gone" those of them that were in the queue. The others were
// waiting for a retry, or frozen, and wait no more; and the next rows behind all of
// them are woken. Only some: each of those, when it is settled, wakes the next, so that
// a key with a hundred thousand rows behind it comes back without one long transaction.
//
// "hold + 0" keeps the planner from the wrong index: by key where ids are looked up,
// which it thinks as good with old statistics; and by id where a key is, which it
// thinks better when most rows that wait are of one key.
const wakeKeysSQL = `,
	freed AS (
		DELETE FROM {wait} w WHERE EXISTS (SELECT FROM {wait} WHERE hold = 2)
			AND w.hold + 0 = 2 AND w.id IN (SELECT id FROM settled EXCEPT SELECT id FROM gone)
		RETURNING w.id),
	keys AS (
		SELECT DISTINCT s.aggregate_type, s.aggregate_id FROM settled s
		WHERE EXISTS (SELECT FROM {wait} WHERE hold = 3) AND s.aggregate_id <> ''
			AND coalesce({hash s} = ANY (` + heldKeys + `), true)),
	next AS (
		SELECT w.id FROM keys s CROSS JOIN LATERAL (
			SELECT w.id FROM {wait} w WHERE w.hold IN (2, 3) AND w.hold + 0 = 3 AND {w has the key of s}
				AND NOT EXISTS (SELECT FROM {wait} p WHERE p.hold IN (2, 3) AND p.hold + 0 = 2 AND {p has the key of w}
					AND p.id < w.id AND NOT EXISTS (SELECT FROM freed f WHERE f.id = p.id))
			ORDER BY w.id LIMIT 300) w),
	woken AS (DELETE FROM {wait} w USING next WHERE w.id = next.id RETURNING w.id, w.shard)
	INSERT INTO {queue} (id, shard) SELECT id, shard FROM woken ON CONFLICT DO NOTHING`

// storedSeq is the sequence of a row o: in a run of rows it grows by as much as the
// ids, so of each run only the first id ($5) and the difference ($6) are told. NULL
// where it is not known.
const storedSeq = `o.id + ($6::bigint[])[width_bucket(o.id, $5::bigint[])]`

func (s *Store) queuePublished(b *batch, l jetbox.Lease, g group, outcomes []jetbox.Outcome) {
	const these = `o.id = ANY($3::bigint[]) AND o.status = 'PENDING' AND ` + fenced
	ids, firsts, diffs := runs(outcomes)
	args := []any{l.Owner, l.Epoch, ids, g.stream, firsts, diffs}
	var query string
	switch g.remove {
	case jetbox.Delete:
		args = args[:3]
		query = `settled AS (DELETE FROM {outbox} o WHERE ` + these + ` RETURNING o.id, o.aggregate_type, o.aggregate_id)`
	case jetbox.Archive:
		query = `settled AS (DELETE FROM {outbox} o WHERE ` + these + ` RETURNING o.*, ` + storedSeq + ` AS seq),
			archived AS (
				INSERT INTO {archive} (` + columns + `, archived_at) SELECT ` + publishedColumns + `, clock_timestamp() FROM settled r
				ON CONFLICT (id) DO UPDATE SET (` + columns + `, archived_at) = ROW(excluded.*))`
	default:
		query = `settled AS (
			UPDATE {outbox} o SET status = 'PUBLISHED', published_at = clock_timestamp(), stream = nullif($4, ''),
				stream_seq = ` + storedSeq + `, last_error = NULL
			WHERE ` + these + `
			RETURNING o.id, o.aggregate_type, o.aggregate_id)`
	}
	b.Queue(s.sql(leaveSQL+query+wakeKeysSQL), args...)
}

// runs returns the ids of published rows, ascending, and of each run the first id
// and what is to be added to an id to get its sequence; nil if that is not known.
func runs(outcomes []jetbox.Outcome) (ids, firsts []int64, diffs []*int64) {
	outcomes = slices.SortedFunc(slices.Values(outcomes), func(a, b jetbox.Outcome) int { return cmp.Compare(a.Pos, b.Pos) })
	ids = make([]int64, len(outcomes))
	for i, o := range outcomes {
		ids[i] = o.Pos
		var diff *int64
		if o.StreamSeq != 0 {
			d := int64(o.StreamSeq) - o.Pos
			diff = &d
		}
		if i > 0 {
			if last := diffs[len(diffs)-1]; last == diff || last != nil && diff != nil && *last == *diff {
				continue
			}
		}
		firsts, diffs = append(firsts, o.Pos), append(diffs, diff)
	}
	return ids, firsts, diffs
}

// queueRetry makes rows wait for their next attempt, and their keys with them.
func (s *Store) queueRetry(b *batch, l jetbox.Lease, outcomes []jetbox.Outcome) {
	ids, reasons, attempts := failures(outcomes)
	delays := make([]int64, len(outcomes))
	for i, o := range outcomes {
		delays[i] = o.Delay.Microseconds()
	}
	b.Queue(s.sql(`WITH r AS (
			UPDATE {outbox} o SET attempts = o.attempts + u.attempts, last_error = u.reason,
				available_at = clock_timestamp() + u.delay * interval '1 microsecond'
			FROM unnest($3::bigint[], $4::text[], $5::int[], $6::bigint[]) AS u (id, reason, attempts, delay)
			WHERE o.id = u.id AND o.status = 'PENDING' AND `+fenced+`
			RETURNING o.id, o.aggregate_type, o.aggregate_id, o.available_at),
			gone AS (DELETE FROM {queue} q USING r WHERE q.id = r.id)
		INSERT INTO {wait} (id, hold, shard, due, key_hash, aggregate_type, aggregate_id)
			SELECT r.id, 2, {fn_shard}(r.aggregate_type, r.aggregate_id, r.id), r.available_at, {hash r}, r.aggregate_type, r.aggregate_id FROM r
			ON CONFLICT (id) DO UPDATE SET hold = 2, due = excluded.due`), l.Owner, l.Epoch, ids, reasons, attempts, delays)
}

// queueDead parks rows, with a copy, and freezes the keys that are to be frozen.
func (s *Store) queueDead(b *batch, l jetbox.Lease, outcomes []jetbox.Outcome) {
	ids, reasons, attempts := failures(outcomes)
	freeze := make([]bool, len(outcomes))
	for i, o := range outcomes {
		freeze[i] = o.Freeze
	}
	b.Queue(s.sql(leaveSQL+`r AS (
			UPDATE {outbox} o SET status = 'DEAD_LETTER', attempts = o.attempts + u.attempts, last_error = u.reason
			FROM unnest($3::bigint[], $4::text[], $5::int[], $6::bool[]) AS u (id, reason, attempts, holds)
			WHERE o.id = u.id AND o.status = 'PENDING' AND `+fenced+`
			RETURNING o.*, u.holds),
		frozen AS (
			INSERT INTO {wait} (id, hold, shard, key_hash, aggregate_type, aggregate_id)
			SELECT r.id, 2, {fn_shard}(r.aggregate_type, r.aggregate_id, r.id), {hash r}, r.aggregate_type, r.aggregate_id
			FROM r WHERE r.holds
			ON CONFLICT (id) DO UPDATE SET hold = 2, due = NULL),
		copies AS (
			INSERT INTO {dead} (`+columns+`, dead_at) SELECT `+columns+`, clock_timestamp() FROM r
			ON CONFLICT (id) DO UPDATE SET (`+columns+`, dead_at) = ROW(excluded.*)),
		settled AS (SELECT id, aggregate_type, aggregate_id FROM r WHERE NOT holds)`+wakeKeysSQL), l.Owner, l.Epoch, ids, reasons, attempts, freeze)
}

func failures(outcomes []jetbox.Outcome) (ids []int64, reasons []string, attempts []int32) {
	ids, reasons, attempts = make([]int64, len(outcomes)), make([]string, len(outcomes)), make([]int32, len(outcomes))
	for i, o := range outcomes {
		ids[i], reasons[i] = o.Pos, storable(outbox.LastError(o))
		if o.Attempted {
			attempts[i] = 1
		}
	}
	return ids, reasons, attempts
}

// shrinkSQL cuts the relay's claims, and those of relays that are gone, down to rows
// that are still unresolved, without those in $3, which were not sent. Two relays that
// resolve parts of a dead one's claim do not wait for each other.
const shrinkSQL = `WITH mine AS MATERIALIZED (
		SELECT c.id, c.first, c.last, c.shards FROM {claim} c
		WHERE (c.owner = $1 OR NOT EXISTS (SELECT FROM {relay} r WHERE r.owner = c.owner)) AND ` + fenced + `
		FOR UPDATE SKIP LOCKED),
	rest AS MATERIALIZED (
		SELECT c.id, c.first, c.last,
			(SELECT q.id FROM {queue} q WHERE q.id BETWEEN c.first AND c.last AND q.shard = ANY (c.shards) AND q.id <> ALL($3::bigint[])
				ORDER BY q.id LIMIT 1) AS lowest,
			(SELECT q.id FROM {queue} q WHERE q.id BETWEEN c.first AND c.last AND q.shard = ANY (c.shards) AND q.id <> ALL($3::bigint[])
				ORDER BY q.id DESC LIMIT 1) AS highest
		FROM mine c),
	gone AS (DELETE FROM {claim} c USING rest r WHERE c.id = r.id AND r.lowest IS NULL)
	UPDATE {claim} c SET first = r.lowest, last = r.highest FROM rest r
		WHERE c.id = r.id AND r.lowest IS NOT NULL AND (r.lowest, r.highest) <> (r.first, r.last)`
