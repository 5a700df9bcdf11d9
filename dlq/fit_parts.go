package dlq

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A letter that does not fit into one message has its original beside it, in
// parts: messages on subjects below the letter's own,
//
//	<letter>.part.<hash>-<count>.<number>
//
// whose payloads, one after the other, are the original's header block and
// payload. They are stored before the letter that names them, and whoever may
// write the letter may write them. The hash is of the content: reporters that
// cut it alike write the same subjects, others do not disturb each other.

// headerParts is the hash and the count of a letter's parts.
const headerParts = "Dlq-Parts"

const (
	partInfix = ".part."

	// partRoom is what the headers of a part's publish need.
	partRoom = 256

	// partsOutlive is how much longer than a closed letter its parts are kept.
	partsOutlive = time.Hour
)

// payloadLost reports whether the payload is neither in the letter nor beside it.
func (l Letter) payloadLost() (lost bool) { return l.PayloadMissing && l.parts == "" }

// encodeOriginal returns the header block and the payload of a letter's original.
func encodeOriginal(l Letter) []byte {
	var b bytes.Buffer
	b.WriteString(headerBlock)
	for _, name := range slices.Sorted(maps.Keys(l.Header)) {
		for _, v := range l.Header[name] {
			fmt.Fprintf(&b, "%s: %s\r\n", name, v)
		}
	}
	b.WriteString("\r\n")
	b.Write(l.Payload)
	return b.Bytes()
}

const headerBlock = "NATS/1.0\r\n"

func decodeOriginal(whole []byte) (header map[string][]string, payload []byte, err error) {
	const end = "\r\n\r\n"
	i := bytes.Index(whole, []byte(end))
	if i < 0 {
		return nil, nil, errors.New("parts have no header block")
	}
	i += len(end)
	h := nats.Header{}
	if block := whole[:i]; len(block) > len(headerBlock)+len("\r\n") {
		if h, err = nats.DecodeHeadersMsg(block); err != nil {
			return nil, nil, err
		}
	}
	return traveling(h), whole[i:], nil
}

// fitWhole returns the letter as the broker takes it, and the parts that hold the
// original if the letter does not.
func fitWhole(l Letter, m limits) (fitting Letter, parts [][]byte) {
	fitting = fit(l, m)
	if l.parts != "" || fitting.PayloadMissing == l.PayloadMissing && len(fitting.Header) == len(l.Header) {
		return fitting, nil
	}
	whole := encodeOriginal(l)
	size := max(m.message-partRoom, 1)
	parts = slices.Collect(slices.Chunk(whole, size))
	l.parts = partsName(whole, len(parts))
	return fit(l, m), parts
}

func partsName(whole []byte, count int) string {
	sum := sha256.Sum256(whole)
	return hex.EncodeToString(sum[:8]) + "-" + strconv.Itoa(count)
}

func (l Letter) partSubject(number int) string {
	return l.ID + partInfix + l.parts + "." + strconv.Itoa(number)
}

// partCount is how many parts the letter's name of them says there are.
func (l Letter) partCount() int {
	_, count, _ := strings.Cut(l.parts, "-")
	n, err := strconv.Atoi(count)
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// storeParts stores the parts that l names, for good. Repeating it is harmless.
func (s *Letters) storeParts(ctx context.Context, l Letter, parts [][]byte) error {
	for i, data := range parts {
		m := nats.NewMsg(l.partSubject(i + 1))
		m.Data = data
		if _, err := s.publish(ctx, m, s.cfg.Stream); err != nil {
			return fmt.Errorf("store part %d of %d of letter %s: %w", i+1, len(parts), l.ID, err)
		}
	}
	return nil
}

// expireParts lets the parts of a letter that was closed go after it. parts were
// read before that: whoever has opened the letter since has stored them again, for
// good, and the condition leaves those alone.
func (s *Letters) expireParts(ctx context.Context, l Letter, parts []*record) {
	for _, p := range parts {
		m := nats.NewMsg(p.subject)
		m.Data = p.data
		_, err := s.publish(ctx, m, s.cfg.Stream, jetstream.WithExpectLastSequencePerSubject(p.seq),
			jetstream.WithMsgTTL(s.keepClosed(l)+partsOutlive))
		if err != nil {
			return // it stays until the letter is pruned
		}
	}
}

// readParts returns the parts that l names, or an error that wraps
// jetstream.ErrMsgNotFound when somebody has removed them.
func (s *Letters) readParts(ctx context.Context, l Letter) ([]*record, error) {
	var parts []*record
	for number := range l.partCount() {
		m, err := s.get(ctx, s.cfg.Stream, getRequest{LastFor: l.partSubject(number + 1)})
		if err != nil {
			return nil, fmt.Errorf("read part %d of letter %s: %w", number+1, l.ID, err)
		}
		parts = append(parts, m)
	}
	if l.parts == "" {
		return nil, nil
	}
	if name := partsName(bytes.Join(dataOf(parts), nil), len(parts)); name != l.parts {
		return nil, fmt.Errorf("parts of letter %s are damaged: they are %s, want %s: %w", l.ID, name, l.parts, jetstream.ErrMsgNotFound)
	}
	return parts, nil
}

func dataOf(parts []*record) [][]byte {
	data := make([][]byte, len(parts))
	for i, p := range parts {
		data[i] = p.data
	}
	return data
}

// assemble returns the letter with what lies beside it. One whose parts are gone
// is returned as it is, and says what is missing.
func (s *Letters) assemble(ctx context.Context, l Letter) (Letter, error) {
	if l.parts == "" {
		return l, nil
	}
	parts, err := s.readParts(ctx, l)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return l, nil
	} else if err != nil {
		return Letter{}, err
	}
	if l.Header, l.Payload, err = decodeOriginal(bytes.Join(dataOf(parts), nil)); err != nil {
		return Letter{}, fmt.Errorf("letter %s: %w", l.ID, err)
	}
	l.PayloadMissing, l.HeadersTrimmed, l.parts = false, false, ""
	return l, nil
}

// reopenParts stores the parts of a closed letter again, for good. That they cannot
// be found is for whoever needs them.
func (s *Letters) reopenParts(ctx context.Context, l Letter) error {
	parts, err := s.readParts(ctx, l)
	if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
		return err
	}
	return s.storeParts(ctx, l, dataOf(parts))
}

// removeLetter removes one version of a letter, then its parts as they were before:
// those that another reporter has stored since have other sequences.
func (s *Letters) removeLetter(ctx context.Context, l Letter) error {
	parts, err := s.readParts(ctx, l)
	if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
		return err
	}
	if err := s.remove(ctx, s.cfg.Stream, l.Seq); err != nil {
		return err
	}
	s.removeParts(ctx, parts)
	return nil
}

// removeParts removes parts that no letter names any more. What it misses takes
// room and harms nobody.
func (s *Letters) removeParts(ctx context.Context, parts []*record) {
	for _, p := range parts {
		_ = s.remove(ctx, s.cfg.Stream, p.seq)
	}
}
