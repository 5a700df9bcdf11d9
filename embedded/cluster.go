package embedded

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

const (
	clusterPoll  = 10 * time.Millisecond
	portAttempts = 5 // another process may take a port that was free just now
)

// drawing is held from the moment in which a cluster draws its ports until its nodes
// listen on them: clusters of this process that start together draw others.
var drawing sync.Mutex

// Cluster is a JetStream cluster on the loopback interface, all of it in this
// process, for tests. It is safe for concurrent use.
type Cluster struct {
	nodes []*Server
}

// peering is what a node knows about the routes of its cluster. Its name is that of
// no other cluster: a node that finds one of those at a port is turned away.
type peering struct {
	cluster string
	addr    string   // its own
	routes  []string // everybody's
}

// StartCluster starts n nodes with their streams in folders of dir, named n0,
// n1 and so on, and waits as [Cluster.WaitReady] does, a minute when ctx has no
// deadline.
func StartCluster(ctx context.Context, dir string, n int) (*Cluster, error) {
	if dir == "" {
		return nil, errors.New("embedded: dir of the cluster is empty, want a directory")
	}
	if n < 2 {
		return nil, fmt.Errorf("embedded: cluster of %d nodes, want at least 2; Start is for one", n)
	}
	for attempt := 1; ; attempt++ {
		c, err := tryCluster(ctx, dir, n)
		if err == nil || !errors.Is(err, ErrListen) || attempt == portAttempts {
			return c, err
		}
	}
}

func tryCluster(ctx context.Context, dir string, n int) (*Cluster, error) {
	c, err := bindCluster(ctx, dir, n)
	if err == nil {
		err = c.WaitReady(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// bindCluster starts the nodes and returns once they listen. With an error it returns
// those that have started.
func bindCluster(ctx context.Context, dir string, n int) (*Cluster, error) {
	drawing.Lock()
	defer drawing.Unlock()
	c := &Cluster{}
	routes, err := freeAddrs(n)
	if err != nil {
		return c, err
	}
	for i := range n {
		name := "n" + strconv.Itoa(i)
		s, err := newServer(Config{
			Dir:    filepath.Join(dir, name),
			Listen: "127.0.0.1:0",
			Name:   name,
			Logger: slog.New(slog.DiscardHandler), // elections are noisy
		}, &peering{cluster: nameOf(dir), addr: routes[i], routes: routes})
		if err != nil {
			return c, err
		}
		c.nodes = append(c.nodes, s)
		if err := s.Restart(ctx); err != nil {
			return c, err
		}
	}
	for _, s := range c.nodes {
		if err := s.awaitRoutes(ctx); err != nil {
			return c, err
		}
	}
	return c, nil
}

// nameOf is the name of the cluster in a folder.
func nameOf(dir string) string {
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(dir)) // never fails
	return fmt.Sprintf("jetbox-%x", h.Sum64())
}

// awaitRoutes waits until the server listens for its peers, which it does some time
// after it has started.
func (s *Server) awaitRoutes(ctx context.Context) error {
	tick := time.NewTicker(clusterPoll)
	defer tick.Stop()
	for {
		if err := s.log.Load().fatalError(); err != nil {
			return fmt.Errorf("embedded: start %s: %w", s.Name(), err)
		}
		if ns := s.current.Load(); ns == nil || ns.ClusterAddr() != nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("embedded: start %s: %w", s.Name(), context.Cause(ctx))
		}
	}
}

// Nodes returns the nodes in the order of their names. Close stops one,
// Restart brings it back; WaitReady then waits until it has caught up.
func (c *Cluster) Nodes() []*Server { return c.nodes }

// URL returns the addresses of all nodes, those that are stopped too, in the
// form nats.Connect takes.
func (c *Cluster) URL() string {
	urls := make([]string, len(c.nodes))
	for i, s := range c.nodes {
		urls[i] = s.ClientURL()
	}
	return strings.Join(urls, ",")
}

// Connect returns a connection, over TCP, to any node that runs. It moves to
// another one when that node stops. Connect on a node stays with the node.
func (c *Cluster) Connect(opts ...nats.Option) (*nats.Conn, error) {
	nc, err := nats.Connect(c.URL(), opts...)
	if err != nil {
		return nil, fmt.Errorf("embedded: connect to cluster: %w", err)
	}
	return nc, nil
}

// WaitReady waits until the running nodes have one leader, which knows them
// all, and each of them, by its own account, is current in everything it has a
// replica of. It gives up when ctx is done, or
// after a minute when ctx has no deadline, and says what was missing.
func (c *Cluster) WaitReady(ctx context.Context) error {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, startTimeout)
		defer cancel()
	}
	tick := time.NewTicker(clusterPoll)
	defer tick.Stop()
	for {
		missing := c.missing()
		if missing == "" {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("embedded: wait for cluster: %s: %w", missing, context.Cause(ctx))
		}
	}
}

// missing returns what keeps the running nodes from being ready, or "".
func (c *Cluster) missing() string {
	var running, known []string
	leaders := 0
	for _, s := range c.nodes {
		ns := s.current.Load()
		if ns == nil {
			continue
		}
		running = append(running, s.Name())
		if !ns.JetStreamIsCurrent() {
			return s.Name() + " is not current"
		}
		if h := ns.Healthz(nil); h.Status != "ok" {
			return s.Name() + " is not healthy: " + h.Error
		}
		if ns.JetStreamIsLeader() {
			leaders++
			known = ns.JetStreamClusterPeers()
		}
	}
	if leaders != 1 {
		return fmt.Sprintf("%d leaders", leaders)
	}
	// Before it has heard of a node's resources the leader places nothing there,
	// and a stream of three replicas is refused (10005).
	for _, name := range running {
		if !slices.Contains(known, name) {
			return "the leader does not know " + name
		}
	}
	return ""
}

// Close stops every node.
func (c *Cluster) Close() error {
	var errs []error
	for _, s := range c.nodes {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// join writes the cluster's part of a node's options.
func (p *peering) join(o *server.Options) error {
	if err := checkFree(p.addr); err != nil {
		return err
	}
	addr, err := net.ResolveTCPAddr("tcp", p.addr)
	if err != nil {
		return fmt.Errorf("embedded: route address: %w", err)
	}
	o.Cluster = server.ClusterOpts{Name: p.cluster, Host: addr.IP.String(), Port: addr.Port}
	for _, r := range p.routes {
		o.Routes = append(o.Routes, &url.URL{Scheme: "nats-route", Host: r})
	}
	return nil
}

// freeAddrs returns n loopback addresses that nobody listens on, each another.
func freeAddrs(n int) ([]string, error) {
	var addrs []string
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("embedded: find a free port: %w", err)
		}
		defer l.Close() // in the end: open ports are not drawn twice
		addrs = append(addrs, l.Addr().String())
	}
	return addrs, nil
}
