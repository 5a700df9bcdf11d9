package consumer

import "log/slog"

// maxBehindBytes bounds what waits behind others of its key.
const maxBehindBytes = 64 << 20

// pause is why nothing is asked for.
type pause int

const (
	goesOn pause = iota
	pausedForLetters
	pausedForKey
	pausedForKeys
)

// full reports whether nothing more is to be taken in, and says so once.
func (r *run) full(c counts, l *live) (full bool) {
	most := r.cfg.MaxBehind
	if l.maxAckPending > 0 {
		most = min(most, max(l.maxAckPending/2, 1))
	}
	why := goesOn
	switch {
	case c.aside >= r.cfg.MaxHeld:
		why = pausedForLetters
	case r.pace.starting && r.pace.gated:
		// What was out must come, or the gate would never open. Of what is new,
		// one comes in a second, until the ack wait is over.
	case c.crowded > 0:
		why = pausedForKey
	case c.behind+c.atGate >= most || c.bytes >= maxBehindBytes:
		why = pausedForKeys
	}
	if why == r.paused {
		return why != goesOn
	}
	switch r.paused = why; why {
	case goesOn:
		r.cfg.Logger.LogAttrs(r.ctx, slog.LevelInfo, "goes on after a pause", r.attrs()...)
	case pausedForLetters:
		r.cfg.Logger.LogAttrs(r.ctx, slog.LevelError, "paused: too many messages wait for their dead letters to be stored",
			r.attrs(slog.Int("held", c.aside))...)
	case pausedForKey:
		r.cfg.Logger.LogAttrs(r.ctx, slog.LevelError, "paused: too many messages wait behind one of their key",
			r.attrs(slog.String("key", c.crowd))...)
	case pausedForKeys:
		r.cfg.Logger.LogAttrs(r.ctx, slog.LevelError, "paused: too many messages wait behind others of their keys",
			r.attrs(slog.Int("behind", c.behind), slog.Int("bytes", c.bytes))...)
	}
	return why != goesOn
}
