package relay_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// askedSource notes as what a relay asks for the lease. It is safe for concurrent
// use.
type askedSource struct {
	*sharedSource
	ClaimFunc func() error

	mu     sync.Mutex // guards what follows
	unable bool
	since  time.Time // of the last change
}

func newAskedSource(r *rig) *askedSource {
	return &askedSource{sharedSource: newSharedSource(r, 1), since: time.Now()}
}

func (s *askedSource) Acquire(ctx context.Context, c jetbox.Candidate) (jetbox.Lease, error) {
	s.mu.Lock()
	if c.Unable != s.unable {
		s.unable, s.since = c.Unable, time.Now()
	}
	s.mu.Unlock()
	return s.sharedSource.Acquire(ctx, c)
}

func (s *askedSource) Claim(ctx context.Context, l jetbox.Lease, ask jetbox.Ask) ([]jetbox.Row, error) {
	if s.ClaimFunc != nil {
		if err := s.ClaimFunc(); err != nil {
			return nil, err
		}
	}
	return s.sharedSource.Claim(ctx, l, ask)
}

// wantAsked fails unless the relay has been able, or unable, since a time between
// least and most after began.
func (s *askedSource) wantAsked(r *rig, unable bool, began time.Time, least, most time.Duration) {
	r.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if after := s.since.Sub(began); s.unable != unable || after < least || after > most {
		r.t.Fatalf("unable %v since %v after; want %v since %v to %v after", s.unable, after, unable, least, most)
	}
}

const unableLease = 9 * time.Second

// A holder that makes no progress for a whole lease says so with the next renewal.
// It may have its part again when it has rested: a standby cannot try.
func TestHolderWithoutBrokerIsUnableUntilItHasRested(t *testing.T) {
	inBubble(t, func(r *rig) {
		src := newAskedSource(r)
		rel, stop := r.start(src, relay.Config{Lease: unableLease})
		defer stop()
		time.Sleep(2 * time.Second)
		down := time.Now()
		r.must(r.srv.Close())
		r.append(event("events.a", "", "1"))
		rel.Wake()
		time.Sleep(4 * unableLease)
		src.wantAsked(r, true, down, unableLease, unableLease+unableLease/3+time.Second)

		up := time.Now()
		r.must(r.srv.Restart(r.t.Context()))
		time.Sleep(8 * time.Second) // the loop waits up to 4.5s
		r.wantPayloads("1")
		r.wantHealth(rel, true, "")
		time.Sleep(5 * unableLease)
		src.wantAsked(r, false, up, 3*unableLease-5*time.Second, 3*unableLease+8*time.Second+unableLease/3)
	})
}

// A standby knows of the broker alone, and that it is back.
func TestStandbyIsUnableWhileItHasNoBroker(t *testing.T) {
	inBubble(t, func(r *rig) {
		src := newAskedSource(r)
		src.take(jetbox.Lease{Owner: "other", Holder: "the other", Epoch: 9})
		_, stop := r.start(src, relay.Config{Lease: unableLease})
		defer stop()
		time.Sleep(2 * time.Second)
		down := time.Now()
		r.must(r.srv.Close())
		time.Sleep(4 * unableLease)
		src.wantAsked(r, true, down, unableLease, unableLease+5*time.Second)
		up := time.Now()
		r.must(r.srv.Restart(r.t.Context()))
		time.Sleep(unableLease)
		src.wantAsked(r, false, up, 0, 5*time.Second)
	})
}

// A relay that gave everything back because it could not record must not come back
// as soon as it stands by, when it can no longer see what was wrong.
func TestRelayThatHandedOverRests(t *testing.T) {
	inBubble(t, func(r *rig) {
		src := newAskedSource(r)
		src.RecordFunc = func() error { return errors.New("no space left") }
		rel, stop := r.start(src, relay.Config{Lease: unableLease})
		defer stop()
		began := time.Now()
		r.append(event("events.a", "", "1"))
		rel.Wake()
		time.Sleep(2 * unableLease)
		src.wantAsked(r, true, began, unableLease, unableLease+unableLease/3+time.Second)
		src.want(1)
		time.Sleep(unableLease)
		r.wantRole(rel, relay.RoleStandby, 0)
		src.wantAsked(r, true, began, unableLease, unableLease+unableLease/3+time.Second)
		time.Sleep(4 * unableLease)
		src.wantAsked(r, false, began, 5*unableLease, 6*unableLease)
	})
}

// Trouble that is over within a lease, however often, and a database in trouble
// are no reason to hand anything over.
func TestShortTroubleAndTheDatabaseAreNoReasonToHandOver(t *testing.T) {
	for name, fail := range map[string]func(src *askedSource, broken func() error){
		"short":    func(src *askedSource, broken func() error) { src.RecordFunc = broken },
		"database": func(src *askedSource, broken func() error) { src.ClaimFunc = broken },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				src := newAskedSource(r)
				began := time.Now()
				fail(src, func() error {
					// The relay tries again within 4.5s.
					if name == "short" && time.Since(began)%(12*time.Second) > 4*time.Second {
						return nil
					}
					return errors.New("out of order")
				})
				rel, stop := r.start(src, relay.Config{Lease: unableLease})
				defer stop()
				failed := false
				for range 60 {
					r.append(event("events.a", "", "x"))
					time.Sleep(time.Second)
					failed = failed || !rel.Health().Ready
				}
				if !failed {
					r.t.Fatal("it was always ready: nothing failed")
				}
				src.wantAsked(r, false, began, 0, 0)
			})
		})
	}
}
