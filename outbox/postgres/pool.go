package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	connectTimeout = 5 * time.Second
	poolConns      = 8 // unless the URL says otherwise
)

// newPool makes the pool and, in front of its new connections, the gate.
func newPool(ctx context.Context, url string) (*pgxpool.Pool, *gate, error) {
	if url == "" {
		return nil, nil, errors.New("open outbox: the URL of the database is empty")
	}
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, nil, fmt.Errorf("open outbox: %w", err) // pgx hides the password
	}
	if !strings.Contains(url, "default_query_exec_mode") {
		cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	}
	if !strings.Contains(url, "pool_max_conns") {
		cfg.MaxConns = poolConns
	}
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = connectTimeout
	}
	if cfg.ConnConfig.RuntimeParams["application_name"] == "" {
		cfg.ConnConfig.RuntimeParams["application_name"] = "jetbox"
	}
	g := new(gate)
	cfg.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { return g.enter() }
	cfg.AfterConnect = func(context.Context, *pgx.Conn) error { g.open(); return nil }
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, nil, fmt.Errorf("open outbox: %w", err)
	}
	return pool, g, nil
}

// gate keeps a store from hammering a database that takes no connections: after
// a failure it lets one attempt through at a time, with growing waits. Until then
// everybody else gets the reason at once.
type gate struct {
	mu    sync.Mutex // guards what follows
	cause error      // nil while connecting works
	wait  time.Duration
	next  time.Time
}

// Waits between two attempts: at most some two in a second, and back within
// seconds once the database is.
const (
	gateFirst = 600 * time.Millisecond
	gateMost  = 3 * time.Second
)

// errGate is what an attempt gets that was not made.
var errGate = errors.New("the database takes no connections, waiting before the next attempt")

func (g *gate) enter() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.cause == nil {
		return nil
	}
	now := time.Now()
	if now.Before(g.next) {
		return fmt.Errorf("%w: %w", errGate, g.cause)
	}
	g.next = now.Add(g.wait) // for the others, while this one tries
	return nil
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cause, g.wait = nil, 0
}

// note learns from an operation's error.
func (g *gate) note(err error) {
	var failed *pgconn.ConnectError
	if !errors.As(err, &failed) || errors.Is(err, errGate) || errors.Is(err, context.Canceled) {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cause = failed
	g.wait = min(gateMost, max(gateFirst, 2*g.wait))
	g.next = time.Now().Add(g.wait)
}
