package embedded

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"

	"github.com/nats-io/nats-server/v2/server"
)

// serverLog hands the server's log lines to slog, and keeps the first fatal
// one, and the last one that says that nothing can be stored: that is the only
// way the server has to say so.
type serverLog struct {
	log    *slog.Logger
	fatal  atomic.Pointer[string]
	broken atomic.Pointer[string]
}

var _ server.Logger = (*serverLog)(nil)

func (l *serverLog) Noticef(format string, v ...any) { l.print(slog.LevelDebug, format, v) }
func (l *serverLog) Warnf(format string, v ...any)   { l.print(slog.LevelWarn, format, v) }
func (l *serverLog) Debugf(format string, v ...any)  { l.print(slog.LevelDebug, format, v) }
func (l *serverLog) Tracef(format string, v ...any)  { l.print(slog.LevelDebug, format, v) }

// Errorf also finds what ends only with the server, as of nats-server 2.15: a
// stream remembers a failed write for good, and JetStream stays disabled.
func (l *serverLog) Errorf(format string, v ...any) {
	text := fmt.Sprintf(format, v...)
	if strings.Contains(text, "failed to store a msg") || strings.Contains(text, "will be DISABLED") {
		l.broken.Store(&text)
	}
	l.print(slog.LevelError, format, v)
}

// Fatalf does not log: Start returns the text.
func (l *serverLog) Fatalf(format string, v ...any) {
	text := fmt.Sprintf(format, v...)
	if !l.fatal.CompareAndSwap(nil, &text) {
		l.print(slog.LevelError, format, v)
	}
}

// fatalError returns what kept the server from starting, or nil. A port that was
// free a moment ago may be taken by now.
func (l *serverLog) fatalError() error {
	text := l.fatal.Load()
	switch {
	case text == nil:
		return nil
	case strings.HasPrefix(*text, "Error listening on"):
		return fmt.Errorf("%w: nats-server: %s", ErrListen, *text)
	}
	return fmt.Errorf("nats-server: %s", *text)
}

func (l *serverLog) print(level slog.Level, format string, v []any) {
	ctx := context.Background()
	if !l.log.Enabled(ctx, level) {
		return
	}
	l.log.LogAttrs(ctx, level, "nats-server", slog.String("text", fmt.Sprintf(format, v...)))
}
