package main

import (
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/dlq"
	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// desk is a broker with dead letters, and relay dlq in this process.
type desk struct {
	t       *testing.T
	url     string
	js      jetstream.JetStream
	letters *dlq.Letters
}

func newDesk(t *testing.T) *desk {
	t.Helper()
	d := &desk{t: t, url: embedded.RunTest(t, func(c *embedded.Config) { c.Listen = "127.0.0.1:0" }).ClientURL()}
	d.js = connectJS(t, d.url)
	if _, err := d.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}}); err != nil {
		t.Fatal(err)
	}
	var err error
	if d.letters, err = dlq.New(d.js, dlq.Config{}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.letters.Setup(t.Context(), "EVENTS"); err != nil {
		t.Fatal(err)
	}
	return d
}

// park publishes an event and parks it for the consumer.
func (d *desk) park(consumer, subject, payload string, headers ...string) dlq.Letter {
	d.t.Helper()
	m := nats.NewMsg(subject)
	m.Data = []byte(payload)
	for i := 0; i < len(headers); i += 2 {
		m.Header.Set(headers[i], headers[i+1])
	}
	ack, err := d.js.PublishMsg(d.t.Context(), m)
	if err != nil {
		d.t.Fatal(err)
	}
	return d.fail(consumer, ack.Sequence, "no rate for <EUR> & \x1b[2J\nat billing.go:7")
}

// fail parks the message of a sequence.
func (d *desk) fail(consumer string, seq uint64, text string) dlq.Letter {
	d.t.Helper()
	st, err := d.js.Stream(d.t.Context(), "EVENTS")
	if err != nil {
		d.t.Fatal(err)
	}
	m, err := st.GetMsg(d.t.Context(), seq)
	if err != nil {
		d.t.Fatal(err)
	}
	err = d.letters.Park(d.t.Context(), jetbox.Failure{
		Stream: "EVENTS", Consumer: consumer, Seq: seq, Stored: m.Time, Subject: m.Subject, Header: m.Header, Payload: m.Data,
		Deliveries: 5, Reason: jetbox.ReasonMaxDeliveries, Err: text,
	})
	if err != nil {
		d.t.Fatal(err)
	}
	id := m.Header.Get(jetbox.HeaderLetter)
	if id == "" {
		id = fmt.Sprintf("dlq.EVENTS.%s.%d-%d", consumer, seq, m.Time.UnixNano())
	}
	l, err := d.letters.Show(d.t.Context(), id)
	if err != nil {
		d.t.Fatal(err)
	}
	return l
}

// relay runs relay dlq with these arguments.
func (d *desk) relay(args ...string) (code int, stdout, stderr string) {
	d.t.Helper()
	var out, errs strings.Builder
	code = run(d.t.Context(), append(append([]string{"dlq"}, args...), "--nats", d.url), nil, strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

// want runs it and fails the test unless status and stderr are these.
func (d *desk) want(wantCode int, wantStderr string, args ...string) (stdout string) {
	d.t.Helper()
	code, stdout, stderr := d.relay(args...)
	if code != wantCode || !strings.Contains(stderr, wantStderr) {
		d.t.Errorf("relay dlq %q: status %d, stderr %q; want %d and %q", args, code, stderr, wantCode, wantStderr)
	}
	return stdout
}

// replays returns the letters whose messages are on the event stream again.
func (d *desk) replays() (ids []string) {
	d.t.Helper()
	st, err := d.js.Stream(d.t.Context(), "EVENTS")
	if err != nil {
		d.t.Fatal(err)
	}
	for seq := uint64(1); seq <= st.CachedInfo().State.LastSeq; seq++ {
		m, err := st.GetMsg(d.t.Context(), seq)
		if err != nil {
			d.t.Fatal(err)
		}
		if id := m.Header.Get(jetbox.HeaderLetter); id != "" {
			ids = append(ids, id)
		}
	}
	return ids
}

func TestLettersAreListedCountedAndShown(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	if out := d.want(exitFine, "no letter matches\n", "list", "--json"); out != "" {
		t.Errorf("list of nothing printed %q", out)
	}
	d.want(exitFine, "no letter matches\n", "replay")
	object := d.park("billing", "events.order.1", `{"b":1e400,"a":[-0,"é"],"b":2}`, "Nats-Msg-Id", "k1", "traceparent", "00-1")
	text := d.park("billing", "events.order.2", "two\nlines \u009b")
	binary := d.park("shipping", "events.user.1", "\x00\xff")

	out := d.want(exitFine, "", "list", "--json", "--subject", "events.order.*", "--consumer", "billing", "--reason", "max_deliveries", "--since", "1h", "--limit", "1")
	var keys map[string]any
	if err := json.Unmarshal([]byte(out), &keys); err != nil || strings.Count(out, "\n") != 1 {
		t.Fatalf("list --json printed %q: %v", out, err)
	}
	for _, key := range []string{"id", "state", "stream", "consumer", "stream_seq", "subject", "deliveries", "reason", "error", "time", "replays"} {
		if _, ok := keys[key]; !ok {
			t.Errorf("list --json has no %s: %s", key, out)
		}
		delete(keys, key)
	}
	if len(keys) > 0 || !strings.Contains(out, object.ID) {
		t.Errorf("list --json has %v besides, or another letter: %s", keys, out)
	}
	if out := d.want(exitFine, "", "list"); strings.Count(out, "\n") != 4 || strings.Contains(out, "\x1b") {
		t.Errorf("list printed\n%s", out)
	}
	d.want(exitFine, "no letter matches\n", "list", "--since", "2100-01-01T00:00:00Z")

	out = d.want(exitFine, "", "list", "--summary")
	for _, line := range []string{`EVENTS +billing +max_deliveries +open +2 `, `EVENTS +shipping +max_deliveries +open +1 `} {
		if !regexp.MustCompile(line).MatchString(out) {
			t.Errorf("no line %s in\n%s", line, out)
		}
	}
	out = d.want(exitFine, "", "list", "--summary", "--json", "--consumer", "shipping")
	if !strings.HasPrefix(out, `{"stream":"EVENTS","consumer":"shipping","reason":"max_deliveries","state":"open","letters":1,"oldest":"`) {
		t.Errorf("list --summary --json printed %s", out)
	}
	d.want(exitUsage, "--summary counts all", "list", "--summary", "--limit", "1")

	// Digits, double keys and letters as they were sent.
	for args, want := range map[[3]string]string{
		{object.ID}:                      "\n\n{\n  \"b\": 1e400,\n  \"a\": [\n    -0,\n    \"é\"\n  ],\n  \"b\": 2\n}\n",
		{object.ID, "--payload", "text"}: "\n\n{\"b\":1e400,\"a\":[-0,\"é\"],\"b\":2}\n",
		{text.ID}:                        "00000000  74 77 6f 0a 6c 69 6e 65  73 20 c2 9b              |two.lines ..|\n",
		{text.ID, "--payload", "text"}:   "\n\ntwo\nlines \\u009b\n",
		{binary.ID}:                      "00000000  00 ff  ",
		{binary.ID, "--payload", "text"}: "\n\n\\x00\\xff\n",
		{object.ID, "--payload", "hex"}:  "00000000  7b 22 62 22",
	} {
		show := slices.DeleteFunc(append([]string{"show"}, args[:]...), func(s string) bool { return s == "" })
		if out := d.want(exitFine, "", show...); !strings.Contains(out, want) || strings.ContainsAny(out, "\x1b\u009b") {
			t.Errorf("%q printed\n%s\nwant %q", show, out, want)
		}
	}
	d.want(exitFailed, "the payload is no JSON", "show", text.ID, "--payload", "json")
	d.want(exitUsage, "flag --payload", "show", text.ID, "--payload", "yaml")
}

func TestReplayOfLettersIsChosenTriedOutAndLimited(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	a := d.park("billing", "events.order.1", "x", "Nats-Msg-Id", "k1", "traceparent", "00-1")
	b := d.park("shipping", "events.order.2", "x")
	if out := d.want(exitFine, "2 letters would be replayed\n", "replay", "--dry-run"); out != a.ID+" would be replayed\n"+b.ID+" would be replayed\n" {
		t.Errorf("replay --dry-run printed %q", out)
	}
	if got := d.replays(); len(got) != 0 {
		t.Errorf("replay --dry-run replayed %q", got)
	}
	out := d.want(exitFine, "1 letter replayed\n", "replay", "--json", "--consumer", "billing")
	if !strings.Contains(out, a.ID) || !strings.Contains(out, `"state":"replayed"`) || !strings.Contains(out, `"replays":1`) {
		t.Errorf("replay --json printed %s", out)
	}
	d.want(exitFine, "no letter matches\n", "replay", "--consumer", "billing")

	// It fails, again and again, until it is refused; show tells all of it.
	for n := range 5 {
		l, err := d.letters.Show(t.Context(), a.ID)
		if err != nil {
			t.Fatal(err)
		}
		d.fail("billing", l.ReplaySeq, fmt.Sprint("still no rate, ", n))
		if n < 4 {
			d.want(exitFine, "1 letter replayed\n", "replay", a.ID)
		}
	}
	d.want(exitFine, a.ID+": would be refused: replayed 5 times\n1 letter would be replayed\n", "replay", "--dry-run")
	d.want(exitFailed, "letter "+a.ID+" waits again after 5 replays, at most 5 are allowed", "replay", a.ID)
	d.want(exitFailed, "relay: 1 of 2 letters could not be replayed\nrelay: hint: relay dlq show tells why", "replay")
	out = d.want(exitFine, "", "show", a.ID)
	for n := range 4 {
		if !strings.Contains(out, fmt.Sprintf("%d deliveries, max_deliveries: still no rate, %d\n", 5*(n+2), n)) {
			t.Errorf("show does not tell of failure %d:\n%s", n, out)
		}
	}
	out = d.want(exitFine, "", "show", a.ID, "--json")
	var full struct {
		History []dlq.Past
		Headers map[string][]string
		Payload string
	}
	if err := json.Unmarshal([]byte(out), &full); err != nil || len(full.History) != 5 || full.Payload != "x" || full.Headers["traceparent"][0] != "00-1" {
		t.Errorf("show --json printed %s: %v", out, err)
	}
	d.want(exitFine, "1 letter replayed\n", "replay", a.ID, "--max-replays", "6")
	if got := d.replays(); len(got) != 7 {
		t.Errorf("messages replayed = %d, want 6 of one letter and 1 of the other", len(got))
	}

	// Discarded letters are marks, and removed when they are old.
	c := d.park("billing", "events.order.3", "x")
	d.want(exitUsage, "which letters?", "discard")
	d.want(exitFine, "1 letter would be discarded\n", "discard", "--dry-run", "--consumer", "billing")
	d.want(exitFine, "1 letter discarded\n", "discard", c.ID)
	d.want(exitFine, "no letter matches "+c.ID, "discard", c.ID)
	if out := d.want(exitFine, "", "list", "--state", "discarded", "--json"); !strings.Contains(out, c.ID) {
		t.Errorf("list --state discarded printed %s", out)
	}
	if out := d.want(exitFine, "", "prune"); out != "0 letters removed\n" {
		t.Errorf("prune printed %q", out)
	}
	d.want(exitUsage, "--older-than", "prune", "--older-than", "1h")
}

func TestReplayKeepsToItsRate(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	for range 6 {
		d.park("billing", "events.a", "x")
	}
	began := time.Now()
	d.want(exitFine, "6 letters replayed\n", "replay", "--rate", "20")
	if took := time.Since(began); took < 250*time.Millisecond {
		t.Errorf("6 letters at 20 a second took %v, want 250ms at least", took)
	}
}

// BR-59: killed in the middle of a replay of many, then finished by two operators
// at once: every message once, and what they say is what happened.
func TestKilledReplayIsFinishedByTwoOperatorsAtOnce(t *testing.T) {
	t.Parallel()
	letters := 300
	if testing.Short() {
		letters = 120
	}
	d := newDesk(t)
	for range letters {
		d.park("billing", "events.a", "x")
	}
	dir := t.TempDir()
	for _, kill := range []int{letters / 6, letters / 3} {
		p := start(t, dir, "dlq", "replay", "--rate", "600", "--nats", d.url)
		eventually(t, "some replayed", func() (bool, string) {
			select {
			case <-p.ended:
				return true, ""
			default:
			}
			n := strings.Count(p.stdout.String(), "\n")
			return n >= kill, fmt.Sprint(n)
		})
		p.signal(t, syscall.SIGKILL)
		if p.wait(t); p.cmd.ProcessState.Success() {
			t.Fatal("it ended before it was killed: the test proves nothing")
		}
	}
	var said [2]string
	var wg sync.WaitGroup
	for i := range said {
		wg.Go(func() {
			out, err := relayCmd(t.Context(), dir, "dlq", "replay", "--nats", d.url).Output()
			if err != nil {
				t.Errorf("operator %d: %v", i, err)
			}
			said[i] = string(out)
		})
	}
	wg.Wait()
	got := d.replays()
	slices.Sort(got)
	if n := len(slices.Compact(slices.Clone(got))); n != letters || len(got) != letters {
		t.Errorf("%d messages of %d letters were replayed, want %d, each once", len(got), n, letters)
	}
	if n, err := d.letters.Count(t.Context(), dlq.Filter{States: []dlq.State{dlq.StateReplayed}}); n != letters || err != nil {
		t.Errorf("%d letters are replayed, %v, want %d", n, err, letters)
	}
	for line := range strings.Lines(said[0]) {
		if strings.Contains(said[1], line) {
			t.Errorf("both operators say: %s", line)
		}
	}
}

// The age of the oldest letter, for alerts.
func TestStatusTellsTheAgeOfTheOldestLetter(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	db := "sqlite:" + filepath.Join(t.TempDir(), "jetbox.db")
	relay := func(args ...string) (code int, stdout string) {
		t.Helper()
		var out strings.Builder
		code = run(t.Context(), append(args, "--db", db, "--nats", d.url), nil, strings.NewReader(""), &out, io.Discard)
		return code, out.String()
	}
	relay("migrate")
	if code, out := relay("status", "--json", "--check"); code != exitFine || !strings.Contains(out, `"dlq_letters":0,"dlq_oldest_letter_age_seconds":0,`) {
		t.Errorf("status without letters: %d, %s", code, out)
	}
	l := d.park("billing", "events.a", "x")
	d.park("billing", "events.a", "x")
	if code, out := relay("status", "--check"); code != exitFound || !regexp.MustCompile(`(?m)^problem +2 dead letters in DLQ, the oldest waits for \d+s$`).MatchString(out) ||
		!regexp.MustCompile(`(?m)^oldest letter +\d+(\.\d+)?m?s$`).MatchString(out) {
		t.Errorf("status with letters: %d\n%s", code, out)
	}
	w, err := countWaiting(t.Context(), d.letters)
	if err != nil || w.letters != 2 || !w.since.Equal(l.Time) || w.age(l.Time.Add(time.Hour)) != time.Hour {
		t.Errorf("waiting = %+v, %v, want 2 letters since %v", w, err, l.Time)
	}
}
