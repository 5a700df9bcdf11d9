package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// ErrInUse is returned by [Store.Reshard] while relays hold shards. Its text names
// them. Stop them, or wait for the leases of dead ones to end.
var ErrInUse = errors.New("relays are working on the outbox")

// Reshard divides an outbox that exists into another number of shards, at least
// one. Nobody may relay meanwhile: while a relay has a lease nothing is changed,
// and the error is ErrInUse. Writers wait for it, some milliseconds for each
// thousand pending rows. What is unresolved stays claimed, in every shard: whoever
// relays next treats it as of unknown outcome.
func (s *Store) Reshard(ctx context.Context, shards int) error {
	err := checkShards(shards)
	if err == nil {
		err = s.inTx(ctx, operateTimeout, func(ctx context.Context, tx pgx.Tx) error { return s.reshard(ctx, tx, shards) })
	}
	if err != nil {
		return fmt.Errorf("reshard outbox %q: %w", s.cfg.Table, err)
	}
	return nil
}

func (s *Store) reshard(ctx context.Context, tx pgx.Tx, shards int) error {
	if _, err := s.lockSchema(ctx, tx); err != nil {
		return err
	}
	var now int
	if err := tx.QueryRow(ctx, s.sql(`SELECT count(*) FROM {shard}`)).Scan(&now); err != nil || now == shards {
		return err
	}
	// No relay can announce itself from here on.
	if _, err := tx.Exec(ctx, s.sql(`LOCK TABLE {relay} IN SHARE ROW EXCLUSIVE MODE`)); err != nil {
		return err
	}
	rows, err := tx.Query(ctx, s.sql(`SELECT holder FROM {relay} WHERE expires_at >= clock_timestamp() ORDER BY epoch`))
	if err != nil {
		return err
	}
	holders, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	if len(holders) > 0 {
		return fmt.Errorf("%w: %s", ErrInUse, strings.Join(holders, ", "))
	}
	// A transaction that has inserted rows has put them into the queue under the
	// old number: it is waited for, and those after it see the new one.
	for _, query := range []string{
		`LOCK TABLE {outbox} IN SHARE ROW EXCLUSIVE MODE`,
		strings.ReplaceAll(shardSQL, "{shards}", fmt.Sprint(shards)),
		`DELETE FROM {relay}`,
		strings.ReplaceAll(`INSERT INTO {shard} (shard, epoch)
			SELECT n, max(epoch) FROM {shard}, generate_series(0, {shards} - 1) n GROUP BY n
			ON CONFLICT (shard) DO UPDATE SET owner = NULL, epoch = excluded.epoch`, "{shards}", fmt.Sprint(shards)),
		strings.ReplaceAll(`DELETE FROM {shard} WHERE shard >= {shards}`, "{shards}", fmt.Sprint(shards)),
		`UPDATE {claim} SET shards = ARRAY(SELECT shard FROM {shard} ORDER BY shard)`,
		`UPDATE {queue} q SET shard = {fn_shard}(o.aggregate_type, o.aggregate_id, o.id) FROM {outbox} o WHERE o.id = q.id`,
		`UPDATE {wait} w SET shard = {fn_shard}(o.aggregate_type, o.aggregate_id, o.id) FROM {outbox} o WHERE o.id = w.id`,
	} {
		if _, err := tx.Exec(ctx, s.sql(query)); err != nil {
			return err
		}
	}
	return nil
}
