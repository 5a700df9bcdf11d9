package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/metrics"
	"strings"

	"github.com/nats-io/nats.go"
)

// describe returns a report with everything but the figures, as server and
// databases say it.
func (r *rig) describe(ctx context.Context) (*Report, error) {
	rep := &Report{
		Version:  r.cfg.Version,
		Go:       runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH,
		NATS:     r.nc.ConnectedServerVersion(),
		NATSGo:   nats.Version,
		Cores:    runtime.GOMAXPROCS(0),
		GOGC:     gogc(),
		Dir:      r.cfg.Dir,
		Rows:     r.cfg.Rows,
		Rounds:   r.cfg.Rounds,
		Rate:     r.cfg.Rate,
		Payload:  payloadBytes,
		Durability: Durability{
			BrokerSync:  brokerSync.String(),
			SQLiteRelay: "FULL", // on a connection that is the store's own; see its package comment
		},
	}
	if err := r.describeSQLite(ctx, rep); err != nil {
		return nil, err
	}
	if r.cfg.Postgres != "" {
		return rep, r.describePostgres(ctx, rep)
	}
	return rep, nil
}

func (r *rig) describeSQLite(ctx context.Context, rep *Report) (err error) {
	b, err := r.openSQLite(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.discard()) }()
	var synchronous int
	err = b.DB().QueryRowContext(ctx, `SELECT sqlite_version(), (SELECT synchronous FROM pragma_synchronous)`).
		Scan(&rep.SQLite, &synchronous)
	if err != nil {
		return fmt.Errorf("ask SQLite for its settings: %w", err)
	}
	names := []string{"OFF", "NORMAL", "FULL", "EXTRA"}
	if synchronous < 0 || synchronous >= len(names) {
		return fmt.Errorf("SQLite says that synchronous is %d", synchronous)
	}
	rep.Durability.SQLiteWriters = names[synchronous]
	return nil
}

// describePostgres also finds out, before anything takes time, whether the role
// may create a schema.
func (r *rig) describePostgres(ctx context.Context, rep *Report) (err error) {
	b, err := r.openPostgres(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.discard()) }()
	d := &rep.Durability
	err = b.DB().QueryRowContext(ctx, `SELECT current_setting('server_version'), current_setting('fsync'),
		current_setting('synchronous_commit'), current_setting('full_page_writes')`).
		Scan(&rep.Postgres, &d.PostgresFsync, &d.PostgresCommit, &d.PostgresFullPage)
	if err != nil {
		return fmt.Errorf("ask PostgreSQL for its settings: %w", err)
	}
	rep.Postgres, _, _ = strings.Cut(rep.Postgres, " ") // without the packager's part
	return nil
}

// gogc returns the setting, -1 for off. Asking package debug would change it.
func gogc() int {
	sample := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return int(int64(sample[0].Value.Uint64())) // off is the largest number
}
