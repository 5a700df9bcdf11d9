// Package dedup remembers which events a consumer has handled, so that the
// effect of an event happens once although it may be delivered many times.
//
// A ledger is one method:
//
//	Do(ctx, consumer, key, apply) (seen bool, err error)
//
// It runs apply unless the key is there for that consumer already. Every ledger
// promises, and package deduptest checks:
//
//   - An apply that returns an error or panics leaves no entry.
//   - "seen" is answered only for an apply that succeeded, never for one that
//     still runs or was undone. A concurrent call with the same key waits for
//     the first one's fate, and runs its own apply if that failed.
//   - Consumers are independent: the same key counts once for each of them.
//
// What differs is what happens in a crash. Package dedup/sqlite writes the entry
// in the transaction of the effect: both or neither, whatever happens. [Memory]
// is for handlers whose effect is elsewhere, and forgets when the process ends.
//
// Entries are kept for a retention, by default a week, and then forgotten: an
// event delivered again after that happens again. It must be longer than an
// event can take to come back: the time all its deliveries take, an outage, and
// the age at which somebody still replays a dead letter. Nothing checks that
// yet. There are no ledgers on PostgreSQL and NATS KV yet, no batches, and no
// HTTP middleware.
package dedup

import "time"

// DefaultRetention is how long a ledger keeps an entry unless told otherwise.
const DefaultRetention = 7 * 24 * time.Hour
