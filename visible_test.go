package jetbox_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// What PostgreSQL shows when, and what an outbox makes of it: ids are handed out
// at the insert and become visible at the commit, in another order, or never.

// soon is within how long a row of an idle outbox must be on the stream.
const soon = 2 * time.Second

// insert commits n rows without a key; payload and message ID are the same.
func (s *several) insert(prefix string, n int) {
	s.t.Helper()
	s.exec(`INSERT INTO outbox (event_id, subject, payload) SELECT $1 || g, 'events.a', ($1 || g)::bytea FROM generate_series(1, $2) g`,
		prefix, n)
}

// awaitStored waits until the stream has n messages, and no row is pending.
func (s *several) awaitStored(n int, limit time.Duration) (took time.Duration) {
	s.t.Helper()
	return s.await(fmt.Sprintf("%d messages, and all rows recorded", n), limit, func() (string, bool) {
		stream, err := s.js.Stream(s.t.Context(), "EVENTS")
		s.must(err)
		st := s.stats()
		msgs := stream.CachedInfo().State.Msgs
		return fmt.Sprintf("%d messages, %+v", msgs, st), msgs == uint64(n) && st.Pending == 0
	})
}

// wantOnce fails the test unless the stream has exactly the committed rows, once.
func (s *several) wantOnce() {
	s.t.Helper()
	run := sharedRun{committed: make(map[string]bool), table: s.table(), stream: s.stored()}
	for _, row := range run.table {
		run.committed[row.msgID] = false
	}
	if v := run.check(); len(v) > 0 {
		s.t.Fatalf("%d violations:\n%s", len(v), strings.Join(v[:min(len(v), 20)], "\n"))
	}
}

// open begins a transaction that has written a row of the outbox, and leaves it
// open.
func (s *several) open(id string) pgx.Tx {
	s.t.Helper()
	tx, err := s.pool.Begin(s.t.Context())
	s.must(err)
	s.t.Cleanup(func() { _ = tx.Rollback(s.t.Context()) })
	_, err = tx.Exec(s.t.Context(), `INSERT INTO outbox (event_id, subject, payload) VALUES ($1, 'events.a', $1::text::bytea)`, id)
	s.must(err)
	return tx
}

// A reader that keeps the highest id it has seen never comes back for a row below
// it that commits later, and one that waits for gaps gives up some time: BR-01.
// Here the transaction is open while a thousand rows pass it by, and while the
// relay is replaced.
func TestRowThatCommitsLateIsNotLost(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := newSeveral(t, pgtest.URL(t), time.Second)
	s.start(1)
	s.awaitShares(patience)
	slow := s.open("slow")
	s.insert("fast", 1000)
	s.awaitStored(1000, patience)
	s.end(s.alive[0], os.Kill)
	s.start(1)
	s.awaitShares(patience)
	s.insert("more", 100)
	s.awaitStored(1100, patience)

	s.must(slow.Commit(ctx))
	took := s.awaitStored(1101, soon)
	s.wantOnce()
	last := s.stored()[1100]
	if first := s.table()[0]; first.msgID != "slow" || last.msgID != "slow" {
		t.Fatalf("the first row is %s and the last message %s: the transaction did not commit late", first.msgID, last.msgID)
	}
	t.Logf("on the stream and recorded %v after the commit", took)
}

// A reader that waits for the ids that are missing stops at those that were rolled
// back: BR-02.
func TestRolledBackIDsDoNotStallTheOutbox(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := newSeveral(t, pgtest.URL(t), time.Second)
	s.start(1)
	s.awaitShares(patience)
	for range 10 {
		tx, err := s.pool.Begin(ctx)
		s.must(err)
		_, err = tx.Exec(ctx, `INSERT INTO outbox (subject, payload) SELECT 'events.gone', '' FROM generate_series(1, 1000)`)
		s.must(err)
		s.must(tx.Rollback(ctx))
	}
	s.insert("after", 1)
	took := s.awaitStored(1, soon)
	s.wantOnce()
	if id := s.table()[0].id; id <= 10_000 {
		t.Fatalf("the row has id %d: no ids were burnt", id)
	}
	t.Logf("on the stream and recorded after %v", took)
}

// A reader that waits for the oldest transaction of all stops at any that stays
// open, also in another database, and at a prepared one that everybody has
// forgotten: BR-02.
func TestOpenTransactionsDoNotStallTheOutbox(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	cluster := pgtest.Start(t, "max_prepared_transactions=5")
	s := newSeveral(t, cluster.URL(t), time.Second)
	s.exec(`CREATE TABLE other (id INTEGER)`)
	other, err := pgx.Connect(ctx, cluster.URL(t))
	s.must(err)
	defer other.Close(ctx)
	s.start(1)
	s.awaitShares(patience)

	// Each of them stays open until the end.
	here, err := s.pool.Begin(ctx)
	s.must(err)
	t.Cleanup(func() { _ = here.Rollback(ctx) })
	writing := s.open("open")
	rows := 0
	for _, tt := range []struct {
		name  string
		begin func() error
	}{
		{"writer of another database", func() error {
			_, err := other.Exec(ctx, `CREATE TABLE t (id INTEGER); BEGIN; INSERT INTO t VALUES (1)`)
			return err
		}},
		{"writer of another table, with a snapshot", func() error {
			_, err := here.Exec(ctx, `SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; INSERT INTO other VALUES (1)`)
			return err
		}},
		{"writer of the outbox", func() error { return nil }}, // begun above
		{"prepared transaction", func() error {
			// While the relay waits for rows: a transaction that has sent a
			// notification cannot be prepared.
			s.awaitIdle()
			tx, err := s.pool.Begin(ctx)
			if err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, `INSERT INTO outbox (event_id, subject, payload) VALUES ('prepared', 'events.a', 'prepared')`); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, `PREPARE TRANSACTION 'forgotten'`); err != nil {
				return err
			}
			return tx.Commit(ctx) // there is none any more
		}},
	} {
		if err := tt.begin(); err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		s.insert(fmt.Sprintf("rows%d.", rows), 100)
		rows += 100
		t.Logf("%s: 100 rows after %v", tt.name, s.awaitStored(rows, soon))
	}
	s.must(writing.Commit(ctx))
	s.awaitStored(rows+1, soon)
	s.exec(`COMMIT PREPARED 'forgotten'`)
	s.awaitStored(rows+2, soon)
	s.wantOnce()
}

// awaitIdle waits until the relay has had nothing to do for a while: by then it
// would have asked to be notified, where it does.
func (s *several) awaitIdle() {
	s.t.Helper()
	s.await("nothing pending", patience, func() (string, bool) {
		st := s.stats()
		return fmt.Sprintf("%+v", st), st.Pending == 0
	})
	pause(s.t.Context(), 300*time.Millisecond)
}

// A cursor that holds transaction ids of one cluster means nothing in another,
// which counts from lower ones: after a restore nothing new was ever delivered, or
// everything again: BR-03. The dump is taken from an outbox whose relay has died,
// with rows pending.
func TestDumpRestoredInAnotherClusterGoesOn(t *testing.T) {
	t.Parallel()
	old := pgtest.Start(t)
	s := newSeveral(t, old.URL(t), time.Second)
	s.start(1)
	s.awaitShares(patience)
	s.exec(`CREATE TABLE burnt (id INTEGER)`)
	s.exec(`DO $$ BEGIN FOR i IN 1..50000 LOOP
		BEGIN INSERT INTO burnt VALUES (i); EXCEPTION WHEN division_by_zero THEN NULL; END;
		END LOOP; END $$`) // each block has a transaction id of its own
	s.insert("old", 2000)
	s.awaitStored(2000, patience)
	s.end(s.alive[0], os.Kill)
	s.insert("pending", 5)
	recorded := s.dump(settled)
	dump := s.tool("pg_dump", nil, "--no-owner", s.child.Outbox)
	before := s.xid()

	fresh := pgtest.Start(t).URL(t)
	s.tool("psql", dump, "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", fresh)
	s.move(fresh)
	if after := s.xid(); after+40_000 > before {
		t.Fatalf("the fresh cluster is at transaction %d, the old one at %d: nothing is shown", after, before)
	}
	acks := s.acks.Load()
	begin := time.Now()
	s.start(1)
	s.insert("new", 10)
	s.awaitStored(2015, patience)
	took := time.Since(begin)
	if sent := s.acks.Load() - acks; sent != 15 {
		t.Errorf("%d messages were sent after the restore, want the 5 that were pending and 10 new ones", sent)
	}
	s.wantOnce()
	s.wantUnchanged(recorded, s.dump(settled))
	t.Logf("15 rows on the stream and recorded %v after the first start of a relay there", took)
}

// move leaves the database for another one. No relay may be running.
func (s *several) move(url string) {
	s.t.Helper()
	s.pool.Close()
	s.must(s.store.Close())
	s.child.Outbox = url
	s.connect()
	s.must(s.store.Check(s.t.Context()))
}

// xid returns where the cluster's transaction ids are.
func (s *several) xid() (id int64) {
	s.t.Helper()
	s.must(s.pool.QueryRow(s.t.Context(), `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint`).Scan(&id))
	return id
}

// tool runs a client program of PostgreSQL's: that of the newest version, as the
// servers of the tests are.
func (s *several) tool(name string, stdin []byte, args ...string) (stdout []byte) {
	s.t.Helper()
	cmd := exec.CommandContext(s.t.Context(), clientProgram(s.t, name), args...)
	cmd.Stdin = bytes.NewReader(stdin)
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	if err := cmd.Run(); err != nil {
		s.t.Fatalf("%s: %v\n%s", name, err, problems.String())
	}
	return out.Bytes()
}

// clientProgram finds a program where the server's are.
func clientProgram(t *testing.T, name string) string {
	t.Helper()
	if path, err := exec.LookPath("initdb"); err == nil {
		if path, err = filepath.EvalSymlinks(path); err == nil {
			return filepath.Join(filepath.Dir(path), name)
		}
	}
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	if err != nil || len(found) == 0 {
		t.Fatalf("%s: not found beside initdb (%v)", name, err)
	}
	version := func(path string) (v int) {
		_, _ = fmt.Sscanf(path, "/usr/lib/postgresql/%d/", &v)
		return v
	}
	return slices.MaxFunc(found, func(a, b string) int { return version(a) - version(b) })
}
