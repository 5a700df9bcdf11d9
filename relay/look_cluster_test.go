package relay

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// The tests of this file have three nodes, and so a real clock.

type lookCluster struct {
	*lookRig
	nodes *embedded.Cluster
}

func newLookCluster(t *testing.T, adjust ...func(*jetstream.StreamConfig)) *lookCluster {
	t.Helper()
	t.Parallel()
	if testing.Short() {
		t.Skip("starts a cluster")
	}
	c := &lookCluster{lookRig: &lookRig{t: t}, nodes: embedded.RunTestCluster(t, 3)}
	for _, js := range []*jetstream.JetStream{&c.js, &c.admin} {
		nc, err := c.nodes.Connect(nats.MaxReconnects(-1), nats.ReconnectBufSize(-1))
		c.must(err)
		t.Cleanup(nc.Close)
		*js, err = jetstream.New(nc)
		c.must(err)
	}
	c.create(lookStream(append(adjust, func(c *jetstream.StreamConfig) { c.Replicas = 3 })...))
	return c
}

// stepDown makes another node the stream's leader.
func (c *lookCluster) stepDown(ctx context.Context) error {
	_, err := c.admin.Conn().RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN.S", nil)
	return err
}

// While the leader changes again and again everything is found, and absence is
// proved to the end.
func TestLookThroughChangesOfTheLeader(t *testing.T) {
	c := newLookCluster(t)
	from := c.now()
	c.others(5000)
	a := c.publish("a", "a")
	c.others(5000)
	b := c.publish("b", "b")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	changes := make(chan int)
	go func() {
		n := 0
		for ctx.Err() == nil {
			if c.stepDown(ctx) == nil {
				n++
			}
			pause(ctx, 700*time.Millisecond)
		}
		changes <- n
	}()
	const looks = 5
	for i := range looks {
		wanted := want("a", "b", "nowhere")
		var res lookResult
		for pos, err := from, error(nil); !res.done; pos = res.next {
			pause(ctx, 50*time.Millisecond) // in pieces, so that leaders change in between
			res, err = look(t.Context(), c.js, pos, wanted, 1000)
			c.must(err)
		}
		c.wantSeqs(wanted, a, b, 0)
		if !res.absent || res.next.Seq < b {
			t.Fatalf("look() = %+v, want absence proved up to %d", res, b)
		}
		// A new leader knows what was acknowledged a moment ago.
		last := c.publishSurely(fmt.Sprint("last-", i))
		wanted = want(fmt.Sprint("last-", i))
		if res := c.look(position{"S", from.Created, b, false}, wanted); wanted[0].seq != last {
			t.Fatalf("acknowledged at %d, found at %d: %+v", last, wanted[0].seq, res)
		}
	}
	cancel()
	n := <-changes
	t.Logf("%d looks, %d changes of the leader", looks, n)
	if n < 3 {
		t.Fatalf("%d changes of the leader, want several", n)
	}
}

// publishSurely publishes under a message ID until there is a PubAck.
func (c *lookCluster) publishSurely(event string) uint64 {
	c.t.Helper()
	for range 20 {
		ctx, cancel := context.WithTimeout(c.t.Context(), time.Second)
		ack, err := c.admin.PublishMsg(ctx, eventMsg("s.a", event, event))
		cancel()
		if err == nil {
			return ack.Sequence
		}
	}
	c.t.Fatalf("event %s was not stored", event)
	return 0
}

// Node and consumer of a look, and perhaps its connection and the stream's leader, die
// in the middle. It goes on with another one, and leaves nothing to the node for when
// it comes back.
func TestLookOutlivesTheNodeThatItReadsFrom(t *testing.T) {
	c := newLookCluster(t)
	from := c.now()
	c.others(5000)
	a := c.publish("a", "a")
	var dead *embedded.Server
	js := hooked{c.js, func(info *jetstream.ConsumerInfo) {
		for _, node := range c.nodes.Nodes() {
			if dead == nil && node.Name() == info.Cluster.Leader {
				dead = node
				c.must(node.Close())
			}
		}
	}}
	wanted := want("a", "nowhere")
	res, err := look(t.Context(), js, from, wanted, noLimit)
	c.must(err)
	c.wantSeqs(wanted, a, 0)
	if dead == nil || !res.absent || res.read != 5001 {
		t.Fatalf("look() = %+v, want absence proved although a node died", res)
	}
	c.must(dead.Restart(t.Context()))
	c.must(c.nodes.WaitReady(t.Context()))
	for deadline := time.Now().Add(3 * readAlive); ; {
		n := c.stream().CachedInfo().State.Consumers
		if n == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d consumers are left", n)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// A node that has lost the others still calls itself leader. It is not believed.
func TestLookDoesNotBelieveALeaderThatIsAlone(t *testing.T) {
	c := newLookCluster(t)
	c.others(10)
	from := c.now()
	leader := c.stream().CachedInfo().Cluster.Leader
	var alone jetstream.JetStream
	for _, node := range c.nodes.Nodes() {
		if node.Name() == leader {
			nc, err := node.Connect()
			c.must(err)
			t.Cleanup(nc.Close)
			alone, err = jetstream.New(nc)
			c.must(err)
			continue
		}
	}
	for _, node := range c.nodes.Nodes() {
		if node.Name() != leader {
			c.must(node.Close())
		}
	}
	time.Sleep(readContact + time.Second)
	if st, err := alone.Stream(t.Context(), "S"); err == nil {
		t.Logf("the node alone names %q as leader, last sequence %d", st.CachedInfo().Cluster.Leader, st.CachedInfo().State.LastSeq)
	} else {
		t.Logf("the node alone says: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if info, err := leaderInfo(ctx, alone, "S"); !errors.Is(err, errNoLeader) {
		t.Fatalf("leaderInfo() = %+v, %v, want errNoLeader", info, err)
	}
	res, err := look(ctx, alone, from, want("nowhere"), noLimit)
	if err == nil || res.done || res.absent || classify(err) != classOutage {
		t.Fatalf("look() = %+v, %v, want an outage", res, err)
	}
}
