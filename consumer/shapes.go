package consumer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/seed-5e04d8fb/jetbox"
)

// JSON returns a Handler for events whose payload is a T in JSON. One that is
// not becomes a dead letter at once: no retry makes it readable.
func JSON[T any](h func(ctx context.Context, v T, d *Delivery) error) Handler {
	return func(ctx context.Context, d *Delivery) error {
		v, err := Decode[T](d)
		if err != nil {
			return err
		}
		return h(ctx, v, d)
	}
}

// Decode reads the payload as JSON. Its error is permanent.
func Decode[T any](d *Delivery) (T, error) {
	var v T
	if err := json.Unmarshal(d.Payload, &v); err != nil {
		return v, jetbox.Permanent(fmt.Errorf("payload as %T: %w", v, err))
	}
	return v, nil
}

// ErrNoRoute is the permanent error for an event whose type has no handler.
var ErrNoRoute = errors.New("no handler for this type of event")

// Routes is a handler for each type of event. The one for "" gets what has no
// type or another one; without it, those are dead letters. It must not be
// changed once it is in use.
type Routes map[string]Handler

// Handle is the Handler that looks up the event's type.
func (r Routes) Handle(ctx context.Context, d *Delivery) error {
	h := r[d.Type]
	if h == nil {
		h = r[""]
	}
	if h == nil {
		return jetbox.Permanent(fmt.Errorf("%w: %q", ErrNoRoute, d.Type))
	}
	return h(ctx, d)
}
