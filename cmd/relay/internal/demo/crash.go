package demo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// crashed is the order whose relay is killed.
const crashed = 5

// noMark is a trigger that lets a relay do everything but record: it keeps the
// moment between PubAck and mark open for as long as it takes to kill it.
const (
	noMarkText = "demo: no marking now"
	noMark     = `CREATE TRIGGER demo_no_mark BEFORE UPDATE OF status ON outbox WHEN new.status = 'PUBLISHED'
		BEGIN SELECT raise(ABORT, '` + noMarkText + `'); END`
	mark = `DROP TRIGGER demo_no_mark`
)

// crash is the first half of the fourth cycle.
func (d *demo) crash(ctx context.Context) error {
	if err := d.stopRelay(); err != nil {
		return fmt.Errorf("stop the relay: %w", err)
	}
	if _, err := d.store.DB().ExecContext(ctx, noMark); err != nil {
		return fmt.Errorf("create trigger: %w", err)
	}
	if err := d.shop.place(ctx, crashed, nil); err != nil {
		return err
	}
	pid, err := d.killAfterPubAck(ctx)
	if err != nil {
		return err
	}
	row, err := d.shop.row(ctx, crashed)
	if err != nil {
		return err
	}
	if row.State != jetbox.Processing {
		return fmt.Errorf("row %d is %s after the kill, want %s", row.ID, row.State, jetbox.Processing)
	}
	copies, err := d.copies(ctx, row.Event.ID)
	if err != nil {
		return err
	}
	if len(copies) != 1 {
		return fmt.Errorf("stream %s has event %s at the sequences %v, want one", stream, row.Event.ID, copies)
	}
	d.tell.holds(fmt.Sprintf("relay process %d had its PubAck and was killed (SIGKILL) before the mark: stream sequence %d, row %d still %s",
		pid, copies[0], row.ID, row.State), "pid", pid, "stream_seq", copies[0], "row", row.ID, "status", row.State)
	return d.takeOver(ctx, row.Event.ID)
}

// killAfterPubAck runs a relay in a process of its own, waits until it says that
// it cannot record what the broker acknowledged, and kills it.
func (d *demo) killAfterPubAck(ctx context.Context) (pid int, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmd := d.cfg.Relay(ctx, "run",
		"--db", "sqlite:"+d.dbFile(), "--nats", d.broker.ClientURL(), "--stream", stream,
		"--http", "off", "--lease", lease.String(), "--poll-interval", "20ms", "--log-level", "warn")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return 0, fmt.Errorf("start a relay process: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start a relay process: %w", err)
	}
	last, found := "", false
	for lines := bufio.NewScanner(stderr); !found && lines.Scan(); {
		last = lines.Text()
		found = strings.Contains(last, noMarkText)
	}
	if err := cmd.Process.Kill(); err != nil && found {
		return 0, fmt.Errorf("kill the relay process: %w", err)
	}
	_, _ = io.Copy(io.Discard, stderr)
	_ = cmd.Wait() // it was killed, or has said why it ended
	if !found {
		return 0, errors.Join(fmt.Errorf("the relay process did not get to the mark; its last words: %q", last), context.Cause(ctx))
	}
	return cmd.Process.Pid, nil
}

// takeOver is the second half: another relay finds the row.
func (d *demo) takeOver(ctx context.Context, event string) error {
	if _, err := d.store.DB().ExecContext(ctx, mark); err != nil {
		return fmt.Errorf("drop trigger: %w", err)
	}
	before := d.duplicates.count()
	if err := d.startRelay(ctx); err != nil {
		return err
	}
	row, err := d.published(ctx, crashed)
	if err != nil {
		return err
	}
	if n := d.duplicates.count() - before; n != 1 {
		return fmt.Errorf("the relay that took over counted %d duplicates, want 1", n)
	}
	d.tell.holds(fmt.Sprintf("the next relay sent it again under the same Nats-Msg-Id: PubAck says Duplicate, row %d is %s", row.ID, row.State),
		"duplicates", 1, "row", row.ID, "status", row.State)
	copies, err := d.copies(ctx, event)
	if err != nil {
		return err
	}
	if len(copies) != 1 {
		return fmt.Errorf("stream %s has event %s at the sequences %v, want one", stream, event, copies)
	}
	if err := d.invoiced(ctx, crashed); err != nil {
		return err
	}
	d.tell.holds(fmt.Sprintf("one message on the stream, one invoice for order %d", crashed), "messages", 1, "invoices", 1)
	return d.replay(ctx)
}

// replay ends the story: the handler is mended, and the dead letter put back.
func (d *demo) replay(ctx context.Context) error {
	original, err := d.shop.row(ctx, poisoned)
	if err != nil {
		return err
	}
	d.billing.mended.Store(true)
	letter, err := d.letters.Replay(ctx, d.letter)
	if err != nil {
		return err
	}
	if err := d.invoiced(ctx, poisoned); err != nil {
		return err
	}
	s, err := d.js.Stream(ctx, stream)
	if err != nil {
		return err
	}
	msg, err := s.GetMsg(ctx, letter.ReplaySeq)
	if err != nil {
		return fmt.Errorf("read the replayed message: %w", err)
	}
	id, key := msg.Header.Get(jetbox.HeaderMsgID), msg.Header.Get(jetbox.HeaderIdempotencyKey)
	if id == original.Event.Key || key != original.Event.Key {
		return fmt.Errorf("the replayed message has %s %q and %s %q, want a fresh one and %q",
			jetbox.HeaderMsgID, id, jetbox.HeaderIdempotencyKey, key, original.Event.Key)
	}
	d.tell.holds(fmt.Sprintf("the handler is mended and the letter replayed: fresh message ID, same idempotency key %s, 1 invoice for order %d",
		key, poisoned), "message_id", id, "idempotency_key", key, "invoices", 1)

	_, err = d.letters.Replay(ctx, d.letter)
	if err := refused("a second replay", err, jetbox.ErrLetterGone); err != nil {
		return err
	}
	for order := 1; order <= crashed; order++ {
		if err := d.invoiced(ctx, order); err != nil {
			return err
		}
	}
	d.tell.holds(fmt.Sprintf("a second replay is refused; %d orders have %d invoices", crashed, crashed), "orders", crashed, "invoices", crashed)
	return nil
}

// copies returns the stream sequences of an event.
func (d *demo) copies(ctx context.Context, event string) ([]uint64, error) {
	s, err := d.js.Stream(ctx, stream)
	if err != nil {
		return nil, err
	}
	var out []uint64
	state := s.CachedInfo().State
	for seq := state.FirstSeq; seq <= state.LastSeq; seq++ {
		msg, err := s.GetMsg(ctx, seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("read sequence %d of %s: %w", seq, stream, err)
		}
		if msg.Header.Get(jetbox.HeaderCEID) == event {
			out = append(out, seq)
		}
	}
	return out, nil
}
