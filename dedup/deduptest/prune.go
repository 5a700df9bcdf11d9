package deduptest

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

func (s *suite[Tx]) pruning() *Pruning {
	s.Helper()
	if s.Pruning == nil {
		s.Skip("the entries of this ledger expire by themselves")
	}
	return s.Pruning
}

func (s *suite[Tx]) fill(consumer, prefix string, n int) {
	s.Helper()
	for i := range n {
		s.wantDo(consumer, fmt.Sprint(prefix, i), s.effect("e"), false)
	}
}

func (s *suite[Tx]) age(d time.Duration) {
	s.Helper()
	if err := s.Pruning.Age(s.ctx, d); err != nil {
		s.Fatalf("age the entries: %v", err)
	}
}

func (s *suite[Tx]) wantPruned(want int64) {
	s.Helper()
	if n, err := s.Pruning.Prune(s.ctx); n != want || err != nil {
		s.Errorf("Prune = %d, %v, want %d, nil", n, err, want)
	}
}

func (s *suite[Tx]) prune() {
	p := s.pruning()
	s.wantPruned(0)
	s.fill("a", "old", 3)
	s.fill("b", "old", 2)
	s.age(p.Retention + time.Minute)
	s.fill("a", "young", 2)
	s.wantPruned(5)
	s.wantPruned(0)
	s.wantDo("a", "old0", s.effect("e"), false)
	s.wantDo("a", "young1", s.effect("e"), true)
	s.wantSeen("b", "old1", false)
}

// BR-51: an entry younger than the oldest message that may still be delivered is
// the only proof that it was handled.
func (s *suite[Tx]) pruneKeeps() {
	p := s.pruning()
	s.fill("a", "older", 2)
	s.fill("b", "older", 1)
	s.fill("d", "older", 1)
	s.age(3 * time.Hour)
	s.fill("a", "old", 3)
	s.fill("b", "old", 1)
	s.age(p.Retention + time.Hour)
	errUnknown := errors.New("the broker does not answer")
	p.Keep = func(consumer string) (time.Time, error) {
		switch consumer {
		case "a":
			return time.Now().Add(-p.Retention - 2*time.Hour), nil
		case "b":
			return time.Time{}, errUnknown
		}
		return time.Time{}, nil
	}
	if n, err := p.Prune(s.ctx); n != 3 || !errors.Is(err, errUnknown) {
		s.Errorf("Prune = %d, %v, want two of a and one of d, and the error of b", n, err)
	}
	s.wantSeen("a", "old0", true)
	s.wantSeen("a", "older0", false)
	s.wantSeen("b", "older0", true)
	p.Keep = nil
	s.wantPruned(5)
}

// BR-61: old entries go while new ones come, and nobody gets an error for it.
func (s *suite[Tx]) pruneWhileHandling() {
	p := s.pruning()
	s.fill("c", "old", 30)
	s.age(p.Retention + time.Minute)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() { s.fill("c", fmt.Sprintf("new%d-", w), 10) })
	}
	var removed int64
	var mu sync.Mutex
	for range 2 {
		wg.Go(func() {
			for range 3 {
				n, err := p.Prune(s.ctx)
				if err != nil {
					s.Errorf("Prune: %v", err)
				}
				mu.Lock()
				removed += n
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	// One of the two may have left to the other what it was busy with.
	if n, err := p.Prune(s.ctx); removed+n != 30 || err != nil {
		s.Errorf("pruned %d and then %d, %v, want 30 in all", removed, n, err)
	}
	s.wantSeen("c", "new3-9", true)
}
