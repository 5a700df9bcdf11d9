package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/synadia-io/orbit.go/natscontext"

	"github.com/seed-5e04d8fb/jetbox/internal/delay"
)

const (
	connectTimeout = 5 * time.Second

	// A dead peer is found after pingInterval times maxPings: before the 30 s
	// in which trouble has to be visible.
	pingInterval = 5 * time.Second
	maxPings     = 2

	// repeatLog is how often something that lasts is said again.
	repeatLog = 30 * time.Second
)

// reconnectDelays keeps a fleet from coming back in one moment.
var reconnectDelays = delay.Policy{Initial: 250 * time.Millisecond, Max: 5 * time.Second}

// natsOptions are the options of every connection. name shows up in the
// server's list of connections; with the prefix of its own, replies need no
// permission on the inboxes of others.
func (g *globals) natsOptions(log *slog.Logger, name, inbox string) []nats.Option {
	opts := []nats.Option{
		nats.Name(name),
		nats.Timeout(connectTimeout),
		// Never give up: the default closes the connection for good after two
		// minutes, or after two refused logins.
		nats.MaxReconnects(-1),
		nats.IgnoreAuthErrorAbort(),
		nats.CustomReconnectDelay(reconnectDelays.After),
		// A publish during an outage fails at once, instead of being stored
		// later behind the relay's back.
		nats.ReconnectBufSize(-1),
		nats.PingInterval(pingInterval),
		nats.MaxPingsOutstanding(maxPings),
		// A denied publish shows up here and otherwise only as a timeout.
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			log.LogAttrs(context.Background(), slog.LevelWarn, "NATS reports an error", slog.Any("err", err))
		}),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.LogAttrs(context.Background(), slog.LevelWarn, "disconnected from NATS, reconnecting", slog.Any("err", err))
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			log.LogAttrs(context.Background(), slog.LevelInfo, "reconnected to NATS", slog.String("server", nc.ConnectedUrlRedacted()))
		}),
		func(o *nats.Options) error {
			if o.InboxPrefix == "" { // a context may have set one
				o.InboxPrefix = inbox
			}
			return nil
		},
	}
	if g.natsCreds != "" {
		opts = append(opts, nats.UserCredentials(g.natsCreds))
	}
	if g.tlsCA != "" {
		opts = append(opts, nats.RootCAs(g.tlsCA))
	}
	if g.tlsCert != "" {
		opts = append(opts, nats.ClientCert(g.tlsCert, g.tlsKey))
	}
	return opts
}

// dial connects to url, or to the server of the context when url is empty.
func (g *globals) dial(url string, opts ...nats.Option) (*nats.Conn, jetstream.JetStream, error) {
	var (
		nc     *nats.Conn
		domain string
		err    error
	)
	if url == "" {
		var settings natscontext.Settings
		nc, settings, err = natscontext.Connect(g.natsContext, opts...)
		domain = settings.JSDomain
		if err != nil {
			err = fmt.Errorf("connect to NATS as context %q says: %w", g.natsContext, err)
		}
	} else if nc, err = nats.Connect(url, opts...); err != nil {
		err = fmt.Errorf("connect to NATS at %s: %w", mask(url), err)
	}
	if err != nil {
		return nil, nil, err
	}
	js, err := newJetStream(nc, domain)
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	return nc, js, nil
}

func newJetStream(nc *nats.Conn, domain string) (jetstream.JetStream, error) {
	opt := jetstream.WithDefaultTimeout(connectTimeout)
	if domain != "" {
		return jetstream.NewWithDomain(nc, domain, opt)
	}
	return jetstream.New(nc, opt)
}

// connect is for commands that need the broker now: it does not wait for it.
func (a *app) connect(name, inbox string) (*nats.Conn, jetstream.JetStream, error) {
	g := a.global
	if g.nats == embeddedNATS {
		return nil, nil, withHint(usagef("--nats %s is for relay run: this command connects to a running broker", embeddedNATS),
			"leave it out to use the broker of relay run at "+defaultNATS)
	}
	nc, js, err := g.dial(g.natsURL(defaultNATS), g.natsOptions(a.log, name, inbox)...)
	if err != nil {
		return nil, nil, withHint(err, connectHint(err))
	}
	return nc, js, nil
}

func connectHint(err error) string {
	switch {
	case errors.Is(err, nats.ErrNoServers), errors.Is(err, nats.ErrTimeout), errors.Is(err, syscall.ECONNREFUSED):
		return "is relay run, or another NATS server, running there? --nats names another one"
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired), errors.Is(err, nats.ErrAuthRevoked):
		return "the server refused the credentials: see --nats-creds, --nats-context, or the user in --nats"
	case errors.Is(err, nats.ErrSecureConnWanted):
		return "the server has no TLS: use nats:// instead of tls://, and no --tls-ca or --tls-cert"
	case isTLSMistake(err):
		return "--tls-ca names the certificates to trust, --tls-cert and --tls-key the client's own"
	}
	return ""
}

// isTLSMistake reports whether a TLS handshake failed for a reason that waiting
// does not mend.
func isTLSMistake(err error) (mistake bool) {
	var (
		authority x509.UnknownAuthorityError
		host      x509.HostnameError
		invalid   x509.CertificateInvalidError
		verify    *tls.CertificateVerificationError
		record    tls.RecordHeaderError
		op        *net.OpError
		network   net.Error
	)
	// nats.ErrTLS covers a server that hangs up after the handshake, which is how
	// a refused client certificate looks to the faster client (nats.go 1.55).
	if errors.Is(err, nats.ErrTLS) {
		return !errors.As(err, &network) || !network.Timeout()
	}
	return errors.Is(err, nats.ErrSecureConnWanted) ||
		errors.As(err, &authority) || errors.As(err, &host) || errors.As(err, &invalid) ||
		errors.As(err, &verify) || errors.As(err, &record) ||
		errors.As(err, &op) && op.Op == "remote error" // the server's alert
}

// isOutage reports whether connecting failed for a reason that may end by
// itself: no server, no network, a login refused for now.
func isOutage(err error) (outage bool) {
	var (
		parse   *url.Error
		network net.Error
	)
	switch {
	case isTLSMistake(err), errors.As(err, &parse), errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
		return false
	case errors.As(err, &network), errors.Is(err, io.EOF):
		return true
	}
	// What the server said, or the lack of one. Mistakes in the options that
	// nats.go finds itself wear the same prefix, and these flags cannot make them.
	cause := err
	for errors.Unwrap(cause) != nil {
		cause = errors.Unwrap(cause)
	}
	return strings.HasPrefix(cause.Error(), "nats: ")
}

// waitForBroker connects, and goes on trying for as long as the broker is away.
// waiting is told why, each time.
func (g *globals) waitForBroker(ctx context.Context, log *slog.Logger, url string, waiting func(error), opts []nats.Option) (*nats.Conn, jetstream.JetStream, error) {
	said := newRepeater(log, "NATS")
	for attempt := 1; ; attempt++ {
		nc, js, err := g.dial(url, opts...)
		if err == nil {
			return nc, js, nil
		}
		if !isOutage(err) {
			return nil, nil, withHint(err, connectHint(err))
		}
		waiting(err)
		said.warn(ctx, err)
		if err := sleep(ctx, reconnectDelays.After(attempt)); err != nil {
			return nil, nil, err
		}
	}
}

// repeater logs what is waited for and why, when that changes, and now and then
// while it lasts.
type repeater struct {
	log  *slog.Logger
	what string
	text string
	at   time.Time
}

func newRepeater(log *slog.Logger, what string) *repeater { return &repeater{log: log, what: what} }

func (r *repeater) warn(ctx context.Context, err error) {
	text := oneLine(err.Error())
	if text == r.text && time.Since(r.at) < repeatLog {
		return
	}
	r.text, r.at = text, time.Now()
	r.log.LogAttrs(ctx, slog.LevelWarn, "waiting", slog.String("for", r.what), slog.String("err", text))
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
