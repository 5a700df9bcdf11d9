package jetbox_test

import (
	"fmt"
	"net/url"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

// skewed returns the URL of a database whose clock can be set: as far as SQL can tell,
// since all its sessions find functions in front of clock_timestamp() and now(). The
// clocks of relay and broker are the machine's.
func skewed(t *testing.T) string {
	t.Helper()
	database := pgtest.URL(t)
	conn, err := pgx.Connect(t.Context(), database)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	for _, sql := range []string{
		`CREATE SCHEMA skew`,
		`CREATE TABLE skew.clock (ahead INTERVAL NOT NULL)`,
		`INSERT INTO skew.clock VALUES ('0')`,
		`CREATE FUNCTION skew.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS 'SELECT pg_catalog.clock_timestamp() + ahead FROM skew.clock'`,
		`CREATE FUNCTION skew.now() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT pg_catalog.now() + ahead FROM skew.clock'`,
	} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	u, err := url.Parse(database)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	q.Set("search_path", "skew,pg_catalog")
	u.RawQuery = q.Encode()
	return u.String()
}

// setClock sets the database's clock to so much ahead of the machine's.
func (s *several) setClock(ahead time.Duration) {
	s.t.Helper()
	s.exec(`UPDATE skew.clock SET ahead = $1`, ahead)
}

// wantClock fails the test unless the last row was recorded by such a clock.
func (s *several) wantClock(ahead time.Duration) {
	s.t.Helper()
	var last time.Time
	s.must(s.pool.QueryRow(s.t.Context(), `SELECT published_at FROM outbox WHERE status = 'PUBLISHED' ORDER BY id DESC LIMIT 1`).Scan(&last))
	if off := time.Until(last.Add(-ahead)).Abs(); off > time.Minute {
		s.t.Fatalf("the last row was published at %v: the clock is not %v ahead", last, ahead)
	}
}

// The database's clock and the broker's are ten minutes apart: BR-09.
func TestChaosDatabaseClockAwayFromTheBrokers(t *testing.T) {
	t.Parallel()
	for _, ahead := range []time.Duration{10 * time.Minute, -10 * time.Minute} {
		t.Run(fmt.Sprint(ahead), func(t *testing.T) {
			t.Parallel()
			s := newSeveralOn(t, skewed(t), 500*time.Millisecond, forgetful(ahead > 0))
			s.setClock(ahead)
			killed, _ := s.loseAcks(600, 7, 7)
			s.wantClock(ahead)
			s.end(killed, os.Kill)
			pause(t.Context(), forgotten())
			s.start(1)
			s.verifyOurs(0)
			s.looked()
		})
	}
}

// The database's clock is set while a row of unknown outcome waits: an old claim looks
// young, or was made in the future. The window is so long that a young claim would be
// left to the broker.
func TestChaosDatabaseClockIsSet(t *testing.T) {
	if *chaosFor == 0 {
		t.Skip("takes as long as such a window: make chaos")
	}
	t.Parallel()
	const window = 10 * time.Second
	for _, ahead := range []time.Duration{10 * time.Minute, -10 * time.Minute, -window} {
		t.Run(fmt.Sprint(ahead), func(t *testing.T) {
			t.Parallel()
			s := newSeveralOn(t, skewed(t), 500*time.Millisecond, jetstream.StreamConfig{Duplicates: window})
			killed, _ := s.loseAcks(600, 7, 7)
			s.end(killed, os.Kill)
			s.setClock(ahead)
			pause(t.Context(), window+time.Second)
			s.start(1)
			s.verifyOurs(0)
			s.wantClock(ahead)
			s.looked()
		})
	}
}

// Of two claims that cover a row the first one tells where to look for it, also when the
// clock has been set back between them.
func TestFirstClaimCountsWhateverTheClock(t *testing.T) {
	t.Parallel()
	s := newSeveralOn(t, skewed(t), time.Minute, oneByOne)
	ctx := t.Context()
	lease, err := s.store.Acquire(ctx, jetbox.Candidate{Owner: "a", Length: time.Minute})
	s.must(err)
	claim := func(seq uint64) map[string]jetbox.Row {
		t.Helper()
		rows, err := s.store.Claim(ctx, lease, jetbox.Ask{Limit: 10, Before: []jetbox.Position{{Stream: "EVENTS", Seq: seq}}})
		s.must(err)
		claimed := make(map[string]jetbox.Row)
		for _, r := range rows {
			claimed[r.Event.ID] = r
		}
		return claimed
	}
	// Of one key, so that one shard has them all.
	const insert = `INSERT INTO outbox (event_id, subject, aggregate_id, payload) VALUES ($1, 'events.a', 'k', '')`
	late, err := s.pool.Begin(ctx)
	s.must(err)
	defer func() { _ = late.Rollback(ctx) }()
	_, err = late.Exec(ctx, insert, "late")
	s.must(err)
	s.exec(insert, "row")
	claim(1)
	s.must(late.Commit(ctx))
	s.exec(insert, "more")
	s.setClock(-10 * time.Minute)
	if n := len(claim(2)); n != 3 {
		t.Fatalf("%d rows claimed, want the one of before, one that was visible too late and a new one", n)
	}
	if e := claim(3)["row"].Earlier; e == nil || e.Before[0].Seq != 1 {
		t.Errorf("the row's earlier claim is %+v, want the first one", e)
	}
}
