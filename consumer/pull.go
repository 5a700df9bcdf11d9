package consumer

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	pullExpires   = 30 * time.Second
	pullHeartbeat = 5 * time.Second
	// pullSilence is how long requests may say nothing at all. Then they are
	// lost: the server has forgotten them, or is not the one that got them.
	pullSilence = 2*pullHeartbeat + time.Second
	pullBuffer  = 256 // statuses that arrive while the loop is busy

	headerPin         = "Nats-Pin-Id"
	headerPendingMsgs = "Nats-Pending-Messages"
	touchReply        = "pin"
)

// puller asks the server for messages. It counts what the open requests may
// still bring: each message is one less, and a request that ends says how many
// it did not bring. So what is asked for never exceeds what the workers can take.
//
// It speaks the pull protocol itself because the client's own iterators keep a
// fixed number of messages on order, and drop what is on its way when stopped.
type puller struct {
	nc      *nats.Conn
	subject string // where requests go
	inbox   string
	msgs    chan *nats.Msg
	sub     *nats.Subscription
	n       int       // number of the last request, part of its reply subject
	lost    int       // number of the last one that is not to be heard of
	waiting int       // messages they may still bring; 0 means that none is open
	heard   time.Time // when one last gave a sign of life

	// A single-active consumer serves the one client whose requests name the
	// pin, which comes with the first message. Empty: no pin, or a standby.
	group string
	pin   string
}

// newPuller returns one for workers that have so many messages.
func newPuller(js jetstream.JetStream, cfg Config, n int) (*puller, error) {
	prefix := jetstream.DefaultAPIPrefix
	switch o := js.Options(); {
	case o.APIPrefix != "":
		prefix = strings.TrimSuffix(o.APIPrefix, ".") + "."
	case o.Domain != "":
		prefix = "$JS." + o.Domain + ".API."
	}
	nc := js.Conn()
	p := &puller{
		nc:      nc,
		subject: prefix + "CONSUMER.MSG.NEXT." + cfg.Stream + "." + cfg.Durable,
		inbox:   nc.NewInbox(),
		msgs:    make(chan *nats.Msg, 4*n+2*maxAhead+pullBuffer),
	}
	var err error
	if p.sub, err = nc.ChanSubscribe(p.inbox+".*", p.msgs); err != nil {
		return nil, fmt.Errorf("subscribe to %s: %w", p.inbox, err)
	}
	return p, nil
}

func (p *puller) open() (open bool) { return p.waiting > 0 }

// pullRequest is what the server takes on CONSUMER.MSG.NEXT.
type pullRequest struct {
	Batch     int           `json:"batch"`
	Expires   time.Duration `json:"expires,omitempty"`
	NoWait    bool          `json:"no_wait,omitempty"`
	MaxBytes  int           `json:"max_bytes,omitempty"`
	Heartbeat time.Duration `json:"idle_heartbeat,omitempty"`
	Group     string        `json:"group,omitempty"`
	Pin       string        `json:"id,omitempty"`
}

// ask requests up to n messages.
func (p *puller) ask(n int, expires time.Duration) error {
	req := pullRequest{Batch: n, Expires: expires, Heartbeat: pullHeartbeat}
	if expires < 2*pullHeartbeat {
		req.Heartbeat = 0 // the server refuses one that long
	}
	p.n++
	if err := p.request(req, strconv.Itoa(p.n)); err != nil {
		return err
	}
	p.waiting += n
	p.heard = time.Now()
	return nil
}

// touch keeps the pin while the workers are busy: only requests do. This one
// brings no message, since none is that small.
func (p *puller) touch() error {
	return p.request(pullRequest{Batch: 1, NoWait: true, MaxBytes: 1}, touchReply)
}

func (p *puller) request(req pullRequest, reply string) error {
	req.Group, req.Pin = p.group, p.pin
	body, err := json.Marshal(req)
	if err != nil {
		return fmt.Errorf("marshal pull request: %w", err)
	}
	if err := p.nc.PublishRequest(p.subject, p.inbox+"."+reply, body); err != nil {
		return fmt.Errorf("pull: %w", err)
	}
	return nil
}

// forget gives up on the open requests.
func (p *puller) forget() { p.waiting, p.lost = 0, p.n }

// silent reports that open requests have not been heard of for too long.
func (p *puller) silent(now time.Time) (lost bool) {
	return p.open() && now.Sub(p.heard) >= pullSilence
}

// status is what a message without an event says about a request.
type status int

const (
	statusNone     status = iota // not a status: a message of the stream
	statusAlive                  // the request is open, or the status is of an old one
	statusOver                   // the request ended as requests do
	statusLost                   // look after the consumer before asking again
	statusUnpinned               // another client has the pin
)

// receive tells messages from statuses and keeps count. text describes a lost
// request.
func (p *puller) receive(m *nats.Msg) (s status, text string) {
	code := m.Header.Get("Status")
	// A message of the stream has its own subject here, whatever inbox it was
	// sent to; a status has that of its request.
	if code == "" || !strings.HasPrefix(m.Subject, p.inbox) {
		p.waiting = max(p.waiting-1, 0)
		p.heard = time.Now()
		return statusNone, ""
	}
	if code == "423" && p.pin != "" {
		p.pin = ""
		p.forget()
		return statusUnpinned, ""
	}
	if n, err := strconv.Atoi(m.Subject[len(p.inbox)+1:]); err != nil || n <= p.lost {
		return statusAlive, "" // of an old one, or a touch
	}
	p.heard = time.Now()
	text = m.Header.Get("Description")
	switch {
	case code == "100": // heartbeat
		return statusAlive, ""
	case code == "404", code == "408", code == "409" && text == "Batch Completed":
		left, err := strconv.Atoi(m.Header.Get(headerPendingMsgs))
		if err != nil {
			left = p.waiting
		}
		p.waiting = max(p.waiting-left, 0)
		return statusOver, text
	default: // consumer deleted, leadership change, no responders, refused
		p.forget()
		return statusLost, strings.TrimSpace(code + " " + text)
	}
}
