package consumer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
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
	// is still open or was rolled back. After an error that is not apply's own
	// the outcome may be unknown; asking again tells.
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
		consumer := d.Stream + "/" + d.Consumer
		var own error // the handler's: it reaches the letter in its own words
		seen, err := l.Do(ctx, consumer, d.ledgerKey(), func(ctx context.Context, tx Tx) error {
			own = h(ctx, tx, d)
			return own
		})
		if err != nil && own != nil {
			return own
		}
		if err != nil {
			return fmt.Errorf("handle %s: %w", d.where(), err)
		}
		d.duplicate = seen
		return nil
	}
}

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
