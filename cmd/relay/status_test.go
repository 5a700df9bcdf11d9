package main

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/outbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
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

// The engine of each stream is the one that the relay, another process, has logged.
func TestStatusShowsTheEngineOfEachStream(t *testing.T) {
	t.Parallel()
	r := startRun(t)
	js := connectJS(t, r.nats)
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "PLAIN", Subjects: []string{"plain.>"}}); err != nil {
		t.Fatal(err)
	}
	for _, subject := range []string{"events.a", "plain.a"} {
		r.sql(t, `INSERT INTO outbox (subject, payload) VALUES (?, 'x')`, subject)
	}
	type choice struct{ Stream, Engine, Reason string }
	logged := func(stream string) (c choice) {
		line := r.stderr.line(t, "publishing engine chosen", `"stream":"`+stream+`"`)
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	want := []choice{logged("EVENTS"), logged("PLAIN")}
	if want[0] != (choice{"EVENTS", relay.EngineFast, ""}) || want[1].Engine != relay.EnginePubAck || want[1].Reason == "" {
		t.Fatalf("the relay has chosen %+v", want)
	}
	eventually(t, "both engines shown", func() (bool, string) {
		out := once(t, r.dir, "status", "--json", "--nats", r.nats)
		var got struct{ Streams []choice }
		err := json.Unmarshal([]byte(out), &got)
		return err == nil && slices.Equal(got.Streams, want), out
	})
	out := once(t, r.dir, "status", "--nats", r.nats)
	for _, c := range want {
		line := "stream        " + c.Stream + ", " + c.Engine
		if c.Reason != "" {
			line += " (" + c.Reason + ")"
		}
		if !strings.Contains(out, line+"\n") {
			t.Errorf("status shows\n%swant the line\n%s", out, line)
		}
	}
	out = once(t, r.dir, "status", "--nats", r.nats, "--stream", "NOWHERE")
	if !strings.Contains(out, "stream        NOWHERE, unknown engine (nats: API error: code=404 err_code=10059 description=stream not found)\n") {
		t.Errorf("status of a stream that is missing shows\n%s", out)
	}
	out = once(t, r.dir, "status", "--nats", "nats://127.0.0.1:1")
	if !strings.Contains(out, "stream        EVENTS, unknown engine\n") {
		t.Errorf("status without a broker shows\n%s", out)
	}
}
