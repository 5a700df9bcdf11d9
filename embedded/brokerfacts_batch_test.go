package embedded_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/synadia-io/orbit.go/jetstreamext"

	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// The facts about fast batches (nats-server 2.14 and later, gap "fail") that the
// relay's engine is built on. Some are told by the protocol alone, which rawBatch
// speaks; the others by jetstreamext as well.

// rawBatch speaks the protocol of a fast batch.
type rawBatch struct {
	t       *testing.T
	nc      *nats.Conn
	inbox   string
	answers *nats.Subscription
}

// Operations of the protocol, ADR-50.
const (
	batchStart = iota
	batchAdd
	batchCommit
	batchEnd
	batchPing
)

func newRawBatch(t *testing.T, nc *nats.Conn) *rawBatch {
	t.Helper()
	b := &rawBatch{t: t, nc: nc, inbox: nc.NewInbox()}
	var err error
	if b.answers, err = nc.SubscribeSync(b.inbox + ".>"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.answers.Unsubscribe() })
	return b
}

func (b *rawBatch) send(op, seq int, subject, id string, data []byte) {
	b.t.Helper()
	m := nats.NewMsg(subject)
	m.Data = data
	if id != "" {
		m.Header.Set("Nats-Msg-Id", id)
	}
	m.Reply = fmt.Sprintf("%s.500.fail.%d.%d.$FI", b.inbox, seq, op)
	if err := b.nc.PublishMsg(m); err != nil {
		b.t.Fatal(err)
	}
}

// wantAnswer fails unless the next answer is to the message with a sequence and
// has these words.
func (b *rawBatch) wantAnswer(seq int, words ...string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	m, err := b.answers.NextMsgWithContext(ctx)
	if err != nil {
		b.t.Fatalf("want an answer with %q: %v", words, err)
	}
	tokens := strings.Split(m.Subject, ".")
	if got := tokens[len(tokens)-3]; got != strconv.Itoa(seq) {
		b.t.Errorf("answer %s is to message %s, want %d", m.Data, got, seq)
	}
	for _, w := range words {
		if !strings.Contains(string(m.Data), w) {
			b.t.Errorf("answer to %d is %s, want %q in it", seq, m.Data, w)
		}
	}
}

func (b *rawBatch) wantSilence(d time.Duration) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	if m, err := b.answers.NextMsgWithContext(ctx); err == nil {
		b.t.Errorf("answer %s, want none", m.Data)
	}
}

func fastStream() jetstream.StreamConfig {
	return jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}, AllowBatchPublish: true}
}

// The final PubAck has the sequence of the last message and how many were counted;
// the reference client and the bare protocol agree.
func TestFactFastBatchAnswersWithLastSequenceAndCount(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, fastStream())
		fp, err := jetstreamext.NewFastPublisher(js)
		if err != nil {
			t.Fatal(err)
		}
		for range 9 {
			if _, err := fp.Add("s.a", nil); err != nil {
				t.Fatal(err)
			}
		}
		ack, err := fp.Commit(t.Context(), "s.a", nil)
		if err != nil || ack.Sequence != 10 || ack.BatchSize != 10 {
			t.Errorf("ten messages: %+v, %v", ack, err)
		}

		b := newRawBatch(t, js.Conn())
		b.send(batchStart, 1, "s.a", "1", nil)
		b.wantAnswer(1, `"type":"ack"`, `"seq":0`, `"msgs":500`)
		b.send(batchAdd, 2, "s.a", "2", nil)
		b.send(batchEnd, 3, "s.a", "", nil)
		b.wantAnswer(3, `"stream":"S"`, `"seq":12`, `"count":2`)
	})
}

// A message with a known ID is skipped without a word and counted, wherever it
// stands; the sequence of the stream alone tells.
func TestFactFastBatchSkipsDuplicatesSilently(t *testing.T) {
	for _, at := range []int{1, 2, 4} {
		t.Run(fmt.Sprint("at ", at), func(t *testing.T) {
			inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
				createStream(t, js, fastStream())
				publish(t, js, "s.b", "known")
				b := newRawBatch(t, js.Conn())
				for i := 1; i <= 4; i++ {
					op, id := batchAdd, fmt.Sprint(i)
					switch i {
					case 1:
						op = batchStart
					case 4:
						op = batchCommit
					}
					if i == at {
						id = "known"
					}
					b.send(op, i, "s.a", id, nil)
				}
				b.wantAnswer(1, `"type":"ack"`)
				b.wantAnswer(4, `"seq":4`, `"count":4`)
				if got := streamInfo(t, js, "S").State.LastSeq; got != 4 {
					t.Errorf("last sequence %d, want 4: one of five is skipped", got)
				}
			})
		})
	}
}

// A batch of nothing but duplicates succeeds with sequence 0.
func TestFactFastBatchOfDuplicatesHasSequenceZero(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, fastStream())
		publish(t, js, "s.b", "1")
		publish(t, js, "s.b", "2")
		b := newRawBatch(t, js.Conn())
		b.send(batchStart, 1, "s.a", "1", nil)
		b.wantAnswer(1, `"type":"ack"`)
		b.send(batchCommit, 2, "s.a", "2", nil)
		b.wantAnswer(2, `"seq":0`, `"count":2`)
	})
}

// What the batch itself refuses is told by its sequence and ends the batch: what is
// before is stored, what is behind is not, and the final PubAck says how many.
func TestFactRefusalEndsAFastBatchBehindItsPrefix(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		cfg := fastStream()
		cfg.Discard, cfg.MaxMsgsPerSubject, cfg.DiscardNewPerSubject = jetstream.DiscardNew, 3, true
		createStream(t, js, cfg)
		b := newRawBatch(t, js.Conn())
		b.send(batchStart, 1, "s.a", "1", nil)
		for i := 2; i <= 5; i++ {
			b.send(batchAdd, i, "s.a", fmt.Sprint(i), nil) // the fourth is one too many
		}
		b.send(batchCommit, 6, "s.b", "6", nil)
		b.wantAnswer(1, `"type":"ack"`)
		b.wantAnswer(4, `"type":"err"`, `"seq":4`, "maximum messages per subject exceeded")
		b.wantAnswer(4, `"seq":3`, `"count":3`)
		// What follows is of a batch that the server does not know any more.
		b.wantAnswer(5, `"err_code":10208`)
		b.wantAnswer(6, `"err_code":10208`)
		if got := streamInfo(t, js, "S").State.LastSeq; got != 3 {
			t.Errorf("last sequence %d, want 3", got)
		}
	})
}

// A message that is too large is refused before the batch sees it, in the form of a
// PubAck: only the gap behind it ends the batch.
func TestFactTooLargeMessageLeavesAGapInAFastBatch(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		cfg := fastStream()
		cfg.MaxMsgSize = 100
		createStream(t, js, cfg)
		b := newRawBatch(t, js.Conn())
		b.send(batchStart, 1, "s.a", "1", nil)
		b.wantAnswer(1, `"type":"ack"`)
		b.send(batchCommit, 2, "s.a", "2", make([]byte, 200))
		b.wantAnswer(2, `"err_code":10054`)
		b.wantSilence(time.Second) // although that was the commit
		b.send(batchPing, 2, "s.a", "", nil)
		b.wantAnswer(2, `"type":"gap"`, `"last_seq":2`)
		b.wantAnswer(2, `"seq":1`, `"count":1`)
	})
}

// A stream without the feature says so for each message, and stores none; the
// number is not the one of jetstreamext v0.3.2, which waits its whole time.
func TestFactDisabledFastBatchIsRefusedMessageByMessage(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		cfg := fastStream()
		cfg.AllowBatchPublish = false
		createStream(t, js, cfg)
		b := newRawBatch(t, js.Conn())
		b.send(batchStart, 1, "s.a", "1", nil)
		b.send(batchAdd, 2, "s.a", "2", nil)
		b.wantAnswer(1, `"err_code":10205`, "batch publish is disabled")
		b.wantAnswer(2, `"err_code":10205`)
		if got := streamInfo(t, js, "S").State.LastSeq; got != 0 {
			t.Errorf("last sequence %d, want nothing stored", got)
		}

		fp, err := jetstreamext.NewFastPublisher(js)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		var api *jetstream.APIError
		if _, err = fp.Add("s.a", nil); err == nil || errors.As(err, &api) {
			t.Errorf("jetstreamext: %v, want an error without a code", err)
		}
		if took := time.Since(began); took < js.Options().DefaultTimeout {
			t.Errorf("jetstreamext answers after %v: it could be used now", took)
		}
	})
}

// A subject that no stream takes is answered at once, by "no responders".
func TestFactFastBatchToAnUnboundSubjectHasNoResponders(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		b := newRawBatch(t, js.Conn())
		b.send(batchStart, 1, "nobody", "1", nil)
		_, err := b.answers.NextMsgWithContext(t.Context())
		if !errors.Is(err, nats.ErrNoResponders) {
			t.Errorf("err = %v, want no responders", err)
		}
	})
}

// A batch from which nothing comes for 10 s is forgotten without a word. What comes
// then is refused, not stored.
func TestFactIdleFastBatchIsForgotten(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, fastStream())
		b := newRawBatch(t, js.Conn())
		b.send(batchStart, 1, "s.a", "1", nil)
		b.wantAnswer(1, `"type":"ack"`)
		b.wantSilence(11 * time.Second)
		b.send(batchAdd, 2, "s.a", "2", nil)
		b.wantAnswer(2, `"err_code":10208`)
		if got := streamInfo(t, js, "S").State.LastSeq; got != 1 {
			t.Errorf("last sequence %d, want 1", got)
		}
	})
}

// A batch beside others is given a flow of 1 at first; one that is alone 500.
func TestFactFlowOfAFastBatchDependsOnOthers(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *embedded.Server, js jetstream.JetStream) {
		createStream(t, js, fastStream())
		first, second := newRawBatch(t, js.Conn()), newRawBatch(t, js.Conn())
		first.send(batchStart, 1, "s.a", "1", nil)
		first.wantAnswer(1, `"msgs":500`)
		second.send(batchStart, 1, "s.a", "2", nil)
		second.wantAnswer(1, `"msgs":1`)
	})
}

// An ID whose first message is proposed and not stored yet: a plain publish is told
// so (10158), a fast batch skips its message and counts it as stored.
func TestFactFastBatchCountsWhatIsStillInProcess(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("a cluster without a quorum takes seconds")
	}
	c := embedded.RunTestCluster(t, 3)
	js := fastCluster(t, c)
	publish(t, js, "s.a", "first")
	lead := leader(t, c, js)
	nc, err := lead.Connect() // stays with the leader, which has no quorum soon
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	onLeader, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range c.Nodes() {
		if s != lead {
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if ack, err := onLeader.Publish(ctx, "s.a", nil, jetstream.WithMsgID("id")); err == nil {
		t.Fatalf("publish without a quorum: %+v", ack)
	}
	_, err = onLeader.Publish(t.Context(), "s.a", nil, jetstream.WithMsgID("id"))
	wantCode(t, "the same again", err, 10158, "duplicate message id is in process")

	b := newRawBatch(t, nc)
	b.send(batchStart, 1, "s.a", "id", nil)
	b.wantAnswer(1, `"type":"ack"`)
	b.send(batchEnd, 2, "s.a", "", nil)
	b.wantAnswer(2, `"seq":0`, `"count":1`)
}

// fastCluster returns a client of the cluster with a stream on three nodes.
func fastCluster(t *testing.T, c *embedded.Cluster) jetstream.JetStream {
	t.Helper()
	nc, err := c.Connect(nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	cfg := fastStream()
	cfg.Replicas = 3
	createStream(t, js, cfg)
	return js
}
