package postgres

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

const (
	// After rows were found, Wait says for busyFor that there may be more, at
	// growing intervals. Only then does the relay call itself idle: each time it
	// does costs a write, and from then on each writer a notification.
	busyFirst = 2 * time.Millisecond
	busyFor   = 60 * time.Millisecond

	// poll is the interval where notifications do not come.
	poll = 100 * time.Millisecond

	// probeEvery is how often it is tried whether they do, and probeWait how
	// long one may take.
	probeEvery = time.Minute
	probeWait  = 2 * time.Second

	// deafFor is how long it is polled before a new try to listen.
	deafFor = 10 * time.Second
)

// wakeState is what Wait knows. s.mu guards it.
type wakeState struct {
	prepared bool // the server has prepared transactions: they must not notify
	worked   time.Time
	step     time.Duration
	idle     bool      // the relay's row says so
	listener *listener // not in use; nil while it is, and before there is one
	busy     bool      // some Wait uses it, or makes one
	deaf     bool      // notifications do not arrive, as was found out
	deafTill time.Time // until then none is tried
}

// worked notes whether a claim has found rows.
func (s *Store) worked(found bool) {
	if !found {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wake.worked, s.wake.step = time.Now(), busyFirst
}

// Wait returns nil when there may be something to claim, or ctx's error. It is a
// hint, in both directions.
//
// While rows come it looks again soon. When none have for a moment, the relay
// marks itself as idle, and from then on the trigger of the outbox notifies it.
// That goes through a connection of its own, which is proved by a notification
// sent through another: behind a pooler in transaction mode none arrives. Then,
// and with Config.NoNotify, and where the server allows prepared transactions (one
// that has notified cannot be prepared), it polls.
func (s *Store) Wait(ctx context.Context) error {
	for {
		if d, idle := s.soon(); d > 0 {
			if idle { // rows were found without a notification
				if err := s.setIdle(ctx, false); err != nil {
					return err
				}
			}
			return sleep(ctx, d)
		}
		l := s.listen(ctx)
		if l == nil {
			if err := sleep(ctx, poll); err != nil {
				return err
			}
			shards, holds := s.watched()
			if !holds {
				continue // nothing here is this relay's
			}
			if idle, err := s.idle(ctx, shards); err != nil {
				return fmt.Errorf("watch outbox %q: %w", s.cfg.Table, err)
			} else if !idle {
				return nil
			}
			continue
		}
		woken, err := s.await(ctx, l)
		if err != nil || woken {
			return err
		}
	}
}

// soon returns how long to wait for the next look after rows were found lately,
// or 0, and whether the relay's row still says that it is idle.
func (s *Store) soon() (d time.Duration, idle bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.wake.worked) > busyFor {
		return 0, s.wake.idle
	}
	d = s.wake.step
	s.wake.step *= 2
	return d, s.wake.idle
}

// watched returns the shards whose rows are waited for; nil stands for all.
func (s *Store) watched() (shards []int16, holds bool) {
	s.mu.Lock()
	holds = len(s.hand.shards) > 0
	s.mu.Unlock()
	return s.claimable(), holds
}

// listener is a connection that gets the outbox's notifications.
type listener struct {
	conn   *pgx.Conn
	proved time.Time // when a notification arrived last
}

// listen returns a listener for the caller alone, or nil when there is none to be
// had now: it is in use, or notifications do not arrive.
func (s *Store) listen(ctx context.Context) *listener {
	s.mu.Lock()
	w := &s.wake
	off := w.busy || s.cfg.NoNotify || w.prepared || len(s.hand.shards) == 0 || time.Now().Before(w.deafTill)
	l := w.listener
	if !off {
		w.busy, w.listener = true, nil
	}
	s.mu.Unlock()
	if off {
		return nil
	}
	if l != nil {
		return l
	}
	l, err := s.connectListener(ctx)
	if err == nil {
		err = s.probe(ctx, l)
	}
	s.heard(ctx, l, err)
	if err != nil {
		return nil
	}
	return l
}

func (s *Store) channel(ctx context.Context, conn *pgx.Conn) (name string, err error) {
	err = conn.QueryRow(ctx, `SELECT 'jetbox_' || $1::regclass::oid`, s.sql("{outbox}")).Scan(&name)
	return name, err
}

func (s *Store) connectListener(ctx context.Context) (*listener, error) {
	if err := s.gate.enter(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	cfg := s.pool.Config().ConnConfig // a copy
	cfg.RuntimeParams["application_name"] += " listener"
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		s.gate.note(err)
		return nil, err
	}
	l := &listener{conn: conn}
	name, err := s.channel(ctx, conn)
	if err == nil {
		_, err = conn.Exec(ctx, `LISTEN "`+name+`"`)
	}
	if err != nil {
		return l, err
	}
	return l, nil
}

// errDeaf is the answer of a probe that did not come back.
var errDeaf = errors.New("a notification does not arrive: is there a pooler in transaction mode?")

// probe sends a notification through the pool and waits for it. Sent on the
// listening connection itself it would arrive even where none from others does.
func (s *Store) probe(ctx context.Context, l *listener) error {
	token := "probe " + uuid.NewString()
	ctx, cancel := context.WithTimeout(ctx, probeWait)
	defer cancel()
	name, err := s.channel(ctx, l.conn)
	if err != nil {
		return err
	}
	if _, err := s.pool.Exec(ctx, `SELECT pg_notify($1, $2)`, name, token); err != nil {
		return err
	}
	for {
		n, err := l.conn.WaitForNotification(ctx)
		switch {
		case err == nil && n.Payload == token:
			l.proved = time.Now()
			return nil
		case err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded):
			return errDeaf
		case err != nil:
			return err
		}
	}
}

// heard notes how a try to listen went, and says so when that has changed.
func (s *Store) heard(ctx context.Context, l *listener, err error) {
	if ctx.Err() != nil {
		s.drop(l)
		return
	}
	s.mu.Lock()
	before := s.wake.deaf
	s.wake.deaf = err != nil
	if err != nil {
		s.wake.deafTill = time.Now().Add(deafFor)
	}
	s.mu.Unlock()
	switch {
	case err != nil && !before:
		s.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "no notifications from the database, polling instead", slog.Any("err", err))
	case err == nil && before:
		s.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "notifications from the database arrive again")
	}
	if err != nil {
		s.drop(l)
	}
}

// drop ends the use of a listener, and the listener.
func (s *Store) drop(l *listener) {
	if l != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = l.conn.Close(ctx) // it may be broken, which is why it is dropped
	}
	s.mu.Lock()
	s.wake.idle, s.wake.busy = false, false
	s.mu.Unlock()
}

// await says that the relay is idle, once, so that the caller looks again for
// what came meanwhile; after that it waits for a notification.
func (s *Store) await(ctx context.Context, l *listener) (woken bool, err error) {
	s.mu.Lock()
	idle := s.wake.idle
	s.mu.Unlock()
	if !idle {
		err := s.setIdle(ctx, true)
		s.giveBack(l)
		return err == nil, err
	}
	quiet, cancel := context.WithTimeout(ctx, probeEvery)
	defer cancel()
	n, err := l.conn.WaitForNotification(quiet)
	switch {
	case ctx.Err() != nil:
		s.giveBack(l)
		return false, ctx.Err()
	case err == nil && strings.HasPrefix(n.Payload, "probe "):
		s.giveBack(l)
		return false, nil
	case err == nil:
		err = s.setIdle(ctx, false)
		s.giveBack(l)
		return true, err
	case quiet.Err() != nil:
		err = s.probe(ctx, l)
	}
	switch {
	case errors.Is(err, errDeaf):
		s.heard(ctx, l, err)
		return true, nil
	case err != nil: // what was sent meanwhile is lost: look, and listen anew
		s.drop(l)
		return true, nil
	}
	s.giveBack(l)
	return false, nil
}

func (s *Store) giveBack(l *listener) {
	s.mu.Lock()
	s.wake.listener, s.wake.busy = l, false
	s.mu.Unlock()
}

// setIdle writes into the relay's row whether writers are to notify. Nothing is
// lost with it: it need not be durable.
func (s *Store) setIdle(ctx context.Context, idle bool) error {
	s.mu.Lock()
	owner := s.hand.owner
	s.mu.Unlock()
	b := new(batch)
	b.Queue(`SELECT set_config('synchronous_commit', 'off', true), set_config('lock_timeout', $1, true)`, millis(lockTimeout))
	b.Queue(s.sql(`UPDATE {relay} SET idle = $2 WHERE owner = $1`), owner, idle)
	if err := s.send(ctx, b); err != nil {
		return fmt.Errorf("watch outbox %q: %w", s.cfg.Table, err)
	}
	s.mu.Lock()
	s.wake.idle = idle
	s.mu.Unlock()
	return nil
}

// hangUp closes the listener that nobody uses.
func (s *Store) hangUp() {
	s.mu.Lock()
	l := s.wake.listener
	s.wake.listener = nil
	s.mu.Unlock()
	s.drop(l)
}

// idle asks without a write whether there is nothing to claim, so that a relay with
// nothing to do costs little. In the order of an index: read in any other, a queue that
// has just been emptied is read to its end.
func (s *Store) idle(ctx context.Context, shards []int16) (idle bool, err error) {
	const first = `(SELECT q.id FROM {queue} q ORDER BY q.id LIMIT 1) IS NOT NULL`
	const ofShards = `EXISTS (SELECT FROM unnest($1::smallint[]) AS m (shard)
		WHERE (SELECT q.id FROM {queue} q WHERE q.shard = m.shard ORDER BY q.id LIMIT 1) IS NOT NULL)`
	const due = ` OR coalesce((SELECT w.due FROM {wait} w WHERE w.due IS NOT NULL ORDER BY w.due LIMIT 1) <= clock_timestamp(), false)`
	query, args := first, []any(nil)
	if shards != nil {
		query, args = ofShards, []any{shards}
	}
	var work bool
	err = s.do(ctx, func(ctx context.Context) error {
		return s.pool.QueryRow(ctx, s.sql(`SELECT `+query+due), args...).Scan(&work)
	})
	return !work, err
}
