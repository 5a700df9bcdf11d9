package relay

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// anchored publishes a message to hold on to, and two behind it.
func (r *lookRig) anchored() jetbox.Anchor {
	r.t.Helper()
	r.others(5)
	a := jetbox.Anchor{Stream: "S", Created: r.now().Created, Seq: r.publish("a", "key-a"), MsgID: "key-a"}
	r.others(2)
	return a
}

func (r *lookRig) wantAnchor(a jetbox.Anchor, want verdict) {
	r.t.Helper()
	got, _, err := checkAnchor(r.t.Context(), r.js, a)
	r.must(err)
	if got != want {
		r.t.Fatalf("anchor is %s, want %s", got, want)
	}
}

// What a person, a limit or a consumer removed is not lost, however little is left.
func TestRemovedAnchorIsNotLost(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg    func(*jetstream.StreamConfig)
		change func(r *lookRig, a jetbox.Anchor)
		want   verdict
	}{
		"nothing happened": {want: anchorIntact},
		"purged": {
			change: func(r *lookRig, _ jetbox.Anchor) { r.must(r.stream().Purge(r.t.Context())) }, want: anchorRemoved,
		},
		"purged up to it": {change: func(r *lookRig, a jetbox.Anchor) {
			r.must(r.stream().Purge(r.t.Context(), jetstream.WithPurgeSequence(a.Seq)))
		}, want: anchorIntact},
		"purged by subject": {change: func(r *lookRig, _ jetbox.Anchor) {
			r.must(r.stream().Purge(r.t.Context(), jetstream.WithPurgeSubject("s.a")))
		}, want: anchorRemoved},
		"deleted": {change: func(r *lookRig, a jetbox.Anchor) {
			r.must(r.stream().DeleteMsg(r.t.Context(), a.Seq))
		}, want: anchorRemoved},
		"the last ones deleted": {change: func(r *lookRig, a jetbox.Anchor) {
			for seq := a.Seq; seq <= r.now().Seq; seq++ {
				r.must(r.stream().SecureDeleteMsg(r.t.Context(), seq))
			}
		}, want: anchorRemoved},
		"aged": {
			cfg:    func(c *jetstream.StreamConfig) { c.MaxAge = time.Hour },
			change: func(*lookRig, jetbox.Anchor) { time.Sleep(2 * time.Hour) }, want: anchorRemoved,
		},
		"above a limit": {
			cfg: func(c *jetstream.StreamConfig) { c.MaxMsgs = 1 }, want: anchorRemoved,
		},
		"handled": {
			cfg: func(c *jetstream.StreamConfig) { c.Retention = jetstream.WorkQueuePolicy },
			change: func(r *lookRig, _ jetbox.Anchor) {
				c, err := r.stream().CreateConsumer(r.t.Context(), jetstream.ConsumerConfig{Durable: "worker"})
				r.must(err)
				for range 8 {
					m, err := c.Next()
					r.must(err)
					r.must(m.DoubleAck(r.t.Context()))
				}
			}, want: anchorRemoved,
		},
		"nobody was interested": {
			cfg: func(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy }, want: anchorRemoved,
		},
		"created anew": {change: func(r *lookRig, _ jetbox.Anchor) {
			r.must(r.admin.DeleteStream(r.t.Context(), "S"))
			time.Sleep(time.Second)
			r.create(lookStream())
		}, want: anchorRecreated},
		"missing": {change: func(r *lookRig, _ jetbox.Anchor) {
			r.must(r.admin.DeleteStream(r.t.Context(), "S"))
		}, want: anchorMissing},
	} {
		t.Run(name, func(t *testing.T) {
			withLook(t, func(t *testing.T, r *lookRig) {
				a := r.anchored()
				if tt.change != nil {
					tt.change(r, a)
				}
				r.wantAnchor(a, tt.want)
				if tt.want == anchorMissing || tt.want == anchorRecreated {
					return
				}
				// What a server knows of its sequences it knows after a restart too.
				r.must(r.srv.Close())
				r.must(r.srv.Restart(t.Context()))
				time.Sleep(5 * time.Second)
				r.wantAnchor(a, tt.want)
			}, lookStream(func(c *jetstream.StreamConfig) {
				if tt.cfg != nil {
					tt.cfg(c)
				}
			}))
		})
	}
}

// A store brought back from an older copy is a broker that lost what it had
// acknowledged: before others have used the sequences again, and after.
func TestAnchorIsLostWithAnOlderCopyOfTheStore(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		r.others(5)
		r.must(r.srv.Close())
		backup := t.TempDir()
		r.must(os.CopyFS(backup, os.DirFS(r.srv.Dir())))
		r.must(r.srv.Restart(t.Context()))
		time.Sleep(5 * time.Second)
		a := jetbox.Anchor{Stream: "S", Created: r.now().Created, Seq: r.publish("a", "key-a"), MsgID: "key-a"}
		r.wantAnchor(a, anchorIntact)

		r.must(r.srv.Close())
		const store = "jetstream"
		r.must(os.RemoveAll(filepath.Join(r.srv.Dir(), store)))
		r.must(os.CopyFS(filepath.Join(r.srv.Dir(), store), os.DirFS(filepath.Join(backup, store))))
		r.must(r.srv.Restart(t.Context()))
		time.Sleep(5 * time.Second)
		if got := r.now(); got.Seq != 5 || !got.Created.Equal(a.Created) {
			t.Fatalf("the copy has %+v, want 5 messages of the same stream", got)
		}
		start := time.Now()
		r.wantAnchor(a, anchorLost)
		if time.Since(start) < anchorPause {
			t.Fatal("said after one look")
		}
		r.others(1)
		r.wantAnchor(a, anchorLost)
		r.others(10)
		r.wantAnchor(a, anchorLost)
		// Published again it has another sequence, which is the next anchor.
		a.Seq = r.publish("a", "key-a")
		r.wantAnchor(a, anchorIntact)
	}, lookStream())
}

// Bad news that is not there any more at the second look was none.
func TestAnchorMissedOnceIsNotLost(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		r.others(5)
		a := jetbox.Anchor{Stream: "S", Created: r.now().Created, Seq: 6, MsgID: "key-a"}
		time.AfterFunc(anchorPause/2, func() {
			_, _ = r.admin.PublishMsg(context.Background(), eventMsg("s.a", "a", "key-a"))
		})
		r.wantAnchor(a, anchorIntact)
	}, lookStream())
}

// Without an answer nothing is said.
func TestAnchorIsNotLostWhileTheBrokerIsAway(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		a := r.anchored()
		r.box.Cut(true)
		if v, _, err := checkAnchor(t.Context(), r.js, a); err == nil || classify(err) != classOutage {
			t.Fatalf("checkAnchor() = %s, %v, want an outage", v, err)
		}
	}, lookStream())
}

// Sequences of batches that do not grow make the stream suspect, and nothing else
// does.
func TestSequencesThatDoNotGrowAreSuspect(t *testing.T) {
	t.Parallel()
	born := time.Unix(1, 1)
	for _, tt := range []struct {
		name         string
		created      time.Time
		lowest, last uint64
		want         bool
	}{
		{"they go on", born, 11, 20, true},
		{"others publish too", born, 15, 20, true},
		{"there are duplicates beside new ones", born, 0, 20, true},
		{"all of them are used again", born, 3, 9, false},
		{"they end where they did", born, 1, 10, false},
		{"some are used again", born, 9, 200, false},
		{"only duplicates", born, 0, 10, false},
		{"the stream is another one", born.Add(1), 11, 20, false},
	} {
		w := new(watch)
		if !w.acked("S", born, 1, 10) {
			t.Error("the first batch is suspect")
		}
		if got := w.acked("S", tt.created, tt.lowest, tt.last); got != tt.want || w.suspicious != !tt.want {
			t.Errorf("%s: acked = %v, suspicious = %v, want %v, %v", tt.name, got, w.suspicious, tt.want, !tt.want)
		}
		if want := map[bool]uint64{true: tt.last, false: 10}[tt.want]; w.of("S").seq != want {
			t.Errorf("%s: highest = %d, want %d", tt.name, w.of("S").seq, want)
		}
	}
}

// listed is a source of published rows, of which it shows few at a time.
type listed struct {
	Recaller
	rows []jetbox.PublishedRow // by id
}

func (l listed) Recallable(_ context.Context, _ string, _ jetbox.Recall, after int64) (rows []jetbox.PublishedRow, upTo int64, err error) {
	const page = 7
	i, _ := slices.BinarySearchFunc(l.rows, after, func(r jetbox.PublishedRow, after int64) int {
		if r.Pos <= after {
			return -1
		}
		return 1
	})
	rows = l.rows[i:min(i+page, len(l.rows))]
	if len(rows) < page {
		return rows, math.MaxInt64, nil
	}
	return rows, rows[page-1].Pos, nil
}

// However the rows lie, none is taken for kept that is not, and without disorder the
// last one that is kept is found.
func TestLastSurvivorIsFoundAmongPublishedRows(t *testing.T) {
	const kept, last = 40, 60 // messages that the stream has kept, and its last
	withLook(t, func(t *testing.T, r *lookRig) {
		name := func(seq uint64) string { return fmt.Sprint("e", seq) }
		for seq := uint64(1); seq <= kept; seq++ {
			r.publish(name(seq), name(seq))
		}
		r.others(last - kept - 1)
		r.publish("new", "new")
		seed := rand.Uint64()
		rng := rand.New(rand.NewPCG(seed, 1))
		before := time.Now().Add(-time.Minute)
		for trial := range 60 {
			want := uint64(0)
			var rows []jetbox.PublishedRow
			pos := int64(rng.IntN(100)) - 50
			for seq := uint64(1); seq <= 90; seq++ {
				if pos += 1 + rng.Int64N(int64(1)<<rng.IntN(14)); rng.IntN(3) == 0 {
					continue // somebody else's
				}
				rows = append(rows, jetbox.PublishedRow{Pos: pos, ID: name(seq), MsgID: name(seq), Seq: seq, At: before})
				if seq <= kept {
					want = seq
				}
			}
			disorder := trial%3 == 2
			if disorder {
				for range 10 {
					i, j := rng.IntN(len(rows)), rng.IntN(len(rows))
					rows[i].Seq, rows[j].Seq = rows[j].Seq, rows[i].Seq
					rows[i].ID, rows[j].ID, rows[i].MsgID, rows[j].MsgID = rows[j].ID, rows[i].ID, rows[j].MsgID, rows[i].MsgID
				}
			}
			// One that was published since, by who had not noticed yet.
			anchor := rows[len(rows)-1]
			rows = append(rows, jetbox.PublishedRow{Pos: pos + 1, ID: "new", MsgID: "new", Seq: last, At: time.Now()})
			f := &survivors{
				ctx: t.Context(), js: r.js, src: listed{rows: rows}, latest: before,
				last: jetbox.Anchor{Stream: "S", Seq: anchor.Seq, MsgID: anchor.MsgID, Pos: anchor.Pos},
			}
			r.must(f.find())
			if got := f.after(); got > kept || !disorder && got != want {
				t.Errorf("seed %d, trial %d: rows up to %d are kept, want %d (disorder: %v)", seed, trial, got, want, disorder)
			}
		}
	}, lookStream())
}

// A batch whose sequences do not grow is not remembered: what is remembered has to
// tell the next relay, too, what the stream should have.
func TestSuspectBatchIsNotRemembered(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		s := &session{Relay: &Relay{streams: newStreams(r.js, "S")}, ctx: t.Context()}
		born := s.born([]outbound{{message: message{stream: "S"}}, {message: message{stream: "S"}}})
		if !born["S"].Equal(r.now().Created) {
			t.Fatalf("born = %v, want %v", born, r.now().Created)
		}
		batch := func(first, last uint64) []jetbox.Outcome {
			var out []jetbox.Outcome
			for seq := first; seq <= last; seq++ {
				out = append(out, jetbox.Outcome{State: jetbox.Published, Stream: "S", StreamSeq: seq})
			}
			return append(out, jetbox.Outcome{State: jetbox.DeadLetter})
		}
		remembered := func(outcomes []jetbox.Outcome) (n int) {
			for _, o := range outcomes {
				if !o.Created.IsZero() {
					n++
				}
			}
			return n
		}
		s.watch.begin(r.js.Conn())
		good, bad, after := batch(1, 10), batch(5, 30), batch(11, 12)
		s.remember(good, false, born)
		s.remember(bad, false, born)
		s.remember(after, false, born)
		if remembered(good) != 10 || remembered(bad) != 0 || remembered(after) != 0 || !s.watch.suspicious {
			t.Errorf("remembered %d, %d, %d rows, suspicious: %v, want 10, none, none before it is looked at, and suspicion",
				remembered(good), remembered(bad), remembered(after), s.watch.suspicious)
		}
		s.watch.begin(r.js.Conn())
		older := batch(13, 14)
		s.remember(older, false, map[string]time.Time{"S": born["S"].Add(-1)}) // sent before the stream was created anew
		if remembered(older) != 0 {
			t.Error("acknowledgements of an older stream are remembered as this one's")
		}
	}, lookStream())
}

// A stream in doubt is asked within seconds; one that cannot be asked is asked ever more
// seldom, after those that can.
func TestStreamInDoubtIsAskedSoon(t *testing.T) {
	withLook(t, func(t *testing.T, r *lookRig) {
		nc := r.js.Conn()
		w := new(watch)
		// next is when the streams are asked next.
		next := func() (after time.Duration) {
			for since := time.Now(); !w.suspected(nc); time.Sleep(time.Second) {
				after = time.Since(since) + time.Second
			}
			w.begin(nc)
			return after.Truncate(time.Second)
		}
		next()
		w.expect([]string{"X", "Y"})
		w.verified("X", time.Unix(1, 1), 7)
		w.end(true)
		if w.doubt("X"); w.believed(nc, "X") || w.believed(nc, "Y") || !w.believed(nc, "Z") {
			t.Error("believed are others than the stream that is not in doubt")
		}
		for i, want := range []time.Duration{6, 11, 21, 41, 61, 61} {
			if got := next(); got != want*time.Second {
				t.Errorf("check %d comes after %v, want %v", i, got, want*time.Second)
			}
			want := []string{"X", "Y"}
			if i > 0 {
				want = []string{"Y", "X"}
			}
			if got := w.expect([]string{"X", "Y"}); !slices.Equal(got, want) {
				t.Errorf("streams are asked as %v, want %v", got, want)
			}
			w.failed("X")
			w.end(false)
		}
		w.verified("X", time.Unix(1, 1), 7)
		w.end(true)
		if !w.believed(nc, "X") {
			t.Error("a stream that has what it should is not believed")
		}
		if got := next(); got != 61*time.Second {
			t.Errorf("the check after a complete one comes after %v", got)
		}
	})
}
