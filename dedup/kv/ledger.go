// Package kv keeps a ledger of handled events in a NATS key-value bucket, for
// effects that are elsewhere: a crash between the effect and its mark repeats the
// effect.
//
// Use it where the effect is a call to another service, several instances share
// the work, and there is no database whose transaction the effect could be in:
// dedup/sqlite and dedup/postgres promise one effect, this does not. It has no
// DoAll: there is no transaction for several keys.
//
// A key has one of two states. Whoever creates it has it in progress and renews
// that while apply runs. After success it is done; after an error, a panic or
// runtime.Goexit it is deleted. A concurrent call with the same key, in this
// process or another, waits for that. When the one in progress is not renewed
// for [Config.Lease] its process is taken for dead, and who waits takes over; a
// process that was only stopped, or cut off, for so long may then repeat the
// effect with it. No clocks are compared: each waits by its own.
//
// Entries go by the bucket's age limit, the retention; whatever else is in
// doubt, nothing keeps them longer.
package kv

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/dedup"
)

// DefaultBucket is the bucket's name unless configured.
const DefaultBucket = "JETBOX_LEDGER"

const defaultLease = 30 * time.Second

// Config tunes a [Ledger]. The zero value is ready to use.
type Config struct {
	// Bucket is where the entries are. It is the ledger's own. Default
	// [DefaultBucket].
	Bucket string

	// Retention is how long an entry is kept. Default [dedup.DefaultRetention].
	Retention time.Duration

	// Replicas is how many servers of a cluster a new bucket is kept on. Default
	// 1.
	Replicas int

	// Lease is how long an entry stays in progress that nobody renews. Default
	// 30s.
	Lease time.Duration

	// Logger is told when an effect could not be marked. Default [slog.Default].
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Bucket == "" {
		c.Bucket = DefaultBucket
	}
	if c.Retention == 0 {
		c.Retention = dedup.DefaultRetention
	}
	if c.Replicas == 0 {
		c.Replicas = 1
	}
	if c.Lease == 0 {
		c.Lease = defaultLease
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// validate leaves the bucket's name to the client, whose error names it.
func (c Config) validate() error {
	const minLease = time.Second
	switch {
	case c.Lease < minLease:
		return fmt.Errorf("dedup/kv: Lease is %v, want at least %v", c.Lease, minLease)
	case c.Retention < 2*c.Lease:
		return fmt.Errorf("dedup/kv: Retention is %v, want at least twice the Lease of %v", c.Retention, c.Lease)
	case c.Replicas < 1:
		return fmt.Errorf("dedup/kv: Replicas is %d, want a positive count", c.Replicas)
	}
	return nil
}

// Ledger remembers handled events in a bucket. It is safe for concurrent use,
// also by several processes.
type Ledger struct {
	kv  jetstream.KeyValue
	cfg Config
}

// New creates the bucket if it is missing, with file storage. One that exists is
// used as it is, unless it forgets before the retention: that is an error with
// both numbers. It keeps js, whose connection the caller closes after the last
// Do, and starts nothing.
func New(ctx context.Context, js jetstream.JetStream, cfg Config) (*Ledger, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	bucket, err := js.KeyValue(ctx, cfg.Bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		bucket, err = js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
			Bucket: cfg.Bucket, Description: "events handled, by package dedup/kv of jetbox",
			TTL: cfg.Retention, Storage: jetstream.FileStorage, Replicas: cfg.Replicas,
		})
		if errors.Is(err, jetstream.ErrBucketExists) { // another process was faster
			bucket, err = js.KeyValue(ctx, cfg.Bucket)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", cfg.Bucket, err)
	}
	status, err := bucket.Status(ctx)
	if err != nil {
		return nil, fmt.Errorf("look up bucket %s: %w", cfg.Bucket, err)
	}
	if ttl := status.TTL(); ttl > 0 && ttl < cfg.Retention {
		return nil, fmt.Errorf("dedup/kv: Retention is %v, but bucket %s forgets after %v", cfg.Retention, cfg.Bucket, ttl)
	}
	return &Ledger{kv: bucket, cfg: cfg}, nil
}

// Seen reports whether there is an entry of an apply that succeeded.
func (l *Ledger) Seen(ctx context.Context, consumer, key string) (seen bool, err error) {
	e, err := l.kv.Get(ctx, entryName(consumer, key))
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for %q in the ledger: %w", key, err)
	}
	return read(e).State == stateDone, nil
}

// value is what an entry holds: for people, but for the state and the holder,
// which is the call that made it.
type value struct {
	State    string    `json:"state"`
	Holder   string    `json:"holder"`
	Consumer string    `json:"consumer"`
	Key      string    `json:"key"`
	At       time.Time `json:"at"`
}

const (
	stateInProgress = "in progress"
	stateDone       = "done"
)

func (v value) bytes() []byte {
	v.At = time.Now().UTC()
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // texts and a time
	}
	return b
}

// read takes what it cannot read for somebody's work in progress.
func read(e jetstream.KeyValueEntry) (v value) {
	if json.Unmarshal(e.Value(), &v) != nil {
		return value{}
	}
	return v
}

// entryName makes a name that every bucket takes, of any two texts.
func entryName(consumer, key string) string {
	h := sha256.New()
	h.Write(binary.AppendUvarint(nil, uint64(len(consumer))))
	h.Write([]byte(consumer))
	h.Write([]byte(key))
	return base64.RawURLEncoding.EncodeToString(h.Sum(nil))
}
