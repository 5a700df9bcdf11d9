// Package dedup remembers which events a consumer has handled, so that the
// effect of an event happens once although it may be delivered many times.
//
// A ledger is these methods:
//
//	Do(ctx, consumer, key, apply) (seen bool, err error)
//	Seen(ctx, consumer, key) (bool, error)
//
// and, except for dedup/kv, which has no transaction for several keys:
//
//	DoAll(ctx, consumer, keys, apply) (seen []bool, err error)
//
// Do runs apply unless the key is there for that consumer already. Every ledger
// promises, and package deduptest checks:
//
//   - An apply that returns an error, panics or ends its goroutine leaves no
//     entry.
//   - "seen" is answered only for an apply that succeeded, never for one that
//     still runs or was undone. A concurrent call with the same key waits for
//     the first one's fate, and runs its own apply if that failed.
//   - Consumers are independent: the same key counts once for each of them.
//
// What differs is what happens in a crash:
//
//	dedup/sqlite, dedup/postgres  the entry is in the transaction of the effect:
//	                              both or neither, whatever dies and whenever
//	dedup/kv                      for effects elsewhere: a crash between the effect
//	                              and its mark repeats the effect
//	Memory                        for effects elsewhere: forgets when the process ends
//
// Entries are kept for a retention, by default a week, and then forgotten: an
// event delivered again after that happens again. So it must be longer than an
// event can take to come back: the time all its deliveries take, an outage, and
// the age at which somebody still replays a dead letter. The databases' ledgers
// have a KeepFunc that says what may still come, and keep the entries of that
// whatever the retention: method Oldest of package consumer's Consumer is made
// for it, and where dead letters are replayed, the Stored of the oldest open one.
// Such a ledger forgets only while its Run runs, which the application starts.
//
// Package dedup/idempotent is the same for HTTP requests with an Idempotency-Key.
package dedup

import "time"

// DefaultRetention is how long a ledger keeps an entry unless told otherwise.
const DefaultRetention = 7 * 24 * time.Hour
