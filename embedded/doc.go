// Package embedded runs a JetStream server inside this process: a broker for
// tests, and for one machine that wants no second program to look after.
//
// # What is promised
//
// A message whose PubAck has arrived survives the death of the process, kill
// -9 included: it was written to the operating system before the PubAck left.
// It survives a power failure only once it has been synced, which happens up
// to [Config.Sync] after the PubAck, 1s by default. With [Config.SyncAlways]
// it is synced before the PubAck, for about three times the time per publish.
// [Server.Close] syncs everything, and so does the next start after a kill. So
// whoever publishes from an outbox keeps its published rows for at least Sync,
// and can publish again what a power failure took back.
//
// [Start] returns a server that takes connections and has JetStream, or an
// error that says what is in the way. One directory serves one server: a
// second one, in this process or another, is refused with [ErrDirInUse]. The
// lock belongs to the process, so a killed one leaves nothing to clean up.
// The server installs no signal handler and never ends the process. All of
// its goroutines have ended when Close returns.
//
// # What is not
//
// The state of consumers (acknowledgments, delivery counts) is written a
// little later, with SyncAlways too: after a kill, messages that were
// acknowledged, even with DoubleAck, can be delivered again. Memory streams
// end with the server, and a stream with PersistMode async can lose
// acknowledged messages in a kill. There is no authentication and no TLS: who
// reaches the port may do everything, so listen on a loopback address. A
// [Cluster] is for tests: its nodes share a machine, a process and its fate.
//
// # In tests
//
// [RunTest] is a broker in one line, [RunTestCluster] is three of them. Without
// a port the server also runs inside a testing/synctest bubble, where ack
// waits, duplicate windows and reconnect waits elapse at once. Four things to
// know there, all seen with nats-server 2.15:
//
//   - Bubbles with file storage must not run in parallel in one test binary,
//     nor beside a test that has such a server outside a bubble: all servers of
//     a process share one goroutine. Run them in sequence (no t.Parallel), use
//     memory storage, or call ats.Register (nats-server/v2/server/ats) in
//     TestMain, but not where it matters that a message does not expire.
//   - nats.Conn's Flush, Drain and Request with a timeout, Subscription.NextMsg
//     and every reconnect draw timers from a pool that outlives the bubble; one
//     of a bubble, drawn outside it, is fatal. RunTest empties the pool before
//     and after. Where it does not run, call runtime.GC twice after a bubble,
//     and prefer the variants that take a context.
//   - Close every connection before the bubble ends. One that still tries to
//     reconnect keeps the bubble, and its clock, running.
//   - Nothing with a socket: no Listen, no cluster.
package embedded
