package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
)

const (
	// linesStop is how long the command may take to end after its stdin was closed.
	linesStop = 5 * time.Second

	// answerMost is the longest answer that is read, in bytes.
	answerMost = 64 << 10
)

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
	log     *slog.Logger

	turn  chan struct{} // holds one token: whose turn it is
	child *linesChild   // owned by the holder of the token; nil when none runs
}

func newLinesHandler(command string, environ []string, stderr io.Writer, log *slog.Logger) *linesHandler {
	h := &linesHandler{command: command, environ: environ, stderr: stderr, log: log, turn: make(chan struct{}, 1)}
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
	answer, err := h.ask(ctx, d)
	if errors.Is(err, errStale) {
		answer, err = h.ask(ctx, d) // a new one
	}
	if err != nil {
		return err
	}
	return verdict(answer)
}

var (
	errEnded   = errors.New("the command has ended without an answer")
	errUnasked = errors.New("the command wrote without having been asked")

	// errStale says that a command which was there before this event failed in one
	// of these ways. That says nothing about the event, which it may not have seen.
	errStale = errors.New("stale")
)

// ask asks the command, which it starts where none runs.
func (h *linesHandler) ask(ctx context.Context, d *consumer.Delivery) (answer string, err error) {
	isNew := h.child == nil
	if isNew {
		if h.child, err = startLines(h.command, h.environ, h.stderr); err != nil {
			return "", err
		}
	}
	if answer, err = h.child.ask(ctx, d); err == nil {
		return answer, nil
	}
	// Its next line could be the answer to this event: never use it again.
	last := h.child.kill()
	h.child = nil
	if isNew || !errors.Is(err, errEnded) && !errors.Is(err, errUnasked) {
		return "", fmt.Errorf("%w%s", err, last)
	}
	if errors.Is(err, errUnasked) {
		h.log.LogAttrs(ctx, slog.LevelWarn, "command of --exec-lines is started again", slog.Any("err", err))
	}
	return "", errStale
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
	failed error       // why its stdout is read no further; set before lines is closed
	last   tail
	exit   error // of Wait, once ended
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
	stdout, output := io.Pipe()
	c.cmd.Stdout = output
	if err := c.cmd.Start(); err != nil {
		cancel()
		return nil, fmt.Errorf("start command: %w", err)
	}
	// Its end is the end of its stdout, soon: what it leaves behind may keep that
	// open for ever.
	c.ended.Go(func() {
		c.exit = c.cmd.Wait()
		_ = output.Close()
	})
	c.ended.Go(func() {
		defer close(c.lines)
		s := bufio.NewScanner(stdout)
		s.Buffer(nil, answerMost)
		defer func() {
			c.failed = s.Err()
			_ = stdout.Close() // nobody else reads what is still written
		}()
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
			return "", fmt.Errorf("%w: %q", errUnasked, line)
		}
		return "", c.atEnd()
	default:
	}
	written := make(chan error, 1)
	c.ended.Go(func() { written <- writeJSON(c.stdin, deliveryJSON(d)) })
	for {
		select {
		case err := <-written:
			if err != nil {
				return "", fmt.Errorf("%w: give it an event: %w", errEnded, err)
			}
			written = nil
		case line, ok := <-c.lines:
			if !ok {
				return "", c.atEnd()
			}
			return line, nil
		case <-ctx.Done():
			return "", fmt.Errorf("command killed: %w", context.Cause(ctx))
		}
	}
}

// atEnd says why there will be no line.
func (c *linesChild) atEnd() error {
	if errors.Is(c.failed, bufio.ErrTooLong) {
		return fmt.Errorf("the command's answer has more than %d bytes", answerMost)
	}
	return errEnded
}

// kill ends the command at once and returns its last words.
func (c *linesChild) kill() string {
	c.cancel()
	_ = c.stdin.Close() // a line may be on its way
	c.ended.Wait()
	return c.last.text()
}

// stop closes the command's stdin and waits for it to end.
func (c *linesChild) stop() error {
	_ = c.stdin.Close() // it may be gone
	timer := time.AfterFunc(linesStop, c.cancel)
	defer timer.Stop()
	defer c.cancel()
	for range c.lines { // until the end of its stdout
	}
	c.ended.Wait()
	if c.exit != nil && !ranWell(c.cmd, c.exit) {
		return fmt.Errorf("command at its end: %w%s", c.exit, c.last.text())
	}
	return nil
}
