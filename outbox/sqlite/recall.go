package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/outboxrow"
)

// recallScan is how many rows one page of Recallable looks at.
const recallScan = 5000

// errRecallMoved ends a transaction whose recall is not where the caller saw it.
var errRecallMoved = errors.New("recall has been moved on")

// Anchors returns what is known of each stream that rows were published to.
func (s *Store) Anchors(ctx context.Context) ([]jetbox.Anchor, error) {
	anchors, err := s.anchors(ctx)
	if err != nil {
		return nil, fmt.Errorf("read anchors of outbox %q: %w", s.table, noTables(err))
	}
	return anchors, nil
}

func (s *Store) anchors(ctx context.Context) (anchors []jetbox.Anchor, err error) {
	rows, err := s.db.QueryContext(ctx, s.sql(`SELECT stream, created, seq, msg_id, pos, at, older, recall
		FROM "{t}_stream" ORDER BY stream`))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var (
			a       jetbox.Anchor
			created string
			at      int64
			recall  sql.NullString
		)
		if err := rows.Scan(&a.Stream, &created, &a.Seq, &a.MsgID, &a.Pos, &at, &a.Older, &recall); err != nil {
			return nil, err
		}
		a.At = time.UnixMilli(at).UTC()
		if a.Created, err = outboxrow.ParseCreated(created); err != nil {
			return nil, err
		}
		if recall.Valid {
			a.Recall = new(jetbox.Recall)
			if err := json.Unmarshal([]byte(recall.String), a.Recall); err != nil {
				return nil, fmt.Errorf("recall of stream %s: %w", a.Stream, err)
			}
		}
		anchors = append(anchors, a)
	}
	return anchors, rows.Err()
}

// recordAnchors notes the last message on each stream of what is recorded. Only a
// relay that has looked at the stream says that it is another one ([Store.SetAnchor]).
func (s *Store) recordAnchors(ctx context.Context, tx *sql.Tx, outcomes []jetbox.Outcome, now int64) error {
	for _, o := range outboxrow.Last(outcomes) {
		_, err := tx.ExecContext(ctx, s.sql(`INSERT INTO "{t}_stream" AS s (stream, created, seq, msg_id, pos, at) VALUES (?, ?, ?, ?, ?, ?)
			ON CONFLICT (stream) DO UPDATE SET at = max(s.at, excluded.at), seq = max(s.seq, excluded.seq),
				msg_id = CASE WHEN excluded.seq > s.seq THEN excluded.msg_id ELSE s.msg_id END,
				pos = CASE WHEN excluded.seq > s.seq THEN excluded.pos ELSE s.pos END
			WHERE s.created = excluded.created`),
			o.Stream, outboxrow.FormatCreated(o.Created), int64(o.StreamSeq), o.MsgID, o.Pos, now)
		if err != nil {
			return err
		}
	}
	return nil
}

// SetAnchor replaces what is known of a stream that was created at a time, unless
// a recall is under way there or it is not known as that one any more: then nothing
// is changed. With another time of creation, all rows recorded so far are those of
// an older stream.
func (s *Store) SetAnchor(ctx context.Context, l jetbox.Lease, created time.Time, a jetbox.Anchor) error {
	var recall any
	if a.Recall != nil {
		text, err := json.Marshal(a.Recall)
		if err != nil {
			return err
		}
		recall = string(text)
	}
	err := s.fenced(ctx, l, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, s.sql(`UPDATE "{t}_stream" SET since = CASE WHEN created <> ?3 THEN at ELSE since END,
			created = ?3, seq = ?4, msg_id = ?5, pos = ?6, at = max(at, ?7), older = ?8, recall = ?9
			WHERE stream = ?1 AND created = ?2 AND recall IS NULL`),
			a.Stream, outboxrow.FormatCreated(created), outboxrow.FormatCreated(a.Created), int64(a.Seq), a.MsgID, a.Pos, millis(a.At), a.Older, recall)
		return err
	})
	if err != nil {
		return fmt.Errorf("set anchor of stream %s in outbox %q: %w", a.Stream, s.table, err)
	}
	return nil
}

// millis is a time as the file has it; that of no time is before all others.
func millis(t time.Time) int64 {
	if t.IsZero() {
		return math.MinInt64
	}
	return t.UnixMilli()
}

// Recallable returns rows that a recall chooses, of the next few thousand after an
// id, lowest first, and the id up to which it has looked; math.MaxInt64 after the
// last.
func (s *Store) Recallable(ctx context.Context, stream string, r jetbox.Recall, after int64) (rows []jetbox.PublishedRow, upTo int64, err error) {
	rows, upTo, err = s.recallable(ctx, stream, r, after)
	if err != nil {
		return nil, 0, fmt.Errorf("read published rows of outbox %q: %w", s.table, noTables(err))
	}
	return rows, upTo, nil
}

func (s *Store) recallable(ctx context.Context, stream string, r jetbox.Recall, after int64) (found []jetbox.PublishedRow, upTo int64, err error) {
	const inOlder = `coalesce(o.published_at, 0) <= coalesce((SELECT since FROM "{t}_stream" WHERE stream = ?2), -9223372036854775808)`
	chosen := inOlder
	args := []any{after, stream}
	if !r.Older {
		chosen = `NOT ` + inOlder + ` AND (o.stream_seq > ?3 OR (o.stream_seq IS NULL AND coalesce(o.published_at, 0) > ?4))`
		args = append(args, int64(r.After), millis(r.AfterTime))
	}
	rows, err := s.db.QueryContext(ctx, s.sql(fmt.Sprintf(`SELECT o.id, coalesce(o.status = 'PUBLISHED' AND o.stream = ?2 AND %s, 0),
		o.event_id, coalesce(o.idempotency_key, o.event_id), coalesce(o.stream_seq, 0), coalesce(o.published_at, 0)
		FROM "{t}" o WHERE o.id > ?1 ORDER BY o.id LIMIT %d`, chosen, recallScan)), args...)
	if err != nil {
		return nil, 0, err
	}
	defer rows.Close()
	n := 0
	for rows.Next() {
		var (
			row jetbox.PublishedRow
			is  bool
			at  int64
		)
		if err := rows.Scan(&row.Pos, &is, &row.ID, &row.MsgID, &row.Seq, &at); err != nil {
			return nil, 0, err
		}
		n, upTo = n+1, row.Pos
		if is {
			row.At = time.UnixMilli(at).UTC()
			found = append(found, row)
		}
	}
	if n < recallScan {
		upTo = math.MaxInt64
	}
	return found, upTo, rows.Err()
}

// Recall carries out a step of a recall, in transactions that leave other writers
// room, moves it on, and reports that this is done. If it is not any more where the
// caller has seen it, it is not, and nothing is changed: another relay is at work.
func (s *Store) Recall(ctx context.Context, l jetbox.Lease, stream string, r jetbox.Recall, step jetbox.Recalled) (done bool, err error) {
	for first := true; first || len(step.Lost) > 0; first = false {
		part := step
		if len(part.Lost) > recordBatch {
			part = jetbox.Recalled{Lost: step.Lost[:recordBatch], Done: r.Done}
		}
		err := s.fenced(ctx, l, func(tx *sql.Tx) error { return s.recall(ctx, tx, stream, r, part) })
		if errors.Is(err, errRecallMoved) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("recall rows of outbox %q: %w", s.table, err)
		}
		r.Done, r.Rows = part.Done, r.Rows+len(part.Lost)
		step.Lost = step.Lost[len(part.Lost):]
	}
	return true, nil
}

func (s *Store) recall(ctx context.Context, tx *sql.Tx, stream string, r jetbox.Recall, step jetbox.Recalled) error {
	if err := s.moveRecall(ctx, tx, stream, r, step); err != nil {
		return err
	}
	list, err := jsonIDs(append([]int64{}, step.Lost...))
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, s.sql(`UPDATE "{t}" SET status = 'PENDING', hold = 0, attempts = 0, last_error = NULL,
		published_at = NULL, stream = NULL, stream_seq = NULL
		WHERE id IN (SELECT value FROM json_each(?)) AND status = 'PUBLISHED' AND stream = ?`), list, stream)
	if err != nil {
		return err
	}
	for _, m := range step.Moved {
		_, err := tx.ExecContext(ctx, s.sql(`UPDATE "{t}" SET stream_seq = ? WHERE id = ? AND status = 'PUBLISHED' AND stream = ?`),
			nullSeq(m.Seq), m.Pos, stream)
		if err != nil {
			return err
		}
	}
	return nil
}

// moveRecall writes down how far a recall is with a step, if it is where the caller
// has seen it.
func (s *Store) moveRecall(ctx context.Context, tx *sql.Tx, stream string, r jetbox.Recall, step jetbox.Recalled) error {
	was, err := json.Marshal(r)
	if err != nil {
		return err
	}
	r.Done, r.Rows = step.Done, r.Rows+len(step.Lost)
	is, err := json.Marshal(r)
	if err != nil {
		return err
	}
	var next any = string(is)
	if step.End {
		next = nil
	}
	res, err := tx.ExecContext(ctx, s.sql(`UPDATE "{t}_stream" SET recall = ?3, older = CASE WHEN ?4 THEN 0 ELSE older END
		WHERE stream = ?1 AND recall = ?2`), stream, string(was), next, step.End && r.Older)
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n > 0 {
		return err
	}
	return errRecallMoved
}

// recalling reports whether a recall is under way: nothing is claimed meanwhile.
func (s *Store) recalling(ctx context.Context) (recalling bool, err error) {
	err = s.reader.QueryRowContext(ctx, s.sql(`SELECT EXISTS (SELECT 1 FROM "{t}_stream" WHERE recall IS NOT NULL)`)).Scan(&recalling)
	return recalling, noTables(err)
}
