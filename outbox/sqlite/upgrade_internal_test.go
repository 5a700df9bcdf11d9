package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// A file of version 1, with a relay that had claimed rows, goes on: the rows it had
// claimed are still of unknown outcome, the others fresh.
func TestFileOfVersionOneIsUpgradedWithItsClaims(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s, err := Open(ctx, Config{Path: filepath.Join(t.TempDir(), "old.db")})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	err = inTx(ctx, s.db, func(tx *sql.Tx) error {
		for _, q := range []string{
			versionTable, migrations[0], `INSERT INTO "{t}_schema" VALUES (1, 0)`,
			`INSERT INTO "{t}" (subject, payload) VALUES ('a', ''), ('b', ''), ('c', '')`,
			`UPDATE "{t}_lease" SET owner = 'old', epoch = 7, expires_at = 1, claimed_from = 1, claimed_to = 2, claimed_at = 1000`,
		} {
			if _, err := tx.ExecContext(ctx, s.sql(q)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.Migrate(ctx); err != nil {
			t.Fatal(err)
		}
	}
	l, err := s.Acquire(ctx, jetbox.Candidate{Owner: "new", Length: time.Minute})
	if err != nil || !l.Held || l.Epoch != 8 {
		t.Fatalf("lease = %+v, %v, want epoch 8", l, err)
	}
	rows, err := s.Claim(context.WithoutCancel(ctx), l, jetbox.Ask{Limit: 10})
	if err != nil || len(rows) != 3 {
		t.Fatalf("claimed %d rows, %v, want 3", len(rows), err)
	}
	for i, r := range rows {
		if want := i == 2; r.Fresh != want || (r.Earlier == nil) != want {
			t.Errorf("row %d is fresh: %v, earlier %+v, want fresh: %v", r.Pos, r.Fresh, r.Earlier, want)
		}
	}
	if e := rows[0].Earlier; e != nil && (e.Age < 24*time.Hour || len(e.Before) != 0) {
		t.Errorf("earlier = %+v, want an old claim that knows of no stream", e)
	}
}

// A file of version 2 knows of no stream. What was published before the upgrade is
// recalled all the same, if the stream that the next row goes to has lost it.
func TestFileOfVersionTwoLearnsOfItsStreams(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s, err := Open(ctx, Config{Path: filepath.Join(t.TempDir(), "old.db")})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	err = inTx(ctx, s.db, func(tx *sql.Tx) error {
		for _, q := range []string{
			versionTable, migrations[0], migrations[1], `INSERT INTO "{t}_schema" VALUES (1, 0), (2, 0)`,
			`INSERT INTO "{t}" (subject, payload, status, stream, stream_seq, published_at) VALUES ('a', '', 'PUBLISHED', 'EVENTS', 7, 1)`,
			`INSERT INTO "{t}" (subject, payload) VALUES ('b', '')`,
		} {
			if _, err := tx.ExecContext(ctx, s.sql(q)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Check(ctx); !errors.Is(err, outbox.ErrNoTables) {
		t.Fatalf("Check of version 2 = %v, want ErrNoTables", err)
	}
	for range 2 {
		if err := s.Migrate(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if anchors, err := s.Anchors(ctx); err != nil || len(anchors) != 0 {
		t.Fatalf("anchors after the upgrade = %+v, %v, want none", anchors, err)
	}
	l, err := s.Acquire(ctx, jetbox.Candidate{Owner: "new", Length: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	if rows, err := s.Claim(ctx, l, jetbox.Ask{Limit: 10}); err != nil || len(rows) != 1 {
		t.Fatalf("claimed %d rows, %v, want 1", len(rows), err)
	}
	created := time.Unix(1, 23)
	err = s.Record(ctx, l, []jetbox.Outcome{{Pos: 2, State: jetbox.Published, Stream: "EVENTS", StreamSeq: 8, MsgID: "b", Created: created}})
	if err != nil {
		t.Fatal(err)
	}
	anchors, err := s.Anchors(ctx)
	if err != nil || len(anchors) != 1 || anchors[0].Seq != 8 || anchors[0].MsgID != "b" || !anchors[0].Created.Equal(created) {
		t.Fatalf("anchors = %+v, %v, want the row recorded", anchors, err)
	}
	rows, _, err := s.Recallable(ctx, "EVENTS", jetbox.Recall{After: 6}, 0)
	if err != nil || len(rows) != 2 {
		t.Fatalf("recallable = %+v, %v, want both rows", rows, err)
	}
}
