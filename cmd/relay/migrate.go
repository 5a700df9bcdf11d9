package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
)

func migrateCommand() *command {
	var (
		print  bool
		shards int
	)
	return &command{
		name:  "migrate",
		short: "create or upgrade the outbox tables",
		long: `
Running it again, or several times at once, does no harm. --print writes the SQL
to stdout and touches nothing.

On PostgreSQL the ordering keys are divided into shards: the most relays that can
be active at once. --shards changes the number also when the outbox is there,
which needs all relays stopped.`,
		flags: func(fs *flag.FlagSet) {
			fs.BoolVar(&print, "print", false, "show the SQL instead of running it")
			define(fs, &shards, "shards", 0, positiveInt, "`NUMBER` of shards of keys (PostgreSQL; 16 for a new outbox)")
		},
		run: func(ctx context.Context, a *app, _ []string) error {
			d, err := a.global.database()
			if err != nil {
				return err
			}
			text, err := d.migrationSQL(shards)
			if err != nil {
				return usageError{err}
			}
			if print {
				_, err = fmt.Fprint(a.stdout, text)
				return err
			}
			return migrate(ctx, a, d, shards)
		},
	}
}

func migrate(ctx context.Context, a *app, d database, shards int) (err error) {
	store, err := d.open(ctx, openOptions{shards: shards, log: a.log})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	if r, ok := store.(resharder); ok && shards > 0 {
		if err := r.Reshard(ctx, shards); err != nil {
			return withHint(err, "relay status shows the relays: stop them all, then run this again")
		}
	}
	_, err = fmt.Fprintf(a.stdout, "table %s is ready in %s\n", store.Table(), d)
	return err
}
