package relay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// sharedSource is a store that looks as if several relays shared it. It is safe for
// concurrent use. It calls the store without its lock: in a bubble, a goroutine that
// waits for a lock stops the clock.
type sharedSource struct {
	*faultySource

	// YieldFunc, when set, runs before Yield, with its error instead if there is
	// one. YieldedFunc runs when it is done, and says what
	// it returns.
	YieldFunc   func() error
	YieldedFunc func() error

	mu     sync.Mutex // guards what follows
	shards int        // of this relay
	excess int
	holder *jetbox.Lease // what Acquire says while another relay has all
	did    []string      // claim, yield, release; record when it was done
}

var _ relay.Yielder = (*sharedSource)(nil)

func newSharedSource(r *rig, shards int) *sharedSource {
	return &sharedSource{faultySource: &faultySource{Store: r.store}, shards: shards}
}

// want says how many of the shards another relay should have.
func (s *sharedSource) want(excess int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.excess = excess
}

// give gives this relay shards again.
func (s *sharedSource) give(shards int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holder, s.shards = nil, shards
}

// take gives everything to another relay.
func (s *sharedSource) take(by jetbox.Lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holder = &by
}

func (s *sharedSource) note(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.did = append(s.did, what)
}

// done returns what was done since it was asked last, equal things in a row once.
func (s *sharedSource) done() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	did := slices.Compact(s.did)
	s.did = nil
	return strings.Join(did, " ")
}

func (s *sharedSource) Acquire(ctx context.Context, c jetbox.Candidate) (jetbox.Lease, error) {
	s.hang()
	if s.RenewFunc != nil {
		s.RenewFunc()
	}
	if l, taken := s.taken(); taken {
		return l, nil
	}
	l, err := s.Store.Acquire(ctx, c)
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.Held {
		l.Shards, l.Excess = s.shards, s.excess
	}
	return l, err
}

func (s *sharedSource) taken() (by jetbox.Lease, taken bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holder == nil {
		return jetbox.Lease{}, false
	}
	return *s.holder, true
}

func (s *sharedSource) Yield(ctx context.Context, l jetbox.Lease) error {
	s.note("yield")
	if s.YieldFunc != nil {
		if err := s.YieldFunc(); err != nil {
			return err
		}
	}
	var err error
	if s.giveBack(l) {
		err = s.Store.Release(ctx, l)
	}
	if err == nil && s.YieldedFunc != nil {
		err = s.YieldedFunc()
	}
	return err
}

func (s *sharedSource) giveBack(l jetbox.Lease) (all bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shards -= s.excess
	s.excess = 0
	if s.shards > 0 {
		return false
	}
	s.holder = &jetbox.Lease{Owner: "other", Holder: "the other", Epoch: l.Epoch + 1}
	return true
}

func (s *sharedSource) Claim(ctx context.Context, l jetbox.Lease, ask jetbox.Ask) ([]jetbox.Row, error) {
	s.note("claim")
	return s.faultySource.Claim(ctx, l, ask)
}

func (s *sharedSource) Record(ctx context.Context, l jetbox.Lease, outcomes []jetbox.Outcome) error {
	err := s.faultySource.Record(ctx, l, outcomes)
	if err == nil {
		s.note("record")
	}
	return err
}

func (s *sharedSource) Release(ctx context.Context, l jetbox.Lease) error {
	s.note(fmt.Sprint("release ", l.Epoch))
	return s.faultySource.Release(ctx, l)
}

// fault is an error that can be healed. It is safe for concurrent use.
type fault struct{ now atomic.Pointer[error] }

func newFault(text string) *fault {
	f, err := new(fault), errors.New(text)
	f.now.Store(&err)
	return f
}

func (f *fault) err() error {
	if err := f.now.Load(); err != nil {
		return *err
	}
	return nil
}

func (f *fault) heal() { f.now.Store(nil) }

// logBook is what a relay has logged. It is safe for concurrent use.
type logBook struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

func (b *logBook) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBook) logger() *slog.Logger { return slog.New(slog.NewTextHandler(b, nil)) }

// lines returns the lines that contain a text.
func (b *logBook) lines(part string) (lines []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for line := range strings.Lines(b.text.String()) {
		if strings.Contains(line, part) {
			lines = append(lines, line)
		}
	}
	return lines
}

func (r *rig) wantRole(rel *relay.Relay, role relay.Role, shards int) {
	r.t.Helper()
	if h := rel.Health(); h.Role != role || h.Shards != shards || !h.Ready {
		r.t.Fatalf("health %+v, want %s with %d shards, and ready", h, role, shards)
	}
}

// What another relay should have is given back when what was sent is recorded, and
// before anything else is claimed.
func TestExcessIsGivenBackBetweenTwoBatches(t *testing.T) {
	inBubble(t, func(r *rig) {
		src := newSharedSource(r, 4)
		var atYield string
		src.YieldFunc = func() error {
			st, err := r.store.Stats(r.t.Context())
			atYield = fmt.Sprintf("%d stored, %d pending, %v", len(r.stored()), st.Pending, err)
			return nil
		}
		rel, stop := r.start(src, relay.Config{Lease: 3 * time.Second})
		time.Sleep(2 * time.Second)
		r.wantRole(rel, relay.RoleActive, 4)
		r.box.Hold(true)
		r.append(event("events.a", "", "1"), event("events.a", "", "2"))
		rel.Wake()
		time.Sleep(500 * time.Millisecond)
		src.done()
		src.want(3)
		time.Sleep(3 * time.Second) // it was told, and has two rows on the wire
		if did := src.done(); did != "" {
			r.t.Fatalf("with rows on the wire the relay did: %s", did)
		}
		r.append(event("events.a", "", "3"))
		r.box.Hold(false)
		time.Sleep(500 * time.Millisecond)
		if did, want := src.done(), "record yield claim record claim"; did != want {
			r.t.Fatalf("the relay did: %s; want: %s", did, want)
		}
		if want := "2 stored, 1 pending, <nil>"; atYield != want {
			r.t.Fatalf("at the yield: %s; want %s", atYield, want)
		}
		r.wantPayloads("1", "2", "3")
		r.wantRole(rel, relay.RoleActive, 1)
		time.Sleep(10 * time.Second)
		if did := src.done(); strings.Contains(did, "yield") || strings.Contains(did, "release") {
			r.t.Fatalf("without excess the relay did: %s", did)
		}
		r.wantRole(rel, relay.RoleActive, 1)
		stop()
		if h := rel.Health(); h.Shards != 0 {
			r.t.Fatalf("after the stop: %+v", h)
		}
	})
}

// A renewal tells it, and the other relay does not wait for the poll of this one.
func TestIdleRelayGivesBackBeforeItPolls(t *testing.T) {
	inBubble(t, func(r *rig) {
		src := newSharedSource(r, 2)
		rel, stop := r.start(src, relay.Config{Lease: 3 * time.Second, PollInterval: time.Hour})
		defer stop()
		time.Sleep(10500 * time.Millisecond)
		src.done()
		src.want(1)
		time.Sleep(1100 * time.Millisecond) // a renewal
		if did, want := src.done(), "yield claim"; did != want {
			r.t.Fatalf("an idle relay with a shard too many did %q, want %q", did, want)
		}
		r.wantRole(rel, relay.RoleActive, 1)
	})
}

// A database that cannot take shards back is waited for; nothing is claimed in
// between, or their rows would go out with those of the new holder.
func TestYieldIsTriedAgainBeforeAnythingIsClaimed(t *testing.T) {
	inBubble(t, func(r *rig) {
		src := newSharedSource(r, 2)
		broken := newFault("connection reset")
		src.YieldFunc = broken.err
		rel, stop := r.start(src, relay.Config{Lease: 3 * time.Second})
		defer stop()
		time.Sleep(2 * time.Second)
		src.want(1)
		time.Sleep(2 * time.Second)
		src.done()
		r.append(event("events.a", "", "1"))
		time.Sleep(20 * time.Second)
		r.wantHealth(rel, false, "database: give back shards: connection reset")
		if did, want := src.done(), "yield"; did != want {
			r.t.Fatalf("while it cannot give back the relay did: %s; want: %s", did, want)
		}
		broken.heal()
		time.Sleep(6 * time.Second) // the loop waits up to 4.5s
		r.wantRole(rel, relay.RoleActive, 1)
		r.wantPayloads("1")
	})
}

func TestYieldThatFindsTheLeaseLostEndsTheSession(t *testing.T) {
	inBubble(t, func(r *rig) {
		src, log := newSharedSource(r, 2), &logBook{}
		src.YieldFunc = func() error {
			src.take(jetbox.Lease{Owner: "other", Holder: "the other", Epoch: 9})
			return fmt.Errorf("give back: %w", jetbox.ErrLeaseLost)
		}
		rel, stop := r.start(src, relay.Config{Lease: 3 * time.Second, Logger: log.logger()})
		defer stop()
		src.want(1)
		time.Sleep(2 * time.Second)
		r.wantRole(rel, relay.RoleStandby, 0)
		if n := len(log.lines("lease lost")); n != 1 {
			r.t.Fatalf("%d lines of a lost lease, want 1", n)
		}
	})
}

// To have given everything back is no reason to worry anybody.
func TestRelayThatGaveEverythingBackStandsByQuietly(t *testing.T) {
	inBubble(t, func(r *rig) {
		src, log := newSharedSource(r, 2), &logBook{}
		rel, stop := r.start(src, relay.Config{Lease: 3 * time.Second, Logger: log.logger()})
		time.Sleep(2500 * time.Millisecond)
		src.done()
		src.want(2)
		time.Sleep(700 * time.Millisecond) // a renewal, and not yet the next Acquire
		r.wantRole(rel, relay.RoleStandby, 0)
		r.wantHealth(rel, true, "standing by for other relays")
		if did, want := src.done(), "yield"; !strings.HasSuffix(did, want) {
			r.t.Fatalf("the relay did: %s; want it to end with: %s", did, want)
		}
		time.Sleep(time.Minute)
		r.wantRole(rel, relay.RoleStandby, 0)
		r.wantHealth(rel, true, "standing by for the other")
		if did := src.done(); did != "" {
			r.t.Fatalf("with nothing in hand the relay did: %s", did)
		}
		if lines := log.lines("level=WARN"); len(lines) > 0 {
			r.t.Fatalf("it warns of what it did itself: %q", lines)
		}
		if lines := log.lines("shards given back"); len(lines) != 1 || !strings.Contains(lines[0], "count=2 left=0") {
			r.t.Fatalf("log of what was given back: %q", lines)
		}
		src.give(1)
		time.Sleep(time.Second)
		r.wantRole(rel, relay.RoleActive, 1)
		stop()
	})
}

// Relays that share a source do not wait for one that has stopped, also when it only
// stood by.
func TestStandbyTakesItsLeave(t *testing.T) {
	inBubble(t, func(r *rig) {
		src := newSharedSource(r, 1)
		rel, stop := r.start(src, relay.Config{Lease: 3 * time.Second})
		time.Sleep(time.Second)
		src.want(1)
		time.Sleep(2 * time.Second)
		r.wantRole(rel, relay.RoleStandby, 0)
		src.done()
		stop()
		if did, want := src.done(), "release 0"; did != want {
			r.t.Fatalf("at its end the standby did %q, want %q", did, want)
		}
		src.give(1)
		_, stop = r.start(src, relay.Config{})
		time.Sleep(time.Second)
		src.done()
		stop()
		did := strings.TrimPrefix(src.done(), "claim ") // it may have polled in the same instant
		if !strings.HasPrefix(did, "release ") || did == "release 0" || strings.Count(did, "release") != 1 {
			r.t.Fatalf("at its end the holder did %q, want it to release its lease once", did)
		}
	})
}

// A renewal that finds nothing left ends the session, with a warning when another
// relay has taken it.
func TestRenewalWithoutAShardSaysWhenAnotherTookThem(t *testing.T) {
	for _, tt := range []struct {
		name  string
		found jetbox.Lease
		warns int
	}{
		{"under the same epoch", jetbox.Lease{Owner: "me", Holder: "the other", Epoch: 1}, 0},
		{"taken by another", jetbox.Lease{Owner: "other", Holder: "the other", Epoch: 2}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				src, log := newSharedSource(r, 2), &logBook{}
				rel, stop := r.start(src, relay.Config{Lease: 3 * time.Second, Logger: log.logger()})
				defer stop()
				time.Sleep(500 * time.Millisecond)
				src.take(tt.found)
				time.Sleep(2 * time.Second)
				r.wantRole(rel, relay.RoleStandby, 0)
				if lines := log.lines("level=WARN"); len(lines) != tt.warns {
					r.t.Fatalf("warnings %q, want %d", lines, tt.warns)
				}
			})
		})
	}
}

// What a renewal finds while the loop gives back must not bring the excess back to
// life, nor be taken for a theft.
func TestRenewalBesideAYieldIsOld(t *testing.T) {
	for _, tt := range []struct {
		name          string
		shards        int
		before, after time.Duration // in the yield, until it is done and until it is known
		lost          error         // what becomes known of it
		answer        time.Duration // of the renewal
	}{
		{"asked before it is done and answered after", 2, 4 * time.Second, 0, nil, 3 * time.Second},
		{"finds all gone before that is known", 1, 0, 4 * time.Second, nil, 0},
		{"finds all gone, which never becomes known", 1, 0, 4 * time.Second, errors.New("connection reset"), 0},
		{"finds it not done, the next one finds all gone", 1, 5 * time.Second, 3 * time.Second, errors.New("connection reset"), 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				src, log := newSharedSource(r, tt.shards), &logBook{}
				src.YieldFunc = func() error { time.Sleep(tt.before); return nil }
				src.YieldedFunc = func() error { time.Sleep(tt.after); return tt.lost }
				slow := &lateAnswers{sharedSource: src}
				rel, stop := r.start(slow, relay.Config{Lease: 9 * time.Second, Logger: log.logger()})
				defer stop()
				time.Sleep(500 * time.Millisecond)
				src.want(1) // the renewal at 3s tells it, those at 6s and 9s are beside the yield
				time.Sleep(3 * time.Second)
				slow.set(tt.answer)
				time.Sleep(10 * time.Second)
				if n := strings.Count(src.done(), "yield"); n != 1 {
					r.t.Fatalf("%d yields, want 1", n)
				}
				role := relay.RoleActive
				if tt.shards == 1 {
					role = relay.RoleStandby
				}
				r.wantRole(rel, role, tt.shards-1)
				if lines := log.lines("level=WARN"); len(lines) > 0 {
					r.t.Fatalf("warnings: %q", lines)
				}
			})
		})
	}
}

// lateAnswers is a source whose answers about the lease take their time on the way
// back.
type lateAnswers struct {
	*sharedSource
	mu   sync.Mutex // guards wait
	wait time.Duration
}

func (s *lateAnswers) set(wait time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wait = wait
}

func (s *lateAnswers) Acquire(ctx context.Context, c jetbox.Candidate) (jetbox.Lease, error) {
	l, err := s.sharedSource.Acquire(ctx, c)
	s.mu.Lock()
	wait := s.wait
	s.mu.Unlock()
	time.Sleep(wait)
	return l, err
}

// Rows that cannot be recorded do not bind a relay to its shards when another should
// have all of them: that one finds them of unknown outcome, as after a crash.
func TestRelayThatCannotRecordGivesEverythingBack(t *testing.T) {
	inBubble(t, func(r *rig) {
		src := newSharedSource(r, 1)
		src.RecordFunc = func() error { return errors.New("no space left") }
		rel, stop := r.start(src, relay.Config{Lease: 3 * time.Second})
		defer stop()
		r.append(event("events.a", "k", "1"), event("events.a", "k", "2"))
		rel.Wake()
		time.Sleep(20 * time.Second)
		r.wantHealth(rel, false, "record: cannot record outcomes")
		if did := src.done(); strings.Contains(did, "yield") {
			r.t.Fatalf("with nobody else there the relay did: %s", did)
		}
		src.want(1)
		time.Sleep(5 * time.Second)
		r.wantRole(rel, relay.RoleStandby, 0)
		other := r.open()
		defer other.Close()
		_, stopOther := r.start(other, relay.Config{Lease: 3 * time.Second})
		time.Sleep(2 * time.Second)
		stopOther()
		r.wantPayloads("1", "2")
		r.wantState(2, jetbox.Published, "")
	})
}

// The other relay went away before the shards were given back: what the broker has
// is still recorded, and not sent again.
func TestOutcomesSurviveAYieldThatIsCalledOff(t *testing.T) {
	for name, end := range map[string]func(src *sharedSource, stop func()){
		"kept":    func(src *sharedSource, _ func()) { src.want(0) },
		"stopped": func(_ *sharedSource, stop func()) { stop() },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				src := newSharedSource(r, 1)
				full, broken := newFault("no space left"), newFault("read-only")
				src.RecordFunc, src.YieldFunc = full.err, broken.err
				published := 0
				rel, stop := r.start(src, relay.Config{Lease: 3 * time.Second, Hooks: relay.Hooks{
					PublishedFunc: func(time.Duration, time.Duration, bool) { published++ },
				}})
				r.append(event("events.a", "k", "1"), event("events.a", "k", "2"))
				rel.Wake()
				time.Sleep(4 * time.Second)
				src.want(1)
				time.Sleep(10 * time.Second)
				if did := src.done(); !strings.HasSuffix(did, "yield") {
					r.t.Fatalf("the relay did: %s; want it to give back", did)
				}
				full.heal()
				end(src, stop)
				time.Sleep(6 * time.Second)
				r.wantState(2, jetbox.Published, "")
				if published != 2 {
					r.t.Fatalf("%d PubAcks for 2 rows", published)
				}
				stop()
			})
		})
	}
}
