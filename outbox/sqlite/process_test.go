package sqlite_test

import (
	"bufio"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

const killedLease = 300 * time.Millisecond

// Catalog BR-08: a relay that dies with rows in hand holds them for its lease
// and no longer, and nobody has to edit the table.
func TestRelayKilledBetweenClaimAndRecordIsFollowedByTheNext(t *testing.T) {
	t.Parallel()
	s, path := migrated(t)
	mustExec(t, s.DB(), `INSERT INTO outbox (subject, payload, aggregate_id) VALUES ('s', '1', 'k'), ('s', '2', 'k'), ('s', '3', NULL)`)

	child := childProcess(t, "claim and hang", path)
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err := child.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = child.Wait() // it was killed
	killed := time.Now()
	if err != nil || line != "claimed 3\n" {
		t.Fatalf("child said %q, %v, want that it claimed 3", line, err)
	}

	if got := queryString(t, s.DB(), `SELECT group_concat(status) FROM outbox_status`); got != "PROCESSING,PROCESSING,PROCESSING" {
		t.Errorf("states after the kill = %s, want all PROCESSING: their outcome is unknown", got)
	}
	var l jetbox.Lease
	for !l.Held {
		if l, err = s.Acquire(t.Context(), jetbox.Candidate{Owner: "next", Length: time.Minute}); err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(killed); waited > 20*killedLease {
			t.Fatalf("no lease %v after the kill: %+v", waited, l)
		}
		time.Sleep(5 * time.Millisecond)
	}
	rows, err := s.Claim(t.Context(), l, jetbox.Ask{Limit: 10})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range rows {
		got = append(got, fmt.Sprintf("%s/%d", r.Event.Payload, r.Attempts))
	}
	if want := []string{"1/0", "2/0", "3/0"}; !slices.Equal(got, want) {
		t.Errorf("the next relay claimed %v, want %v", got, want)
	}
	if got := queryString(t, s.DB(), `PRAGMA integrity_check`); got != "ok" {
		t.Errorf("integrity_check = %s", got)
	}
}

// Catalog BR-25: the zone of a process is in none of the times it stores.
func TestStoredTimesAreIntegersInEveryTimeZone(t *testing.T) {
	t.Parallel()
	path := t.TempDir() + "/outbox.db"
	before := time.Now().UnixMilli()
	for _, tz := range []string{"Asia/Kathmandu", "America/St_Johns", "UTC", ""} {
		if out, err := childProcess(t, "work a while", path, "TZ="+tz).CombinedOutput(); err != nil {
			t.Fatalf("TZ=%s: %v\n%s", tz, err, out)
		}
	}
	after := time.Now().UnixMilli()

	s := open(t, path)
	defer s.Close()
	for _, c := range []struct {
		table, column  string
		want, slack, n int64 // want is relative to now; n is the fewest values
	}{
		{"outbox", "created_at", 0, 0, 16},
		{"outbox", "published_at", 0, 0, 8},
		{"outbox", "available_at", 0, 3600_001, 16},
		{"outbox_dead_letter", "dead_at", 0, 0, 4},
		{"outbox_dead_letter", "created_at", 0, 0, 4},
		{"outbox_archive", "archived_at", 0, 0, 4},
		{"outbox_archive", "published_at", 0, 0, 4},
		{"outbox_schema", "applied_at", 0, 0, 2},
		{"outbox_claim", "claimed_at", 0, 0, 0},
	} {
		var n, bad int64
		q := fmt.Sprintf(`SELECT count(%[2]s), count(%[2]s) FILTER (WHERE typeof(%[2]s) <> 'integer' OR %[2]s NOT BETWEEN ? AND ?) FROM %[1]s`,
			c.table, c.column)
		if err := s.DB().QueryRowContext(t.Context(), q, before-c.slack, after+c.slack).Scan(&n, &bad); err != nil {
			t.Fatal(err)
		}
		if n < c.n || bad > 0 {
			t.Errorf("%s.%s: %d of %d values are not Unix milliseconds of this test, want none of at least %d", c.table, c.column, bad, n, c.n)
		}
	}
	if got := queryString(t, s.DB(), `SELECT group_concat(DISTINCT typeof(expires_at)) FROM outbox_lease`); got != "integer" {
		t.Errorf("expires_at is %s, want an integer", got)
	}
	// The rows that failed in one zone came due in the next.
	if n := queryString(t, s.DB(), `SELECT count(*) FROM outbox WHERE attempts = 1 AND status = 'PUBLISHED'`); n == "0" {
		t.Error("no row was tried again by a process in another zone")
	}
}
