package relay

import (
	"errors"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// denials are the subjects that the server did not let this user publish to. It
// says so on the connection alone; the PubAck never comes (nats-server 2.15).
// Whoever waits for one would wait its whole time, and all other rows with it.
type denials struct {
	mu      sync.Mutex           // guards what follows
	last    map[string]time.Time // by subject
	changed chan struct{}        // closed by the next one
}

// watch notes what the server refuses on a connection, in front of the handler
// that it has. It stays there: taking it away again would take along what another
// relay on the connection has put in front since.
func (d *denials) watch(nc *nats.Conn) {
	before := nc.ErrorHandler()
	nc.SetErrorHandler(func(nc *nats.Conn, sub *nats.Subscription, err error) {
		d.note(err)
		if before != nil {
			before(nc, sub, err)
		}
	})
}

func (d *denials) note(err error) {
	if !errors.Is(err, nats.ErrPermissionViolation) {
		return
	}
	_, quoted, _ := strings.Cut(err.Error(), "for Publish to ")
	quoted, err = strconv.QuotedPrefix(quoted)
	if err != nil {
		return // to subscribe, or to publish with this reply: not a matter of one row
	}
	subject, err := strconv.Unquote(quoted)
	if err != nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.last == nil || len(d.last) >= cacheMost {
		d.last = make(map[string]time.Time)
	}
	d.last[subject] = time.Now()
	if d.changed != nil {
		close(d.changed)
		d.changed = nil
	}
}

// since reports whether a publish to a subject was refused after a time. If not,
// changed is closed when there is something new.
func (d *denials) since(subject string, t time.Time) (denied bool, changed <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if last, ok := d.last[subject]; ok && !last.Before(t) {
		return true, nil
	}
	if d.changed == nil {
		d.changed = make(chan struct{})
	}
	return false, d.changed
}
