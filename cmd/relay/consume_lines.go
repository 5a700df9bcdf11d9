package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
)

// linesStop is how long the command may take to end after its stdin was closed.
const linesStop = 5 * time.Second

// lineEvent is an event on the stdin of an --exec-lines command, and what
// --print --json writes.
type lineEvent struct {
	Subject   string              `json:"subject"`
	Stream    string              `json:"stream"`
	Sequence  uint64              `json:"sequence"`
	Delivered uint64              `json:"delivered"`
	ID        string              `json:"id,omitempty"`
	Key       string              `json:"key,omitempty"`
	Type      string              `json:"type,omitempty"`
	Headers   map[string][]string `json:"headers,omitempty"`
	payloadJSON
}

func deliveryJSON(d *consumer.Delivery) lineEvent {
	return lineEvent{
		Subject:     d.Subject,
		Stream:      d.Stream,
		Sequence:    d.StreamSeq,
		Delivered:   d.NumDelivered,
		ID:          d.ID,
		Key:         d.Key,
		Type:        d.Type,
		Headers:     d.RawHeader,
		payloadJSON: payloadOf(d.Payload),
	}
}

// linesHandler runs one command that handles event after event. It is safe for
// concurrent use; the events take turns.
type linesHandler struct {
	command string
	environ []string
	stderr  io.Writer

	turn  chan struct{} // holds one token: whose turn it is
	child *linesChild   // owned by the holder of the token; nil when none runs
}

func newLinesHandler(command string, environ []string, stderr io.Writer) *linesHandler {
	h := &linesHandler{command: command, environ: environ, stderr: stderr, turn: make(chan struct{}, 1)}
	h.turn <- struct{}{}
	return h
}

func (h *linesHandler) handle(ctx context.Context, d *consumer.Delivery) error {
	select {
	case <-h.turn:
		defer func() { h.turn <- struct{}{} }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if h.child == nil {
		child, err := startLines(h.command, h.environ, h.stderr)
		if err != nil {
			return err
		}
		h.child = child
	}
	answer, err := h.child.ask(ctx, d)
	if err != nil {
		// Its next line could be the answer to this event: never use it again.
		last := h.child.kill()
		h.child = nil
		return fmt.Errorf("%w%s", err, last)
	}
	return verdict(answer)
}

// verdict reads the command's answer.
func verdict(line string) error {
	word, text, _ := strings.Cut(strings.TrimSpace(line), " ")
	switch word {
	case "ok":
		return nil
	case "retry":
		return errors.New(orElse(text, "the command asks for a retry"))
	case "permanent":
		return jetbox.Permanent(errors.New(orElse(text, "the command calls it permanent")))
	}
	return fmt.Errorf("the command answered %q, want ok, retry TEXT or permanent TEXT", line)
}

func orElse(s, otherwise string) string {
	if s = strings.TrimSpace(s); s == "" {
		return otherwise
	}
	return s
}

// close lets the command end by itself, for a while.
func (h *linesHandler) close() error {
	<-h.turn
	if h.child == nil {
		return nil
	}
	return h.child.stop()
}

// linesChild is a running --exec-lines command.
type linesChild struct {
	cmd    *exec.Cmd
	cancel context.CancelFunc
	stdin  io.WriteCloser
	lines  chan string // closed at the end of its stdout
	last   tail
	ended  sync.WaitGroup
}

func startLines(command string, environ []string, stderr io.Writer) (*linesChild, error) {
	ctx, cancel := context.WithCancel(context.Background())
	c := &linesChild{cancel: cancel, lines: make(chan string, 1)}
	c.cmd = shell(ctx, command)
	c.cmd.Env = eventless(environ)
	c.cmd.Stderr = io.MultiWriter(&c.last, stderr)
	c.cmd.WaitDelay = execWaitDelay
	stdin, err := c.cmd.StdinPipe()
	if err != nil {
		cancel()
		return nil, fmt.Errorf("start command: %w", err)
	}
	c.stdin = stdin
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		cancel()
		return nil, fmt.Errorf("start command: %w", err)
	}
	if err := c.cmd.Start(); err != nil {
		cancel()
		return nil, fmt.Errorf("start command: %w", err)
	}
	c.ended.Go(func() {
		defer close(c.lines)
		s := bufio.NewScanner(stdout)
		for s.Scan() {
			select {
			case c.lines <- s.Text():
			case <-ctx.Done():
				return
			}
		}
	})
	return c, nil
}

// ask sends one event and waits for its answer.
func (c *linesChild) ask(ctx context.Context, d *consumer.Delivery) (string, error) {
	select {
	case line, ok := <-c.lines:
		if ok {
			return "", fmt.Errorf("the command wrote %q without having been asked", line)
		}
		return "", errors.New("the command has ended")
	default:
	}
	written := make(chan error, 1)
	c.ended.Go(func() { written <- writeJSON(c.stdin, deliveryJSON(d)) })
	for {
		select {
		case err := <-written:
			if err != nil {
				return "", fmt.Errorf("give the command an event: %w", err)
			}
			written = nil
		case line, ok := <-c.lines:
			if !ok {
				return "", errors.New("the command has ended without an answer")
			}
			return line, nil
		case <-ctx.Done():
			return "", fmt.Errorf("command killed: %w", context.Cause(ctx))
		}
	}
}

// kill ends the command at once and returns its last words.
func (c *linesChild) kill() string {
	c.cancel()
	_ = c.end() // it was killed
	return c.last.text()
}

// stop closes the command's stdin and waits for it to end.
func (c *linesChild) stop() error {
	timer := time.AfterFunc(linesStop, c.cancel)
	defer timer.Stop()
	defer c.cancel()
	c.ended.Go(func() {
		for range c.lines { // nothing is expected of it any more, and it must be able to write
		}
	})
	if err := c.end(); err != nil && !ranWell(c.cmd, err) {
		return fmt.Errorf("command at its end: %w%s", err, c.last.text())
	}
	return nil
}

// end waits for the command to end, with its stdin closed. It does not wait for the
// end of stdout: what the command has left behind may keep that open for ever. Wait
// closes it once the command is gone, and so ends the reading.
func (c *linesChild) end() error {
	_ = c.stdin.Close() // it may be gone
	err := c.cmd.Wait()
	c.ended.Wait()
	return err
}
