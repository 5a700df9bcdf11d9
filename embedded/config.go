package embedded

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	defaultName      = "jetbox"
	defaultSync      = time.Second
	defaultMaxMemory = 256 << 20

	// The server draws a random part of half the interval, and spends its time
	// on nothing but fsync when the interval is shorter than one.
	minSync = time.Millisecond
)

// Config describes a [Server]. Only Dir is mandatory.
type Config struct {
	// Dir is where the streams live, created when missing. It belongs to this
	// server alone and must survive whatever the messages have to survive. A
	// listening server below the system's temporary directory is warned about:
	// a reboot or a cleaner empties it.
	Dir string

	// Listen is the host:port for other programs; port 0 takes a free one.
	// Empty, the default, opens no port: only this process can connect. There
	// is no authentication; an address that other machines reach is warned
	// about.
	Listen string

	// Name is the server's name. Default "jetbox".
	Name string

	// Sync is the longest time a message stays unsynced after its PubAck, and
	// so what a power failure can take. Default 1s.
	Sync time.Duration

	// SyncAlways syncs every message before its PubAck. It excludes Sync.
	SyncAlways bool

	// MaxStore is the most bytes that all streams may keep on disk. Beyond it
	// publishes fail until something is removed. Default three quarters of the
	// disk space that is free without this server's own data.
	MaxStore int64

	// MaxMemory is the most bytes that all memory streams may keep. Default
	// 256 MiB.
	MaxMemory int64

	// Logger gets the server's warnings and errors, its notices at debug
	// level. Default [slog.Default].
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Name == "" {
		c.Name = defaultName
	}
	if c.Sync == 0 {
		c.Sync = defaultSync
	}
	if c.MaxMemory == 0 {
		c.MaxMemory = defaultMaxMemory
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// validate looks at what the caller wrote, before the defaults.
func (c Config) validate() error {
	if c.Dir == "" {
		return fmt.Errorf("embedded: Dir is empty, want a directory that survives a restart")
	}
	if c.Listen != "" {
		if _, _, err := c.hostPort(); err != nil {
			return fmt.Errorf("embedded: Listen is %q, want host:port, or nothing for no port: %w", c.Listen, err)
		}
	}
	if strings.ContainsAny(c.Name, " \t\r\n") {
		return fmt.Errorf("embedded: Name is %q, want one without blanks", c.Name)
	}
	if c.Sync != 0 && c.SyncAlways {
		return fmt.Errorf("embedded: Sync is %v and SyncAlways is set, want one of them", c.Sync)
	}
	if c.Sync != 0 && c.Sync < minSync {
		return fmt.Errorf("embedded: Sync is %v, want at least %v; SyncAlways is the stricter setting", c.Sync, minSync)
	}
	if c.MaxStore < 0 {
		return fmt.Errorf("embedded: MaxStore is %d, want a positive number of bytes", c.MaxStore)
	}
	if c.MaxMemory < 0 {
		return fmt.Errorf("embedded: MaxMemory is %d, want a positive number of bytes", c.MaxMemory)
	}
	return nil
}

// hostPort splits Listen. An empty host is every interface.
func (c Config) hostPort() (host string, port int, err error) {
	host, text, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return "", 0, err
	}
	number, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("port %q is not a number up to 65535", text)
	}
	return host, int(number), nil
}

// warn tells the operator about settings that work today and hurt later.
func (c Config) warn(ctx context.Context) {
	if c.Listen == "" {
		return
	}
	if below(c.Dir, os.TempDir()) {
		c.Logger.LogAttrs(ctx, slog.LevelWarn,
			"embedded broker keeps its streams below the temporary directory, where a reboot or a cleaner removes them",
			slog.String("dir", c.Dir))
	}
	host, _, _ := c.hostPort()
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		c.Logger.LogAttrs(ctx, slog.LevelWarn,
			"embedded broker has no authentication and listens on an address that other machines may reach",
			slog.String("listen", c.Listen))
	}
}

// below reports whether dir is inside parent, with symbolic links resolved.
func below(dir, parent string) bool {
	if p, err := filepath.EvalSymlinks(dir); err == nil {
		dir = p
	}
	if p, err := filepath.EvalSymlinks(parent); err == nil {
		parent = p
	}
	rel, err := filepath.Rel(parent, dir)
	return err == nil && filepath.IsLocal(rel)
}
