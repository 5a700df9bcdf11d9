package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed-5e04d8fb/jetbox/dedup"
	"github.com/seed-5e04d8fb/jetbox/dedup/sqlite"
)

// A handler that hangs in its transaction loses the write lock, although it does
// not look at its context: others write on, and what it did is gone.
func TestHandlerThatHangsLosesTheWriteLock(t *testing.T) {
	t.Parallel()
	db := openDB(t, filepath.Join(t.TempDir(), "app.db"), walDSN)
	createEffects(t, db)
	l := newLedger(t, db, sqlite.Config{MaxHold: 200 * time.Millisecond})
	inside, end := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := l.Do(t.Context(), "c", "k", func(ctx context.Context, tx *sql.Tx) error {
			err := insertEffect(ctx, tx, "first")
			close(inside)
			<-end
			return err
		})
		if !errors.Is(err, dedup.ErrHeldTooLong) {
			t.Errorf("the first Do: %v, want ErrHeldTooLong", err)
		}
	})
	<-inside
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := db.ExecContext(ctx, `INSERT INTO effects VALUES ('application')`); err != nil {
		t.Errorf("another writer: %v", err)
	}
	patient := newLedger(t, db, sqlite.Config{})
	seen, err := patient.Do(ctx, "c", "k", func(ctx context.Context, tx *sql.Tx) error { return insertEffect(ctx, tx, "second") })
	if seen || err != nil {
		t.Errorf("the second Do = %v, %v, want false, nil", seen, err)
	}
	close(end)
	wg.Wait()
	if n := count(t, db, `SELECT count(*) FROM effects WHERE name = 'first'`); n != 0 {
		t.Errorf("%d effects of the first one, want none", n)
	}
}

// A table of an earlier version is taken over, one of a later version refused.
func TestTablesOfOtherVersions(t *testing.T) {
	t.Parallel()
	db := openDB(t, filepath.Join(t.TempDir(), "app.db"), walDSN)
	if _, err := db.Exec(`CREATE TABLE jetbox_ledger (consumer TEXT NOT NULL, key TEXT NOT NULL, handled_at INTEGER NOT NULL,
		PRIMARY KEY (consumer, key)) WITHOUT ROWID;
		CREATE INDEX jetbox_ledger_handled_at ON jetbox_ledger (handled_at);
		INSERT INTO jetbox_ledger VALUES ('c', 'k', ?)`, time.Now().UnixMilli()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		l := newLedger(t, db, sqlite.Config{})
		if seen, err := l.Seen(t.Context(), "c", "k"); !seen || err != nil {
			t.Errorf("Seen = %v, %v, want true, nil", seen, err)
		}
	}
	if n := count(t, db, `SELECT count(*) FROM sqlite_master WHERE name IN ('jetbox_ledger_handled_at', 'jetbox_ledger_age')`); n != 1 {
		t.Errorf("%d indexes, want the new one", n)
	}
	if _, err := db.Exec(`INSERT INTO jetbox_ledger_schema VALUES (7, 0)`); err != nil {
		t.Fatal(err)
	}
	_, err := sqlite.New(t.Context(), db, sqlite.Config{})
	if !errors.Is(err, dedup.ErrSchemaTooNew) || !strings.Contains(err.Error(), "version 7") || !strings.Contains(err.Error(), "knows 1") {
		t.Errorf("New: %v, want ErrSchemaTooNew with both versions", err)
	}
}

// BR-61: with Run the table is what arrives in one retention, whether or not
// events arrive; what may still be delivered stays, also while nobody can say
// what that is.
func TestRunPrunesAndKeepsWhatMayStillComeBack(t *testing.T) {
	// Not parallel: on a fake clock.
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		db := openDB(t, filepath.Join(dir, "app.db"), walDSN)
		var mu sync.Mutex
		var oldest time.Time
		var unknown error
		set := func(at time.Time, err error) {
			mu.Lock()
			defer mu.Unlock()
			oldest, unknown = at, err
		}
		var log strings.Builder
		l := newLedger(t, db, sqlite.Config{
			Retention: time.Hour,
			KeepFunc: func(context.Context, string) (time.Time, error) {
				mu.Lock()
				defer mu.Unlock()
				return oldest, unknown
			},
			Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		for i := range 1200 {
			if _, err := l.Do(t.Context(), "c", fmt.Sprint(i), func(context.Context, *sql.Tx) error { return nil }); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- l.Run(ctx) }()
		entries := func() int { return count(t, db, `SELECT count(*) FROM jetbox_ledger`) }
		for _, step := range []struct {
			wait   time.Duration
			oldest time.Time
			err    error
			want   int
		}{
			{wait: 59 * time.Minute, oldest: time.Now(), want: 1200},
			{wait: 10 * time.Hour, oldest: time.Now(), want: 1200},
			{wait: 10 * time.Hour, err: errors.New("no broker"), want: 1200},
			{wait: 2 * time.Minute, want: 0},
		} {
			set(step.oldest, step.err)
			time.Sleep(step.wait)
			synctest.Wait()
			if n := entries(); n != step.want {
				t.Errorf("after another %v: %d entries, want %d", step.wait, n, step.want)
			}
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		if n := strings.Count(log.String(), "no broker"); n != 1 || !strings.Contains(log.String(), "removed again") {
			t.Errorf("logged %d times that it fails, want once, and the end of it:\n%s", n, log.String())
		}
	})
}
