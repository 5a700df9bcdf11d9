package relay

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// The protocol of the fast batch, ADR-50 and nats-server 2.14: everything is in
// the reply subject, <inbox>.<flow>.<gap>.<sequence>.<operation>.$FI. The server
// numbers what comes, stores a prefix, and with gap "fail" ends the batch at the
// first message that is missing or refused.
//
// This is a client of our own because jetstreamext v0.3.2, whose protocol it
// follows, hides what exactness needs: it drops the final PubAck and the sequence
// of a refusal, waits its whole timeout when the first message is refused or
// nobody takes the subject, knows no context, and leaves its subscription behind
// when a batch fails.
const (
	opStart = iota
	opAdd
	opCommit // the last message
	opEnd    // no message: ends the batch behind the last one
	opPing   // no message: asks for acks that may be lost, and for a lost message
)

const (
	// fastFlow is how many messages the server may leave unacknowledged before it
	// sends its next ack. It allows 500 at most, shared by all batches of a stream.
	fastFlow = 500
	// fastOutstanding is how many such acks may be missing.
	fastOutstanding = 2
	// fastPing is how long nothing may come before the server is asked.
	fastPing = time.Second
)

// codeNoBatch is an append to a batch that the server does not have (any more).
const codeNoBatch = 10208

// batchEnd is what became of a fast batch.
type batchEnd struct {
	sent    int      // so many, the first ones, went to the connection
	final   *wireAck // the server's receipt for the whole; nil when it did not come
	heard   bool     // the server said anything at all
	refused int      // index of the message that ended the batch, or -1
	err     error    // why it was refused, or why the batch ended
	began   time.Time
}

// wireAck is anything the server says to a batch.
type wireAck struct {
	Type     string              `json:"type"` // "ack", "gap", "err", or "" for a PubAck
	Sequence uint64              `json:"seq"`  // in the batch; in a PubAck, in the stream
	Messages uint16              `json:"msgs"`
	Stream   string              `json:"stream"`
	Count    int                 `json:"count"` // messages stored, or skipped as duplicates
	Error    *jetstream.APIError `json:"error"`
}

// fastWire is one batch on the wire, used by one goroutine.
type fastWire struct {
	nc      *nats.Conn
	denials *denials
	prefix  string // of the reply subjects
	subject string // of what has no message
	replies chan *nats.Msg
	acked   int // the server has stored, or skipped, so many
	window  int
	stopped bool // nothing more is sent
	closing bool // the batch is committed, or ended
	ended   bool // nothing more will come
	end     batchEnd

	progress time.Time // when something was sent or stored last
	waited   int       // end.sent at that time
	asked    time.Time // when the server was asked last, or that
}

// sendFast publishes messages as one fast batch and waits for its end.
func sendFast(ctx context.Context, nc *nats.Conn, d *denials, batch []message, maySend func() bool) batchEnd {
	inbox := nc.NewInbox()
	w := &fastWire{
		nc:      nc,
		denials: d,
		prefix:  inbox + "." + strconv.Itoa(fastFlow) + ".fail.",
		subject: batch[0].msg.Subject,
		replies: make(chan *nats.Msg, 2*fastFlow*fastOutstanding), // a refused start is answered message by message
		window:  fastFlow * fastOutstanding,
		end:     batchEnd{refused: -1, began: time.Now()},
	}
	sub, err := nc.ChanSubscribe(inbox+".>", w.replies)
	if err != nil {
		w.end.err = err
		return w.end
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only with the connection

	committed := w.send(ctx, batch, maySend)
	if w.end.sent == 0 {
		return w.end
	}
	if !committed && !w.ended {
		w.control(opEnd, w.end.sent+1)
	}
	w.closing = true
	for !w.ended {
		w.wait(ctx, batch)
	}
	return w.end
}

// send puts the messages on the wire until something stops it, and reports whether
// the last one, which commits the batch, is there and not refused.
func (w *fastWire) send(ctx context.Context, batch []message, maySend func() bool) (committed bool) {
	for i, m := range batch {
		for !w.stopped && i-w.acked >= w.window {
			w.wait(ctx, batch)
		}
		w.drain()
		if w.stopped || !maySend() {
			return false
		}
		op := opAdd
		switch i {
		case len(batch) - 1:
			op = opCommit
		case 0:
			op = opStart
		}
		m.msg.Reply = w.reply(op, i+1)
		err := w.nc.PublishMsg(m.msg)
		m.msg.Reply = "" // the other engine takes no message that has one
		if err != nil {
			// The client's own refusal. The server does not miss it: its number
			// was not used.
			w.end.refused, w.end.err = i, err
			return false
		}
		w.end.sent++
	}
	// A commit that is refused before the batch sees it leaves the batch open; only
	// this client can know, so wait asks by a ping.
	return true
}

func (w *fastWire) reply(op, seq int) string {
	var room [96]byte // an inbox has some thirty bytes
	b := append(room[:0], w.prefix...)
	b = strconv.AppendInt(b, int64(seq), 10)
	b = append(b, '.')
	b = strconv.AppendInt(b, int64(op), 10)
	return string(append(b, ".$FI"...))
}

// control sends an operation without a message.
func (w *fastWire) control(op, seq int) {
	if err := w.nc.PublishRequest(w.subject, w.reply(op, seq), nil); err != nil {
		w.stop(err)
		w.ended = true
	}
}

// stop notes why the batch ends. The first reason counts.
func (w *fastWire) stop(err error) {
	w.stopped = true
	if w.end.err == nil {
		w.end.err = err
	}
}

// drain takes what has come, without waiting.
func (w *fastWire) drain() {
	for len(w.replies) > 0 {
		w.take(<-w.replies)
	}
}

// wait takes the next reply. It ends the batch when none comes in time.
func (w *fastWire) wait(ctx context.Context, batch []message) {
	if w.waited != w.end.sent {
		w.waited = w.end.sent
		w.progressed()
	}
	// Replies that say nothing new do not put the question off: a stream that
	// changes its leader often sends one each time.
	ping := time.NewTimer(time.Until(w.asked.Add(fastPing)))
	defer ping.Stop()
	for {
		// What the server does not let through it says on the connection alone.
		denied, changed := w.denials.since(batch[min(w.acked, len(batch)-1)].msg.Subject, w.end.began)
		if denied && !w.end.heard {
			w.stop(errDenied)
			w.ended = true
			return
		}
		select {
		case m := <-w.replies:
			w.take(m)
			return
		case <-changed:
		case <-ping.C:
			if time.Since(w.progress) >= ackTimeout {
				w.stop(errNoAck)
				w.ended = true
				w.control(opEnd, w.end.sent+1) // nobody waits for the answer
				return
			}
			if w.ask(); w.ended {
				return
			}
			ping.Reset(fastPing)
		case <-ctx.Done():
			w.stop(fmt.Errorf("%w: %w", errNoAck, ctx.Err()))
			w.ended = true
			w.control(opEnd, w.end.sent+1)
			return
		}
	}
}

func (w *fastWire) progressed() {
	w.progress = time.Now()
	w.asked = w.progress
}

// ask makes the server say where it is.
func (w *fastWire) ask() {
	w.asked = time.Now()
	if w.closing {
		// A new leader of the stream has forgotten that the batch was to end, and
		// would answer pings for ever.
		w.control(opEnd, w.end.sent+1)
		return
	}
	w.control(opPing, w.end.sent)
}

// take learns from a reply.
func (w *fastWire) take(m *nats.Msg) {
	if w.ended {
		return
	}
	if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		w.stop(jetstream.ErrNoStreamResponse)
		w.ended = true
		return
	}
	var a wireAck
	if err := json.Unmarshal(m.Data, &a); err != nil {
		w.stop(fmt.Errorf("%w: %w", errWrongAck, err))
		w.ended = true
		return
	}
	w.end.heard = true
	switch a.Type {
	case "ack":
		if int(a.Sequence) > w.acked {
			w.acked = int(a.Sequence)
			w.progressed()
		}
		w.window = max(1, int(a.Messages)) * fastOutstanding
	case "gap":
		// The server misses a message and ends the batch before it.
		w.stopped = true
	case "err":
		if i := int(a.Sequence) - 1; a.Error != nil {
			w.refuse(i, a.Error)
		}
	default:
		w.receipt(m.Subject, a)
	}
}

func (w *fastWire) refuse(i int, err error) {
	if w.end.refused < 0 && w.end.err == nil {
		w.end.refused, w.end.err = i, err
	}
	w.stopped = true
}

// receipt takes what looks like a PubAck: the final one, or a refusal from before
// the server looked at the batch.
func (w *fastWire) receipt(subject string, a wireAck) {
	if a.Error == nil {
		w.end.final = &a
		w.stopped, w.ended = true, true
		return
	}
	seq := sequenceOf(subject)
	switch {
	case a.Error.ErrorCode == codeNoBatch:
		w.stop(a.Error)
		w.ended = true
	case seq <= 1:
		w.refuse(0, a.Error) // there is no batch
		w.ended = true
	default:
		// The batch does not know: the next number it sees ends it.
		w.refuse(seq-1, a.Error)
		w.control(opEnd, w.end.sent+1)
	}
}

// sequenceOf reads the sequence in the batch from a reply subject, 0 if there is
// none.
func sequenceOf(subject string) int {
	rest, ok := strings.CutSuffix(subject, ".$FI")
	if !ok {
		return 0
	}
	rest = rest[:max(0, strings.LastIndexByte(rest, '.'))]
	n, err := strconv.Atoi(rest[strings.LastIndexByte(rest, '.')+1:])
	if err != nil {
		return 0
	}
	return n
}
