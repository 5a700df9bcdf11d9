package dlq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// Filter selects letters. The zero value selects what waits for a person: open
// letters, and intents older than Config.Grace. Fields that are set must all
// match.
type Filter struct {
	// ID is one letter's ID. The others are not even read.
	ID string

	// Stream and Consumer are matched by the server.
	Stream   string
	Consumer string

	// Subject is the subject of the original, or a pattern with * and >.
	Subject string

	Reason string

	// Since leaves out letters whose last failure was reported before.
	Since time.Time

	// States replaces the default by exactly these. Intents of any age count
	// when StateIntent is among them.
	States []State

	// Interrupted adds to the default the letters a replay has left replaying,
	// so that what is selected is what can be replayed.
	Interrupted bool

	// Limit is the most letters returned. Default: no limit.
	Limit int

	// HeadersOnly leaves payloads out, which is faster.
	HeadersOnly bool
}

func (f Filter) validate() error {
	for _, n := range [...]struct{ field, name string }{{"Stream", f.Stream}, {"Consumer", f.Consumer}} {
		if n.name != "" && !validName(n.name) {
			return fmt.Errorf("dlq: filter: %s is %q, want a name without blanks, dots, wildcards or slashes", n.field, n.name)
		}
	}
	if f.Limit < 0 {
		return fmt.Errorf("dlq: filter: Limit is %d, want a positive count", f.Limit)
	}
	for _, st := range f.States {
		switch st {
		case StateIntent, StateOpen, StateReplaying, StateReplayed, StateDiscarded:
		default:
			return fmt.Errorf("dlq: filter: no state %q, want %s, %s, %s, %s or %s", st,
				StateIntent, StateOpen, StateReplaying, StateReplayed, StateDiscarded)
		}
	}
	return nil
}

// matches reports whether l is selected at the time now. grace is asked only for
// an intent that everything else selects.
func (f Filter) matches(l Letter, now time.Time, grace func(Letter) time.Duration) (selected bool) {
	switch {
	case l.State == "":
		return false // somebody else's message
	case f.ID != "" && f.ID != l.ID,
		f.Stream != "" && f.Stream != l.Stream,
		f.Consumer != "" && f.Consumer != l.Consumer,
		f.Subject != "" && !covers(f.Subject, l.Subject),
		f.Reason != "" && f.Reason != l.Reason,
		l.Time.Before(f.Since):
		return false
	case len(f.States) > 0:
		return slices.Contains(f.States, l.State)
	case f.Interrupted && l.State == StateReplaying:
		return true
	default:
		return l.waits(now, grace)
	}
}

// List returns the selected letters, those changed least recently first, as
// they were stored when the iteration began. A letter that changes while it is
// running may be left out. Breaking out of the loop stops it; an error is the
// last thing it yields. Memory does not grow with the number of letters.
func (s *Letters) List(ctx context.Context, f Filter) iter.Seq2[Letter, error] {
	return func(yield func(Letter, error) bool) {
		if err := f.validate(); err != nil {
			yield(Letter{}, err)
			return
		}
		if f.ID != "" {
			s.listOne(ctx, f, yield)
			return
		}
		stopped, err := s.list(ctx, f, yield)
		if err != nil && !stopped {
			yield(Letter{}, fmt.Errorf("list letters: %w", err))
		}
	}
}

func (s *Letters) list(ctx context.Context, f Filter, yield func(Letter, error) bool) (stopped bool, err error) {
	st, err := s.js.Stream(ctx, s.cfg.Stream)
	if err != nil {
		return false, err
	}
	// A stream somebody else made may keep old versions of letters.
	versions := st.CachedInfo().Config.MaxMsgsPerSubject != 1
	found, now, grace := 0, time.Now(), s.graceOf(ctx)
	var lastErr error
	err = scan(ctx, st, s.listSubject(f), 1, f.HeadersOnly, func(m *record) (more bool) {
		l := newLetter(m, s.cfg.Prefix)
		if !f.matches(l, now, grace) {
			return true
		}
		if versions {
			current, err := s.last(ctx, l.ID)
			if err != nil {
				lastErr = err
				return false
			}
			if current == nil || current.Seq != l.Seq {
				return true
			}
		}
		found++
		stopped = !yield(l, nil)
		return !stopped && found != f.Limit
	})
	return stopped, errors.Join(err, lastErr)
}

func (s *Letters) listOne(ctx context.Context, f Filter, yield func(Letter, error) bool) {
	if _, err := parseID(s.cfg.Prefix, f.ID); err != nil {
		yield(Letter{}, fmt.Errorf("dlq: filter: %w", err))
		return
	}
	l, err := s.last(ctx, f.ID)
	switch {
	case err != nil:
		yield(Letter{}, err)
	case l != nil && f.matches(*l, time.Now(), s.graceOf(ctx)):
		yield(*l, nil)
	}
}

// graceOf returns how old the intents of a letter's consumer are when they
// count as letters. A consumer is asked about once.
func (s *Letters) graceOf(ctx context.Context) func(Letter) time.Duration {
	if s.cfg.Grace > 0 {
		return func(Letter) time.Duration { return s.cfg.Grace }
	}
	known := make(map[[2]string]time.Duration)
	return func(l Letter) time.Duration {
		name := [2]string{l.Stream, l.Consumer}
		grace, ok := known[name]
		if !ok {
			grace = s.ackWait(ctx, l.Stream, l.Consumer)
			known[name] = grace
		}
		return grace
	}
}

// ackWait returns the longest time the server waits for an ack of the consumer.
// One that is gone has nobody at work, and one that may not be asked about must
// not hide its letters: both have the default.
func (s *Letters) ackWait(ctx context.Context, stream, consumer string) time.Duration {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c, err := s.events.js.Consumer(ctx, stream, consumer)
	if err != nil {
		return defaultGrace
	}
	cfg := c.CachedInfo().Config
	return slices.Max(append(cfg.BackOff, cfg.AckWait))
}

// listSubject returns the narrowest subject that has all selected letters.
func (s *Letters) listSubject(f Filter) string {
	token := func(name string) string {
		if name == "" {
			return "*"
		}
		return name
	}
	return strings.Join([]string{s.cfg.Prefix, token(f.Stream), token(f.Consumer), "*"}, ".")
}

// Count returns how many letters are selected. It reads the headers of every
// letter of the stream and consumer named, so do not call it on every scrape.
func (s *Letters) Count(ctx context.Context, f Filter) (int, error) {
	f.HeadersOnly = true
	n := 0
	for _, err := range s.List(ctx, f) {
		if err != nil {
			return 0, err
		}
		n++
	}
	return n, nil
}

// Group is how many letters have stream, consumer, reason and state in common.
type Group struct {
	Stream   string `json:"stream"`
	Consumer string `json:"consumer"`
	Reason   string `json:"reason"`
	State    State  `json:"state"`
	Letters  int    `json:"letters"`

	// Oldest is when the failure was reported that waits longest.
	Oldest time.Time `json:"oldest"`
}

// Groups counts the selected letters by stream, consumer, reason and state, in
// that order. It costs what Count does.
func (s *Letters) Groups(ctx context.Context, f Filter) ([]Group, error) {
	f.HeadersOnly = true
	var groups []Group
	known := make(map[Group]int)
	for l, err := range s.List(ctx, f) {
		if err != nil {
			return nil, err
		}
		key := Group{Stream: l.Stream, Consumer: l.Consumer, Reason: l.Reason, State: l.State}
		i, ok := known[key]
		if !ok {
			i = len(groups)
			known[key] = i
			groups = append(groups, key)
		}
		g := &groups[i]
		if g.Letters++; g.Letters == 1 || l.Time.Before(g.Oldest) {
			g.Oldest = l.Time
		}
	}
	slices.SortFunc(groups, func(a, b Group) int {
		return cmp.Or(cmp.Compare(a.Stream, b.Stream), cmp.Compare(a.Consumer, b.Consumer),
			cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.State, b.State))
	})
	return groups, nil
}

// Prune removes the letters that were closed before a time, and returns how many.
// It is for dead-letter streams that take no message TTL, and for letters closed
// through one that did not: the others expire by themselves. A letter that is
// opened again meanwhile stays. Closed letters absorb late reports of their
// failure: leave those that are younger than Config.KeepClosed.
func (s *Letters) Prune(ctx context.Context, before time.Time) (pruned int, err error) {
	closed := Filter{States: []State{StateReplayed, StateDiscarded}, HeadersOnly: true}
	for l, err := range s.List(ctx, closed) {
		if err != nil {
			return pruned, err
		}
		if !l.Updated.Before(before) {
			continue
		}
		// That sequence, not the subject: a letter opened since then has another.
		err = s.removeLetter(ctx, l)
		if err != nil && !hasCode(err, codeNoSuchSequence) {
			return pruned, fmt.Errorf("prune letter %s: %w", l.ID, err)
		}
		if err == nil {
			pruned++
		}
	}
	return pruned, nil
}

// Show returns one letter, whatever its state and with what lies beside it, or an
// error that wraps jetbox.ErrLetterGone when there is none.
func (s *Letters) Show(ctx context.Context, id string) (Letter, error) {
	l, err := s.find(ctx, id)
	if err != nil {
		return Letter{}, err
	}
	return s.assemble(ctx, l)
}

// find returns one letter as it is stored.
func (s *Letters) find(ctx context.Context, id string) (Letter, error) {
	if _, err := parseID(s.cfg.Prefix, id); err != nil {
		return Letter{}, fmt.Errorf("show letter: %w", err)
	}
	l, err := s.last(ctx, id)
	switch {
	case err != nil:
		return Letter{}, err
	case l == nil || l.State == "":
		return Letter{}, fmt.Errorf("letter %s: there is none: %w", id, jetbox.ErrLetterGone)
	}
	return *l, nil
}
