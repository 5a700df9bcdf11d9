package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Names of jetbox's own streams, a contract.
const (
	dlqStream      = "DLQ"
	advisoryStream = "JETBOX_ADVISORIES"
)

// duplicateWindow is how long a stream created here remembers message IDs.
const duplicateWindow = 2 * time.Minute

// codeSubjectOverlap is the server's error for a subject that another stream
// has; nats.go has no name for it.
const codeSubjectOverlap jetstream.ErrorCode = 10065

// eventStream is the stream as relay run creates it.
func (g *globals) eventStream(replicas int) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name:              g.stream,
		Subjects:          g.subjects,
		Storage:           jetstream.FileStorage,
		Replicas:          replicas,
		Duplicates:        duplicateWindow,
		AllowBatchPublish: true,
	}
}

// ensureStream creates the stream when it is missing. One that is there belongs
// to its operator: what differs is logged and left.
func ensureStream(ctx context.Context, js jetstream.JetStream, want jetstream.StreamConfig, log *slog.Logger) (jetstream.StreamConfig, error) {
	s, err := js.Stream(ctx, want.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		s, err = createStream(ctx, js, want, log)
	}
	if err != nil {
		return jetstream.StreamConfig{}, fmt.Errorf("set up stream %s: %w", want.Name, err)
	}
	have := s.CachedInfo().Config
	for _, d := range differences(have, want) {
		log.LogAttrs(ctx, slog.LevelWarn, "stream differs from what relay run would create, left as it is",
			slog.String("stream", want.Name), slog.String("setting", d.setting), slog.String("have", d.have), slog.String("want", d.want))
	}
	return have, nil
}

func createStream(ctx context.Context, js jetstream.JetStream, want jetstream.StreamConfig, log *slog.Logger) (jetstream.Stream, error) {
	s, err := js.CreateStream(ctx, want)
	var refused *jetstream.APIError
	if errors.As(err, &refused) && want.AllowBatchPublish && refused.ErrorCode != codeSubjectOverlap &&
		refused.ErrorCode != jetstream.JSErrCodeStreamNameInUse {
		// A server before 2.14 does not know fast batches. If that was not the
		// reason, this fails the same way.
		want.AllowBatchPublish = false
		s, err = js.CreateStream(ctx, want)
	}
	if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
		return js.Stream(ctx, want.Name) // another process was quicker
	}
	if err != nil {
		return nil, err
	}
	log.LogAttrs(ctx, slog.LevelInfo, "stream created", slog.String("stream", want.Name),
		slog.String("subjects", strings.Join(want.Subjects, ",")), slog.Int("replicas", want.Replicas))
	return s, nil
}

type difference struct{ setting, have, want string }

// differences compares what matters to a relay.
func differences(have, want jetstream.StreamConfig) []difference {
	var out []difference
	compare := func(setting string, have, want any) {
		if h, w := fmt.Sprint(have), fmt.Sprint(want); h != w {
			out = append(out, difference{setting, h, w})
		}
	}
	sorted := func(s []string) string { return strings.Join(slices.Sorted(slices.Values(s)), ",") }
	compare("subjects", sorted(have.Subjects), sorted(want.Subjects))
	compare("storage", have.Storage, want.Storage)
	compare("replicas", have.Replicas, want.Replicas)
	compare("retention", have.Retention, want.Retention)
	compare("duplicate_window", have.Duplicates, want.Duplicates)
	compare("max_age", have.MaxAge, want.MaxAge)
	return out
}

// checkOverlap refuses an event stream that would take dead letters for events.
func checkOverlap(cfg jetstream.StreamConfig) error {
	for _, s := range cfg.Subjects {
		if overlap(s, dlqSubjects) {
			return withHint(fmt.Errorf("stream %s has the subject %q, which overlaps %q: dead letters would be relayed as events",
				cfg.Name, s, dlqSubjects), "narrow the stream's subjects, or name another stream with --stream")
		}
	}
	return nil
}

// checkRetention refuses to delete rows while the broker may still lose their
// messages or forget their IDs.
func checkRetention(r retention, window, sync time.Duration) error {
	if r.archive || r.keep == 0 {
		return nil
	}
	if r.keep < window {
		return withHint(usagef("--retention %v is shorter than the duplicate window %v of the stream", r, shortDuration(window)),
			"keep rows at least as long, or 0 to delete them at once and accept it")
	}
	if r.keep < sync {
		return withHint(usagef("--retention %v is shorter than %v, in which the broker syncs what it acknowledged", r, shortDuration(sync)),
			"keep rows at least as long, or 0 to delete them at once and accept it")
	}
	return nil
}

func setupHint(err error) string {
	var api *jetstream.APIError
	switch {
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount):
		return "start the server with JetStream (-js), or enable it for the account"
	case errors.As(err, &api) && api.ErrorCode == codeSubjectOverlap:
		return "another stream has these subjects: --stream names it, or --subjects takes others"
	case errors.As(err, &api) && api.ErrorCode == codeReplicasNotSupported:
		return "--replicas above 1 needs a cluster of at least as many servers"
	}
	return ""
}
