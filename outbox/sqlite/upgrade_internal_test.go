package sqlite

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
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
