package sqlite_test

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox/outbox/outboxtest"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

var (
	_ outboxtest.Store = (*sqlite.Store)(nil)
	_ relay.Source     = (*sqlite.Store)(nil)
	_ relay.Pruner     = (*sqlite.Store)(nil)
)

func TestStoreKeepsThePromisesOfAnOutbox(t *testing.T) {
	t.Parallel()
	outboxtest.Run(t, func(t *testing.T) outboxtest.Database {
		path := filepath.Join(t.TempDir(), "outbox.db")
		return outboxtest.Database{
			Open: func(t *testing.T) outboxtest.Store { return open(t, path) },
			Outgrow: func(t *testing.T) {
				db, err := sqlite.OpenDB(t.Context(), path)
				if err != nil {
					t.Fatal(err)
				}
				defer db.Close()
				if _, err := db.ExecContext(t.Context(), `INSERT INTO outbox_schema VALUES (9, ?)`, time.Now().UnixMilli()); err != nil {
					t.Fatal(err)
				}
			},
		}
	})
}

// open opens the file's outbox; the caller closes it.
func open(t testing.TB, path string) *sqlite.Store {
	t.Helper()
	s, err := sqlite.Open(t.Context(), sqlite.Config{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	return s
}
