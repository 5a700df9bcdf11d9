package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/dlq"
)

// watchEvery is how often relay run looks whether the streams of dead letters are
// there: while they are not, what the server says about failed messages is lost.
const watchEvery = 10 * time.Second

// watchLetters creates the streams of dead letters again when somebody deletes
// them, until ctx is done; without setup it only says so. An outage is not its
// business: the relay reports that.
func watchLetters(ctx context.Context, js jetstream.JetStream, setup func(context.Context) error, log *slog.Logger) {
	said := ""
	for sleep(ctx, watchEvery) == nil {
		err := missing(ctx, js, dlqStream, advisoryStream)
		if err == nil {
			said = ""
			continue
		}
		if said != err.Error() {
			said = err.Error()
			log.LogAttrs(ctx, slog.LevelError, "dead letters have no place", slog.Any("err", err))
		}
		if setup == nil {
			continue
		}
		if err := setup(ctx); err != nil && ctx.Err() == nil {
			log.LogAttrs(ctx, slog.LevelError, "stream of dead letters not created again, will retry", slog.Any("err", err))
		}
	}
}

// missing returns an error that names a stream which the server says is not there.
func missing(ctx context.Context, js jetstream.JetStream, names ...string) error {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	for _, name := range names {
		if _, err := js.Stream(ctx, name); errors.Is(err, jetstream.ErrStreamNotFound) {
			return fmt.Errorf("stream %s does not exist", name)
		}
	}
	return nil
}

// setupLetters creates what is missing of the streams of dead letters.
func (p *parts) setupLetters(letters *dlq.Letters) func(context.Context) error {
	if p.flags.noSetup {
		return nil
	}
	return func(ctx context.Context) error {
		diffs, err := letters.Setup(ctx, p.app.global.stream)
		for _, d := range diffs {
			p.app.log.LogAttrs(ctx, slog.LevelWarn, "stream differs from what relay run would create, left as it is", slog.String("difference", d))
		}
		return err
	}
}
