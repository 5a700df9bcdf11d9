package postgres_test

import (
	"fmt"
	"testing"

	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
	"github.com/seed-5e04d8fb/jetbox/outbox/outboxtest"
	"github.com/seed-5e04d8fb/jetbox/outbox/postgres"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

var (
	_ outboxtest.Store = (*postgres.Store)(nil)
	_ relay.Source     = (*postgres.Store)(nil)
	_ relay.Pruner     = (*postgres.Store)(nil)
	_ relay.Yielder    = (*postgres.Store)(nil)
)

// One shard is the plain case: one relay works, the others stand by. Of several
// the first relay holds all, until another comes.
func TestStoreKeepsThePromisesOfAnOutbox(t *testing.T) {
	t.Parallel()
	all := []int{1, postgres.DefaultShards}
	if testing.Short() {
		all = all[1:]
	}
	for _, shards := range all {
		t.Run(fmt.Sprintf("shards=%d", shards), func(t *testing.T) {
			t.Parallel()
			outboxtest.Run(t, func(t *testing.T) outboxtest.Database {
				url := pgtest.URL(t)
				return outboxtest.Database{
					Open: func(t *testing.T) outboxtest.Store {
						return open(t, postgres.Config{URL: url, Shards: shards})
					},
					Outgrow: func(t *testing.T) {
						s := open(t, postgres.Config{URL: url})
						defer s.Close()
						if _, err := s.Pool().Exec(t.Context(), `INSERT INTO outbox_schema (version) VALUES (9)`); err != nil {
							t.Fatal(err)
						}
					},
				}
			})
		})
	}
}

// open opens a store; the caller closes it.
func open(t testing.TB, cfg postgres.Config) *postgres.Store {
	t.Helper()
	s, err := postgres.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
