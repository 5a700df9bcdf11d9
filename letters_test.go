package jetbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox"
	"github.com/seed-5e04d8fb/jetbox/consumer"
	ledger "github.com/seed-5e04d8fb/jetbox/dedup/sqlite"
	"github.com/seed-5e04d8fb/jetbox/dlq"
	"github.com/seed-5e04d8fb/jetbox/internal/faultbox"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// TestChaosLetters sends messages through two consumers whose handlers fail, while
// routers, consumers and whoever replays are killed and the broker is restarted.
//
//  1. Then a message has been handled by a consumer, or it has a letter of that
//     consumer, one, with its payload. It may have both when the server lost the
//     ack of a last delivery (a consumer is killed, the broker restarted); such a
//     letter has no error, since no handler gave one.
//  2. A letter whose replay fails is the same letter, with the next count and the
//     error before in its history.
//  3. After all letters were replayed to mended handlers, by two at once who are
//     killed, everything was handled once by each consumer, no letter waits, and
//     every replay is on the stream once.
//
// With -chaos.for it is 2,000 messages, again and again.
func TestChaosLetters(t *testing.T) {
	messages := 200
	switch {
	case *chaosFor > 0:
		messages = 2000
	case testing.Short():
		messages = 60
	}
	seed := *chaosSeed
	if seed == 0 {
		seed = rand.Uint64() >> 16
	}
	for begin := time.Now(); ; seed++ {
		ok := t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Logf("replay with: go test . -run TestChaosLetters -chaos.seed=%d -chaos.for=%v", seed, min(*chaosFor, 1))
			inBubble(t, func(b *bus) { newPost(b, seed, messages).run() })
		})
		if !ok || time.Since(begin) >= *chaosFor {
			return
		}
	}
}

// A letter too many: the message was handled, its ack lost, and the server reported
// it as exhausted. Replayed, the ledger knows it, and the letter is closed.
func TestReplayOfWhatWasHandledIsClosedAsADuplicate(t *testing.T) {
	inBubble(t, func(b *bus) {
		ctx := b.t.Context()
		led, err := ledger.New(ctx, b.store.DB(), ledger.Config{})
		b.must(err)
		var duplicates, handled atomic.Int32
		c, err := consumer.New(b.js, consumer.Once(led, func(ctx context.Context, tx *sql.Tx, d *consumer.Delivery) error {
			handled.Add(1)
			_, err := tx.ExecContext(ctx, "INSERT INTO shipped VALUES (?, 1)", d.AggregateID)
			return err
		}), consumer.Config{
			Stream: "EVENTS", Durable: "shipping", DeadLetters: b.letters, Logger: slog.New(slog.DiscardHandler),
			DuplicateFunc: func(*consumer.Delivery) { duplicates.Add(1) },
		})
		b.must(err)
		b.run(c.Run)
		b.relay(b.store, relay.Config{})
		b.must(b.order("o-1", nil))
		time.Sleep(time.Second)
		st, err := b.admin.Stream(ctx, "EVENTS")
		b.must(err)
		m, err := st.GetMsg(ctx, 1)
		b.must(err)
		b.must(b.letters.Park(ctx, jetbox.Failure{
			Stream: "EVENTS", Consumer: "shipping", Seq: 1, Stored: m.Time, Subject: m.Subject, Header: m.Header, Payload: m.Data,
			Deliveries: 5, Reason: jetbox.ReasonMaxDeliveries,
		}))
		letter := b.oneLetter()
		_, err = b.letters.Replay(ctx, letter.ID)
		b.must(err)
		time.Sleep(time.Minute)
		if n := b.count("SELECT count(*) FROM shipped"); n != 1 || handled.Load() != 1 || duplicates.Load() != 1 {
			b.t.Errorf("shipped %d times, handler ran %d times, %d duplicates; want 1 each", n, handled.Load(), duplicates.Load())
		}
		letter, err = b.letters.Show(ctx, letter.ID)
		if err != nil || letter.State != dlq.StateReplayed {
			b.t.Errorf("letter is %q, %v, want %q", letter.State, err, dlq.StateReplayed)
		}
	})
}

// post is one run. What goes wrong is drawn from the seed; which message a handler
// fails at depends on nothing but seed, consumer and message.
type post struct {
	*bus
	seed     uint64
	messages int
	led      *ledger.Ledger
	mended   atomic.Bool
}

var postConsumers = [...]string{"billing", "shipping"}

func newPost(b *bus, seed uint64, messages int) *post {
	b.t.Helper()
	led, err := ledger.New(b.t.Context(), b.store.DB(), ledger.Config{})
	b.must(err)
	b.exec(`CREATE TABLE effects (consumer TEXT, payload TEXT)`) // no key: a second effect would show
	return &post{bus: b, seed: seed, messages: messages, led: led}
}

func (p *post) rand(stream int) *rand.Rand { return rand.New(rand.NewPCG(p.seed, uint64(stream))) }

// fate says how a consumer's handler fails at a message: not at all, twice, or always.
func (p *post) fate(consumerName, payload string) (fails int, err error) {
	h := fnv.New64a()
	fmt.Fprint(h, p.seed, consumerName, payload)
	switch n := h.Sum64() % 100; {
	case n < 8:
		return 1000, errors.New("no rate")
	case n < 14:
		return 1000, jetbox.Permanent(errors.New("no such customer"))
	case n < 18:
		return 1000, nil // a panic
	case n < 40:
		return 2, errors.New("not yet")
	}
	return 0, nil
}

func (p *post) handler() consumer.Handler {
	h := consumer.Once(p.led, func(ctx context.Context, tx *sql.Tx, d *consumer.Delivery) error {
		fails, err := p.fate(d.Consumer, string(d.Payload))
		switch {
		case p.mended.Load() || int(d.NumDelivered) > fails:
		case err == nil:
			panic("a bug")
		default:
			return err
		}
		_, err = tx.ExecContext(ctx, "INSERT INTO effects VALUES (?, ?)", d.Consumer, string(d.Payload))
		return err
	})
	return func(ctx context.Context, d *consumer.Delivery) error {
		time.Sleep(time.Duration(d.StreamSeq%40) * time.Millisecond) // or all is done before the first fault
		return h(ctx, d)
	}
}

// process is a part with a connection of its own. kill cuts that first, so that
// nothing the part does at its end reaches the broker.
type process struct {
	box  *faultbox.Box
	stop func()
}

func (x process) kill() {
	x.box.Cut(true)
	x.stop()
}

// start runs a part of the bus as a process of its own.
func (p *post) start(part func(js jetstream.JetStream, letters *dlq.Letters) (func(context.Context) error, error)) process {
	p.t.Helper()
	box := &faultbox.Box{Server: p.srv}
	nc, err := nats.Connect("", nats.InProcessServer(box), nats.MaxReconnects(-1), nats.ReconnectBufSize(-1), nats.ReconnectWait(200*time.Millisecond),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})) // cut connections are the point
	p.must(err)
	js, err := jetstream.New(nc)
	p.must(err)
	letters, err := dlq.New(js, dlq.Config{Logger: slog.New(slog.DiscardHandler)})
	p.must(err)
	f, err := part(js, letters)
	p.must(err)
	stop := p.bus.run(f)
	return process{box, func() { stop(); nc.Close() }}
}

func (p *post) router() process {
	p.t.Helper()
	return p.start(func(_ jetstream.JetStream, letters *dlq.Letters) (func(context.Context) error, error) {
		r, err := dlq.NewRouter(letters, dlq.RouterConfig{EventStream: "EVENTS"})
		return r.Run, err
	})
}

func (p *post) consumers() (all []process) {
	p.t.Helper()
	for _, name := range postConsumers {
		all = append(all, p.start(func(js jetstream.JetStream, letters *dlq.Letters) (func(context.Context) error, error) {
			c, err := consumer.New(js, p.handler(), consumer.Config{
				Stream: "EVENTS", Durable: name, Workers: 4, MaxDeliver: 3, AckWait: 5 * time.Second, Backoff: 200 * time.Millisecond,
				DeadLetters: letters, Logger: slog.New(slog.DiscardHandler),
			})
			return c.Run, err
		}))
	}
	return all
}

func (p *post) run() {
	p.t.Helper()
	p.commit()
	p.relay(p.store, relay.Config{})
	p.faults()

	// From here on they live.
	consumers, router := p.consumers(), p.router()
	p.settle()
	letters := p.waiting()
	p.checkLetters(letters)

	// The handlers are not mended yet: a third of the letters fails again.
	for i, l := range letters {
		if i%3 == 0 {
			p.replay(l.ID)
		}
	}
	p.settle()
	p.checkAgain(letters)

	p.mended.Store(true)
	p.operators()
	p.settle()
	p.checkEnd()
	for _, x := range append(consumers, router) {
		x.stop()
	}
}

// commit appends all messages to the outbox.
func (p *post) commit() {
	p.t.Helper()
	ctx := p.t.Context()
	tx, err := p.store.DB().BeginTx(ctx, nil)
	p.must(err)
	for i := range p.messages {
		p.must(p.store.Append(ctx, tx, &jetbox.Event{Subject: "events.post", Payload: fmt.Append(nil, i)}))
	}
	p.must(tx.Commit())
}

// faults kills routers and consumers and restarts the broker while there is work.
func (p *post) faults() {
	p.t.Helper()
	r := p.rand(1)
	for range 2 + p.messages/200 {
		consumers, router := p.consumers(), p.router()
		for range 1 + r.IntN(3) {
			time.Sleep(time.Duration(r.IntN(400)) * time.Millisecond)
			router.kill()
			time.Sleep(time.Duration(r.IntN(400)) * time.Millisecond)
			router = p.router()
		}
		time.Sleep(time.Duration(r.IntN(500)) * time.Millisecond)
		router.kill()
		for _, c := range consumers {
			if r.IntN(2) == 0 {
				c.kill()
			} else {
				c.stop()
			}
		}
		if r.IntN(3) > 0 {
			p.must(p.srv.Restart(p.t.Context()))
			time.Sleep(time.Second)
		}
	}
}

// settle waits until nobody has anything to do any more.
func (p *post) settle() {
	p.t.Helper()
	var state string
	for quiet, end := 0, time.Now().Add(time.Hour); quiet < 3; {
		time.Sleep(10 * time.Second) // two ack waits: what is out comes back in between
		if time.Now().After(end) {
			p.t.Fatalf("seed %d: still at work after an hour: %s", p.seed, state)
		}
		if state = p.work(); state == "" {
			quiet++
		} else {
			quiet = 0
		}
	}
}

// work says what is still to be done.
func (p *post) work() string {
	st, err := p.store.Stats(p.t.Context())
	if err != nil || st.Pending > 0 {
		return fmt.Sprint(st.Pending, " rows ", err)
	}
	for stream, names := range map[string][]string{"EVENTS": postConsumers[:], "JETBOX_ADVISORIES": {"router-EVENTS"}} {
		for _, name := range names {
			c, err := p.admin.Consumer(p.t.Context(), stream, name)
			if err != nil {
				return err.Error()
			}
			if i := c.CachedInfo(); i.NumPending > 0 || i.NumAckPending > 0 {
				return fmt.Sprintf("%s has %d to come and %d out", name, i.NumPending, i.NumAckPending)
			}
		}
	}
	return ""
}

// waiting returns the letters that wait, each with its payload.
func (p *post) waiting() (all []dlq.Letter) {
	p.t.Helper()
	for l, err := range p.letters.List(p.t.Context(), dlq.Filter{}) {
		p.must(err)
		all = append(all, l)
	}
	return all
}

// effects is how often each consumer handled each message.
func (p *post) effects() map[string]int {
	p.t.Helper()
	rows, err := p.store.DB().QueryContext(p.t.Context(), "SELECT consumer || ' ' || payload, count(*) FROM effects GROUP BY 1")
	p.must(err)
	defer rows.Close()
	all := make(map[string]int)
	for rows.Next() {
		var key string
		var n int
		p.must(rows.Scan(&key, &n))
		all[key] = n
	}
	p.must(rows.Err())
	return all
}

// checkLetters is invariant 1.
func (p *post) checkLetters(letters []dlq.Letter) {
	p.t.Helper()
	effects, has, mute := p.effects(), make(map[string]int), make(map[string]bool)
	for _, l := range letters {
		key := l.Consumer + " " + string(l.Payload)
		has[key]++
		mute[key] = l.Error == ""
		if l.Stream != "EVENTS" || l.Subject != "events.post" || l.PayloadMissing || l.Replays != 0 {
			p.t.Errorf("seed %d: letter %s of %s: %d replays, payload missing: %v", p.seed, l.ID, l.Subject, l.Replays, l.PayloadMissing)
		}
	}
	extra, failed := 0, 0
	for i := range p.messages {
		for _, name := range postConsumers {
			key := fmt.Sprint(name, " ", i)
			fails, _ := p.fate(name, fmt.Sprint(i))
			switch {
			case effects[key] == 0 && has[key] == 1:
				failed++
			case effects[key] == 1 && has[key] == 0 && fails < 3:
			case effects[key] == 1 && has[key] == 1 && mute[key] && fails < 3:
				extra++
			default:
				p.t.Errorf("seed %d: %s, which fails %d times, was handled %d times and has %d letters", p.seed, key, fails, effects[key], has[key])
			}
		}
	}
	p.t.Logf("%d messages: %d deserved a letter, %d have one although they were handled", p.messages, failed, extra)
	if failed < p.messages/8 {
		p.t.Errorf("seed %d: the run shows nothing", p.seed)
	}
}

func (p *post) replay(id string) {
	p.t.Helper()
	if _, err := p.letters.Replay(p.t.Context(), id); err != nil {
		p.t.Fatalf("seed %d: replay: %v", p.seed, err)
	}
}

// checkAgain is invariant 2, for every third of these letters.
func (p *post) checkAgain(letters []dlq.Letter) {
	p.t.Helper()
	for i, before := range letters {
		if i%3 != 0 {
			continue
		}
		l, err := p.letters.Show(p.t.Context(), before.ID)
		p.must(err)
		fails, _ := p.fate(l.Consumer, string(l.Payload))
		switch {
		case l.State == dlq.StateReplayed && fails < 3: // it was unlucky, or had happened
		case l.State == dlq.StateOpen && l.Replays == 1 && l.Deliveries > before.Deliveries && l.Error != "" &&
			len(l.History) == 1 && l.History[0].Time.Equal(before.Time) && sameBeginning(l.History[0].Error, before.Error):
		default:
			p.t.Errorf("seed %d: after a replay, which fails %d times: letter %s is %s, %d replays, %d deliveries, error %.60q, history %.200q; before %d deliveries, error %.60q",
				p.seed, fails, l.ID, l.State, l.Replays, l.Deliveries, l.Error, fmt.Sprint(l.History), before.Deliveries, before.Error)
		}
	}
}

// sameBeginning compares an error with one that may have been cut.
func sameBeginning(a, b string) (same bool) {
	const kept = 200
	return a[:min(len(a), kept)] == b[:min(len(b), kept)]
}

// operators replays everything, two at once, each of them killed now and then.
func (p *post) operators() {
	p.t.Helper()
	var wg sync.WaitGroup
	var killed atomic.Int32
	for i := range 2 {
		r := p.rand(10 + i)
		wg.Go(func() {
			for range 8 {
				var left atomic.Bool
				x := p.start(func(_ jetstream.JetStream, letters *dlq.Letters) (func(context.Context) error, error) {
					return func(ctx context.Context) error {
						left.Store(replayAll(ctx, letters) != nil)
						return nil
					}, nil
				})
				x.box.Delay(2 * time.Millisecond) // or it is done before it is killed
				time.Sleep(time.Duration(r.IntN(p.messages)) * time.Millisecond)
				x.kill()
				if !left.Load() {
					return
				}
				killed.Add(1)
				time.Sleep(time.Duration(r.IntN(3000)) * time.Millisecond)
			}
		})
	}
	wg.Wait()
	p.must(replayAll(p.t.Context(), p.letters))
	p.t.Logf("%d replays of many were killed", killed.Load())
}

// replayAll is what relay dlq replay does.
func replayAll(ctx context.Context, letters *dlq.Letters) error {
	var ids []string
	for l, err := range letters.List(ctx, dlq.Filter{Interrupted: true, HeadersOnly: true}) {
		if err != nil {
			return err
		}
		ids = append(ids, l.ID)
	}
	for _, id := range ids {
		if _, err := letters.Replay(ctx, id); err != nil && !errors.Is(err, jetbox.ErrLetterGone) {
			return err
		}
	}
	return nil
}

// checkEnd is invariant 3.
func (p *post) checkEnd() {
	p.t.Helper()
	effects := p.effects()
	for i := range p.messages {
		for _, name := range postConsumers {
			if key := fmt.Sprint(name, " ", i); effects[key] != 1 {
				p.t.Errorf("seed %d: %s was handled %d times, want once", p.seed, key, effects[key])
			}
		}
	}
	groups, err := p.letters.Groups(p.t.Context(), dlq.Filter{States: []dlq.State{
		dlq.StateIntent, dlq.StateOpen, dlq.StateReplaying, dlq.StateReplayed, dlq.StateDiscarded,
	}})
	p.must(err)
	replays := 0
	for _, g := range groups {
		if g.State != dlq.StateReplayed {
			p.t.Errorf("seed %d: letters left: %+v", p.seed, g)
		}
	}
	for l, err := range p.letters.List(p.t.Context(), dlq.Filter{States: []dlq.State{dlq.StateReplayed}}) {
		p.must(err)
		replays += l.Replays
	}
	st, err := p.admin.Stream(p.t.Context(), "EVENTS")
	p.must(err)
	if n := st.CachedInfo().State.Msgs; n != uint64(p.messages+replays) {
		p.t.Errorf("seed %d: the stream has %d messages, want %d and %d replays", p.seed, n, p.messages, replays)
	}
	if groups == nil || !strings.Contains(fmt.Sprint(groups), postConsumers[1]) {
		p.t.Errorf("seed %d: letters replayed: %+v, want those of two consumers", p.seed, groups)
	}
}
