package relay

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

const (
	// fastLeast is the fewest messages that are worth a batch.
	fastLeast = 16
	// fastChain is how many messages of one key make a batch worth while where
	// every batch must be read back: the other engine takes a round trip for each.
	fastChain = 16
	// fastTries is how many batches to a stream may end early in one call. What
	// is left then goes message by message.
	fastTries = 4
	// settleLeast is the shortest duplicate window in which a message of unknown
	// outcome is sent again without looking for it.
	settleLeast = 4 * ackTimeout
)

// fastEngine publishes what was never sent before in fast batches, where the
// stream takes them, and everything else through the engine behind it.
//
// Only fresh messages may enter a batch: the server skips one whose ID it knows,
// without a word, and counts it as stored, even when the earlier copy is not
// stored yet and may still be lost (nats-server 2.15). So a batch is believed only
// when the stream's sequence grew by as many as it had messages. If not, each
// message is looked for on the stream, and what is not found goes through the
// other engine under the same ID: that one says what it is a duplicate of.
type fastEngine struct {
	slow    engine
	streams *streams
	denials *denials
	log     *slog.Logger
	states  fastStates
}

func newEngine(js jetstream.JetStream, cfg Config, s *streams, d *denials) (*fastEngine, error) {
	slow, err := newPubAckEngine(js, cfg.most, d)
	if err != nil {
		return nil, err
	}
	return &fastEngine{slow: slow, streams: s, denials: d, log: cfg.Logger}, nil
}

func (e *fastEngine) close() { e.slow.close() }

// mode says which engine serves a stream, and why.
func (e *fastEngine) mode(stream string) string { return e.states.mode(stream) }

func (e *fastEngine) publish(ctx context.Context, batch []message, maySend func() bool) []result {
	c := &fastCall{
		fastEngine: e,
		ctx:        ctx,
		maySend:    maySend,
		batch:      batch,
		results:    make([]result, len(batch)),
		course:     make([]course, len(batch)),
		lanes:      make(map[string]*lane),
	}
	for c.pass() {
	}
	c.finish()
	return c.results
}

// course is what is to be done with a message.
type course uint8

const (
	undecided course = iota
	slowly           // through the engine with one PubAck per message
	settled          // its result is final
)

// fastCall is one call of publish.
type fastCall struct {
	*fastEngine
	ctx     context.Context
	maySend func() bool
	batch   []message
	results []result
	course  []course
	unknown map[int]bool    // sent in a batch, and not found on the stream
	dead    map[string]bool // keys of which a message is not stored: no more of them
	lanes   map[string]*lane
}

// lane is the way to one stream, for the length of a call.
type lane struct {
	stream string
	st     *fastState
	info   *jetstream.StreamInfo
	fast   bool
	tries  int
	down   bool // must be given a rest
}

// pass sends what may go now, in groups that have no key in common, and reports
// whether there was anything. What the other engine takes goes first.
func (c *fastCall) pass() (more bool) {
	slow, fast := c.groups()
	if len(slow) > 0 {
		c.sendSlowly(slow)
	}
	for stream, group := range fast {
		c.sendFast(c.lanes[stream], group)
	}
	return len(slow)+len(fast) > 0
}

// groups sorts what is left: by engine and stream, in the order of the batch. A
// key that occurs in two groups goes on in a later pass, when the result of the
// first group is known.
func (c *fastCall) groups() (slow []int, fast map[string][]int) {
	c.decide()
	mixed := c.mixed()
	const split = "\x00" // no stream has such a name
	owner := make(map[string]string)
	for i, m := range c.batch {
		if c.course[i] == settled {
			continue
		}
		if l := c.lanes[m.stream]; l.down || m.key != "" && c.dead[m.key] {
			c.skip(i)
			continue
		}
		group := "" // the other engine
		if c.course[i] == undecided {
			group = m.stream
		}
		if mixed && m.key != "" {
			if o, taken := owner[m.key]; taken && o != group {
				owner[m.key] = split
				continue
			}
			owner[m.key] = group
		}
		if group == "" {
			slow = append(slow, i)
			continue
		}
		if fast == nil {
			fast = make(map[string][]int, 1)
		}
		fast[group] = append(fast[group], i)
	}
	for stream, group := range fast {
		if len(group) < fastLeast {
			slow = append(slow, group...) // the others of their keys wait for these
			delete(fast, stream)
		}
	}
	return slow, fast
}

// mixed reports whether what is left takes more than one way.
func (c *fastCall) mixed() (mixed bool) {
	if len(c.lanes) > 1 {
		return true
	}
	first := settled
	for _, course := range c.course {
		switch {
		case course == settled:
		case first == settled:
			first = course
		case course != first:
			return true
		}
	}
	return false
}

// decide chooses the engine for what is left.
func (c *fastCall) decide() {
	fresh := make(map[string]*freshness, 1)
	for i, m := range c.batch {
		if c.course[i] != undecided {
			continue
		}
		l := c.lane(m.stream)
		if !m.fresh || !l.fast {
			c.course[i] = slowly
			continue
		}
		f := fresh[m.stream]
		if f == nil {
			f = &freshness{shared: l.st.isShared(), readable: l.readable()}
			fresh[m.stream] = f
		}
		f.add(m)
	}
	for i, m := range c.batch {
		if c.course[i] == undecided && !fresh[m.stream].worth(m) {
			c.course[i] = slowly
		}
	}
}

// freshness is what decides whether messages to a stream go in a batch.
type freshness struct {
	shared   bool // others publish to it
	readable bool // what it stores stays there
	sure     int  // messages that can be in a batch without being looked for
	chains   map[string]int
	chain    int // the most of one key among the others
}

func (f *freshness) add(m message) {
	if !f.shared && !chosen(m) {
		f.sure++
		return
	}
	if m.key == "" {
		return
	}
	if f.chains == nil {
		f.chains = make(map[string]int)
	}
	f.chains[m.key]++
	f.chain = max(f.chain, f.chains[m.key])
}

// worth reports whether a batch is the way for m. To read back a batch costs more
// than a PubAck for each message does, except for long chains of one key.
func (f *freshness) worth(m message) (worth bool) {
	return f.readable && f.chain >= fastChain || f.sure >= fastLeast && !f.shared && !chosen(m)
}

// readable reports whether what the stream stores stays there.
func (l *lane) readable() (readable bool) {
	return l.info.Config.Retention == jetstream.LimitsPolicy
}

// chosen reports whether the message ID is one that its writer chose: others may
// choose the same. Nobody does so with the ID of an event, which is random.
func chosen(m message) (chosen bool) {
	return m.msg.Header.Get(jetbox.HeaderMsgID) != m.msg.Header.Get(jetbox.HeaderCEID)
}

func (c *fastCall) lane(stream string) *lane {
	if l := c.lanes[stream]; l != nil {
		return l
	}
	l := &lane{stream: stream, st: c.states.of(stream)}
	c.lanes[stream] = l
	info, err := c.streams.known(c.ctx, stream)
	if err != nil {
		return l // the other engine will say what is wrong
	}
	l.info = info
	l.fast = l.st.usable(info, c.log)
	return l
}

// settle makes a result final.
func (c *fastCall) settle(i int, r result) {
	c.results[i], c.course[i] = r, settled
	if key := c.batch[i].key; key != "" && r.ack == nil {
		if c.dead == nil {
			c.dead = make(map[string]bool)
		}
		c.dead[key] = true
	}
}

// skip settles a message that is not sent, or not sent again.
func (c *fastCall) skip(i int) {
	var r result
	if c.unknown[i] {
		r.err = errNoAck
	}
	c.settle(i, r)
}

// finish settles what no pass has taken.
func (c *fastCall) finish() {
	for i := range c.batch {
		if c.course[i] != settled {
			c.skip(i)
		}
	}
}

// sendSlowly sends a group through the other engine.
func (c *fastCall) sendSlowly(group []int) {
	part := c.part(group)
	results := c.slow.publish(c.ctx, part, c.maySend)
	for n, i := range group {
		r := results[n]
		if r.ack == nil && r.err == nil {
			c.skip(i)
			continue
		}
		c.settle(i, r)
		if r.err != nil && classify(r.err) == classOutage && !errors.Is(r.err, errDenied) {
			c.lanes[part[n].stream].down = true
		}
	}
	for stream, l := range c.lanes {
		l.st.advance(stream, part, results, c.log)
	}
}

func (c *fastCall) part(group []int) []message {
	part := make([]message, len(group))
	for n, i := range group {
		part[n] = c.batch[i]
	}
	return part
}

// sendFast sends a group as one fast batch. What it cannot settle it leaves to a
// later pass.
func (c *fastCall) sendFast(l *lane, group []int) {
	if !c.maySend() || c.ctx.Err() != nil {
		l.down = true
		return
	}
	base, err := c.base(l)
	if err != nil {
		l.fast = false
		c.leave(group, false)
		return
	}
	part := c.part(group)
	end := sendFast(c.ctx, c.streams.js.Conn(), c.denials, part, c.maySend)
	took := time.Since(end.began)
	end.check(l.stream)
	if l.tries++; l.tries >= fastTries {
		l.fast = false
	}

	counted := 0
	if end.final != nil {
		counted = end.final.Count
	}
	grew := end.final != nil && (counted == 0 || end.final.Sequence == base+uint64(counted))
	switch {
	case end.sent == 0:
	case grew && (counted == 0 || (l.st.isProven() || !l.readable()) && !slices.ContainsFunc(part, chosen)):
		for n, i := range group[:counted] {
			c.settle(i, stored(l.stream, base+uint64(n)+1, took))
		}
		l.st.reach(base+uint64(counted), false)
	default:
		c.look(l, base, group, part, end, took)
	}
	c.conclude(l, group, end, counted, took)
}

// conclude settles the message that ended a batch, and says how what is not
// settled yet goes on.
func (c *fastCall) conclude(l *lane, group []int, end batchEnd, counted int, took time.Duration) {
	if why, pause := end.unusable(); why != "" {
		l.fast = false
		l.st.turnOff(l.stream, why, pause, c.log)
		if end.refused == 0 {
			c.leave(group, false) // the server took none
			return
		}
	}
	if end.refused < 0 || end.refused != counted {
		// Either all of it was counted, or nobody knows what comes behind.
		c.leave(group[:end.sent], true)
		if counted < end.sent || end.err != nil {
			l.fast = false // not again in this call
		}
		return
	}
	// From the refused message on nothing was taken: the rest is as fresh as before.
	c.leave(group[:counted], true)
	c.settle(group[end.refused], result{err: end.err, took: took})
	if classify(end.err) == classOutage {
		l.down = true
	}
}

// leave gives what is not settled to the other engine.
func (c *fastCall) leave(group []int, unknown bool) {
	for _, i := range group {
		if c.course[i] == settled {
			continue
		}
		c.course[i] = slowly
		if unknown {
			if c.unknown == nil {
				c.unknown = make(map[int]bool)
			}
			c.unknown[i] = true
		}
	}
}

// base is the stream's last sequence before a batch.
func (c *fastCall) base(l *lane) (uint64, error) {
	if last, ok := l.st.last(l.info.Created); ok {
		return last, nil
	}
	info, err := c.streams.now(c.ctx, l.stream)
	if err != nil {
		return 0, err
	}
	l.info = info
	l.st.resume(l.stream, info, c.log)
	return info.State.LastSeq, nil
}

// look finds out which messages of a batch are stored, where the stream's sequence
// does not say it. A message that is not there is either one that the server took
// for a duplicate, or was not stored: the other engine will tell.
func (c *fastCall) look(l *lane, base uint64, group []int, part []message, end batchEnd, took time.Duration) {
	found, upTo, err := c.find(l, base, part[:end.sent], end)
	if err != nil {
		if l.st.lose(); end.final != nil {
			l.st.share(l.stream, c.log)
		}
		if !errors.Is(err, errNoLook) && c.ctx.Err() == nil {
			l.fast = false
			l.st.turnOff(l.stream, "what is stored cannot be read back: "+err.Error(), offUnreadable, c.log)
		}
		// Sent again only where the broker is sure to remember.
		if l.info.Config.Duplicates < settleLeast {
			for _, i := range group[:end.sent] {
				c.settle(i, result{err: errNoAck, took: took})
			}
		}
		return
	}
	for n, i := range group[:end.sent] {
		if seq, ok := found[part[n].msg.Header.Get(jetbox.HeaderMsgID)]; ok {
			c.settle(i, stored(l.stream, seq, took))
		}
	}
	switch {
	case end.final == nil:
		l.st.lose()
	case uint64(len(found)) == upTo-base:
		l.st.reach(upTo, true) // all of it is ours
	default:
		l.st.share(l.stream, c.log)
	}
}

// find reads back what the stream stored since base. The error is errNoLook where
// that is no use.
func (c *fastCall) find(l *lane, base uint64, part []message, end batchEnd) (found map[string]uint64, upTo uint64, err error) {
	if !l.readable() || !end.heard {
		return nil, 0, errNoLook
	}
	if end.final != nil {
		upTo = end.final.Sequence
	} else {
		info, err := c.streams.now(c.ctx, l.stream)
		if err != nil || !info.Created.Equal(l.info.Created) {
			return nil, 0, errNoLook
		}
		upTo = info.State.LastSeq
	}
	if upTo < base || upTo-base > lookMost {
		return nil, 0, errNoLook
	}
	found, err = c.streams.find(c.ctx, l.stream, base, upTo, part)
	return found, upTo, err
}

func stored(stream string, seq uint64, took time.Duration) result {
	return result{ack: &jetstream.PubAck{Stream: stream, Sequence: seq}, took: took}
}
