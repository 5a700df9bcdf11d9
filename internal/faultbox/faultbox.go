// Package faultbox breaks connections to an in-process broker on purpose, for
// tests: it stands where a client gets its connections from.
//
// It breaks whole connections, never bytes inside one: that would test the
// protocol's parser.
package faultbox

import (
	"errors"
	"net"
	"sync"
	"time"
)

// Box hands out connections to a broker and spoils them. It is what
// nats.InProcessServer takes. It is safe for concurrent use.
type Box struct {
	// Server is where the connections come from.
	Server interface{ InProcessConn() (net.Conn, error) }

	mu     sync.Mutex // guards what follows
	refuse bool
	mute   bool
	hold   bool
	delay  time.Duration
	conns  []*conn
	dialed int
}

// InProcessConn returns a connection whose traffic the box controls.
func (b *Box) InProcessConn() (net.Conn, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.dialed++
	if b.refuse || b.mute {
		return nil, errors.New("faultbox: connection refused")
	}
	nc, err := b.Server.InProcessConn()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: nc, box: b}
	b.conns = append(b.conns, c)
	return c, nil
}

// Cut closes all connections and, while refuse is set, refuses new ones.
func (b *Box) Cut(refuse bool) {
	b.mu.Lock()
	conns := b.conns
	b.conns, b.refuse = nil, refuse
	b.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
}

// Mute swallows what the broker sends, PubAcks above all, until it is called with
// false. What the client sends arrives. New connections are refused meanwhile: a
// client that waits for the broker's first word holds its own lock, and in a
// synctest bubble a goroutine that waits for a lock stops the clock.
func (b *Box) Mute(mute bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mute = mute
}

// Hold keeps back what the broker sends until it is called with false; then all
// of it arrives.
func (b *Box) Hold(hold bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hold = hold
}

// Delay makes what the broker sends take that much longer on its way.
func (b *Box) Delay(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.delay = d
}

// Dialed is how many connections were asked for.
func (b *Box) Dialed() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.dialed
}

func (b *Box) faults() (mute, hold bool, delay time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mute, b.hold, b.delay
}

type conn struct {
	net.Conn
	box *Box
}

func (c *conn) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		mute, hold, delay := c.box.faults()
		if err == nil {
			time.Sleep(delay)
		}
		for err == nil && hold {
			time.Sleep(10 * time.Millisecond)
			mute, hold, _ = c.box.faults()
		}
		if err != nil || !mute {
			return n, err
		}
	}
}
