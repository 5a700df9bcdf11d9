package relay

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// checkEvery is how often streams are looked at although nothing is suspected: a
// recall that another relay has left behind must not keep the source waiting.
const checkEvery = time.Minute

// checkAgain is how soon after a check that could not ask everything the next is,
// twice as long each time.
const checkAgain = 5 * time.Second

// watch knows when to ask whether the streams still have what they acknowledged. It
// is safe for concurrent use.
type watch struct {
	mu         sync.Mutex // guards what follows
	suspicious bool
	checked    time.Time
	reconnects uint64
	failures   int             // checks in succession that could not ask everything
	highest    map[string]mark // by stream

	// unsure are streams that have acknowledged something and were not found to have
	// it yet, or in doubt since, and when asking them failed.
	unsure map[string]time.Time

	// owed are, by stream, acknowledged messages that are not remembered as anchors
	// because something was in doubt then.
	owed map[string]jetbox.Anchor
}

// mark is the highest sequence seen on a stream.
type mark struct {
	created time.Time
	seq     uint64
}

// suspect asks for a look at the streams.
func (w *watch) suspect() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.suspicious = true
}

// suspected reports whether the streams are to be looked at: on every connection
// first of all.
func (w *watch) suspected(nc *nats.Conn) (suspected bool) {
	reconnects := nc.Stats().Reconnects
	w.mu.Lock()
	defer w.mu.Unlock()
	every := checkEvery
	if w.failures > 0 {
		every = min(every, checkAgain<<min(w.failures-1, 10))
	}
	return w.suspicious || w.reconnects != reconnects || time.Since(w.checked) > every
}

// believed reports whether a stream is believed to have what it acknowledged: nothing
// else may take the place of the anchor that tells.
func (w *watch) believed(nc *nats.Conn, stream string) (believed bool) {
	reconnects := nc.Stats().Reconnects
	w.mu.Lock()
	defer w.mu.Unlock()
	_, unsure := w.unsure[stream]
	return !unsure && !w.suspicious && w.reconnects == reconnects
}

// doubt asks for a look at one stream, within seconds.
func (w *watch) doubt(stream string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.note(stream, w.unsure[stream])
	w.failures = max(w.failures, 1)
}

// expect notes the streams that a check is about to ask, and returns them, those last
// that failed last.
func (w *watch) expect(streams []string) (inOrder []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	was := w.unsure
	w.unsure = make(map[string]time.Time, len(streams))
	for _, stream := range streams {
		w.unsure[stream] = was[stream]
	}
	slices.SortFunc(streams, func(a, b string) int { return cmp.Or(was[a].Compare(was[b]), cmp.Compare(a, b)) })
	return streams
}

// failed notes that nothing could be found out about a stream.
func (w *watch) failed(stream string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.note(stream, time.Now())
}

// note notes when asking a stream failed. mu is locked.
func (w *watch) note(stream string, failed time.Time) {
	if w.unsure == nil {
		w.unsure = make(map[string]time.Time)
	}
	w.unsure[stream] = failed
}

// end ends a check.
func (w *watch) end(complete bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.checked = time.Now()
	if w.failures++; complete {
		w.failures = 0
	}
}

// owe notes a message that a stream should have and that is not remembered.
func (w *watch) owe(a jetbox.Anchor) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if was := w.owed[a.Stream]; was.Created.Equal(a.Created) && was.Seq > a.Seq {
		return
	}
	if w.owed == nil || len(w.owed) >= cacheMost {
		w.owed = make(map[string]jetbox.Anchor)
	}
	w.owed[a.Stream] = a
}

// owes returns what is owed of a stream that was created at a time.
func (w *watch) owes(stream string, created time.Time) (a jetbox.Anchor, owes bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	a, owes = w.owed[stream]
	return a, owes && a.Created.Equal(created)
}

// forgive forgets what is owed of a stream.
func (w *watch) forgive(stream string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.owed, stream)
}

// begin ends the suspicion, before a look.
func (w *watch) begin(nc *nats.Conn) {
	reconnects := nc.Stats().Reconnects
	w.mu.Lock()
	defer w.mu.Unlock()
	w.suspicious, w.reconnects, w.checked = false, reconnects, time.Now()
}

// verified notes what a look has found, whatever was known before.
func (w *watch) verified(stream string, created time.Time, seq uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.set(stream, mark{created, seq})
	delete(w.unsure, stream)
	delete(w.owed, stream)
}

// set notes the highest sequence. mu is locked.
func (w *watch) set(stream string, m mark) {
	if w.highest == nil || len(w.highest) >= cacheMost {
		w.highest = make(map[string]mark)
	}
	w.highest[stream] = m
}

// of returns the highest sequence known of a stream.
func (w *watch) of(stream string) mark {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.highest[stream]
}

// saw compares what the broker says of a stream with what was known before it was
// asked, and reports whether the stream is to be looked at.
func (w *watch) saw(before mark, info *jetstream.StreamInfo) (suspect bool) {
	if before.created.IsZero() || before.created.Equal(info.Created) && before.seq <= info.State.LastSeq {
		return false
	}
	w.suspect()
	return true
}

// acked compares the sequences of a batch on a stream with those before, and reports
// whether they grow as they should. The lowest is 0 where some may be those of
// duplicates, which are lower.
func (w *watch) acked(stream string, created time.Time, lowest, last uint64) (grows bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m, known := w.highest[stream]
	if known && (!m.created.Equal(created) || last <= m.seq || lowest > 0 && lowest <= m.seq) {
		w.suspicious = true
		return false
	}
	w.set(stream, mark{created, last})
	return true
}

// born returns when the streams of a batch were created, as is known before it is
// sent: an acknowledgement is of that stream, or of a later one.
func (s *session) born(batch []outbound) map[string]time.Time {
	born := make(map[string]time.Time, 1)
	last := ""
	for i := range batch {
		stream := batch[i].stream
		if stream == last {
			continue
		}
		last = stream
		if _, known := born[stream]; known {
			continue
		}
		born[stream] = s.streams.created(stream)
		if !born[stream].IsZero() {
			continue
		}
		if info, err := s.streams.known(s.ctx, stream); err == nil {
			born[stream] = info.Created
		}
	}
	return born
}

// created returns when a stream was created, as the server said last; no time if it
// has not lately.
func (s *streams) created(stream string) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	info := s.infos[stream].info
	if stream == s.name {
		info = s.info
	}
	if info == nil {
		return time.Time{}
	}
	return info.Created
}

// remember lets the rows of a batch be remembered as anchors of their streams. Where
// the sequences do not grow, the stream may be another by now, or whether it has lost
// something is still to be asked, they are not: the stream is looked at first, and what
// is remembered tells what it should have.
func (s *session) remember(outcomes []jetbox.Outcome, duplicates bool, born map[string]time.Time) {
	for stream, created := range born {
		lowest, last, at := uint64(0), uint64(0), 0
		for i := range outcomes {
			if o := &outcomes[i]; o.StreamSeq > 0 && o.Stream == stream {
				if o.StreamSeq > last {
					last, at = o.StreamSeq, i
				}
				if lowest == 0 || o.StreamSeq < lowest {
					lowest = o.StreamSeq
				}
			}
		}
		if last == 0 {
			continue
		}
		if duplicates {
			lowest = 0
		}
		if created.IsZero() {
			continue
		}
		if !s.watch.believed(s.streams.js.Conn(), stream) {
			s.watch.owe(jetbox.Anchor{Stream: stream, Created: created, Seq: last, MsgID: outcomes[at].MsgID, Pos: outcomes[at].Pos})
			continue
		}
		if !s.streams.created(stream).Equal(created) || !s.watch.acked(stream, created, lowest, last) {
			s.watch.suspect()
			continue
		}
		for i := range outcomes {
			if o := &outcomes[i]; o.StreamSeq > 0 && o.Stream == stream {
				o.Created = created
			}
		}
	}
}
