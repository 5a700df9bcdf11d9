// Package outboxtest is the conformance suite of outbox stores: what package
// outbox promises, as tests that any database must pass.
//
// A store's own test calls [Run] with a function that makes an empty database.
// The suite then opens as many stores on it as a scenario has processes: two
// relays and a writer, eight that start at once. It uses nothing but the methods
// of [Store], SQL that both SQLite and PostgreSQL understand, and real time, in
// small amounts: a database server knows no fake clock.
//
// It leaves to each store's own tests what only its database can show: settings,
// query plans, columns of times, defaults for explicit NULLs, a full disk.
package outboxtest

import (
	"context"
	"database/sql"
	"iter"
	"slices"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// Store is what every store has. Its methods keep what package outbox promises
// and are safe for concurrent use.
type Store interface {
	Migrate(ctx context.Context) error
	Check(ctx context.Context) error
	Append(ctx context.Context, tx *sql.Tx, events ...*jetbox.Event) error

	// DB is for writers. Table is the outbox's name as it stands in SQL.
	DB() *sql.DB
	Table() string

	Acquire(ctx context.Context, c jetbox.Candidate) (jetbox.Lease, error)
	Release(ctx context.Context, l jetbox.Lease) error
	Claim(ctx context.Context, l jetbox.Lease, ask jetbox.Ask) ([]jetbox.Row, error)
	Record(ctx context.Context, l jetbox.Lease, outcomes []jetbox.Outcome) error
	Prune(ctx context.Context, l jetbox.Lease, before time.Time, archive bool) (pruned int, err error)
	Wait(ctx context.Context) error

	Anchors(ctx context.Context) ([]jetbox.Anchor, error)
	SetAnchor(ctx context.Context, l jetbox.Lease, created time.Time, a jetbox.Anchor) error
	Recallable(ctx context.Context, stream string, r jetbox.Recall, after int64) (rows []jetbox.PublishedRow, upTo int64, err error)
	Recall(ctx context.Context, l jetbox.Lease, stream string, r jetbox.Recall, step jetbox.Recalled) (done bool, err error)

	List(ctx context.Context, f outbox.Filter) iter.Seq2[outbox.Entry, error]
	Show(ctx context.Context, id int64) (outbox.Entry, error)
	Retry(ctx context.Context, f outbox.Filter) (retried int, err error)
	Discard(ctx context.Context, f outbox.Filter) (discarded int, err error)
	Stats(ctx context.Context) (outbox.Stats, error)

	Close() error
}

// Database is one empty database.
type Database struct {
	// Open opens a store on it, as another process would, and fails the test
	// when it cannot. The suite closes the store.
	Open func(t *testing.T) Store

	// Outgrow makes the tables look as if a later version of the store had
	// written them. Other stores are open while it runs.
	Outgrow func(t *testing.T)
}

// scenario is one promise.
type scenario struct {
	name string
	run  func(t *testing.T, b *bench)
}

// Run runs the suite, each scenario in parallel on a database of its own. The
// databases may be removed when t's cleanup functions run.
func Run(t *testing.T, newDatabase func(t *testing.T) Database) {
	t.Helper()
	all := slices.Concat(
		setUpScenarios(), appendScenarios(), rawScenarios(), claimScenarios(), leaseScenarios(),
		recordScenarios(), recallScenarios(), retryScenarios(), backlogScenarios(), deadScenarios(), pruneScenarios(),
		operateScenarios(), concurrentScenarios(), modelScenarios(),
	)
	for _, s := range all {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			s.run(t, newBench(t, newDatabase(t)))
		})
	}
}
