package relay

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// The first of two relays on a connection to stop took the other's handler away,
// and the application's own must hear of every error too.
func TestRelaysOnOneConnectionHearOfDenialsSideBySide(t *testing.T) {
	t.Parallel()
	heard := 0
	nc := new(nats.Conn)
	nc.SetErrorHandler(func(*nats.Conn, *nats.Subscription, error) { heard++ })
	var a, b denials
	a.watch(nc)
	b.watch(nc)
	begin := time.Now()
	nc.ErrorHandler()(nc, nil, fmt.Errorf("%w: Permissions Violation for Publish to %q", nats.ErrPermissionViolation, "events.secret"))
	for name, d := range map[string]*denials{"first": &a, "second": &b} {
		if denied, _ := d.since("events.secret", begin); !denied {
			t.Errorf("the %s relay did not hear of the denial", name)
		}
		if denied, _ := d.since("events.other", begin); denied {
			t.Errorf("the %s relay takes another subject for denied", name)
		}
	}
	if heard != 1 {
		t.Errorf("the application's handler was called %d times, want once", heard)
	}
}
