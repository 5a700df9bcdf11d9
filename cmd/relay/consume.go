package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/seed-5e04d8fb/jetbox/consumer"
	"github.com/seed-5e04d8fb/jetbox/dedup"
	"github.com/seed-5e04d8fb/jetbox/dlq"
)

// consumeFlags are the flags of relay consume.
type consumeFlags struct {
	durable    string
	filters    []string
	maxDeliver int
	ackWait    time.Duration
	workers    int
	backoff    time.Duration
	maxBackoff time.Duration
	timeout    time.Duration

	ledger          string
	ledgerRetention time.Duration

	print       bool
	json        bool
	exec        string
	execLines   string
	webhook     string
	hmacKeyFile string

	metrics string
}

func (f *consumeFlags) define(fs *flag.FlagSet) {
	define(fs, &f.durable, "durable", "", someText, "`NAME` of the consumer; processes that share it share the work")
	defineList(fs, &f.filters, "filter", "", streamSubject, "only events with these `SUBJECTS`; * and > match (default all)")
	define(fs, &f.maxDeliver, "max-deliver", 5, positiveInt, "`NUMBER` of deliveries after which an event is a dead letter")
	define(fs, &f.ackWait, "ack-wait", 30*time.Second, positiveDuration, "`TIME` after which the event of a dead process is delivered again")
	define(fs, &f.workers, "workers", 1, positiveInt, "`NUMBER` of events handled at the same time; with --exec-lines always 1")
	define(fs, &f.backoff, "backoff", time.Second, positiveDuration, "`TIME` to wait after the first failure; doubles up to --max-backoff")
	define(fs, &f.maxBackoff, "max-backoff", time.Minute, positiveDuration, "longest `TIME` to wait after a failure")
	define(fs, &f.timeout, "timeout", 5*time.Minute, positiveDuration, "longest `TIME` to handle one event")
	define(fs, &f.ledger, "ledger", "", someText, "`URL` of a database (sqlite:FILE or postgres://...) that remembers what\nsucceeded, so that it is not run again; with --exec, --exec-lines and --webhook")
	define(fs, &f.ledgerRetention, "ledger-retention", dedup.DefaultRetention, positiveDuration, "`TIME` the ledger remembers at least")
	fs.BoolVar(&f.print, "print", false, "write subject and payload to stdout, one event a line")
	fs.BoolVar(&f.json, "json", false, "with --print: one JSON object per event")
	define(fs, &f.exec, "exec", "", someText, "shell `COMMAND` to run for each event")
	define(fs, &f.execLines, "exec-lines", "", someText, "shell `COMMAND` to run once, which handles event after event")
	define(fs, &f.webhook, "webhook", "", webhookURL, "`URL` to POST each event to")
	define(fs, &f.hmacKeyFile, "hmac-key-file", "", someText, "`FILE` with the key that signs webhooks")
	define(fs, &f.metrics, "metrics", listenOff, hostPort, "`HOST:PORT` of /livez, /readyz and /metrics, or off")
}

func (f *consumeFlags) check() error {
	if f.durable == "" {
		return withHint(usagef("consume: no consumer named"), "give --durable NAME")
	}
	modes := 0
	for _, given := range []bool{f.print, f.exec != "", f.execLines != "", f.webhook != ""} {
		if given {
			modes++
		}
	}
	if modes != 1 {
		return usagef("consume: give one of --print, --exec, --exec-lines and --webhook")
	}
	if f.maxBackoff < f.backoff {
		return usagef("--max-backoff %v is shorter than --backoff %v", shortDuration(f.maxBackoff), shortDuration(f.backoff))
	}
	if f.ledger != "" {
		return f.checkLedger()
	}
	return nil
}

const consumeHelp = `
A durable consumer without writing Go. It starts at the stream's first message,
retries with growing delays, and makes a dead letter of what fails for good or
--max-deliver times. Events of one ordering key are handled one after the other,
also with several --workers; one that is tried again holds up the later ones of
its key. Every event is handled at least once; with --ledger, one that succeeded
is not handled again, unless the process dies between the success and the note, the
note fails (a warning says so), or the process is stopped or cut off from NATS for
longer than --ack-wait while it handles the event: then another may do so as well.

--exec runs COMMAND with sh -c for each event, the payload on its stdin. The
environment has JETBOX_SUBJECT, JETBOX_STREAM, JETBOX_SEQUENCE, JETBOX_DELIVERED
and each header as JETBOX_H_ and its name in upper case, with _ for other
characters. Exit 0 is success, 65 a permanent error, anything else is tried
again. The end of stderr goes into the dead letter. After --timeout, and some time
after relay consume was told to stop, COMMAND is killed with all its children.

--exec-lines runs COMMAND with sh -c once and gives it one event at a time, as
one line on its stdin, a JSON object with subject, stream, sequence, delivered,
id, key, type, headers (lists of texts) and payload (or payload_base64 when it
is no text). It answers each with one line on stdout: "ok", "retry TEXT" or
"permanent TEXT", at most 64 KiB. It is started again when it ends, and killed
when an answer takes longer than --timeout. An event that it took in hand after
another, and left without an answer, is given to a new one at once; what that
leaves without an answer has failed. Its stdin is closed when relay consume stops.

--webhook sends a POST with the payload, Idempotency-Key, X-Event-Id and
X-Event-Type, X-Event-Subject, and the ce- headers. 2xx is success; 409, 429,
5xx and no answer are tried again, after Retry-After where given (a minute at
most, and half of --timeout); so are redirects, which are not followed. Other
answers are permanent errors. --hmac-key-file adds X-Jetbox-Signature:
t=UNIX,v1=HEX, the HMAC-SHA256 of "UNIX.PAYLOAD" with the file's content, without
a newline at its end, as key.`

func consumeCommand() *command {
	var f consumeFlags
	return &command{
		name:  "consume",
		short: "handle events with a command or webhook, or print them",
		long:  consumeHelp,
		flags: f.define,
		run: func(ctx context.Context, a *app, _ []string) error {
			if err := f.check(); err != nil {
				return err
			}
			return consume(ctx, a, f)
		},
	}
}

func consume(ctx context.Context, a *app, f consumeFlags) (err error) {
	handler, closeHandler, err := f.handler(a)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeHandler()) }()
	nc, js, err := a.connect("relay consume "+f.durable, "_INBOX_worker")
	if err != nil {
		return err
	}
	defer nc.Close()
	letters, err := dlq.New(js, dlq.Config{Logger: a.log})
	if err != nil {
		return err
	}
	var (
		c        *consumer.Consumer
		remember ledger
	)
	if f.ledger != "" {
		oldest := func(ctx context.Context) (time.Time, error) { return c.Oldest(ctx) }
		var closeLedger func() error
		remember, closeLedger, err = f.openLedger(ctx, keeper(oldest, letters, a.global.stream, f.durable), a.log)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, closeLedger()) }()
		handler = besideLedger(remember, a.log, handler)
	}
	m := newConsumerMetrics(f.durable)
	c, err = consumer.New(js, handler, consumer.Config{
		Stream:         a.global.stream,
		Durable:        f.durable,
		FilterSubjects: f.filters,
		MaxDeliver:     f.maxDeliver,
		AckWait:        f.ackWait,
		Workers:        f.atOnce(),
		Backoff:        f.backoff,
		MaxBackoff:     f.maxBackoff,
		HandleTimeout:  f.timeout,
		DeadLetters:    letters,
		Logger:         a.log,
		HandledFunc:    m.onHandled,
		DuplicateFunc:  m.onDuplicate,
		GapFunc:        m.onGap,
	})
	if err != nil {
		return usageError{err}
	}
	stopServing, err := m.serve(ctx, f.metrics, nc, a.log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopServing()) }()
	if remember != nil {
		defer inBackground(ctx, remember.Run)()
	}
	err = c.Run(ctx)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return withHint(err, "relay run creates the stream; --stream names another")
	}
	return err
}

// atOnce returns how many events are handled at the same time. One command takes
// one after the other, and what waits for its turn would use up its time.
func (f *consumeFlags) atOnce() int {
	if f.execLines != "" {
		return 1
	}
	return f.workers
}

// handler returns what is done with an event, and what ends it.
func (f *consumeFlags) handler(a *app) (consumer.Handler, func() error, error) {
	nothing := func() error { return nil }
	switch {
	case f.exec != "":
		return (&execHandler{command: f.exec, environ: a.environ, stdout: a.stdout, stderr: a.stderr}).handle, nothing, nil
	case f.execLines != "":
		h := newLinesHandler(f.execLines, a.environ, a.stderr, a.log)
		return h.handle, h.close, nil
	case f.webhook != "":
		h, err := newWebhook(f.webhook, f.hmacKeyFile, f.timeout)
		if err != nil {
			return nil, nil, err
		}
		return h.handle, nothing, nil
	}
	return (&printer{w: a.stdout, json: f.json}).handle, nothing, nil
}

// printer writes each event as a line.
type printer struct {
	mu   sync.Mutex // one line at a time
	w    io.Writer
	json bool
}

func (p *printer) handle(_ context.Context, d *consumer.Delivery) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.json {
		return writeJSON(p.w, deliveryJSON(d))
	}
	_, err := fmt.Fprintln(p.w, strings.TrimSpace(printable(d.Subject)+" "+printable(string(d.Payload))))
	return err
}
