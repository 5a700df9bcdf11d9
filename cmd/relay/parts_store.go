package main

import (
	"context"
	"errors"
	"log/slog"
	"strings"

	"github.com/seed-5e04d8fb/jetbox/outbox"
)

// openStore opens the outbox, and goes on trying for as long as the database is
// away.
func (p *parts) openStore(ctx context.Context) error {
	said := newRepeater(p.app.log, "database")
	for attempt := 1; ; attempt++ {
		store, err := p.tryStore(ctx)
		if err == nil {
			p.store.Store(&store)
			p.onClose(func() error { return p.db.close(store) })
			p.app.log.LogAttrs(ctx, slog.LevelInfo, "outbox opened", slog.String("db", p.db.String()), slog.String("table", store.Table()))
			p.warnOfOthers(ctx, store)
			return nil
		}
		if !p.db.away(err) {
			return err
		}
		p.health.starting("waiting for the database: " + oneLine(err.Error()))
		said.warn(ctx, err)
		if err := sleep(ctx, reconnectDelays.After(attempt)); err != nil {
			return err
		}
	}
}

func (p *parts) tryStore(ctx context.Context) (outboxStore, error) {
	o := openOptions{noNotify: !p.flags.notify, log: p.app.log}
	if p.flags.noSetup {
		return p.db.openExisting(ctx, o)
	}
	store, err := p.db.open(ctx, o)
	if err != nil {
		return nil, err
	}
	if err := store.Migrate(ctx); err != nil {
		return nil, errors.Join(err, p.db.close(store))
	}
	return store, nil
}

// warnOfOthers says that events may end on two brokers: a relay with a broker of
// its own, and others on the same outbox. It is no error, since they may use this
// one's, or be dead and about to be taken over. SQLite's relays share a machine,
// where the broker's folder and port are taken.
func (p *parts) warnOfOthers(ctx context.Context, store outboxStore) {
	if p.db.url == "" || p.url != embeddedNATS {
		return
	}
	stats, err := store.Stats(ctx)
	if err != nil || len(stats.Leases) == 0 {
		return // an error comes again, and is reported then
	}
	holders := make([]string, len(stats.Leases))
	for i, l := range stats.Leases {
		holders[i] = l.Holder
	}
	p.app.log.LogAttrs(ctx, slog.LevelWarn, "other relays share this outbox, this one publishes to a broker of its own: "+
		"unless they use it too, the events are split; --nats URL names a common broker",
		slog.String("relays", strings.Join(holders, ", ")))
}

// stats is what the gauges ask; they may before there is a store.
func (p *parts) stats(ctx context.Context) (outbox.Stats, error) {
	store := p.store.Load()
	if store == nil {
		return outbox.Stats{}, errors.New("the database is not open yet")
	}
	return (*store).Stats(ctx)
}
