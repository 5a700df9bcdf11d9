package postgres

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// Tables of version 1 know of no stream. What was published before the upgrade is
// recalled all the same, if the stream that the next row goes to has lost it; what
// was pending goes on.
func TestTablesOfVersionOneLearnOfTheirStreams(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s, err := Open(ctx, Config{URL: pgtest.URL(t)})
	must(t, err)
	defer s.Close()
	for _, q := range []string{
		s.sql(versionSQL), migrations(s.names, 3)[0], s.sql(`INSERT INTO {version} (version) VALUES (1)`),
		s.sql(`INSERT INTO {outbox} (subject, payload, status, stream, stream_seq, published_at) VALUES ('a', '', 'PUBLISHED', 'EVENTS', 7, '2020-01-01')`),
		s.sql(`INSERT INTO {outbox} (subject, payload) VALUES ('b', '')`),
	} {
		_, err := s.pool.Exec(ctx, q, pgx.QueryExecModeSimpleProtocol)
		must(t, err)
	}
	if err := s.Check(ctx); !errors.Is(err, outbox.ErrNoTables) {
		t.Fatalf("Check of version 1 = %v, want ErrNoTables", err)
	}
	for range 2 {
		must(t, s.Migrate(ctx))
	}
	must(t, s.Check(ctx))
	var shards int
	must(t, s.pool.QueryRow(ctx, s.sql(`SELECT count(*) FROM {shard}`)).Scan(&shards))
	if shards != 3 {
		t.Errorf("%d shards after the upgrade, want the 3 there were", shards)
	}

	l, err := s.Acquire(ctx, jetbox.Candidate{Owner: "new", Length: time.Minute})
	must(t, err)
	rows, err := s.Claim(ctx, l, jetbox.Ask{Limit: 10})
	if err != nil || len(rows) != 1 {
		t.Fatalf("claimed %d rows, %v, want 1", len(rows), err)
	}
	created := time.Unix(1, 23)
	must(t, s.Record(ctx, l, []jetbox.Outcome{
		{Pos: rows[0].Pos, State: jetbox.Published, Stream: "EVENTS", StreamSeq: 8, MsgID: "b", Created: created},
	}))
	anchors, err := s.Anchors(ctx)
	if err != nil || len(anchors) == 0 {
		t.Fatalf("anchors = %+v, %v, want the row recorded", anchors, err)
	}
	if a := anchors[len(anchors)-1]; a.Seq != 8 || a.MsgID != "b" || !a.Created.Equal(created) {
		t.Fatalf("anchor = %+v, want the row recorded", a)
	}
	recallable, _, err := s.Recallable(ctx, "EVENTS", jetbox.Recall{After: 6}, 0)
	if err != nil || len(recallable) != 2 {
		t.Fatalf("recallable = %+v, %v, want both rows", recallable, err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
