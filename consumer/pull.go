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
	// pullSilence is how long a pull may say nothing at all. Then it is lost:
	// the server has forgotten it, or is not the one that got it.
	pullSilence = 2*pullHeartbeat + time.Second
	pullBuffer  = 256 // statuses that arrive while the loop is busy
)

// puller asks the server for messages, one request at a time. A request ends
// when its messages have arrived or with a status; so what is asked for never
// exceeds the workers that were free when it was.
//
// It speaks the pull protocol itself because the client's own iterators keep a
// fixed number of messages on order, and drop what is on its way when stopped.
type puller struct {
	nc      *nats.Conn
	subject string // where requests go
	inbox   string
	msgs    chan *nats.Msg
	sub     *nats.Subscription

	n       int       // number of the request, part of its reply subject
	waiting int       // messages it may still bring; 0 means that none is open
	heard   time.Time // when it last gave a sign of life
}

func newPuller(js jetstream.JetStream, cfg Config) (*puller, error) {
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
		msgs:    make(chan *nats.Msg, 4*cfg.Workers+pullBuffer),
	}
	var err error
	if p.sub, err = nc.ChanSubscribe(p.inbox+".*", p.msgs); err != nil {
		return nil, fmt.Errorf("subscribe to %s: %w", p.inbox, err)
	}
	return p, nil
}

func (p *puller) open() (open bool) { return p.waiting > 0 }

// ask requests up to n messages.
func (p *puller) ask(n int, expires time.Duration) error {
	req := struct {
		Batch     int           `json:"batch"`
		Expires   time.Duration `json:"expires"`
		Heartbeat time.Duration `json:"idle_heartbeat,omitempty"`
	}{Batch: n, Expires: expires, Heartbeat: pullHeartbeat}
	if expires < 2*pullHeartbeat {
		req.Heartbeat = 0 // the server refuses one that long
	}
	body, err := json.Marshal(req)
	if err != nil {
		return fmt.Errorf("marshal pull request: %w", err)
	}
	p.n++
	if err := p.nc.PublishRequest(p.subject, p.reply(), body); err != nil {
		return fmt.Errorf("pull: %w", err)
	}
	p.waiting, p.heard = n, time.Now()
	return nil
}

func (p *puller) reply() string { return p.inbox + "." + strconv.Itoa(p.n) }

// silent reports that an open request has not been heard of for too long.
func (p *puller) silent(now time.Time) (lost bool) {
	return p.open() && now.Sub(p.heard) >= pullSilence
}

// status is what a message without an event says about the request.
type status int

const (
	statusNone  status = iota // not a status: a message of the stream
	statusAlive               // the request is open, or the status is of an old one
	statusOver                // the request ended as requests do
	statusLost                // look after the consumer before asking again
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
	if m.Subject != p.reply() {
		return statusAlive, ""
	}
	p.heard = time.Now()
	text = m.Header.Get("Description")
	switch {
	case code == "100": // heartbeat
		return statusAlive, ""
	case code == "404", code == "408", code == "409" && text == "Batch Completed":
		p.waiting = 0
		return statusOver, text
	default: // consumer deleted, leadership change, no responders, refused
		p.waiting = 0
		return statusLost, strings.TrimSpace(code + " " + text)
	}
}
