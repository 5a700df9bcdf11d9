package consumer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"github.com/seed-5e04d8fb/jetbox"
)

// Ledger remembers which events were handled, in the transaction of their
// effect. Tx is what the effect is written with, such as *sql.Tx. It must be
// safe for concurrent use.
type Ledger[Tx any] interface {
	// Do runs apply unless the key is there for the consumer already, and
	// commits the effect together with the key: both or neither. seen reports
	// that an earlier call committed the key, and is never answered for one that
	// is still open or was rolled back. An error of apply is returned as it is or
	// wrapped. After any other the outcome may be unknown; asking again tells.
	Do(ctx context.Context, consumer, key string, apply func(ctx context.Context, tx Tx) error) (seen bool, err error)
}

// maxKey is the longest key a ledger has to take. Longer ones, which only other
// programs can send, are hashed.
const maxKey = 512

// Once returns a Handler whose effect happens once however often its message is
// delivered: h writes with tx, and l commits that together with the event's
// idempotency key. h must not commit or roll back tx, and must do nothing else
// that a repeat would harm.
//
// The key is that of the event. A message without one is known by its stream,
// sequence and time of storage, which two copies of it do not share.
func Once[Tx any](l Ledger[Tx], h func(ctx context.Context, tx Tx, d *Delivery) error) Handler {
	return func(ctx context.Context, d *Delivery) error {
		var own error // the handler's
		seen, err := l.Do(ctx, d.ledgerName(), d.ledgerKey(), func(ctx context.Context, tx Tx) error {
			own = h(ctx, tx, d)
			return own
		})
		if own != nil && errors.Is(err, own) {
			return err // it reaches the letter in its own words, and with what the ledger adds
		}
		if err != nil {
			return fmt.Errorf("handle %s: %w", d.where(), err)
		}
		d.duplicate = seen
		return nil
	}
}

// OncePrepared is [Once] for handlers that are slow: prepare does what takes
// long, outside the transaction, and apply writes its result. So a ledger in
// SQLite keeps others from writing only as long as apply takes.
//
// prepare may run more than once for an event, also at the same time, and must
// do no harm by it. A ledger with a method
//
//	Seen(ctx context.Context, consumer, key string) (seen bool, err error)
//
// is asked first, so that prepare is spared for what was handled long ago.
func OncePrepared[Tx, P any](
	l Ledger[Tx],
	prepare func(ctx context.Context, d *Delivery) (P, error),
	apply func(ctx context.Context, tx Tx, d *Delivery, p P) error,
) Handler {
	return func(ctx context.Context, d *Delivery) error {
		if s, ok := l.(interface {
			Seen(ctx context.Context, consumer, key string) (bool, error)
		}); ok {
			seen, err := s.Seen(ctx, d.ledgerName(), d.ledgerKey())
			if err != nil {
				return fmt.Errorf("handle %s: %w", d.where(), err)
			}
			if seen {
				d.duplicate = true
				return nil
			}
		}
		p, err := prepare(ctx, d)
		if err != nil {
			return err
		}
		return Once(l, func(ctx context.Context, tx Tx, d *Delivery) error {
			return apply(ctx, tx, d, p)
		})(ctx, d)
	}
}

// BatchLedger is a [Ledger] for many events in one transaction.
type BatchLedger[Tx any] interface {
	// DoAll runs apply once, in one transaction with entries for the keys that
	// have none yet, and commits both: all or nothing. fresh are the indexes in
	// keys of those, ascending; of equal keys only the first is fresh. With
	// none, apply is not called. When DoAll returns nil, seen[i] is whether
	// keys[i] had an entry, or repeats an earlier one of the call.
	DoAll(ctx context.Context, consumer string, keys []string, apply func(ctx context.Context, tx Tx, fresh []int) error) (seen []bool, err error)
}

// OnceAll is [Once] for batches: one transaction, and one commit, for all of
// them. h gets those whose effect has not happened.
func OnceAll[Tx any](l BatchLedger[Tx], h func(ctx context.Context, tx Tx, ds []*Delivery) error) BatchHandler {
	return func(ctx context.Context, ds []*Delivery) error {
		keys := make([]string, len(ds))
		for i, d := range ds {
			keys[i] = d.ledgerKey()
		}
		var own error
		seen, err := l.DoAll(ctx, ds[0].ledgerName(), keys, func(ctx context.Context, tx Tx, fresh []int) error {
			some := make([]*Delivery, len(fresh))
			for i, n := range fresh {
				some[i] = ds[n]
			}
			own = h(ctx, tx, some)
			return own
		})
		if own != nil && errors.Is(err, own) {
			return err
		}
		if err != nil {
			return fmt.Errorf("handle %d from %s: %w", len(ds), ds[0].where(), err)
		}
		for i, d := range ds {
			d.duplicate = seen[i]
		}
		return nil
	}
}

// ledgerName is whose entries they are.
func (d *Delivery) ledgerName() string { return d.Stream + "/" + d.Consumer }

// ledgerKey identifies the event for the ledger. A replay has the key of its
// original.
func (d *Delivery) ledgerKey() string {
	hasOwn := d.Letter == "" || len(d.RawHeader[jetbox.HeaderIdempotencyKey]) > 0
	switch {
	case d.Key != "" && hasOwn && len(d.Key) <= maxKey:
		return d.Key
	case d.Key != "" && hasOwn:
		sum := sha256.Sum256([]byte(d.Key))
		return "sha256:" + hex.EncodeToString(sum[:])
	case d.Letter != "":
		// The message ID of a replay is fresh. The letter's last token is the
		// original's sequence and time.
		last := d.Letter[strings.LastIndexByte(d.Letter, '.')+1:]
		seq, stored, _ := strings.Cut(last, "-")
		stream, _, _ := strings.Cut(d.ReplayFor, "/")
		return stream + "/" + seq + "/" + stored
	default:
		return fmt.Sprintf("%s/%d/%d", d.Stream, d.StreamSeq, d.Stored.UnixNano())
	}
}
