package jetbox_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// sharedRow is a row of an outbox that several relays share, as the table has it.
type sharedRow struct {
	id        int64
	msgID     string
	key       string // "" without one
	status    string
	lastError string
	seq       uint64
}

// sharedMsg is a message as the stream has it.
type sharedMsg struct {
	seq   uint64
	msgID string
	data  string
}

// sharedRun is what was written during a run, and what is there after it.
type sharedRun struct {
	committed  map[string]bool // message IDs; the value says that the row can not be sent
	rolledBack map[string]bool
	table      []sharedRow // by id
	stream     []sharedMsg // by sequence
}

// check returns what the run violates. The invariants, by number:
//
//  1. every committed row is in the table, and on the stream unless it is dead;
//  2. nothing else is in either: nothing rolled back, nothing made up;
//  3. a row is on the stream once, with its own payload;
//  4. per ordering key, the stream has the rows in the order of their ids, which
//     is commit order as the writers lock the key;
//  5. the table says of each row how it ended: PUBLISHED with its sequence on the
//     stream, or DEAD_LETTER with a reason where it cannot be sent.
func (r *sharedRun) check() (violations []string) {
	bad := func(invariant int, format string, args ...any) {
		violations = append(violations, fmt.Sprintf("%d: ", invariant)+fmt.Sprintf(format, args...))
	}
	rows := make(map[string]sharedRow, len(r.table))
	for _, row := range r.table {
		rows[row.msgID] = row
		if _, ok := r.committed[row.msgID]; !ok {
			bad(2, "%s is in the table, rolled back: %v", row.msgID, r.rolledBack[row.msgID])
		}
	}
	stored := make(map[string][]uint64, len(r.stream))
	last := make(map[string]sharedRow) // by key
	for _, m := range r.stream {
		stored[m.msgID] = append(stored[m.msgID], m.seq)
		if m.data != m.msgID {
			bad(3, "%s is on the stream with the payload of %s", m.msgID, m.data)
		}
		row, ok := rows[m.msgID]
		if _, committed := r.committed[m.msgID]; !ok || !committed {
			bad(2, "%s is on the stream, rolled back: %v", m.msgID, r.rolledBack[m.msgID])
			continue
		}
		if row.key == "" || len(stored[m.msgID]) > 1 {
			continue
		}
		if before, ok := last[row.key]; ok && before.id > row.id {
			bad(4, "key %s: row %d (%s) is on the stream at %d, after row %d (%s)", row.key, row.id, row.msgID, m.seq, before.id, before.msgID)
		}
		last[row.key] = row
	}
	for id, dead := range r.committed {
		row, ok := rows[id]
		seqs := stored[id]
		switch {
		case !ok:
			bad(1, "%s was committed and is not in the table", id)
		case dead && row.status != "DEAD_LETTER", dead && row.lastError == "", dead && len(seqs) > 0:
			bad(5, "%s cannot be sent: row %d is %s %q, on the stream at %v", id, row.id, row.status, row.lastError, seqs)
		case dead:
		case len(seqs) == 0:
			bad(1, "%s was committed and is not on the stream: row %d is %s %q", id, row.id, row.status, row.lastError)
		case len(seqs) > 1:
			bad(3, "%s is on the stream at %v", id, seqs)
		case row.status != "PUBLISHED" || row.seq != seqs[0]:
			bad(5, "%s is on the stream at %d, row %d is %s at %d", id, seqs[0], row.id, row.status, row.seq)
		}
	}
	slices.Sort(violations)
	return violations
}

// The checker itself must be able to fail.
func TestSharedCheckerSeesEachViolation(t *testing.T) {
	t.Parallel()
	good := func() *sharedRun {
		return &sharedRun{
			committed:  map[string]bool{"a1": false, "a2": false, "b1": false, "n1": false, "d1": true},
			rolledBack: map[string]bool{"x": true},
			table: []sharedRow{
				{1, "a1", "a", "PUBLISHED", "", 2},
				{2, "a2", "a", "PUBLISHED", "", 3},
				{3, "b1", "b", "PUBLISHED", "", 1},
				{4, "n1", "", "PUBLISHED", "", 4},
				{5, "d1", "", "DEAD_LETTER", "nobody takes it", 0},
			},
			stream: []sharedMsg{{1, "b1", "b1"}, {2, "a1", "a1"}, {3, "a2", "a2"}, {4, "n1", "n1"}},
		}
	}
	if v := good().check(); len(v) != 0 {
		t.Fatalf("a good run violates %q", v)
	}
	for _, tt := range []struct {
		name  string
		spoil func(r *sharedRun)
		want  []string
	}{
		{"lost row", func(r *sharedRun) { r.table = r.table[:4] }, []string{"1: d1"}},
		{"lost message", func(r *sharedRun) { r.stream = r.stream[:3] }, []string{"1: n1"}},
		{"ghost in the table", func(r *sharedRun) { r.table = append(r.table, sharedRow{msgID: "x"}) }, []string{"2: x is in the table, rolled back: true"}},
		{"ghost on the stream", func(r *sharedRun) { r.stream = append(r.stream, sharedMsg{5, "x", "x"}) }, []string{"2: x is on the stream, rolled back: true"}},
		{"made up", func(r *sharedRun) { r.stream = append(r.stream, sharedMsg{5, "y", "y"}) }, []string{"2: y is on the stream, rolled back: false"}},
		{"second copy", func(r *sharedRun) { r.stream = append(r.stream, sharedMsg{5, "a1", "a1"}) }, []string{"3: a1"}},
		{"other payload", func(r *sharedRun) { r.stream[0].data = "a1" }, []string{"3: b1"}},
		{"overtaken", func(r *sharedRun) {
			r.stream[1].msgID, r.stream[1].data, r.stream[2].msgID, r.stream[2].data = "a2", "a2", "a1", "a1"
			r.table[0].seq, r.table[1].seq = 3, 2
		}, []string{"4: key a: row 1"}},
		{"not recorded", func(r *sharedRun) { r.table[3].status = "PENDING" }, []string{"5: n1"}},
		{"wrong sequence", func(r *sharedRun) { r.table[3].seq = 3 }, []string{"5: n1"}},
		{"dead without a reason", func(r *sharedRun) { r.table[4].lastError = "" }, []string{"5: d1"}},
		{"parked for nothing", func(r *sharedRun) {
			r.table[3].status, r.stream = "DEAD_LETTER", r.stream[:3]
		}, []string{"1: n1"}},
	} {
		r := good()
		tt.spoil(r)
		v := r.check()
		if len(v) != len(tt.want) || !strings.HasPrefix(v[0], tt.want[0]) {
			t.Errorf("%s: violations %q, want %q", tt.name, v, tt.want)
		}
	}
}
