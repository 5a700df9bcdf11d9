package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
)

// emitFlags are the flags of relay emit.
type emitFlags struct {
	key, typ                   string
	aggregateType, aggregateID string
	aggregateSeq               *int64
	headers                    []headerLine
	at                         moment
	count                      int
	lines                      bool
}

func emitCommand() *command {
	var f emitFlags
	return &command{
		name:    "emit",
		args:    "SUBJECT [PAYLOAD|-]",
		minArgs: 1,
		maxArgs: 2,
		short:   "append events to the outbox",
		long: `
All events of a call are appended in one transaction. PAYLOAD is taken byte for
byte; - reads it from stdin, and without it the event has none. --lines reads
one payload per line from stdin, to its end, before it begins.

Prints the ID of the event, or how many were appended.`,
		flags: func(fs *flag.FlagSet) {
			define(fs, &f.key, "key", "", someText, "idempotency key `TEXT` (default the event ID)")
			define(fs, &f.typ, "type", "", someText, "event type `TEXT`, such as order.created (default the subject)")
			define(fs, &f.aggregateType, "aggregate-type", "", someText, "`TEXT` before the aggregate ID in the ordering key")
			define(fs, &f.aggregateID, "aggregate-id", "", someText, "`ID` of what the event is about; events that share it keep their order")
			fs.Var(&parsed[*int64]{p: &f.aggregateSeq, parse: anyInt64}, "aggregate-seq", "`VERSION` of the aggregate; with several events, of the first one")
			defineEach(fs, &f.headers, "header", parseHeader, "extra header `NAME=VALUE`; may be repeated")
			define(fs, &f.at, "at", moment{}, parseMoment, "`TIME` to publish at: RFC 3339, or a duration from now")
			define(fs, &f.count, "count", 1, positiveInt, "`NUMBER` of equal events to append")
			fs.BoolVar(&f.lines, "lines", false, "read one payload per line from stdin")
		},
		run: func(ctx context.Context, a *app, args []string) error { return emit(ctx, a, f, args) },
	}
}

func emit(ctx context.Context, a *app, f emitFlags, args []string) (err error) {
	if f.key != "" && (f.count > 1 || f.lines) {
		return usagef("--key with --count or --lines: every event needs a key of its own")
	}
	// Everything is read before the transaction begins: on SQLite it holds the
	// only write lock of the database.
	payloads, err := f.payloads(ctx, a.stdin, args[1:])
	if err != nil {
		return err
	}
	events := f.events(args[0], payloads, time.Now())
	store, err := a.openStore(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	tx, err := store.DB().BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("begin transaction: %w", err)
	}
	if err := store.Append(ctx, tx, events...); err != nil {
		_ = tx.Rollback() // the cause is err
		if errors.Is(err, jetbox.ErrInvalidEvent) {
			return usageError{err}
		}
		return err
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	if len(events) == 1 && !f.lines {
		_, err = fmt.Fprintln(a.stdout, events[0].ID)
	} else {
		_, err = fmt.Fprintf(a.stdout, "%d events appended\n", len(events))
	}
	return err
}

// payloads returns one payload per event.
func (f emitFlags) payloads(ctx context.Context, stdin io.Reader, args []string) ([][]byte, error) {
	if f.lines {
		if len(args) > 0 {
			return nil, usagef("--lines reads the payloads from stdin: unexpected argument %q", args[0])
		}
		return untilDone(ctx, func() ([][]byte, error) { return readLines(stdin, f.count) })
	}
	var payload []byte
	if len(args) > 0 {
		payload = []byte(args[0])
		if args[0] == "-" {
			var err error
			if payload, err = untilDone(ctx, func() ([]byte, error) { return io.ReadAll(stdin) }); err != nil {
				return nil, fmt.Errorf("read payload from stdin: %w", err)
			}
		}
	}
	out := make([][]byte, f.count)
	for i := range out {
		out[i] = payload
	}
	return out, nil
}

// untilDone returns what read does, or an error when ctx is done first. A read
// from a terminal cannot be interrupted otherwise; the goroutine that is left
// behind ends with the process.
func untilDone[T any](ctx context.Context, read func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	go func() {
		v, err := read()
		done <- result{v, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		var none T
		return none, context.Cause(ctx)
	}
}

func readLines(r io.Reader, each int) ([][]byte, error) {
	var out [][]byte
	br := bufio.NewReader(r)
	for {
		line, err := br.ReadBytes('\n')
		if len(line) > 0 {
			line = bytes.TrimSuffix(line, []byte("\n"))
			for range each {
				out = append(out, line)
			}
		}
		if errors.Is(err, io.EOF) {
			return out, nil
		} else if err != nil {
			return nil, fmt.Errorf("read payloads from stdin: %w", err)
		}
	}
}

func (f emitFlags) events(subject string, payloads [][]byte, now time.Time) []*jetbox.Event {
	headers := map[string][]string{}
	for _, h := range f.headers {
		headers[h.name] = append(headers[h.name], h.value)
	}
	events := make([]*jetbox.Event, len(payloads))
	for i, payload := range payloads {
		ev := &jetbox.Event{
			Key:           f.key,
			Subject:       subject,
			Type:          f.typ,
			AggregateType: f.aggregateType,
			AggregateID:   f.aggregateID,
			Headers:       headers,
			Payload:       payload,
			NotBefore:     f.at.after(now),
		}
		if f.aggregateSeq != nil {
			ev.AggregateSeq = new(*f.aggregateSeq + int64(i))
		}
		events[i] = ev
	}
	return events
}
