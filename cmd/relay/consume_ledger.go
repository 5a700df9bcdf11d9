package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/dedup"
	deduppostgres "github.com/seed-5e04d8fb/jetbox/dedup/postgres"
	dedupsqlite "github.com/seed-5e04d8fb/jetbox/dedup/sqlite"
	"github.com/seed-5e04d8fb/jetbox/dlq"
	"github.com/seed-5e04d8fb/jetbox/outbox/sqlite"
)

// ledger is a database that remembers what was handled.
type ledger interface {
	consumer.Ledger[*sql.Tx]

	Seen(ctx context.Context, consumer, key string) (seen bool, err error)
	Run(ctx context.Context) error
}

// checkLedger refuses a URL that names no database, and a retention in which an
// event can come back. What comes later than its last delivery, a replay for
// instance, is up to keeper.
func (f *consumeFlags) checkLedger() error {
	if isPostgres(f.ledger) {
		if _, err := pgx.ParseConfig(f.ledger); err != nil {
			return usagef("--ledger: %w", err) // pgx hides the password
		}
	} else if _, err := sqlite.ParseURL(f.ledger); err != nil {
		return usagef("--ledger: %w, or postgres://...", err)
	}
	longest := time.Duration(math.MaxInt64)
	if total := float64(f.maxDeliver) * (float64(f.timeout) + float64(f.ackWait) + float64(f.maxBackoff)); total < float64(longest) {
		longest = time.Duration(f.maxDeliver) * (f.timeout + f.ackWait + f.maxBackoff)
	}
	if f.ledgerRetention >= longest {
		return nil
	}
	return withHint(
		usagef("--ledger-retention %v is shorter than the %v in which an event can be delivered again: --max-deliver %d times --timeout %v, --ack-wait %v and --max-backoff %v",
			shortDuration(f.ledgerRetention), shortDuration(longest), f.maxDeliver, shortDuration(f.timeout), shortDuration(f.ackWait), shortDuration(f.maxBackoff)),
		"an entry that is forgotten too early lets its event happen again: keep it longer, or give up earlier")
}

// openLedger opens the database that remembers what was handled, and makes its
// tables where they are missing.
func (f *consumeFlags) openLedger(ctx context.Context, keep keepFunc, log *slog.Logger) (ledger, func() error, error) {
	if isPostgres(f.ledger) {
		return f.openPostgresLedger(ctx, keep, log)
	}
	path, err := sqlite.ParseURL(f.ledger)
	if err != nil {
		return nil, nil, usagef("--ledger: %w", err)
	}
	db, err := sqlite.OpenDB(ctx, path)
	if err != nil {
		return nil, nil, err
	}
	l, err := dedupsqlite.New(ctx, db, dedupsqlite.Config{Retention: f.ledgerRetention, KeepFunc: keep, Logger: log})
	if err != nil {
		return nil, nil, errors.Join(err, db.Close())
	}
	return l, db.Close, nil
}

func (f *consumeFlags) openPostgresLedger(ctx context.Context, keep keepFunc, log *slog.Logger) (ledger, func() error, error) {
	cfg, err := pgx.ParseConfig(f.ledger)
	if err != nil {
		return nil, nil, fmt.Errorf("--ledger: %w", err)
	}
	if !strings.Contains(f.ledger, "default_query_exec_mode") {
		// Nothing is prepared by name: a pooler may be in front.
		cfg.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	}
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = connectTimeout
	}
	if cfg.RuntimeParams["application_name"] == "" {
		cfg.RuntimeParams["application_name"] = "jetbox"
	}
	db := stdlib.OpenDB(*cfg)
	db.SetMaxOpenConns(f.atOnce() + 1) // and one that removes what is old
	db.SetMaxIdleConns(f.atOnce() + 1)
	l, err := deduppostgres.New(db, deduppostgres.Config{Retention: f.ledgerRetention, KeepFunc: keep, Logger: log})
	if err == nil {
		err = l.Migrate(ctx)
	}
	if err != nil {
		err = errors.Join(fmt.Errorf("--ledger: %w", err), db.Close())
		if errors.Is(err, dedup.ErrSchemaTooNew) {
			return nil, nil, withHint(err, "use a newer relay, or another database")
		}
		return nil, nil, err
	}
	return l, db.Close, nil
}

type keepFunc func(ctx context.Context, name string) (time.Time, error)

// clockSkew is how far the clocks of this host and of the servers that store
// events and letters may be apart.
const clockSkew = time.Minute

// keeper returns from when on a consumer's entries are needed: that of the oldest
// message that may still be delivered, and of the oldest letter that may still be
// replayed or is being so. Entries of other consumers are theirs to remove.
//
// Each answer also has what the one before it needed, and the first one is all: a
// letter that changes while they are listed may be missing from the list.
func keeper(oldest func(context.Context) (time.Time, error), letters *dlq.Letters, stream, durable string) keepFunc {
	var mu sync.Mutex
	last := time.Unix(0, 0) // guarded by mu
	return func(ctx context.Context, name string) (time.Time, error) {
		if name != stream+"/"+durable {
			return time.Unix(0, 0), nil
		}
		asked := time.Now()
		keep, err := oldest(ctx)
		if err != nil {
			return time.Time{}, err
		}
		keep, err = keepOfLetters(ctx, letters, stream, durable, keep, asked)
		if err != nil {
			return time.Time{}, err
		}
		mu.Lock()
		defer mu.Unlock()
		before := last
		last = keep
		return earlier(keep, before), nil
	}
}

// keepOfLetters returns keep, or the earlier time from which on letters need
// entries.
func keepOfLetters(ctx context.Context, letters *dlq.Letters, stream, durable string, keep, asked time.Time) (time.Time, error) {
	// What was replayed before this has been settled. With nothing to be
	// delivered, a message that came after the question may be a replay.
	settled := keep
	if settled.IsZero() {
		settled = asked
	}
	settled = settled.Add(-clockSkew)
	for l, err := range letters.List(ctx, dlq.Filter{
		Stream: stream, Consumer: durable, HeadersOnly: true,
		States: []dlq.State{dlq.StateIntent, dlq.StateOpen, dlq.StateReplaying, dlq.StateReplayed},
	}) {
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			break // no letters
		}
		if err != nil {
			return time.Time{}, err
		}
		// A replay is a new message with the key of the old one.
		if l.State != dlq.StateReplayed || !l.Updated.Before(settled) {
			keep = earlier(keep, l.Stored)
		}
	}
	return keep, nil
}

// earlier returns the earlier of two times, of which zero is none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// beside is a ledger for effects that are outside its database, so that they
// cannot share a transaction with the entry; one around them would be held open
// while a command runs. The ledger is asked before and told afterwards: a crash
// in between handles the event again, and another process to which it is delivered
// meanwhile handles it too.
type beside struct {
	ledger
	log    *slog.Logger
	inHand keyLocks
}

// tellTimeout is how long a database may take to note what has happened.
const tellTimeout = 10 * time.Second

func besideLedger(l ledger, log *slog.Logger, h consumer.Handler) consumer.Handler {
	return consumer.Once(&beside{ledger: l, log: log}, func(ctx context.Context, _ struct{}, d *consumer.Delivery) error { return h(ctx, d) })
}

// inBackground runs f until the returned stop is called, which waits for its end.
func inBackground(ctx context.Context, f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = f(ctx) // a ledger's Run has nothing to return
	}()
	return func() {
		cancel()
		<-ended
	}
}

// Do is that of [consumer.Ledger]. Two copies of one event in this process wait
// for each other.
func (b *beside) Do(ctx context.Context, name, key string, apply func(ctx context.Context, none struct{}) error) (seen bool, err error) {
	unlock, err := b.inHand.lock(ctx, key)
	if err != nil {
		return false, err
	}
	defer unlock()
	if seen, err := b.Seen(ctx, name, key); seen || err != nil {
		return seen, err
	}
	if err := apply(ctx, struct{}{}); err != nil {
		return false, err
	}
	// It has happened: that must be remembered even when time is up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tellTimeout)
	defer cancel()
	_, err = b.ledger.Do(ctx, name, key, func(context.Context, *sql.Tx) error { return nil })
	if err != nil {
		// An error would have it delivered, and so happen, again for sure.
		b.log.LogAttrs(ctx, slog.LevelWarn, "event handled but not noted in the ledger: another delivery would handle it again",
			slog.String("consumer", name), slog.String("key", key), slog.Any("err", err))
	}
	return false, nil
}

// keyLocks is a lock per key. The zero value is ready to use.
type keyLocks struct {
	mu   sync.Mutex
	held map[string]chan struct{} // guarded by mu; closed when released
}

func (l *keyLocks) lock(ctx context.Context, key string) (unlock func(), err error) {
	for {
		l.mu.Lock()
		other, busy := l.held[key]
		if !busy {
			if l.held == nil {
				l.held = map[string]chan struct{}{}
			}
			mine := make(chan struct{})
			l.held[key] = mine
			l.mu.Unlock()
			return func() {
				l.mu.Lock()
				delete(l.held, key)
				l.mu.Unlock()
				close(mine)
			}, nil
		}
		l.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}
