package embedded

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// startTimeout bounds a start whose context has no deadline. Recovering a
// large store after a kill takes time; a start that takes longer is stuck.
const startTimeout = time.Minute

// Server is a JetStream server in this process. It is safe for concurrent use.
//
// It outlives its own restarts: a client connected with
// nats.InProcessServer(s), as [Server.Connect] does, loses its connection when
// the server is closed and reconnects after [Server.Restart].
type Server struct {
	cfg   Config   // Listen has the real port, so that a restart keeps it
	url   string   // set by the first start
	peers *peering // nil for a server that stands alone

	current atomic.Pointer[server.Server] // nil while closed
	log     atomic.Pointer[serverLog]     // of the current server, or the last one

	mu   sync.Mutex // serializes Close and Restart
	lock *os.File   // guarded by mu; nil while closed
}

// Start starts a server and returns when it takes connections and JetStream is
// enabled. It gives up when ctx is done, or after a minute when ctx has no
// deadline; what it had begun is then undone in the background, and until that
// is done the directory stays in use. Afterwards ctx has no effect: the caller
// ends the server with Close.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	s, err := newServer(cfg, nil)
	if err != nil {
		return nil, err
	}
	s.cfg.warn(ctx)
	if err := s.Restart(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

func newServer(cfg Config, peers *peering) (*Server, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	dir, err := filepath.Abs(cfg.Dir) // a later chdir must not matter to Restart
	if err != nil {
		return nil, fmt.Errorf("embedded: find directory %s: %w", cfg.Dir, err)
	}
	cfg.Dir = dir
	return &Server{cfg: cfg, peers: peers}, nil
}

// Connect returns a connection through memory, not through the port. The
// options are nats.Connect's; the caller closes the connection, before the
// server where it can.
func (s *Server) Connect(opts ...nats.Option) (*nats.Conn, error) {
	all := append([]nats.Option{nats.InProcessServer(s)}, opts...)
	nc, err := nats.Connect("", all...)
	if err != nil {
		return nil, fmt.Errorf("embedded: connect to %s: %w", s.cfg.Name, err)
	}
	return nc, nil
}

// InProcessConn returns the client's end of a new connection to the server as
// it runs now. It makes a Server a nats.InProcessConnProvider, which a test can
// wrap to lose, cut or refuse connections.
func (s *Server) InProcessConn() (net.Conn, error) {
	ns := s.current.Load()
	if ns == nil {
		return nil, ErrClosed
	}
	return ns.InProcessConn()
}

// Err returns why the server stores nothing any more, or nil. A full disk is the
// usual cause. The server remembers it also when there is room again, until
// [Server.Restart].
func (s *Server) Err() error {
	if s.current.Load() == nil {
		return ErrClosed
	}
	if text := s.log.Load().broken.Load(); text != nil {
		return fmt.Errorf("nats-server: %s", *text)
	}
	return nil
}

// ClientURL returns the URL for other programs on this machine, "" without a
// port. It stays the same across restarts.
func (s *Server) ClientURL() string { return s.url }

// Dir returns the directory of the streams, absolute.
func (s *Server) Dir() string { return s.cfg.Dir }

// Name returns the name that connections see in nats.Conn.ConnectedServerName.
func (s *Server) Name() string { return s.cfg.Name }

// Restart starts the server again on the same directory and port, closing it
// first when it runs. It returns when Start would.
func (s *Server) Restart(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.stop(); err != nil {
		return err
	}
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, startTimeout)
		defer cancel()
	}
	return s.start(ctx)
}

// Close stops the server, syncs its streams, ends its goroutines and gives up
// the directory. Closing a closed server does nothing.
func (s *Server) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stop()
}

// start brings up a server. mu is held, and no server runs.
func (s *Server) start(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("embedded: start in %s: %w", s.cfg.Dir, context.Cause(ctx))
	}
	if err := os.MkdirAll(s.cfg.Dir, 0o750); err != nil {
		return fmt.Errorf("embedded: create directory %s: %w", s.cfg.Dir, err)
	}
	lock, err := lockDir(s.cfg.Dir)
	if errors.Is(err, ErrDirInUse) {
		return err
	} else if err != nil {
		return fmt.Errorf("embedded: lock directory %s: %w", s.cfg.Dir, err)
	}
	if err := syncTree(s.cfg.Dir); err != nil { // what a killed server left
		return errors.Join(err, lock.Close())
	}
	opts, err := s.options()
	if err != nil {
		return errors.Join(err, lock.Close())
	}
	ns, err := server.NewServer(opts)
	if err != nil {
		return errors.Join(fmt.Errorf("embedded: configure server: %w", err), lock.Close())
	}
	undo := func() error {
		ns.Shutdown()
		ns.WaitForShutdown()
		return lock.Close()
	}
	log := &serverLog{log: s.cfg.Logger}
	ns.SetLoggerV2(log, false, false, false)

	started := make(chan struct{})
	go func() {
		defer close(started)
		ns.Start()
	}()
	select {
	case <-started:
	case <-ctx.Done():
		// Start recovers the streams under locks that Shutdown needs, so it
		// cannot be hurried. The lock stays until it is over.
		go func() {
			<-started
			_ = undo()
		}()
		return fmt.Errorf("embedded: start in %s: %w", s.cfg.Dir, context.Cause(ctx))
	}
	if err := startError(ns, log); err != nil {
		return errors.Join(fmt.Errorf("embedded: start in %s: %w", s.cfg.Dir, err), undo())
	}
	s.pinPort(ns)
	s.lock = lock
	s.log.Store(log)
	s.current.Store(ns)
	return nil
}

// startError returns why a server whose Start has returned does not work. It
// reports trouble only to its log, and goes on without JetStream after some.
func startError(ns *server.Server, log *serverLog) error {
	if err := log.fatalError(); err != nil {
		return err
	}
	if !ns.ReadyForConnections(time.Second) {
		return errors.New("not ready for connections")
	}
	if !ns.JetStreamEnabled() {
		return errors.New("JetStream is not enabled")
	}
	return nil
}

// pinPort makes a port that the first start drew the one of every restart.
func (s *Server) pinPort(ns *server.Server) {
	addr, listening := ns.Addr().(*net.TCPAddr)
	if s.url != "" || !listening {
		return
	}
	host, _, _ := s.cfg.hostPort()
	port := strconv.Itoa(addr.Port)
	s.cfg.Listen = net.JoinHostPort(host, port)
	if ip := net.ParseIP(host); host == "" || (ip != nil && ip.IsUnspecified()) {
		host = "127.0.0.1" // listening everywhere is no address to connect to
	}
	s.url = (&url.URL{Scheme: "nats", Host: net.JoinHostPort(host, port)}).String()
}

// stop ends the server, if there is one. mu is held.
func (s *Server) stop() error {
	ns := s.current.Swap(nil)
	if ns == nil {
		return nil
	}
	if s.cfg.Listen == "" {
		disconnect(ns)
	}
	// Not LameDuckShutdown: it does nothing in a server that does not listen.
	ns.Shutdown()
	ns.WaitForShutdown()
	err := errors.Join(syncTree(s.cfg.Dir), s.lock.Close())
	s.lock = nil
	return err
}

// options returns the server's options, after a look whether the ports are
// free: the server only logs that, without an error value.
func (s *Server) options() (*server.Options, error) {
	o := &server.Options{
		ServerName:             s.cfg.Name,
		DontListen:             s.cfg.Listen == "",
		JetStream:              true,
		StoreDir:               s.cfg.Dir,
		JetStreamMaxStore:      s.cfg.MaxStore,
		JetStreamMaxMemory:     s.cfg.MaxMemory,
		SyncInterval:           s.cfg.Sync,
		SyncAlways:             s.cfg.SyncAlways,
		MaxPayload:             server.MAX_PAYLOAD_SIZE,
		DisableJetStreamBanner: true,
		// The server's own handler would call os.Exit in the middle of the
		// application's shutdown.
		NoSigs: true,
		NoLog:  true, // means: no logger of its own; it gets ours
	}
	if s.cfg.Listen != "" {
		host, port, err := s.cfg.hostPort()
		if err != nil {
			return nil, err // validate has seen it
		}
		if err := checkFree(s.cfg.Listen); err != nil {
			return nil, err
		}
		o.Host, o.Port = host, port
		if port == 0 {
			o.Port = server.RANDOM_PORT
		}
	}
	if s.peers != nil {
		if err := s.peers.join(o); err != nil {
			return nil, err
		}
	}
	return o, nil
}

func checkFree(addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrListen, err)
	}
	return l.Close()
}

// disconnect closes all connections. A server that is shut down closes them
// itself, but leaves their subscriptions (nats-server 2.15): until a consumer is
// stopped it sends a message to a pull that nobody reads, takes it back and
// sends it again, without a pause. In a synctest bubble that keeps the clock from
// going on, for which the shutdown waits.
func disconnect(ns *server.Server) {
	const most = 100 // clients that come back at once end with the shutdown
	for range most {
		conns, err := ns.Connz(nil)
		if err != nil || len(conns.Conns) == 0 {
			return
		}
		for _, c := range conns.Conns {
			_ = ns.DisconnectClientByID(c.Cid) // gone already is as good
		}
	}
}
