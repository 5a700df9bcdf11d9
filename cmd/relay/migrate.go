package main

import (
	"context"
	"errors"
	"flag"
	"fmt"

	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
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
to stdout and touches nothing.`,
		flags: func(fs *flag.FlagSet) {
			fs.BoolVar(&print, "print", false, "show the SQL instead of running it")
			define(fs, &shards, "shards", 1, positiveInt, "`NUMBER` of shards of keys (PostgreSQL)")
		},
		run: func(ctx context.Context, a *app, _ []string) error {
			path, err := a.global.dbFile()
			if err != nil {
				return err
			}
			if print {
				text, err := sqlite.MigrationSQL(a.global.table)
				if err != nil {
					return usagef("--table: %w", err)
				}
				_, err = fmt.Fprint(a.stdout, text)
				return err
			}
			return migrate(ctx, a, path)
		},
	}
}

func migrate(ctx context.Context, a *app, path string) (err error) {
	store, err := sqlite.Open(ctx, sqlite.Config{Path: path, Table: a.global.table})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	_, err = fmt.Fprintf(a.stdout, "table %s is ready in %s\n", store.Table(), path)
	return err
}

// openStore opens the outbox of --db, which must be there with its tables. The
// caller closes it.
func (a *app) openStore(ctx context.Context) (*sqlite.Store, error) {
	path, err := a.global.existingDB()
	if err != nil {
		return nil, err
	}
	store, err := sqlite.Open(ctx, sqlite.Config{Path: path, Table: a.global.table})
	if err != nil {
		return nil, err
	}
	if err := store.Check(ctx); err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return store, nil
}
