package dlq

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// Of two operators one succeeds, the other is told, and there is one message.
func TestTwoOperatorsAtOneLetterReplayItOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for round := range 20 {
			id := w.park(w.event("billing", "events.a", "", []byte("x"))).ID
			results := make([]error, 4)
			var wg sync.WaitGroup
			for i := range results {
				s := w.newLetters(w.connect(), Config{})
				wg.Go(func() { _, results[i] = s.Replay(t.Context(), id) })
			}
			wg.Wait()
			won := 0
			for _, err := range results {
				if err == nil {
					won++
				} else if !errors.Is(err, jetbox.ErrLetterGone) {
					t.Errorf("round %d: err = %v, want %v", round, err, jetbox.ErrLetterGone)
				}
			}
			w.wantState(id, StateReplayed)
			if got := len(w.replayed()); won != 1 || got != round+1 {
				t.Fatalf("round %d: %d operators succeeded and %d messages were replayed, want 1 and %d", round, won, got, round+1)
			}
		}
	})
}

// The same, step by step: two operators who start the same replay write equal
// messages, and the second must not take the first one's for its own.
func TestEqualWriteOfAnotherOperatorIsAConflict(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		l := w.park(w.event("billing", "events.a", "k1", []byte("x")))
		l.State, l.Replays, l.replayFrom = StateReplaying, 1, 1
		if _, err := w.letters.put(t.Context(), l, l.Seq); err != nil {
			t.Fatal(err)
		}
		if _, err := w.letters.put(t.Context(), l, l.Seq); !errors.Is(err, jetbox.ErrLetterGone) {
			t.Errorf("second put: err = %v, want %v", err, jetbox.ErrLetterGone)
		}
	})
}

func TestTwoOperatorsTakingOverOneReplayFinishItOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for round := range 20 {
			id := w.park(w.event("billing", "events.a", "", []byte("x"))).ID
			dying := w.newLetters(w.js, Config{})
			dying.testOnlyCrash = func(string) error { return errKilled }
			if _, err := dying.Replay(t.Context(), id); !errors.Is(err, errKilled) {
				t.Fatalf("Replay = %v, want it killed", err)
			}
			results := make([]error, 3)
			var wg sync.WaitGroup
			for i := range results {
				s := w.newLetters(w.connect(), Config{})
				wg.Go(func() { _, results[i] = s.Replay(t.Context(), id) })
			}
			wg.Wait()
			won := 0
			for _, err := range results {
				if err == nil {
					won++
				} else if !errors.Is(err, jetbox.ErrLetterGone) {
					t.Errorf("round %d: err = %v, want %v", round, err, jetbox.ErrLetterGone)
				}
			}
			w.wantState(id, StateReplayed)
			if got := len(w.replayed()); won != 1 || got != round+1 {
				t.Fatalf("round %d: %d operators succeeded and %d messages were replayed, want 1 and %d", round, won, got, round+1)
			}
		}
	})
}

var errKilled = errors.New("killed by the test")

// The crash points of a replay, each resumed at once and beyond the duplicate
// window: one message, and the letter is closed.
func TestReplayKilledAtAnyStepIsResumedWithoutASecondMessage(t *testing.T) {
	retentions := []jetstream.RetentionPolicy{jetstream.LimitsPolicy, jetstream.WorkQueuePolicy}
	for _, retention := range retentions {
		for _, step := range []string{"replaying stored", "replay published"} {
			for _, pause := range []time.Duration{0, time.Hour} {
				t.Run(fmt.Sprintf("%v, %s, resumed after %v", retention, step, pause), func(t *testing.T) {
					inBubble(t, func(t *testing.T, w *world) {
						id := w.park(w.event("billing", "events.a", "k1", []byte("x"))).ID
						w.event("billing", "events.b", "k2", []byte("other"))
						dying := w.newLetters(w.js, Config{})
						dying.testOnlyCrash = func(at string) error {
							if at == step {
								return errKilled
							}
							return nil
						}
						if _, err := dying.Replay(t.Context(), id); !errors.Is(err, errKilled) {
							t.Fatalf("Replay = %v, want it killed", err)
						}
						w.wantState(id, StateReplaying)
						w.wantSeqs(Filter{})
						w.wantSeqs(Filter{Interrupted: true}, 1)
						if _, err := w.letters.Discard(t.Context(), id); !errors.Is(err, jetbox.ErrLetterGone) {
							t.Errorf("Discard: err = %v, want %v", err, jetbox.ErrLetterGone)
						}
						time.Sleep(pause)
						w.event("billing", "events.a", "k3", []byte("later"))
						l := w.replay(id)
						got := w.replayed()
						if len(got) != 1 || l.State != StateReplayed || l.Replays != 1 || l.ReplaySeq != got[0].Sequence {
							t.Errorf("resumed: letter %+v, %d messages; want it replayed once", l, len(got))
						}
					})
				})
			}
		}
	}
}

// The first operator's process stops between two steps, say with its laptop's
// lid, and goes on after the second has finished.
func TestReplayOvertakenWhilePausedPublishesNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		id := w.park(w.event("billing", "events.a", "k1", []byte("x"))).ID
		paused := w.newLetters(w.js, Config{})
		paused.testOnlyCrash = func(at string) error {
			if at == "replaying stored" {
				time.Sleep(time.Hour)
			}
			return nil
		}
		done := make(chan error)
		go func() {
			_, err := paused.Replay(t.Context(), id)
			done <- err
		}()
		time.Sleep(time.Minute)
		w.replay(id)
		if err := <-done; err == nil {
			t.Error("the paused operator reports success, want an error")
		}
		w.wantState(id, StateReplayed)
		if n := len(w.replayed()); n != 1 {
			t.Errorf("replays on the stream = %d, want 1", n)
		}
	})
}

// Looking can take longer than the duplicate window; what another operator has
// published meanwhile is then found by looking again.
func TestReplayTakenOverLooksAgainAfterALongLook(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		id := w.park(w.event("billing", "events.a", "k1", []byte("x"))).ID
		dying := w.newLetters(w.js, Config{})
		dying.testOnlyCrash = func(string) error { return errKilled }
		if _, err := dying.Replay(t.Context(), id); !errors.Is(err, errKilled) {
			t.Fatalf("Replay = %v, want it killed", err)
		}
		s := w.newLetters(w.js, Config{})
		looks := 0
		s.testOnlyCrash = func(at string) error {
			if at != "replay looked for" {
				return nil
			}
			if looks++; looks == 1 {
				if _, err := w.js.PublishMsg(t.Context(), replayMessage(w.show(id))); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Hour)
			}
			return nil
		}
		if l, err := s.Replay(t.Context(), id); err != nil || l.ReplaySeq != 2 {
			t.Errorf("Replay = %d, %v, want the other's message 2", l.ReplaySeq, err)
		}
		if n := len(w.replayed()); n != 1 {
			t.Errorf("replays on the stream = %d, want 1", n)
		}
	})
}

// A replay that was begun and can never be finished must not keep its letter from
// being discarded.
func TestReplayThatCannotBeFinishedOpensTheLetterAgain(t *testing.T) {
	for name, spoil := range map[string]func(w *world) error{
		"the stream is gone": func(w *world) error { return w.js.DeleteStream(w.t.Context(), "EVENTS") },
		"the stream takes less": func(w *world) error {
			cfg := w.events.CachedInfo().Config
			cfg.MaxMsgSize = 10
			_, err := w.js.UpdateStream(w.t.Context(), cfg)
			return err
		},
	} {
		for step, want := range map[string]State{"replaying stored": StateOpen, "replay published": StateReplayed} {
			t.Run(name+", killed after "+step, func(t *testing.T) {
				inBubble(t, func(t *testing.T, w *world) {
					id := w.park(w.event("billing", "events.a", "k1", []byte("x"))).ID
					dying := w.newLetters(w.js, Config{})
					dying.testOnlyCrash = func(at string) error {
						if at == step {
							return errKilled
						}
						return nil
					}
					if _, err := dying.Replay(t.Context(), id); !errors.Is(err, errKilled) {
						t.Fatalf("Replay = %v, want it killed", err)
					}
					if err := spoil(w); err != nil {
						t.Fatal(err)
					}
					if name == "the stream is gone" {
						want = StateOpen // and the message with it
					}
					_, err := w.letters.Replay(t.Context(), id)
					if (err == nil) != (want == StateReplayed) {
						t.Errorf("Replay: err = %v, want the letter %s", err, want)
					}
					w.wantState(id, want)
					if _, err := w.letters.Discard(t.Context(), id); (err == nil) != (want == StateOpen) {
						t.Errorf("Discard of what is %s: err = %v", want, err)
					}
				})
			})
		}
	}
}

// The first attempt is stored and its answer lost, the second refused: what the
// stream said last is no proof that it has no message.
func TestReplayOfUnknownOutcomeIsNotTakenForRefused(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		id := w.park(w.event("billing", "events.a", "k1", []byte("x"))).ID
		box := &deafBox{srv: w.srv}
		nc, err := nats.Connect("", nats.InProcessServer(box))
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		subjects := func(want string) {
			cfg := w.events.CachedInfo().Config
			cfg.Subjects = []string{want}
			if _, err := w.js.UpdateStream(context.Background(), cfg); err != nil {
				t.Error(err)
			}
		}
		s := w.newLetters(js, Config{})
		s.testOnlyCrash = func(at string) error {
			if at == "replaying stored" {
				box.deafFor(askTimeout)
				time.AfterFunc(time.Second, func() { subjects("other.>") })
			}
			return nil
		}
		if _, err := s.Replay(t.Context(), id); err == nil {
			t.Error("Replay without a PubAck succeeded")
		}
		w.wantState(id, StateReplaying)
		subjects("events.>")
		w.replay(id)
		w.wantState(id, StateReplayed)
		if n := len(w.replayed()); n != 1 {
			t.Errorf("replays on the stream = %d, want 1", n)
		}
	})
}

// The consumer can be faster than the last step of the replay.
func TestReplayThatFailsBeforeItIsClosedStaysOpen(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		id := w.park(w.event("billing", "events.a", "k1", []byte("x"))).ID
		s := w.newLetters(w.js, Config{})
		s.testOnlyCrash = func(at string) error {
			if at == "replay published" {
				return w.letters.Park(t.Context(), w.failure("billing", 2))
			}
			return nil
		}
		l, err := s.Replay(t.Context(), id)
		if err != nil || l.State != StateOpen || l.Replays != 1 {
			t.Errorf("Replay = %+v, %v, want the letter open again", l, err)
		}
	})
}

// deafBox hands out connections that can lose what the server sends for a while.
type deafBox struct {
	srv *embedded.Server

	mu    sync.Mutex
	until time.Time // guarded by mu
}

func (b *deafBox) InProcessConn() (net.Conn, error) {
	conn, err := b.srv.InProcessConn()
	return &deafConn{conn, b}, err
}

func (b *deafBox) deafFor(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.until = time.Now().Add(d)
}

func (b *deafBox) deaf() (now bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return time.Now().Before(b.until)
}

type deafConn struct {
	net.Conn
	box *deafBox
}

func (c *deafConn) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.box.deaf() {
			return n, err
		}
	}
}
