package embedded_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/embedded"
)

// replicated returns a client of the cluster with a stream on three nodes.
func replicated(t *testing.T, c *embedded.Cluster) jetstream.JetStream {
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
	createStream(t, js, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, Replicas: 3})
	return js
}

// leader returns the node that leads the stream.
func leader(t *testing.T, c *embedded.Cluster, js jetstream.JetStream) *embedded.Server {
	t.Helper()
	name := streamInfo(t, js, "S").Cluster.Leader
	for _, s := range c.Nodes() {
		if s.Name() == name {
			return s
		}
	}
	t.Fatalf("stream's leader %q is no node of the cluster", name)
	return nil
}

// publishUntil repeats a publish under one message ID until it is stored, as a
// relay does, for at most 30s.
func publishUntil(t *testing.T, js jetstream.JetStream, id string) *jetstream.PubAck {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		once, stop := context.WithTimeout(ctx, time.Second)
		ack, err := js.Publish(once, "s", nil, jetstream.WithMsgID(id))
		stop()
		if err == nil {
			return ack
		}
		if ctx.Err() != nil {
			t.Fatalf("publish %s: %v", id, err)
		}
	}
}

// A stream with three replicas goes on when its leader stops, remembers its
// message IDs, and the stopped node catches up after its restart.
func TestReplicatedStreamSurvivesTheStopOfItsLeader(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("elections take seconds")
	}
	c := embedded.RunTestCluster(t, 3)
	js := replicated(t, c)
	publish(t, js, "s", "1")

	stopped := leader(t, c, js)
	if err := stopped.Close(); err != nil {
		t.Fatal(err)
	}
	if ack := publishUntil(t, js, "1"); !ack.Duplicate {
		t.Errorf("repeat on the new leader = %+v, want a duplicate", ack)
	}
	publishUntil(t, js, "2")

	if err := stopped.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The leader learns with its next message to the node that it has caught up.
	deadline := time.Now().Add(30 * time.Second)
	for {
		info := streamInfo(t, js, "S")
		if info.State.Msgs == 2 && currentFollowers(info) == 2 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d messages, %d current followers, want 2 and 2: %+v", info.State.Msgs, currentFollowers(info), info.Cluster)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func currentFollowers(info *jetstream.StreamInfo) (n int) {
	for _, r := range info.Cluster.Replicas {
		if r.Current && !r.Offline {
			n++
		}
	}
	return n
}

// All nodes stopped and started again keep what was acknowledged. This order,
// duplicate before expected sequence, is the other way round on one server.
func TestRestartedClusterKeepsItsStream(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("elections after a full restart take seconds")
	}
	c := embedded.RunTestCluster(t, 3)
	js := replicated(t, c)
	publish(t, js, "s", "1")
	for _, s := range c.Nodes() {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range c.Nodes() {
		if err := s.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	if ack := publishUntil(t, js, "1"); !ack.Duplicate || ack.Sequence != 1 {
		t.Errorf("repeat after the restart = %+v, want a duplicate of sequence 1", ack)
	}
	ack, err := js.Publish(t.Context(), "s", nil, jetstream.WithMsgID("1"), jetstream.WithExpectLastSequencePerSubject(0))
	if err != nil || !ack.Duplicate {
		t.Errorf("repeat with a wrong expected sequence = %+v, %v, want a duplicate", ack, err)
	}
}

// Waiting for a cluster ends with its context and says what it waited for.
func TestWaitReadyGivesUpWithItsContext(t *testing.T) {
	t.Parallel()
	c := embedded.RunTestCluster(t, 3)
	for _, s := range c.Nodes() {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := c.WaitReady(ctx)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "0 leaders") {
		t.Errorf("WaitReady with no node running: err = %v, want the deadline and what was missing", err)
	}
}
