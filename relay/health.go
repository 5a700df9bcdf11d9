package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// Role is what a relay is doing.
type Role string

const (
	// RoleStarting has not reached its source yet.
	RoleStarting Role = "starting"
	// RoleActive holds the lease and publishes.
	RoleActive Role = "active"
	// RoleStandby waits for another relay's lease to end.
	RoleStandby Role = "standby"
	// RoleStopped has returned from Run.
	RoleStopped Role = "stopped"
)

// Health is whether rows can flow. It is a plain value.
type Health struct {
	Role Role

	// Ready reports that nothing known keeps rows from flowing: through this
	// relay, or through the one it stands by for.
	Ready bool

	// Reason says what is wrong, who works while this one stands by, or what happened
	// to a stream since this relay was started.
	Reason string

	// Shards is how many shards of the source this relay holds now, 0 while it
	// stands by.
	Shards int
}

// part is what a relay depends on; each has at most one fault at a time.
type part int

const (
	partDatabase part = iota
	partBroker
	partPublish
	partRecord
	partStream
	parts
)

func (p part) String() string {
	return [...]string{"database", "broker", "publish", "record", "stream"}[p]
}

type health struct {
	mu     sync.Mutex // guards what follows
	role   Role
	holder string
	faults [parts]error
	notes  map[string]string // to be said although rows flow, by what it is about

	// troubled is since when there has always been a fault that keeps this relay,
	// and perhaps not another, from publishing. failed is when publishing or
	// recording failed last. gaveUp is what unable said last.
	troubled, failed time.Time
	gaveUp           bool
}

// Health says whether rows can flow. It is safe for concurrent use.
func (r *Relay) Health() Health {
	state := r.health.state()
	state.Shards = r.share.now().Shards
	return state
}

func (h *health) state() Health {
	h.mu.Lock()
	defer h.mu.Unlock()
	role := h.role
	if role == "" {
		role = RoleStarting
	}
	if err := errors.Join(h.faults[:]...); err != nil {
		return Health{Role: role, Reason: err.Error()}
	}
	switch role {
	case RoleStarting:
		return Health{Role: role, Reason: "has not reached its outbox yet"}
	case RoleStandby:
		return Health{Role: role, Ready: true, Reason: "standing by for " + h.holder}
	case RoleStopped:
		return Health{Role: role, Reason: "stopped"}
	default:
		return Health{Role: role, Ready: true, Reason: strings.Join(slices.Sorted(maps.Values(h.notes)), "; ")}
	}
}

func (h *health) setRole(role Role, holder string) (changed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	changed = h.role != role || h.holder != holder
	h.role, h.holder = role, holder
	if role != RoleActive {
		// What kept this relay from publishing or recording is no longer its
		// business; whether it can reach broker and database still is.
		h.set(partPublish, nil)
		h.set(partRecord, nil)
		h.set(partStream, nil)
	}
	return changed
}

// note keeps in sight what has been found out about something, nothing for "".
func (h *health) note(about, what string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if what == "" {
		delete(h.notes, about)
		return
	}
	if h.notes == nil || len(h.notes) >= cacheMost {
		h.notes = make(map[string]string)
	}
	h.notes[about] = what
}

// set notes the fault of a part, nil for none, and since when there is trouble. mu
// is locked.
func (h *health) set(p part, err error) {
	now := time.Now()
	if err != nil && (p == partPublish || p == partRecord) {
		h.failed = now
	}
	h.faults[p] = err
	switch {
	case cmp.Or(h.faults[partBroker], h.faults[partPublish], h.faults[partRecord]) == nil:
		h.troubled = time.Time{}
	case h.troubled.IsZero():
		h.troubled = now
	}
}

// unable reports whether another relay, if there is one, should have this one's
// part: it has been in trouble for a whole lease. A fault of the database is none,
// it reaches everybody. It is able again when the trouble is over, but publishing
// and recording get a rest of three leases after they failed last: a standby cannot
// try them, so without it two half-broken relays would hand a source to and fro.
func (h *health) unable(lease time.Duration) (unable bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	switch {
	case h.troubled.IsZero():
		h.gaveUp = h.gaveUp && now.Sub(h.failed) < 3*lease
	case now.Sub(h.troubled) >= lease:
		h.gaveUp = true
	}
	return h.gaveUp
}

// fault notes that a part fails, or with a nil error that it works. Only changes
// are logged.
func (r *Relay) fault(ctx context.Context, p part, err error) {
	if errors.Is(err, nats.ErrReconnectBufExceeded) {
		// What the client says of a request while it has no connection: it may
		// keep none back. The words are about a buffer nobody has.
		err = nats.ErrDisconnected
	}
	r.health.mu.Lock()
	before := r.health.faults[p]
	if err != nil {
		err = fmt.Errorf("%v: %w", p, err)
	}
	r.health.set(p, err)
	r.health.mu.Unlock()
	switch {
	case err != nil && (before == nil || before.Error() != err.Error()):
		r.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "not ready", slog.Any("err", err))
	case err == nil && before != nil:
		r.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "works again", slog.String("part", p.String()))
	}
}
