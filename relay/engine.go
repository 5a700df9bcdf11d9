package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// ackTimeout is how long a PubAck may take before the outcome is unknown.
const ackTimeout = 5 * time.Second

// engine publishes messages in order. For each message of a batch it says whether
// it is stored, was refused and why, is of unknown outcome, or was not sent.
// Messages of one key are stored in the order of the batch: when one of them is
// not known to be stored, the later ones are not sent.
//
// maySend is asked before each message: when it says no, the rest is not sent.
// ctx bounds the wait for what was.
type engine interface {
	publish(ctx context.Context, batch []message, maySend func() bool) []result
	close()
}

// message is one row on its way.
type message struct {
	key    string // ordering key; "" is ordered with nothing
	stream string // that takes its subject
	fresh  bool   // never sent before: nothing of it can be on its way
	msg    *nats.Msg
}

// result is what became of a message. With neither ack nor err it was not sent.
type result struct {
	ack  *jetstream.PubAck
	err  error
	took time.Duration
}

var (
	// errWrongAck is a reply that is no receipt of the stream: some other
	// program answers on the stream's subjects.
	errWrongAck = errors.New("the reply is no PubAck of the stream that takes the subject")

	// errNoAck is given to what was sent and not acknowledged in time.
	errNoAck = errors.New("no PubAck in time")
)

// pubAckEngine waits for one PubAck per message: it works with every server.
// Messages without a key, and the first of each key, are on the wire together;
// the next of a key follows when the one before is stored, since a pipelined
// publish whose predecessor fails would be stored all the same.
type pubAckEngine struct {
	js      jetstream.JetStream
	denials *denials
}

func newPubAckEngine(js jetstream.JetStream, batch int, denials *denials) (*pubAckEngine, error) {
	// A context of our own on the caller's connection: acknowledgements that
	// never come must time out, or they fill the window for good.
	own, err := jetstream.New(js.Conn(),
		jetstream.WithPublishAsyncTimeout(ackTimeout),
		jetstream.WithPublishAsyncMaxPending(2*batch))
	if err != nil {
		return nil, fmt.Errorf("relay: set up publishing: %w", err)
	}
	return &pubAckEngine{own, denials}, nil
}

func (e *pubAckEngine) close() { e.js.CleanupPublisher() }

// sent is a message on the wire.
type sent struct {
	index  int
	future jetstream.PubAckFuture
	at     time.Time
}

func (e *pubAckEngine) publish(ctx context.Context, batch []message, maySend func() bool) []result {
	results := make([]result, len(batch))
	down := make(map[string]bool) // streams that must be given a rest
	for round, q := newQueue(batch); len(round) > 0; round = q.next(round, batch, results) {
		onWire := make([]sent, 0, len(round))
		for _, i := range round {
			if down[batch[i].stream] || !maySend() {
				continue
			}
			at := time.Now()
			future, err := e.js.PublishMsgAsync(batch[i].msg, jetstream.WithRetryAttempts(0))
			if err != nil {
				results[i].err = err
				down[batch[i].stream] = down[batch[i].stream] || classify(err) == classOutage
				continue
			}
			onWire = append(onWire, sent{i, future, at})
		}
		for _, s := range onWire {
			m := batch[s.index]
			results[s.index] = e.await(ctx, s, m)
			if err := results[s.index].err; err != nil && classify(err) == classOutage && !errors.Is(err, errDenied) {
				down[m.stream] = true
			}
		}
	}
	return results
}

func (e *pubAckEngine) await(ctx context.Context, s sent, m message) result {
	var r result
	for r.ack == nil && r.err == nil {
		denied, changed := e.denials.since(m.msg.Subject, s.at)
		if denied {
			r.err = fmt.Errorf("%w for subject %s", errDenied, m.msg.Subject)
			break
		}
		select {
		case r.ack = <-s.future.Ok():
		case r.err = <-s.future.Err():
		case <-changed:
		case <-ctx.Done():
			r.err = fmt.Errorf("%w: %w", errNoAck, ctx.Err())
		}
	}
	r.took = time.Since(s.at)
	if r.ack != nil && (r.ack.Stream != m.stream || r.ack.Sequence == 0) {
		r.err = fmt.Errorf("%w %s: stream %q, sequence %d", errWrongAck, m.stream, r.ack.Stream, r.ack.Sequence)
		r.ack = nil
	}
	return r
}

// queue holds, by key, the messages that wait for the one before them.
type queue map[string][]int

// newQueue returns the first round, what has no key and the first of each, and
// the queue of the rest.
func newQueue(batch []message) (round []int, q queue) {
	q = make(queue)
	for i, m := range batch {
		waiting, busy := q[m.key]
		switch {
		case m.key == "":
			round = append(round, i)
		case !busy:
			round = append(round, i)
			q[m.key] = nil
		default:
			q[m.key] = append(waiting, i)
		}
	}
	return round, q
}

// next returns the round after one: the successors of what was stored.
func (q queue) next(round []int, batch []message, results []result) []int {
	next := round[:0]
	for _, i := range round {
		if waiting := q[batch[i].key]; len(waiting) > 0 && results[i].ack != nil {
			next = append(next, waiting[0])
			q[batch[i].key] = waiting[1:]
		}
	}
	return next
}
