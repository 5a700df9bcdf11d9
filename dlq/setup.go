package dlq

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

const (
	duplicateWindow  = 2 * time.Minute
	advisoriesMaxAge = 7 * 24 * time.Hour

	maxDeliveriesSubject = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
	terminatedSubject    = "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED"
	anyAdvisorySubject   = "$JS.EVENT.ADVISORY.CONSUMER.*"
)

// Setup creates the dead-letter stream and the advisory stream where they are
// missing. A stream that exists is left as it is; what differs from what Setup
// would have made comes back as a list of sentences for a person. Name the
// event streams that exist: letters below their subjects would be consumed as
// events, so Setup refuses that.
//
// Call it before the consumers start: an advisory is gone when no stream
// captures it.
func (s *Letters) Setup(ctx context.Context, eventStreams ...string) (differences []string, err error) {
	for _, name := range eventStreams {
		if err := s.checkEventStream(ctx, name); err != nil {
			return nil, err
		}
	}
	for _, want := range []jetstream.StreamConfig{s.lettersConfig(), s.advisoriesConfig()} {
		have, err := s.ensure(ctx, want)
		if err != nil {
			return nil, err
		}
		diffs, err := compare(want, have)
		if err != nil {
			return nil, err
		}
		differences = append(differences, diffs...)
	}
	return differences, nil
}

func (s *Letters) checkEventStream(ctx context.Context, name string) error {
	if name == s.cfg.Stream || name == s.cfg.Advisories {
		return fmt.Errorf("dlq: stream %s is for dead letters and advisories, it cannot be an event stream too", name)
	}
	stream, err := s.events.js.Stream(ctx, name)
	if err != nil {
		return fmt.Errorf("look up event stream %s: %w", name, err)
	}
	letters := s.cfg.Prefix + ".>"
	for _, subject := range stream.CachedInfo().Config.Subjects {
		if overlap(letters, subject) {
			return fmt.Errorf("dlq: letters go to %s, which is inside subject %s of event stream %s: choose another prefix",
				letters, subject, name)
		}
	}
	return nil
}

func (s *Letters) lettersConfig() jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name:        s.cfg.Stream,
		Description: "Dead letters, one subject each",
		Subjects:    []string{s.cfg.Prefix + ".>"},
		Retention:   jetstream.LimitsPolicy,
		Storage:     jetstream.FileStorage,
		// A full stream refuses new letters, and their messages stay pending.
		// It still takes the next version of a letter on one server, not on
		// several (nats-server 2.15).
		Discard:           jetstream.DiscardNew,
		MaxMsgsPerSubject: 1,
		Replicas:          s.cfg.Replicas,
		Duplicates:        duplicateWindow,
		AllowBatchPublish: true,
		AllowMsgTTL:       true, // closed letters expire
	}
}

func (s *Letters) advisoriesConfig() jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name:              s.cfg.Advisories,
		Description:       "Advisories about exhausted and terminated messages",
		Subjects:          []string{s.cfg.maxDeliveries() + ".>", s.cfg.terminated() + ".>"},
		Retention:         jetstream.LimitsPolicy,
		Storage:           jetstream.FileStorage,
		Discard:           jetstream.DiscardOld,
		MaxAge:            advisoriesMaxAge,
		Replicas:          s.cfg.Replicas,
		Duplicates:        duplicateWindow,
		AllowBatchPublish: true,
	}
}

// ensure returns the configuration of the stream, creating it if missing.
func (s *Letters) ensure(ctx context.Context, want jetstream.StreamConfig) (jetstream.StreamConfig, error) {
	stream, err := s.js.Stream(ctx, want.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		stream, err = s.create(ctx, want)
	}
	if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
		stream, err = s.js.Stream(ctx, want.Name) // another process was faster
	}
	if err != nil {
		return jetstream.StreamConfig{}, fmt.Errorf("set up stream %s: %w", want.Name, err)
	}
	return stream.CachedInfo().Config, nil
}

// create falls back to a stream without the newer features where the server
// does not know them: 2.12 and later refuse unknown fields, older ones ignore
// them.
func (s *Letters) create(ctx context.Context, want jetstream.StreamConfig) (jetstream.Stream, error) {
	stream, err := s.js.CreateStream(ctx, want)
	var api *jetstream.APIError
	if errors.As(err, &api) && (api.ErrorCode == codeInvalidJSON || api.ErrorCode == codeInvalidConfig) {
		want.AllowBatchPublish, want.AllowMsgTTL = false, false
		if plain, plainErr := s.js.CreateStream(ctx, want); plainErr == nil {
			return plain, nil
		}
	}
	if errors.As(err, &api) && api.ErrorCode == codeSubjectOverlap {
		for _, subject := range want.Subjects {
			if owner, ownerErr := s.js.StreamNameBySubject(ctx, subject); ownerErr == nil {
				return nil, fmt.Errorf("subject %s overlaps with stream %s: %w", subject, owner, err)
			}
		}
	}
	return stream, err
}

// compare returns what is different in an existing stream, and an error for
// what makes it useless.
func compare(want, have jetstream.StreamConfig) (differences []string, err error) {
	for _, subject := range want.Subjects {
		var covered bool
		for _, h := range have.Subjects {
			covered = covered || covers(h, subject)
		}
		if !covered {
			return nil, fmt.Errorf("dlq: stream %s has subjects %s, none of which takes %s",
				want.Name, strings.Join(have.Subjects, ", "), subject)
		}
	}
	add := func(setting string, h, w any, why string) {
		if h != w {
			differences = append(differences, fmt.Sprintf("stream %s: %s is %v, want %v%s", want.Name, setting, h, w, why))
		}
	}
	add("retention", have.Retention, want.Retention, ": letters would be removed")
	add("storage", have.Storage, want.Storage, "")
	add("replicas", have.Replicas, want.Replicas, "")
	add("discard policy", have.Discard, want.Discard, "")
	add("maximum age", have.MaxAge, want.MaxAge, "")
	if want.MaxMsgsPerSubject > 0 {
		add("maximum messages per subject", have.MaxMsgsPerSubject, want.MaxMsgsPerSubject, ": old versions of letters stay")
		add("per-subject discard", have.DiscardNewPerSubject, want.DiscardNewPerSubject, ": letters cannot change state")
		add("message TTL allowed", have.AllowMsgTTL, want.AllowMsgTTL, ": closed letters stay until they are pruned")
		add("deny delete", have.DenyDelete, want.DenyDelete, ": intents cannot be withdrawn")
	}
	return differences, nil
}

// overlap reports whether some subject matches both patterns.
func overlap(a, b string) (both bool) {
	x, y := strings.Split(a, "."), strings.Split(b, ".")
	for i := 0; i < len(x) && i < len(y); i++ {
		switch {
		case x[i] == ">" || y[i] == ">":
			return true
		case x[i] != y[i] && x[i] != "*" && y[i] != "*":
			return false
		}
	}
	return len(x) == len(y)
}

// covers reports whether every subject that matches b matches a.
func covers(a, b string) (all bool) {
	x, y := strings.Split(a, "."), strings.Split(b, ".")
	for i := range x {
		switch {
		case i >= len(y):
			return false
		case x[i] == ">":
			return true
		case y[i] == ">" || x[i] != "*" && x[i] != y[i]:
			return false
		}
	}
	return len(x) == len(y)
}
