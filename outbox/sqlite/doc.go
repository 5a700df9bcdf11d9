// Package sqlite keeps an outbox in an SQLite file, by modernc.org/sqlite.
//
// It promises what package outbox says, with one shard: one relay at a time
// holds the lease on a file, others stand by and take over. SQLite has one
// writer, so row ids follow commit order.
//
// Every connection it opens has WAL, foreign keys and immediate transactions;
// the settings are read back, and a connection that does not have them is not
// used. Writers run with synchronous=NORMAL and wait 5 s for the lock. The
// relay's own connection runs with synchronous=FULL: its claim is on disk before
// the first of its rows is sent, and with it every commit the claim could see,
// so that a power failure cannot take back an order whose event is already on
// its way.
//
// Times are Unix milliseconds from the Go clock of the process, never from
// SQLite's. The file must be on a local disk: WAL does not work over a network.
//
// After a crash the file is as after the last commit. A relay that died holds
// its lease until it expires; its claims tell the next one which rows
// may be on the stream already.
//
// Not done yet: looking on the stream for rows whose duplicate window has
// passed. They are sent again.
package sqlite
