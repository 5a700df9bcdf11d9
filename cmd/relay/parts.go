package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/dlq"
	"github.com/seed-5e04d8fb/jetbox/embedded"
	"github.com/seed-5e04d8fb/jetbox/relay"
)

// recoverTimeout bounds the start of the embedded broker. After a kill it reads
// its store: with many gigabytes that takes minutes, which a process that gives
// up and is started again never gets through.
const recoverTimeout = time.Hour

// parts are what relay run opens, in this order, and closes in the reverse one.
type parts struct {
	app    *app
	flags  runFlags
	url    string // of the broker, embeddedNATS, or empty for the context's
	db     database
	health *health

	metrics *metrics
	store   atomic.Pointer[outboxStore] // also read by the metrics
	http    *httpServer
	broker  *embedded.Server
	nc      *nats.Conn
	js      jetstream.JetStream
	letters atomic.Pointer[dlq.Letters] // also read by the metrics
	relay   *relay.Relay
	router  *dlq.Router

	closers []func() error
}

func (p *parts) onClose(f func() error) { p.closers = append(p.closers, f) }

// close releases everything, last opened first.
func (p *parts) close() error {
	var errs []error
	for _, f := range slices.Backward(p.closers) {
		errs = append(errs, f())
	}
	p.closers = nil
	return errors.Join(errs...)
}

// open brings up the parts. A database or a broker that is away is waited for,
// visibly.
func (p *parts) open(ctx context.Context) error {
	p.metrics = newMetrics(p.db.table, p.health)
	scrapes, endScrapes := context.WithCancel(context.WithoutCancel(ctx))
	defer p.onClose(func() error { endScrapes(); return nil }) // before the store, which waits for them
	p.metrics.registry.MustRegister(newGauges(scrapes, p.db.table, p.stats, letterCounter(p.letters.Load), p.app.log))
	// Before what it may have to wait for: the process is alive and not ready.
	if err := p.openHTTP(ctx); err != nil {
		return err
	}
	p.onClose(p.closeHTTP)
	if err := p.openStore(ctx); err != nil {
		return err
	}
	if err := p.openBroker(ctx); err != nil {
		return err
	}
	if err := p.setupStreams(ctx); err != nil {
		return err
	}
	return p.newWorkers()
}

func (p *parts) openHTTP(ctx context.Context) error {
	if p.flags.http == listenOff {
		return nil
	}
	mux := newMux(p.health, p.metrics.registry, p.app.secrets)
	s, err := startHTTP(context.WithoutCancel(ctx), p.flags.http, mux, p.app.log)
	if err != nil {
		return err
	}
	p.http = s
	return nil
}

// openBroker starts the embedded server, or waits for the one at the URL.
func (p *parts) openBroker(ctx context.Context) error {
	opts := p.app.global.natsOptions(p.app.log, "relay run", "_INBOX_relay")
	if p.url != embeddedNATS {
		return p.connect(ctx, opts)
	}
	if err := p.startEmbedded(ctx); err != nil {
		return err
	}
	p.onClose(p.broker.Close)
	nc, err := p.broker.Connect(opts...)
	if err != nil {
		return err
	}
	p.nc = nc
	p.onClose(p.closeConn)
	p.js, err = newJetStream(nc, "")
	return err
}

func (p *parts) startEmbedded(ctx context.Context) error {
	p.health.starting("starting the embedded broker")
	f := p.flags
	listen := f.listen
	if listen == listenOff {
		listen = ""
	}
	cfg := embedded.Config{Dir: f.dataDir, Listen: listen, Logger: p.app.log, SyncAlways: f.sync.always}
	if !f.sync.always {
		cfg.Sync = f.sync.every
	}
	startCtx, cancel := context.WithTimeout(ctx, recoverTimeout)
	defer cancel()
	s, err := embedded.Start(startCtx, cfg)
	if err != nil {
		return err
	}
	p.broker = s
	p.app.log.LogAttrs(ctx, slog.LevelInfo, "embedded broker started",
		slog.String("url", s.ClientURL()), slog.String("dir", s.Dir()))
	return nil
}

func (p *parts) connect(ctx context.Context, opts []nats.Option) error {
	p.health.starting("connecting to NATS")
	waiting := func(err error) { p.health.starting("waiting for NATS: " + err.Error()) }
	nc, js, err := p.app.global.waitForBroker(ctx, p.app.log, p.url, waiting, opts)
	if err != nil {
		return err
	}
	p.nc, p.js = nc, js
	p.onClose(p.closeConn)
	p.app.log.LogAttrs(ctx, slog.LevelInfo, "connected to NATS", slog.String("server", nc.ConnectedUrlRedacted()))
	return nil
}

func (p *parts) closeHTTP() error {
	if p.http == nil {
		return nil
	}
	err := p.http.close()
	p.http = nil
	return err
}

func (p *parts) closeConn() error {
	p.nc.Close()
	return nil
}

// setupStreams creates what is missing, and waits when the broker cannot now.
func (p *parts) setupStreams(ctx context.Context) error {
	letters, err := dlq.New(p.js, dlq.Config{
		Stream:     dlqStream,
		Advisories: advisoryStream,
		Replicas:   p.flags.replicas,
		RoutedFunc: p.metrics.letterRouted,
		Logger:     p.app.log,
	})
	if err != nil {
		return err
	}
	said := newRepeater(p.app.log, "JetStream")
	for attempt := 1; ; attempt++ {
		err := p.trySetup(ctx, letters)
		if err == nil {
			p.letters.Store(letters)
			return nil
		}
		if !mayPass(err) {
			return withHint(err, setupHint(err))
		}
		p.health.starting("waiting for JetStream: " + err.Error())
		said.warn(ctx, err)
		if err := sleep(ctx, reconnectDelays.After(attempt)); err != nil {
			return err
		}
	}
}

func (p *parts) trySetup(ctx context.Context, letters *dlq.Letters) error {
	g, log := p.app.global, p.app.log
	ctx, cancel := context.WithTimeout(ctx, 4*connectTimeout)
	defer cancel()
	if p.flags.noSetup {
		s, err := p.js.Stream(ctx, g.stream)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			// The relay waits for it, not ready, and says so.
			log.LogAttrs(ctx, slog.LevelWarn, "stream does not exist, and --no-setup says not to create it", slog.String("stream", g.stream))
			return nil
		} else if err != nil {
			return fmt.Errorf("look up stream %s: %w", g.stream, err)
		}
		return p.checkStream(s.CachedInfo().Config)
	}
	cfg, err := ensureStream(ctx, p.js, g.eventStream(p.flags.replicas), log)
	if err != nil {
		return err
	}
	if err := p.checkStream(cfg); err != nil {
		return err
	}
	return p.setupLetters(letters)(ctx)
}

// checkStream refuses what the flags and the stream as it is cannot do
// together.
func (p *parts) checkStream(cfg jetstream.StreamConfig) error {
	if err := checkOverlap(cfg); err != nil {
		return err
	}
	return checkRetention(p.flags.retention, cfg.Duplicates, p.flags.brokerSync(p.url == embeddedNATS))
}

// mayPass reports whether setting up streams failed for a reason that may end
// by itself.
func mayPass(err error) (pass bool) {
	var api *jetstream.APIError
	switch {
	case errors.As(err, &api):
		return api.Code >= 500 && api.ErrorCode != codeReplicasNotSupported || errors.Is(err, jetstream.ErrJetStreamNotEnabled)
	case errors.Is(err, nats.ErrNoResponders), errors.Is(err, jetstream.ErrNoStreamResponse), errors.Is(err, nats.ErrTimeout),
		errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrDisconnected), errors.Is(err, nats.ErrConnectionReconnecting),
		errors.Is(err, nats.ErrReconnectBufExceeded):
		return true
	}
	return false
}

// codeReplicasNotSupported is the server's error for several replicas without
// a cluster; its class says that the server has a problem, which time does not
// solve.
const codeReplicasNotSupported jetstream.ErrorCode = 10074

func (p *parts) newWorkers() (err error) {
	g, f := p.app.global, p.flags
	cfg := relay.Config{
		Stream:       g.stream,
		Source:       g.source,
		Batch:        f.batch,
		PollInterval: f.pollInterval,
		Lease:        f.lease,
		MaxAttempts:  f.maxAttempts,
		Backoff:      f.backoff,
		MaxBackoff:   f.maxBackoff,
		OnDead:       relay.OnDead(f.onDead),
		OnRecreated:  relay.OnRecreated(f.onRecreated),
		Retention:    f.retention.keep,
		Archive:      f.retention.archive,
		BrokerSync:   max(f.brokerSync(p.url == embeddedNATS), time.Millisecond), // 0 is the default there
		DrainTimeout: f.drainTimeout,
		Logger:       p.app.log,
		Hooks:        p.metrics.hooks(),
	}
	if f.batch == defaultBatch {
		cfg.Batch = 0 // then it grows with the backlog
	}
	if f.retention == (retention{}) {
		cfg.Retention = relay.DeleteAtOnce
	}
	if p.relay, err = relay.New(*p.store.Load(), p.js, cfg); err != nil {
		return usageError{err}
	}
	p.router, err = dlq.NewRouter(p.letters.Load(), dlq.RouterConfig{EventStream: g.stream})
	return err
}

// run relays and routes until ctx is done or one of the two fails.
func (p *parts) run(ctx context.Context) error {
	// The router is not needed for a clean end and stops after the relay has.
	routerCtx, stopRouter := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRouter()
	relayCtx, stopRelay := context.WithCancel(ctx)
	defer stopRelay()
	p.health.running(p.relay.Health)
	p.app.log.LogAttrs(ctx, slog.LevelInfo, "relaying", slog.String("stream", p.app.global.stream))

	var wg sync.WaitGroup
	var routerErr error
	wg.Go(func() {
		defer stopRelay()
		routerErr = p.router.Run(routerCtx)
	})
	wg.Go(func() { watchLetters(routerCtx, p.js, p.setupLetters(p.letters.Load()), p.app.log) })
	if p.broker != nil {
		wg.Go(func() { heal(routerCtx, p.broker, p.app.log) })
	}
	err := p.relay.Run(relayCtx)
	stopRouter()
	wg.Wait()
	// Before the connection: an answer in progress may need it.
	err = errors.Join(err, routerErr, p.closeHTTP())
	if err == nil {
		p.app.log.LogAttrs(context.WithoutCancel(ctx), slog.LevelInfo, "stopped")
	}
	return err
}
