package relay

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	// readBatch is the most messages asked for at once, and so in memory.
	readBatch = 2048
	// readWait bounds the wait for the next of them, and for an answer.
	readWait = 2 * time.Second
	// readAlive is how long the server keeps a consumer that was not deleted.
	readAlive = 10 * time.Second
	// readContact is how long ago a leader may have heard from the others. It sends
	// a heartbeat every second, and without a quorum notices after ten or twenty
	// that it is none any more (nats-server 2.15).
	readContact = 3 * time.Second
)

// leaderInfo asks the leader of a stream for its state.
//
// A server answers for a stream that it leads. But while there is no leader every
// replica answers, and one cut off from the others takes itself for the leader for a
// while: neither knows how far the stream goes (nats-server 2.15.3).
func leaderInfo(ctx context.Context, js jetstream.JetStream, stream string) (*jetstream.StreamInfo, error) {
	st, err := ask(ctx, js, "STREAM.INFO."+stream, func(ctx context.Context) (jetstream.Stream, error) {
		return js.Stream(ctx, stream)
	})
	if err != nil {
		return nil, err
	}
	info := st.CachedInfo()
	if !leads(info.Cluster) {
		return nil, errNoLeader
	}
	return info, nil
}

// ask repeats a question to a subject of the JetStream API that gets no answer, each
// time with more patience. While the leader changes nobody answers, and a second later
// somebody does.
func ask[T any](ctx context.Context, js jetstream.JetStream, subject string, question func(context.Context) (T, error)) (answer T, err error) {
	for wait := readWait / 4; wait <= readWait; wait *= 2 {
		limited, cancel := context.WithTimeout(ctx, wait)
		answer, err = question(limited)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			break
		}
		if err := denied(js, subject); err != nil {
			return answer, err
		}
	}
	return answer, err
}

// errUnreadable is a question about a stream that the server refused to this user.
var errUnreadable = errors.New("permission to read the stream refused")

// denied is an error if what the server refused last on the connection was to publish
// to a subject of the JetStream API, or below one. A question that is refused has no
// answer, so it shows as a timeout, and there (nats-server 2.15).
func denied(js jetstream.JetStream, subject string) error {
	subject = apiPrefix(js) + subject
	last := js.Conn().LastError()
	if errors.Is(last, nats.ErrPermissionViolation) && strings.Contains(last.Error(), `"`+subject) {
		return fmt.Errorf("%w: the user may not publish to %s", errUnreadable, subject)
	}
	return nil
}

// leads reports whether an answer is that of a leader in touch with a majority.
func leads(c *jetstream.ClusterInfo) (leader bool) {
	if c == nil {
		return true
	}
	if c.Leader == "" {
		return false
	}
	inTouch := 1
	for _, r := range c.Replicas {
		if r.Name == c.Leader {
			return false // said by a follower: nobody lists itself
		}
		if r.Active > 0 && r.Active <= readContact {
			inTouch++
		}
	}
	return inTouch > (1+len(c.Replicas))/2
}

// leaderNext returns the first message from a sequence on that the leader of a
// stream has, nil when there is none. It comes with its payload. Unlike a direct get,
// which Stream.GetMsg uses where it can, no follower answers (nats-server 2.15.3).
func leaderNext(ctx context.Context, js jetstream.JetStream, stream string, seq uint64) (*storedMsg, error) {
	return leaderGet(ctx, js, stream, getRequest{Seq: seq, NextSubject: ">"})
}

type getRequest struct {
	Seq         uint64 `json:"seq"`
	NextSubject string `json:"next_by_subj,omitempty"`
}

func leaderGet(ctx context.Context, js jetstream.JetStream, stream string, req getRequest) (*storedMsg, error) {
	data, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	subject := "STREAM.MSG.GET." + stream
	answer, err := ask(ctx, js, subject, func(ctx context.Context) (*nats.Msg, error) {
		return js.Conn().RequestWithContext(ctx, apiPrefix(js)+subject, data)
	})
	if err != nil {
		return nil, err
	}
	var resp struct {
		Error   *jetstream.APIError `json:"error"`
		Message *struct {
			Seq    uint64    `json:"seq"`
			Header []byte    `json:"hdrs"`
			Time   time.Time `json:"time"`
		} `json:"message"`
	}
	if err := json.Unmarshal(answer.Data, &resp); err != nil {
		return nil, err
	}
	switch {
	case resp.Error != nil && resp.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound:
		return nil, nil
	case resp.Error != nil:
		return nil, resp.Error // its code is what ErrStreamNotFound is compared by
	case resp.Message == nil:
		return nil, jetstream.ErrInvalidJetStreamResponse
	}
	m := &storedMsg{seq: resp.Message.Seq, time: resp.Message.Time}
	if len(resp.Message.Header) > 0 {
		// Headers that cannot be read are not ours.
		m.header, _ = nats.DecodeHeadersMsg(resp.Message.Header)
	}
	return m, nil
}

func apiPrefix(js jetstream.JetStream) string {
	opts := js.Options()
	switch {
	case opts.Domain != "":
		return "$JS." + opts.Domain + ".API."
	case opts.APIPrefix != "":
		return strings.TrimSuffix(opts.APIPrefix, ".") + "."
	default:
		return jetstream.DefaultAPIPrefix
	}
}

// reader is a consumer of its own that delivers headers. On a replicated stream it
// is on any of the replicas. Whatever goes wrong, it is closed and another one opened
// where it was.
type reader struct {
	js        jetstream.JetStream
	stream    string
	name      string
	sub       *nats.Subscription
	arrived   chan *nats.Msg
	delivered uint64 // consumer sequence
	coming    int    // messages asked for that have not come
}

// openReader returns a reader of what is after a position.
func openReader(ctx context.Context, js jetstream.JetStream, at position) (*reader, error) {
	// The name is ours, so that it can be deleted also when the answer is lost. There
	// is room for all that can come: a batch and what the server says about it.
	r := &reader{js: js, stream: at.Stream, name: "jetbox-look-" + rand.Text(), arrived: make(chan *nats.Msg, 2*readBatch)}
	var err error
	if r.sub, err = js.Conn().ChanSubscribe(js.Conn().NewInbox(), r.arrived); err != nil {
		return nil, err
	}
	_, err = ask(ctx, js, "CONSUMER.CREATE."+at.Stream+"."+r.name, func(ctx context.Context) (jetstream.Consumer, error) {
		return js.CreateConsumer(ctx, at.Stream, jetstream.ConsumerConfig{
			Name:              r.name,
			DeliverPolicy:     jetstream.DeliverByStartSequencePolicy,
			OptStartSeq:       at.Seq + 1,
			AckPolicy:         jetstream.AckNonePolicy,
			HeadersOnly:       true,
			MemoryStorage:     true,
			Replicas:          1,
			InactiveThreshold: readAlive,
		})
	})
	switch {
	case errors.Is(err, errUnreadable):
		_ = r.sub.Unsubscribe() // there is no consumer
		return nil, err
	case err != nil:
		r.close(ctx)
		return nil, err
	}
	return r, nil
}

func (r *reader) close(ctx context.Context) {
	_ = r.sub.Unsubscribe()
	if !r.js.Conn().IsConnected() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookTimeout)
	defer cancel()
	_ = r.js.DeleteConsumer(ctx, r.stream, r.name) // it would end by itself
}

// next returns the next message, nil when this replica has no more. It asks for no
// more than most.
func (r *reader) next(ctx context.Context, most uint64) (*storedMsg, error) {
	if r.coming == 0 {
		r.coming = int(min(most, readBatch))
		subject := apiPrefix(r.js) + "CONSUMER.MSG.NEXT." + r.stream + "." + r.name
		req := fmt.Appendf(nil, `{"batch":%d,"no_wait":true}`, r.coming)
		if err := r.js.Conn().PublishRequest(subject, r.sub.Subject, req); err != nil {
			return nil, err
		}
	}
	m, err := r.receive(ctx)
	if err != nil {
		return nil, err
	}
	if m.Reply == "" { // not a message of the stream
		status := m.Header.Get("Status")
		if status == "404" || status == "408" {
			r.coming = 0
			return nil, nil
		}
		return nil, fmt.Errorf("consumer says %s %s", status, m.Header.Get("Description"))
	}
	meta, err := m.Metadata()
	if err != nil {
		return nil, err
	}
	r.coming--
	if r.delivered++; meta.Sequence.Consumer != r.delivered {
		return nil, fmt.Errorf("message lost on the way: delivery %d after %d", meta.Sequence.Consumer, r.delivered-1)
	}
	return &storedMsg{seq: meta.Sequence.Stream, header: m.Header}, nil
}

func (r *reader) receive(ctx context.Context) (*nats.Msg, error) {
	select {
	case m := <-r.arrived:
		return m, nil
	default:
	}
	t := time.NewTimer(readWait)
	defer t.Stop()
	select {
	case m := <-r.arrived:
		return m, nil
	case <-t.C:
		if err := denied(r.js, "CONSUMER.MSG.NEXT."+r.stream+"."+r.name); err != nil {
			return nil, err
		}
		return nil, errSilent
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
