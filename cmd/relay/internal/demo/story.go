package demo

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/dlq"
	"github.com/seed-5e04d8fb/jetbox/outbox"
)

const (
	durable    = "billing"
	maxDeliver = 4
	firstDelay = 100 * time.Millisecond
)

// commit is the first cycle.
func (d *demo) commit(ctx context.Context) error {
	errPower := errors.New("power failure")
	err := d.shop.place(ctx, 1, func() error { return errPower })
	if err := refused("an order with a failure injected", err, errPower); err != nil {
		return err
	}
	if err := d.shop.expect(ctx, 0, 0); err != nil {
		return fmt.Errorf("after a failure between order and event: %w", err)
	}
	d.tell.holds("a failure between order and event leaves neither: 0 orders, 0 rows in the outbox", "orders", 0, "rows", 0)

	if err := d.shop.place(ctx, 1, nil); err != nil {
		return err
	}
	if err := d.shop.expect(ctx, 1, 1); err != nil {
		return fmt.Errorf("after a commit: %w", err)
	}
	row, err := d.shop.row(ctx, 1)
	if err != nil {
		return err
	}
	if row.State != jetbox.Pending {
		return fmt.Errorf("row %d is %s, want %s", row.ID, row.State, jetbox.Pending)
	}
	d.tell.holds(fmt.Sprintf("one transaction has both: order 1, and event %s as row %d, %s", row.Event.ID, row.ID, row.State),
		"event", row.Event.ID, "row", row.ID, "status", row.State)
	return nil
}

// publish is the second cycle.
func (d *demo) publish(ctx context.Context) error {
	if err := d.startConsumer(ctx); err != nil {
		return err
	}
	if err := d.startRelay(ctx); err != nil {
		return err
	}
	row, err := d.published(ctx, 1)
	if err != nil {
		return err
	}
	msg, err := d.message(ctx, row)
	if err != nil {
		return err
	}
	d.tell.holds(fmt.Sprintf("row %d went %s -> %s; PubAck: stream %s, sequence %d, Nats-Msg-Id %s",
		row.ID, jetbox.Pending, row.State, row.Stream, row.StreamSeq, msg.Header.Get(jetbox.HeaderMsgID)),
		"row", row.ID, "status", row.State, "stream", row.Stream, "stream_seq", row.StreamSeq)
	if err := d.invoiced(ctx, 1); err != nil {
		return err
	}
	d.tell.holds("the consumer wrote 1 invoice for order 1, in one transaction with its ledger", "invoices", 1)
	return nil
}

func (d *demo) startConsumer(ctx context.Context) error {
	c, err := consumer.New(d.js, d.billing.handle, consumer.Config{
		Stream:      stream,
		Durable:     durable,
		MaxDeliver:  maxDeliver,
		Workers:     2,
		Backoff:     firstDelay,
		MaxBackoff:  time.Second,
		DeadLetters: d.letters,
		Logger:      d.cfg.Logger,
	})
	if err != nil {
		return err
	}
	router, err := dlq.NewRouter(d.letters, dlq.RouterConfig{EventStream: stream})
	if err != nil {
		return err
	}
	d.background(ctx, c.Run)
	d.background(ctx, router.Run)
	return nil
}

// poison is the third cycle.
func (d *demo) poison(ctx context.Context) error {
	for order := poisoned; order <= 4; order++ {
		if err := d.shop.place(ctx, order, nil); err != nil {
			return err
		}
	}
	for _, order := range []int{3, 4} {
		if err := d.invoiced(ctx, order); err != nil {
			return err
		}
	}
	if tries := len(d.billing.gaps()) + 1; tries >= maxDeliver {
		return fmt.Errorf("orders 3 and 4 had to wait until order %d was given up after %d deliveries", poisoned, tries)
	}
	d.tell.holds(fmt.Sprintf("order %d fails (%v); orders 3 and 4 have their invoices meanwhile", poisoned, errNoCountry),
		"error", errNoCountry.Error())

	var letter dlq.Letter
	err := eventually(ctx, fmt.Sprintf("a dead letter for order %d", poisoned), func(ctx context.Context) (bool, error) {
		found := 0
		for l, err := range d.letters.List(ctx, dlq.Filter{}) {
			if err != nil {
				return false, err
			}
			letter = l
			found++
		}
		return found == 1, nil
	})
	if err != nil {
		return err
	}
	gaps, err := growing(d.billing.gaps())
	if err != nil {
		return err
	}
	d.tell.holds(fmt.Sprintf("%d deliveries, with growing delays: %s", len(d.billing.gaps())+1, strings.Join(gaps, ", ")),
		"deliveries", len(gaps)+1, "delays", gaps)
	if letter.Deliveries != maxDeliver || letter.Reason != jetbox.ReasonMaxDeliveries || !strings.Contains(letter.Error, errNoCountry.Error()) {
		return fmt.Errorf("letter %s has %d deliveries, reason %q, error %q", letter.ID, letter.Deliveries, letter.Reason, letter.Error)
	}
	d.letter = letter.ID
	d.tell.holds(fmt.Sprintf("then it is one dead letter, %s: %s, %q", letter.ID, letter.Reason, letter.Error),
		"letter", letter.ID, "reason", letter.Reason, "error", letter.Error)
	return nil
}

// refused checks that something failed, and for the reason it should.
func refused(what string, got, want error) error {
	switch {
	case errors.Is(got, want):
		return nil
	case got == nil:
		return fmt.Errorf("%s succeeded, want the error %w", what, want)
	}
	return fmt.Errorf("%s: %w", what, got)
}

// growing checks delays that double, with a tenth of jitter.
func growing(gaps []time.Duration) ([]string, error) {
	if len(gaps) != maxDeliver-1 {
		return nil, fmt.Errorf("%d delays (%v), want %d", len(gaps), gaps, maxDeliver-1)
	}
	var out []string
	for i, gap := range gaps {
		if least := firstDelay << i * 85 / 100; gap < least {
			return nil, fmt.Errorf("delay %d of %v is %v, want at least %v", i+1, gaps, gap, least)
		}
		out = append(out, gap.Round(time.Millisecond).String())
	}
	return out, nil
}

// published waits until an order's row is recorded as published.
func (d *demo) published(ctx context.Context, order int) (row outbox.Entry, err error) {
	err = eventually(ctx, fmt.Sprintf("row of order %d PUBLISHED", order), func(ctx context.Context) (bool, error) {
		row, err = d.shop.row(ctx, order)
		return row.State == jetbox.Published, err
	})
	return row, err
}

// message reads what the stream has for a row.
func (d *demo) message(ctx context.Context, row outbox.Entry) (*jetstream.RawStreamMsg, error) {
	s, err := d.js.Stream(ctx, stream)
	if err != nil {
		return nil, err
	}
	msg, err := s.GetMsg(ctx, row.StreamSeq)
	if err != nil {
		return nil, fmt.Errorf("read sequence %d of %s: %w", row.StreamSeq, stream, err)
	}
	if id := msg.Header.Get(jetbox.HeaderCEID); id != row.Event.ID {
		return nil, fmt.Errorf("sequence %d of %s is event %q, want %q", row.StreamSeq, stream, id, row.Event.ID)
	}
	return msg, nil
}

// invoiced waits until billing has handled an order, and checks that it has
// done so once.
func (d *demo) invoiced(ctx context.Context, order int) error {
	var n int
	err := eventually(ctx, fmt.Sprintf("an invoice for order %d", order), func(ctx context.Context) (bool, error) {
		var err error
		n, err = d.billing.invoices(ctx, order)
		return n > 0, err
	})
	if err == nil && n != 1 {
		err = fmt.Errorf("order %d has %d invoices, want 1", order, n)
	}
	return err
}
