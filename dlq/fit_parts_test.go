package dlq

import (
	"bytes"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
)

// BR-58, run 3: what does not fit lies beside the letter, and nothing is lost,
// although the original is.
func TestLetterTooLargeForTheBrokerHasTheRestBesideIt(t *testing.T) {
	const most = 1 << 20
	tests := []struct {
		name                 string
		payload, header      int
		err                  string
		streamMax            int32
		wantPayload, wantHdr bool // in the letter itself
		wantParts            int
		wantError            string
	}{
		{name: "fits", payload: 1000, header: 1000, err: "boom", wantPayload: true, wantHdr: true, wantError: "boom"},
		{name: "long error", payload: most - 4200, header: 1500, err: strings.Repeat("e", 3000), wantPayload: true, wantHdr: true, wantError: strings.Repeat("e", shortError-3) + "..."},
		{name: "headers go first", payload: most - 11400, header: 11000, err: "boom", wantPayload: true, wantParts: 1, wantError: "boom"},
		{name: "payload goes last", payload: most - 500, err: "boom", wantHdr: true, wantParts: 1, wantError: "boom"},
		{name: "header block at the limit", payload: 10, header: 65000, err: "boom", wantPayload: true, wantParts: 1, wantError: "boom"},
		{name: "the stream's own limit", payload: 50000, header: 1000, err: "boom", streamMax: 4096, wantHdr: true, wantParts: 14, wantError: "boom"},
	}
	if testing.Short() {
		tests = tests[3:]
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				if tt.streamMax > 0 {
					cfg := w.letters.lettersConfig()
					cfg.MaxMsgSize = tt.streamMax
					if _, err := w.js.UpdateStream(t.Context(), cfg); err != nil {
						t.Fatal(err)
					}
				}
				headers := []string{"ce-id", "e1", "X-App", "\xffnot UTF-8", "X-App", ""}
				if tt.header > 0 {
					headers = append(headers, "X-Big", strings.Repeat("h", tt.header))
				}
				payload := bytes.Repeat([]byte("0123456789\r\n\r\n\x00"), tt.payload/15+1)[:tt.payload]
				f := w.event("billing", "events.a", "k1", payload, headers...)
				f.Err = tt.err
				w.park(f)
				stored, err := w.letters.find(t.Context(), ownID(f))
				if err != nil {
					t.Fatal(err)
				}
				h := nats.Header(stored.Header)
				if got := len(stored.Payload) == tt.payload; got != tt.wantPayload || stored.PayloadMissing == tt.wantPayload {
					t.Errorf("payload in the letter has %d bytes, missing = %v; want it there: %v", len(stored.Payload), stored.PayloadMissing, tt.wantPayload)
				}
				if got := len(h.Get("X-Big")) == tt.header; got != tt.wantHdr {
					t.Errorf("application header in the letter = %v, want %v", got, tt.wantHdr)
				}
				if h.Get("ce-id") != "e1" || h.Get(jetbox.HeaderIdempotencyKey) != "k1" {
					t.Errorf("headers in the letter = %v, want the event's ID and key", h)
				}
				w.wantMsgs("DLQ", uint64(1+tt.wantParts))
				w.wantSeqs(Filter{}, 1) // parts are no letters
				l := w.show(ownID(f))
				want := map[string][]string{"Idempotency-Key": {"k1"}, "ce-id": {"e1"}, "X-App": {"\xffnot UTF-8", ""}}
				if tt.header > 0 {
					want["X-Big"] = []string{strings.Repeat("h", tt.header)}
				}
				if l.PayloadMissing || l.HeadersTrimmed || !bytes.Equal(l.Payload, payload) || !reflect.DeepEqual(l.Header, want) {
					t.Errorf("letter shown has %d bytes, headers %v, %v missing; want all of the original", len(l.Payload), l.Header, l.PayloadMissing)
				}
				if l.Error != tt.wantError {
					t.Errorf("Error = %q, want %q", l.Error, tt.wantError)
				}
				if again := w.park(f); again.Seq != l.Seq {
					t.Errorf("the same report was written again, sequence %d, want %d", again.Seq, l.Seq)
				}
				if err := w.events.DeleteMsg(t.Context(), 1); err != nil {
					t.Fatal(err)
				}
				if tt.name == "header block at the limit" {
					return // which the replay's own headers would exceed
				}
				w.replay(l.ID)
				m, err := w.events.GetMsg(t.Context(), 2)
				if err != nil || !bytes.Equal(m.Data, payload) || len(m.Header.Get("X-Big")) != tt.header || len(m.Header["X-App"]) != 2 {
					t.Errorf("replayed message = %v, %v, want %d bytes and a header of %d", m, err, tt.payload, tt.header)
				}
			})
		})
	}
}

// The parts of a letter live as long as it does.
func TestPartsFollowTheirLetter(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		payload := bytes.Repeat([]byte("x"), 1<<20-450)
		f := w.event("billing", "events.a", "k1", payload)
		for range 2 {
			if err := w.letters.Intend(t.Context(), f); err != nil {
				t.Fatal(err)
			}
		}
		w.wantMsgs("DLQ", 2)
		if err := w.letters.Withdraw(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		w.wantMsgs("DLQ", 0)

		// Intended, opened, replayed, failed again: parts without an end.
		if err := w.letters.Intend(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		l := w.park(f)
		w.replay(l.ID)
		again := w.failure("billing", 2)
		if err := w.letters.Park(t.Context(), again); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if l = w.show(l.ID); l.State != StateOpen || l.Replays != 1 || !bytes.Equal(l.Payload, payload) || l.Error != "boom" {
			t.Errorf("letter = %s after %d replays with %d bytes and %q, want it open with all", l.State, l.Replays, len(l.Payload), l.Error)
		}
		part, err := w.letters.get(t.Context(), "DLQ", getRequest{NextSubject: l.ID + ".part.>"})
		if err != nil || len(part.header["Nats-TTL"]) > 0 {
			t.Errorf("part of an open letter = %v, %v, want one that does not expire", part, err)
		}

		// Whoever closed it before it was opened again comes too late to let them go.
		stored, err := w.letters.find(t.Context(), l.ID)
		if err != nil {
			t.Fatal(err)
		}
		before, err := w.letters.readParts(t.Context(), stored)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.letters.reopenParts(t.Context(), stored); err != nil {
			t.Fatal(err)
		}
		w.letters.expireParts(t.Context(), stored, before)
		part, err = w.letters.get(t.Context(), "DLQ", getRequest{NextSubject: l.ID + ".part.>"})
		if err != nil || len(part.header["Nats-TTL"]) > 0 {
			t.Errorf("part after a late expiry = %v, %v, want one that does not expire", part, err)
		}

		// Closed: they expire after it. Discarded: they go at once.
		w.replay(l.ID)
		part, err = w.letters.get(t.Context(), "DLQ", getRequest{NextSubject: l.ID + ".part.>"})
		if err != nil || len(part.header["Nats-TTL"]) != 1 {
			t.Errorf("part of a closed letter = %v, %v, want one that expires", part, err)
		}
		w.wantMsgs("DLQ", 2)
		other := w.park(w.event("billing", "events.a", "k2", payload))
		w.wantMsgs("DLQ", 4)
		if _, err := w.letters.Discard(t.Context(), other.ID); err != nil {
			t.Fatal(err)
		}
		w.wantMsgs("DLQ", 3)
		if n, err := w.letters.Prune(t.Context(), time.Now().Add(time.Hour)); err != nil || n != 2 {
			t.Errorf("Prune = %d, %v, want 2", n, err)
		}
		w.wantMsgs("DLQ", 0)
	})
}

// Somebody removes what lies beside a letter: it is still one, and the original
// serves for as long as it is there.
func TestLetterWhosePartsAreGoneSaysSo(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.event("billing", "events.a", "k1", make([]byte, 1<<20-450))
		id := w.park(f).ID
		st, err := w.js.Stream(t.Context(), "DLQ")
		if err != nil {
			t.Fatal(err)
		}
		if err := st.Purge(t.Context(), jetstream.WithPurgeSubject("dlq.*.*.*.part.>")); err != nil {
			t.Fatal(err)
		}
		if l := w.show(id); !l.PayloadMissing || l.Subject != "events.a" {
			t.Errorf("letter = %+v, want one without its payload", l)
		}
		if err := w.events.DeleteMsg(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		if _, err := w.letters.Replay(t.Context(), id); err == nil || !strings.Contains(err.Error(), "payload unavailable") {
			t.Errorf("Replay: err = %v, want payload unavailable", err)
		}
		w.wantState(id, StateOpen)
	})
}

// Whatever a header or payload holds comes back from the parts as it went in.
func FuzzOriginalSurvivesItsParts(f *testing.F) {
	f.Add("X-App", "a", "", []byte("x"), uint16(3))
	f.Add("x", " \t\x00\xff\r\n: y", "NATS/1.0\r\n\r\n", []byte("\r\n\r\nNATS/1.0\r\n"), uint16(1))
	f.Add("traceparent", "00-1", "", []byte{}, uint16(0))
	f.Fuzz(func(t *testing.T, name, value, other string, payload []byte, size uint16) {
		l := Letter{ID: "dlq.S.c.1-1", Payload: payload, Header: traveling(map[string][]string{name: {value, other}, "ce-id": {"e1"}})}
		whole := encodeOriginal(l)
		var parts []*record
		for rest := whole; len(rest) > 0; {
			n := min(int(size)+1, len(rest))
			parts = append(parts, &record{data: rest[:n]})
			rest = rest[n:]
		}
		header, got, err := decodeOriginal(bytes.Join(dataOf(parts), nil))
		if err != nil || !bytes.Equal(got, payload) || !reflect.DeepEqual(header, l.Header) {
			t.Errorf("decoded %q, %q, %v, want %q, %q", header, got, err, l.Header, payload)
		}
	})
}
