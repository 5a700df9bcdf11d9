package relay

import (
	"context"
	"sort"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// survivors looks for the last message that a stream has kept of those it should
// have, without an index: rows are published in about the order of their ids, so
// some of them, looked at on the stream, tell where it is. Whichever is found, rows
// with lower sequences are not lost; from a low one on, more have to be looked for.
type survivors struct {
	ctx    context.Context
	src    Recaller
	js     jetstream.JetStream
	source string
	last   jetbox.Anchor // lost
	latest time.Time     // rows recorded later may be where they are since

	info *jetstream.StreamInfo
	best jetbox.PublishedRow // kept, with the highest sequence; none if its Pos is 0
}

// after is the sequence after which rows may be lost: purged ones are not.
func (f *survivors) after() uint64 {
	if first := f.info.State.FirstSeq; first > 0 {
		return max(f.best.Seq, first-1)
	}
	return f.best.Seq
}

func (f *survivors) find() (err error) {
	if f.info, err = leaderInfo(f.ctx, f.js, f.last.Stream); err != nil {
		return err
	}
	// Back in growing steps to a row that is there, then halfway between.
	const begin = -1 // ids are positive, unless somebody has given others
	kept, gone := int64(begin), max(begin, f.last.Pos)
	for d := int64(1); gone > begin; d *= 4 {
		at := max(begin, f.last.Pos-d)
		ok, err := f.keptAfter(at)
		if err != nil {
			return err
		}
		if ok {
			kept = at
			break
		}
		if gone = at; at == begin {
			return nil
		}
	}
	const near = 1000
	for gone-kept > near {
		mid := kept + (gone-kept)/2
		ok, err := f.keptAfter(mid)
		if err != nil {
			return err
		}
		if ok {
			kept = mid
		} else {
			gone = mid
		}
	}
	return f.exact(kept)
}

// page returns rows after an id that may tell something: the next that there are, if
// they are not too far away.
func (f *survivors) page(after int64) (rows []jetbox.PublishedRow, err error) {
	const pages = 20
	for range pages {
		var all []jetbox.PublishedRow
		if all, after, err = f.src.Recallable(f.ctx, f.last.Stream, jetbox.Recall{}, after); err != nil {
			return nil, err
		}
		for _, r := range all {
			if r.Seq > 0 && !r.At.After(f.latest) {
				rows = append(rows, r)
			}
		}
		if len(rows) > 0 || after >= f.last.Pos {
			break
		}
	}
	return rows, nil
}

// keptAfter reports whether one of the first rows after an id is on the stream.
func (f *survivors) keptAfter(after int64) (kept bool, err error) {
	const tries = 3 // some may have been removed
	rows, err := f.page(after)
	for i := 0; i < min(tries, len(rows)) && err == nil && !kept; i++ {
		kept, err = f.kept(rows[i])
	}
	return kept, err
}

// exact looks for the last row after an id that is there, as far as they follow one
// another.
func (f *survivors) exact(after int64) error {
	for {
		rows, err := f.page(after)
		if err != nil || len(rows) == 0 {
			return err
		}
		n := sort.Search(len(rows), func(i int) bool {
			var kept bool
			if err == nil {
				kept, err = f.kept(rows[i])
			}
			return !kept
		})
		if err != nil || n < len(rows) {
			return err
		}
		after = rows[n-1].Pos
	}
}

// kept reports whether a row is on the stream where it was recorded to be.
func (f *survivors) kept(r jetbox.PublishedRow) (kept bool, err error) {
	if r.Seq < f.info.State.FirstSeq || r.Seq > f.info.State.LastSeq {
		return false, nil
	}
	if f.best.Pos != 0 && r.Seq <= f.best.Seq {
		return true, nil
	}
	m, err := leaderGet(f.ctx, f.js, f.last.Stream, getRequest{Seq: r.Seq})
	if err != nil || m == nil {
		return false, err
	}
	w := wanted(r, f.source)
	if m.header.Get(jetbox.HeaderMsgID) != w.msgID || m.header.Get(jetbox.HeaderCEID) != w.ceID {
		return false, nil
	}
	f.best = r
	return true, nil
}

// wanted is what to look for of a row.
func wanted(r jetbox.PublishedRow, source string) wantedEvent {
	h := jetbox.Event{ID: r.ID, Key: r.MsgID}.Header(source)
	return wantedEvent{msgID: h[jetbox.HeaderMsgID][0], ceID: h[jetbox.HeaderCEID][0]}
}
