package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// Each relay that shares the outbox has its line, also one that holds nothing. Rows
// have a relay as soon as one of them holds something.
func TestStatusNamesEveryRelay(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	lease := func(holder string, epoch int64, shards int) jetbox.Lease {
		return jetbox.Lease{Owner: "o" + holder, Holder: holder, Epoch: epoch, Shards: shards, Expires: now.Add(time.Second)}
	}
	for _, tt := range []struct {
		name        string
		stats       outbox.Stats
		want        []string
		wantProblem bool
	}{
		{
			"several",
			outbox.Stats{Pending: 1, Shards: 16, Leases: []jetbox.Lease{lease("a pid 1", 7, 15), lease("b pid 2", 8, 1), lease("c pid 3", 9, 0)}},
			[]string{
				"relay         a pid 1, epoch 7, 15 of 16 shards, until 2026-07-01T12:00:01Z",
				"relay         b pid 2, epoch 8, 1 of 16 shards, until 2026-07-01T12:00:01Z",
				"relay         c pid 3, epoch 9, 0 of 16 shards, until 2026-07-01T12:00:01Z",
			},
			false,
		},
		{
			"one of one",
			outbox.Stats{Pending: 1, Shards: 1, Leases: []jetbox.Lease{lease("a", 7, 1)}},
			[]string{"relay         a, epoch 7, 1 of 1 shard, until 2026-07-01T12:00:01Z"},
			false,
		},
		{
			"only standbys",
			outbox.Stats{Pending: 2, Shards: 4, Leases: []jetbox.Lease{lease("a", 7, 0)}},
			[]string{
				"relay         a, epoch 7, 0 of 4 shards, until 2026-07-01T12:00:01Z",
				"problem       2 rows pending and no relay holds the lease",
			},
			true,
		},
		{
			"none",
			outbox.Stats{Pending: 1, Shards: 1},
			[]string{"relay         none", "problem       1 row pending and no relay holds the lease"},
			true,
		},
	} {
		r := newStatus("outbox", tt.stats, now)
		var out bytes.Buffer
		if err := showStatus(&app{stdout: &out}, r); err != nil {
			t.Fatal(err)
		}
		_, got, _ := strings.Cut(out.String(), "dead letters  unknown\n")
		if want := strings.Join(tt.want, "\n") + "\n"; got != want {
			t.Errorf("%s: status shows\n%swant\n%s", tt.name, got, want)
		}
		if len(r.Problems) > 0 != tt.wantProblem {
			t.Errorf("%s: problems %q, want some: %v", tt.name, r.Problems, tt.wantProblem)
		}
		if len(r.Leases) != len(tt.stats.Leases) || r.Shards != tt.stats.Shards {
			t.Errorf("%s: JSON has %+v of %d shards, want %d leases of %d", tt.name, r.Leases, r.Shards, len(tt.stats.Leases), tt.stats.Shards)
		}
	}
}
