package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
)

const (
	// exitPermanent is EX_DATAERR of sysexits.h: the input is wrong, and will be.
	exitPermanent = 65

	// stderrKept is how much of a command's last words travel with a letter.
	stderrKept = 2048

	// execWaitDelay is how long a command's children may keep its streams open
	// after it has ended.
	execWaitDelay = 2 * time.Second

	envEvent  = "JETBOX_"
	envHeader = "JETBOX_H_"
)

// execHandler runs a command for each event.
type execHandler struct {
	command        string
	environ        []string
	stdout, stderr io.Writer
}

func (h *execHandler) handle(ctx context.Context, d *consumer.Delivery) error {
	var last tail
	cmd := shell(ctx, h.command)
	cmd.Env = slices.Concat(eventless(h.environ), eventEnv(d))
	cmd.Stdin = bytes.NewReader(d.Payload)
	cmd.Stdout = h.stdout
	cmd.Stderr = io.MultiWriter(&last, h.stderr)
	cmd.WaitDelay = execWaitDelay
	err := cmd.Run()
	if err == nil || ranWell(cmd, err) {
		return nil
	}
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("command killed: %w%s", cause, last.text())
	}
	err = fmt.Errorf("command: %w%s", err, last.text())
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == exitPermanent {
		return jetbox.Permanent(err)
	}
	return err
}

// ranWell reports whether the command succeeded although err is set: it may
// leave its stdin unread, or children that keep its streams open.
func ranWell(cmd *exec.Cmd, err error) (well bool) {
	var exit *exec.ExitError
	return !errors.As(err, &exit) && cmd.ProcessState != nil && cmd.ProcessState.Success()
}

// eventless returns the environment without variables of an event, which would
// be taken for this one's.
func eventless(environ []string) []string {
	return slices.DeleteFunc(slices.Clone(environ), func(e string) bool { return strings.HasPrefix(e, envEvent) })
}

// eventEnv describes an event as environment variables.
func eventEnv(d *consumer.Delivery) []string {
	env := []string{
		envEvent + "SUBJECT=" + d.Subject,
		envEvent + "STREAM=" + d.Stream,
		envEvent + "SEQUENCE=" + strconv.FormatUint(d.StreamSeq, 10),
		envEvent + "DELIVERED=" + strconv.FormatUint(d.NumDelivered, 10),
	}
	for name, values := range sortedHeaders(d.RawHeader) {
		// A NUL would end the process before it starts.
		value := strings.ReplaceAll(strings.Join(values, "\n"), "\x00", "")
		env = append(env, envHeader+envWord(name)+"="+value)
	}
	return env
}

func envWord(name string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return r - 'a' + 'A'
		case r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
			return r
		}
		return '_'
	}, name)
}

// tail keeps the end of what is written to it. It is safe for concurrent use.
type tail struct {
	mu   sync.Mutex
	data []byte // guarded by mu
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.data = append(t.data, p...)
	if extra := len(t.data) - stderrKept; extra > 0 {
		t.data = append(t.data[:0], t.data[extra:]...)
	}
	return len(p), nil
}

// text returns it as the rest of an error's text.
func (t *tail) text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := strings.TrimSpace(strings.ToValidUTF8(string(t.data), ""))
	if s == "" {
		return ""
	}
	return ": " + s
}
