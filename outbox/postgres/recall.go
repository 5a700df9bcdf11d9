package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/outboxrow"
)

const (
	// recallScan is how many rows one page of Recallable looks at.
	recallScan = 5000

	// recallBatch is how many rows one transaction makes pending.
	recallBatch = 2000
)

// errRecallMoved ends a transaction whose recall is not where the caller saw it.
var errRecallMoved = errors.New("recall has been moved on")

// notRecalling is a condition of a claim: nothing is claimed while a recall is under
// way, by any relay.
const notRecalling = `NOT EXISTS (SELECT FROM {stream} WHERE recall IS NOT NULL)`

// anchorsSQL lists what was known at the last look, and what relays have recorded
// since. Their sequences mean something on the stream as it was then.
const anchorsSQL = `SELECT s.stream, s.created, a.seq, a.msg_id, a.pos, a.at,
		(SELECT count(*) > 1 FROM {anchor} o WHERE o.stream = s.stream AND o.created = s.created), s.older, s.recall
	FROM {stream} s CROSS JOIN LATERAL (
		SELECT s.seq, s.msg_id, s.pos, s.at
		UNION ALL
		SELECT r.seq, r.msg_id, r.pos, r.at FROM {anchor} r WHERE r.stream = s.stream AND r.created = s.created) a
	ORDER BY s.stream, a.seq`

// Anchors returns what is known of each stream that rows were published to: of one
// that several relays publish to, what each of them has recorded last.
func (s *Store) Anchors(ctx context.Context) (anchors []jetbox.Anchor, err error) {
	err = s.do(ctx, func(ctx context.Context) error {
		rows, err := s.pool.Query(ctx, s.sql(anchorsSQL))
		if err != nil {
			return err
		}
		anchors, err = pgx.CollectRows(rows, scanAnchor)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read anchors of outbox %q: %w", s.cfg.Table, err)
	}
	return anchors, nil
}

func scanAnchor(row pgx.CollectableRow) (a jetbox.Anchor, err error) {
	var (
		created string
		seq     int64
		at      *time.Time
		recall  []byte
	)
	if err := row.Scan(&a.Stream, &created, &seq, &a.MsgID, &a.Pos, &at, &a.Shared, &a.Older, &recall); err != nil {
		return a, err
	}
	if a.Seq = uint64(seq); at != nil {
		a.At = at.UTC()
	}
	if a.Created, err = outboxrow.ParseCreated(created); err != nil {
		return a, err
	}
	if recall != nil {
		a.Recall = new(jetbox.Recall)
		if err := json.Unmarshal(recall, a.Recall); err != nil {
			return a, fmt.Errorf("recall of stream %s: %w", a.Stream, err)
		}
	}
	return a, nil
}

// anchorSQL notes the last message on a stream of what is recorded. Only a relay
// that has looked at the stream says that it is another one (SetAnchor).
const anchorSQL = `WITH new AS (
		INSERT INTO {stream} (stream, created) SELECT $3, $4 WHERE ` + fenced + ` ON CONFLICT DO NOTHING)
	INSERT INTO {anchor} AS a (stream, owner, created, seq, msg_id, pos, at)
		SELECT $3, $1, $4, $5::bigint, $6, $7::bigint, clock_timestamp() WHERE ` + fenced + `
			AND NOT EXISTS (SELECT FROM {stream} s WHERE s.stream = $3 AND s.created <> $4)
		ON CONFLICT (stream, owner) DO UPDATE SET created = excluded.created, at = excluded.at,
			seq = CASE WHEN {higher} THEN excluded.seq ELSE a.seq END, msg_id = CASE WHEN {higher} THEN excluded.msg_id ELSE a.msg_id END,
			pos = CASE WHEN {higher} THEN excluded.pos ELSE a.pos END`

// queueAnchors comes after what is recorded: its time is no earlier.
func (s *Store) queueAnchors(b *batch, l jetbox.Lease, outcomes []jetbox.Outcome) {
	query := s.sql(strings.ReplaceAll(anchorSQL, "{higher}", "a.created <> excluded.created OR a.seq < excluded.seq"))
	for _, o := range outboxrow.Last(outcomes) {
		b.Queue(query, l.Owner, l.Epoch, o.Stream, outboxrow.FormatCreated(o.Created), int64(o.StreamSeq), o.MsgID, o.Pos)
	}
}

// SetAnchor replaces what is known of a stream that was created at a time, unless
// a recall is under way there or it is not known as that one any more: then nothing
// is changed. With another time of creation, all rows recorded so far are those of
// an older stream.
func (s *Store) SetAnchor(ctx context.Context, l jetbox.Lease, created time.Time, a jetbox.Anchor) error {
	var recall *string
	if a.Recall != nil {
		text, err := json.Marshal(a.Recall)
		if err != nil {
			return err
		}
		recall = new(string(text))
	}
	b := newBatch()
	s.fence(b, l)
	b.Queue(s.sql(`WITH last AS (
			SELECT max(at) AS at FROM (
				SELECT at FROM {stream} WHERE stream = $3
				UNION ALL SELECT at FROM {anchor} WHERE stream = $3 AND created = $4) t),
		was AS (
			UPDATE {stream} s SET since = CASE WHEN s.created <> $5 THEN last.at ELSE s.since END,
				created = $5, seq = $6::bigint, msg_id = $7, pos = $8::bigint, at = last.at, older = $9, recall = $10::jsonb
			FROM last WHERE s.stream = $3 AND s.created = $4 AND s.recall IS NULL AND `+fenced+`
			RETURNING s.stream)
		DELETE FROM {anchor} a USING was WHERE a.stream = was.stream AND (a.seq <= $6::bigint OR $11)`),
		l.Owner, l.Epoch, a.Stream, outboxrow.FormatCreated(created), outboxrow.FormatCreated(a.Created), int64(a.Seq), a.MsgID, a.Pos,
		a.Older, recall, a.Recall != nil || !a.Created.Equal(created))
	if err := s.send(ctx, b); err != nil {
		return fmt.Errorf("set anchor of stream %s in outbox %q: %w", a.Stream, s.cfg.Table, err)
	}
	return nil
}

// Recallable returns rows that a recall chooses, of the next few thousand after an
// id, lowest first, and the id up to which it has looked; math.MaxInt64 after the
// last. They are those of all shards.
func (s *Store) Recallable(ctx context.Context, stream string, r jetbox.Recall, after int64) (rows []jetbox.PublishedRow, upTo int64, err error) {
	const inOlder = `coalesce(o.published_at <= (SELECT since FROM {stream} WHERE stream = $2), false)`
	chosen := inOlder
	args := []any{after, stream}
	if !r.Older {
		chosen = `NOT ` + inOlder + ` AND (o.stream_seq > $3 OR (o.stream_seq IS NULL AND coalesce(o.published_at > $4, true)))`
		args = append(args, int64(r.After), r.AfterTime)
	}
	b := newBatch()
	b.Queue(s.sql(fmt.Sprintf(`WITH page AS MATERIALIZED (
			SELECT id, event_id, coalesce(idempotency_key, event_id) AS key, status, stream, stream_seq, published_at
			FROM {outbox} WHERE id > $1 ORDER BY id LIMIT %d)
		SELECT o.id, o.event_id, o.key, coalesce(o.stream_seq, 0), o.published_at, p.n, p.last
		FROM (SELECT count(*) AS n, coalesce(max(id), 0) AS last FROM page) p
			LEFT JOIN page o ON o.status = 'PUBLISHED' AND o.stream = $2 AND %s ORDER BY o.id`, recallScan, chosen)), args...).
		Query(func(found pgx.Rows) error {
			rows, upTo, err = scanPublished(found)
			return err
		})
	if err := s.send(ctx, b); err != nil {
		return nil, 0, fmt.Errorf("read published rows of outbox %q: %w", s.cfg.Table, err)
	}
	return rows, upTo, nil
}

func scanPublished(found pgx.Rows) (rows []jetbox.PublishedRow, upTo int64, err error) {
	var (
		pos     *int64
		id, key *string
		seq, n  int64
		at      *time.Time
	)
	_, err = pgx.ForEachRow(found, []any{&pos, &id, &key, &seq, &at, &n, &upTo}, func() error {
		if pos == nil {
			return nil // none of the page
		}
		row := jetbox.PublishedRow{Pos: *pos, ID: *id, MsgID: *key, Seq: uint64(seq)}
		if at != nil {
			row.At = at.UTC()
		}
		rows = append(rows, row)
		return nil
	})
	if n < recallScan {
		upTo = math.MaxInt64
	}
	return rows, upTo, err
}

// Recall carries out a step of a recall, in small transactions, moves it on, and
// reports that this is done. If it is not any more where the caller has seen it, it is
// not, and nothing is changed: another relay is at work.
func (s *Store) Recall(ctx context.Context, l jetbox.Lease, stream string, r jetbox.Recall, step jetbox.Recalled) (done bool, err error) {
	for first := true; first || len(step.Lost) > 0; first = false {
		part := step
		if len(part.Lost) > recallBatch {
			part = jetbox.Recalled{Lost: step.Lost[:recallBatch], Done: r.Done}
		}
		err := s.recall(ctx, l, stream, r, part)
		if errors.Is(err, errRecallMoved) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("recall rows of outbox %q: %w", s.cfg.Table, err)
		}
		r.Done, r.Rows = part.Done, r.Rows+len(part.Lost)
		step.Lost = step.Lost[len(part.Lost):]
	}
	return true, nil
}

func (s *Store) recall(ctx context.Context, l jetbox.Lease, stream string, r jetbox.Recall, step jetbox.Recalled) error {
	was, err := json.Marshal(r)
	if err != nil {
		return err
	}
	r.Done, r.Rows = step.Done, r.Rows+len(step.Lost)
	is, err := json.Marshal(r)
	if err != nil {
		return err
	}
	b := newBatch()
	s.fence(b, l)
	// Each statement after the lock sees what is there then.
	const there = `EXISTS (SELECT FROM {stream} WHERE stream = $3 AND recall = $4::jsonb) AND ` + fenced
	b.Queue(s.sql(`SELECT FROM {stream} WHERE stream = $3 AND recall = $4::jsonb AND `+fenced+` FOR UPDATE`), l.Owner, l.Epoch, stream, string(was)).
		Exec(func(tag pgconn.CommandTag) error {
			if tag.RowsAffected() == 0 {
				return errRecallMoved
			}
			return nil
		})
	// The trigger of such an update puts them into the queue.
	b.Queue(s.sql(`UPDATE {outbox} SET status = 'PENDING', attempts = 0, last_error = NULL, published_at = NULL, stream = NULL, stream_seq = NULL
		WHERE id = ANY($5::bigint[]) AND status = 'PUBLISHED' AND stream = $3 AND `+there), l.Owner, l.Epoch, stream, string(was),
		append([]int64{}, step.Lost...))
	for _, m := range step.Moved {
		b.Queue(s.sql(`UPDATE {outbox} SET stream_seq = nullif($6::bigint, 0) WHERE id = $5 AND status = 'PUBLISHED' AND stream = $3 AND `+there),
			l.Owner, l.Epoch, stream, string(was), m.Pos, int64(m.Seq))
	}
	b.Queue(s.sql(`UPDATE {stream} SET recall = CASE WHEN NOT $6 THEN $5::jsonb END, older = older AND NOT $7
		WHERE stream = $3 AND recall = $4::jsonb AND `+fenced), l.Owner, l.Epoch, stream, string(was), string(is), step.End, step.End && r.Older)
	return s.send(ctx, b)
}
