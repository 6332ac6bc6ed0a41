package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/schema"
)

// What both systems share.
const (
	bizType    = "BENCH"
	slots      = 500                    // handlers at once
	retryDelay = 100 * time.Millisecond // of the scenario retry
)

// A system is what is measured. The SQL speaks of its table; parameters are cast, so that it runs prepared.
type system struct {
	name    string
	nats    bool
	roles   []string // of the child processes; the first one starts and stops consuming, the last one runs the handlers
	migrate func(ctx context.Context, pool *pgxpool.Pool) error

	table string // in pg_stat_user_tables
	// fill inserts due tasks with payload numbers $1 to $2, fillFuture the same for tomorrow, of type $3.
	fill, fillFuture string
	// open counts unfinished tasks with an id above $1; last is the highest id.
	open, last string
}

// The rows are what the systems' own libraries write. A task of ours has a biz id, as our documentation asks for: an
// idempotency key, unique in Postgres. River's jobs have none.
var systems = []system{
	{
		name: "taskrelay", nats: true, roles: []string{"relay", "worker"}, table: "taskrelay.task",
		migrate: func(ctx context.Context, pool *pgxpool.Pool) error {
			_, err := schema.Migrate(ctx, pool, schema.Options{})
			return err
		},
		fill: `INSERT INTO taskrelay.task (biz_type, biz_id, payload)
SELECT $3::text, 'B-' || n, json_build_object('n', n, 'pad', $4::text) FROM generate_series($1::int, $2::int) AS n`,
		fillFuture: `INSERT INTO taskrelay.task (biz_type, biz_id, payload, run_at)
SELECT $3::text, 'F-' || n, json_build_object('n', n, 'pad', $4::text), now() + interval '1 day' + n * interval '1 ms'
FROM generate_series($1::int, $2::int) AS n`,
		open: `SELECT count(*) FROM taskrelay.task WHERE id > $1::bigint AND finished_at IS NULL`,
		last: `SELECT coalesce(max(id), 0) FROM taskrelay.task`,
	},
	{
		name: "river", roles: []string{"river"}, table: "public.river_job",
		migrate: func(ctx context.Context, pool *pgxpool.Pool) error {
			m, err := rivermigrate.New(riverpgxv5.New(pool), nil)
			if err != nil {
				return err
			}
			_, err = m.Migrate(ctx, rivermigrate.DirectionUp, nil)
			return err
		},
		fill: `INSERT INTO river_job (kind, args, max_attempts)
SELECT $3::text, jsonb_build_object('n', n, 'pad', $4::text), 25 FROM generate_series($1::int, $2::int) AS n`,
		fillFuture: `INSERT INTO river_job (kind, args, max_attempts, state, scheduled_at)
SELECT $3::text, jsonb_build_object('n', n, 'pad', $4::text), 25, 'scheduled', now() + interval '1 day' + n * interval '1 ms'
FROM generate_series($1::int, $2::int) AS n`,
		open: `SELECT count(*) FROM river_job WHERE id > $1::bigint AND state <> 'completed'`,
		last: `SELECT coalesce(max(id), 0) FROM river_job`,
	},
}

func findSystem(name string) (system, bool) {
	for _, s := range systems {
		if s.name == name {
			return s, true
		}
	}
	return system{}, false
}

// enqueuer writes one task into a business transaction.
type enqueuer func(ctx context.Context, tx pgx.Tx, n int) error

// enqueuer is the way that the system's Go library offers.
func (s system) enqueuer(pool *pgxpool.Pool) (enqueuer, error) {
	if s.name == "river" {
		return riverEnqueuer(pool)
	}
	return enqueueOutbox, nil
}

func enqueueOutbox(ctx context.Context, tx pgx.Tx, n int) error {
	_, err := outbox.Enqueue(ctx, tx, bizType, payload{N: n, Pad: pad}, outbox.BizID(bizID(n)))
	return err
}

func enqueueInsert(ctx context.Context, tx pgx.Tx, n int) error {
	_, err := tx.Exec(ctx, `INSERT INTO taskrelay.task (biz_type, biz_id, payload) VALUES ($1, $2, $3)`,
		bizType, bizID(n), payload{N: n, Pad: pad})
	return err
}

func enqueueFunction(ctx context.Context, tx pgx.Tx, n int) error {
	_, err := tx.Exec(ctx, `SELECT taskrelay.enqueue($1, $2, $3)`, bizType, payload{N: n, Pad: pad}, bizID(n))
	return err
}

// riverEnqueuer inserts with a client that only inserts. It has the consumers' FetchCooldown, which is also the
// shortest time between two NOTIFYs: with the default of 100 ms they would hear of 10 inserts a second.
func riverEnqueuer(pool *pgxpool.Pool) (enqueuer, error) {
	client, err := river.NewClient(riverpgxv5.New(pool), riverConfig())
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, tx pgx.Tx, n int) error {
		_, err := client.InsertTx(ctx, tx, riverArgs{payload{N: n, Pad: pad}}, nil)
		return err
	}, nil
}

func bizID(n int) string { return fmt.Sprintf("B-%d", n) }
