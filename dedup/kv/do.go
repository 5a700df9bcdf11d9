package kv

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// settleTimeout is how long marking or deleting an entry may take, whatever has
// become of the caller's context.
const settleTimeout = 10 * time.Second

// errTakenOver is the cause of the cancel of apply's context when another process
// has taken the key, because this one did not renew it for so long.
var errTakenOver = errors.New("another process has taken over the key")

// Do runs apply unless an earlier call with this consumer and key succeeded
// within the retention, which it reports as seen. While another call's apply
// runs, it waits for that one's fate or for ctx. The second argument of apply
// means nothing: there is no transaction.
//
// A success that cannot be marked is logged and reported as success: an error
// would have the event delivered, and its effect repeated, for certain.
func (l *Ledger) Do(ctx context.Context, consumer, key string, apply func(ctx context.Context, tx struct{}) error) (seen bool, err error) {
	c := &claim{l: l, name: entryName(consumer, key), value: value{Holder: rand.Text(), Consumer: consumer, Key: key}}
	if seen, err := c.take(ctx); seen || err != nil {
		return seen, err
	}
	return false, c.run(ctx, apply)
}

// claim is one call's hold on an entry.
type claim struct {
	l        *Ledger
	name     string
	value    value
	revision uint64
}

func (c *claim) bytes(state string) []byte {
	c.value.State = state
	return c.value.bytes()
}

// take makes the entry, or waits for the fate of the one that is there.
func (c *claim) take(ctx context.Context) (seen bool, err error) {
	const shortest, longest = 20 * time.Millisecond, 500 * time.Millisecond
	var other uint64 // the revision of the one waited for
	var since time.Time
	for wait := shortest; ; wait = min(2*wait, longest) {
		rev, err := c.l.kv.Create(ctx, c.name, c.bytes(stateInProgress))
		if err == nil {
			c.revision = rev
			return false, nil
		}
		if !errors.Is(err, jetstream.ErrKeyExists) {
			return false, c.failed("enter", err)
		}
		e, err := c.l.kv.Get(ctx, c.name)
		switch {
		case errors.Is(err, jetstream.ErrKeyNotFound): // it has failed and is gone
		case err != nil:
			return false, c.failed("look for", err)
		case read(e).State == stateDone:
			return true, nil
		case c.owns(e): // the answer to our own try was lost
			return false, nil
		case e.Revision() != other:
			other, since = e.Revision(), time.Now()
		case time.Since(since) >= c.l.cfg.Lease:
			// Of several who see it die, one gets this revision.
			rev, err := c.l.kv.Update(ctx, c.name, c.bytes(stateInProgress), other)
			if err == nil {
				c.revision = rev
				return false, nil
			}
			if !errors.Is(err, jetstream.ErrKeyRevisionMismatch) {
				return false, c.failed("take over", err)
			}
		}
		if err := sleep(ctx, wait); err != nil {
			return false, err
		}
	}
}

func (c *claim) failed(what string, err error) error {
	return fmt.Errorf("%s %q in the ledger: %w", what, c.value.Key, err)
}

// run settles the entry also when apply panics or ends its goroutine.
func (c *claim) run(ctx context.Context, apply func(context.Context, struct{}) error) (err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := c.renew(ctx, cancel)
	succeeded := false
	defer func() {
		stop()
		ctx, stopSettling := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
		defer stopSettling()
		if succeeded {
			c.mark(ctx)
		} else {
			// If this fails the lease runs out.
			_ = c.l.kv.Delete(ctx, c.name, jetstream.LastRevision(c.revision))
		}
		cancel(nil)
	}()
	err = apply(ctx, struct{}{})
	succeeded = err == nil
	return err
}

// renew keeps the entry from looking dead until the returned stop is called,
// which waits for its end. revision is the goroutine's until then.
func (c *claim) renew(ctx context.Context, cancel context.CancelCauseFunc) (stop func()) {
	// Apply may go on after its context ended, and is alive as long.
	ctx, end := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for sleep(ctx, c.l.cfg.Lease/3) == nil {
			if err := c.update(ctx, stateInProgress); errors.Is(err, errTakenOver) {
				cancel(err)
				return
			}
		}
	}()
	return func() {
		end()
		<-ended
	}
}

// update writes the entry if it is still ours, or returns errTakenOver. After
// another error nobody knows, and it may be tried again.
func (c *claim) update(ctx context.Context, state string) error {
	rev, err := c.l.kv.Update(ctx, c.name, c.bytes(state), c.revision)
	if err == nil {
		c.revision = rev
		return nil
	}
	if !errors.Is(err, jetstream.ErrKeyRevisionMismatch) {
		return err
	}
	// It may be an update of our own, whose answer was lost.
	e, getErr := c.l.kv.Get(ctx, c.name)
	switch {
	case getErr != nil && !errors.Is(getErr, jetstream.ErrKeyNotFound):
		return getErr
	case getErr != nil || !c.owns(e):
		return errTakenOver
	}
	return err
}

// owns reports whether the entry is this claim's, and then notes its revision.
func (c *claim) owns(e jetstream.KeyValueEntry) (ours bool) {
	if read(e).Holder != c.value.Holder {
		return false
	}
	c.revision = e.Revision()
	return true
}

// mark enters the success, for as long as there is time.
func (c *claim) mark(ctx context.Context) {
	const pause = 250 * time.Millisecond
	for {
		err := c.update(ctx, stateDone)
		if err == nil {
			return
		}
		if !errors.Is(err, errTakenOver) && sleep(ctx, pause) == nil {
			continue
		}
		c.l.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "event handled but not marked in the ledger: its effect may be repeated",
			slog.String("consumer", c.value.Consumer), slog.String("key", c.value.Key), slog.Any("err", err))
		return
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
