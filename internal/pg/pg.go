// Package pg runs one statement in its own READ COMMITTED transaction, in one round trip.
//
// A role or a database may set another default isolation level; under it a batch that meets one changed row
// fails as a whole (SQLSTATE 40001). Session settings do not survive PgBouncer's transaction mode, so each
// statement says its level itself, and BEGIN, the statement and COMMIT travel in one pipeline.
package pg

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// pins keeps a plan from depending on statistics: each of our statements is written for index scans in nested loops,
// and a planner that believes a table to be empty (or a batch to be the whole table) picks something else at the
// worst moment. [A flip of the settle statement cost 259 µs a task against 42.] Local to the transaction.
const pins = `SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),
set_config('enable_sort', 'off', true), set_config('jit', 'off', true), `

const (
	// planAnew: what an operator or a rare loop asks is planned for the table as it is now. Planning costs 0.2 to 0.5 ms.
	planAnew = pins + `set_config('plan_cache_mode', 'force_custom_plan', true)`
	planKept = pins + `set_config('plan_cache_mode', 'force_generic_plan', true)`
)

// Query runs sql in a READ COMMITTED transaction of its own, with a plan for the table as it is now, and calls scan
// for each row. What scan reads is valid only if Query returns nil: the commit is part of it.
func Query(ctx context.Context, pool *pgxpool.Pool, sql string, args []any, scan func(pgx.Rows) error) error {
	return query(ctx, pool, planAnew, sql, args, scan)
}

// QueryCached is Query with a plan that is kept, for statements so frequent that planning would cost more than
// running. [A claim and a settle of one task: 540 µs of Postgres against 1,140.] A kept plan may have been made while
// the table was empty, when all ways cost the same; so it is only for statements that leave no choice of an index: a
// row's id is found by the primary key alone, because no other index that has it can serve a statement that says
// nothing of xid, run_at or republish_at.
func QueryCached(ctx context.Context, pool *pgxpool.Pool, sql string, args []any, scan func(pgx.Rows) error) error {
	return query(ctx, pool, planKept, sql, args, scan)
}

// QueryBrief is QueryCached that waits for row locks for 50 ms at most, and then fails as Locked tells. It is for batches
// that take rows as they come: to lock them first, so that locked ones can be skipped, is a second change of each row.
// [Claim and settle together: 1,165 against 1,050 B of WAL a task.] Whoever meets a lock asks again with SKIP LOCKED.
func QueryBrief(ctx context.Context, pool *pgxpool.Pool, sql string, args []any, scan func(pgx.Rows) error) error {
	return query(ctx, pool, planKept+`, set_config('lock_timeout', '50ms', true)`, sql, args, scan)
}

// Locked reports whether a statement gave up waiting for a lock.
func Locked(err error) bool { return Code(err) == "55P03" }

// QueryLocked is Query that waits for row locks for a second at most, and then fails as Locked tells.
func QueryLocked(ctx context.Context, pool *pgxpool.Pool, sql string, args []any, scan func(pgx.Rows) error) error {
	return query(ctx, pool, planAnew+`, set_config('lock_timeout', '1s', true)`, sql, args, scan)
}

func query(ctx context.Context, pool *pgxpool.Pool, settings, sql string, args []any, scan func(pgx.Rows) error) (err error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()

	var b pgx.Batch
	b.Queue("BEGIN ISOLATION LEVEL READ COMMITTED")
	b.Queue(settings)
	b.Queue(sql, args...)
	b.Queue("COMMIT")
	br := conn.SendBatch(ctx, &b)
	defer func() {
		if cerr := br.Close(); err == nil {
			err = cerr
		}
		if err != nil && conn.Conn().PgConn().TxStatus() != 'I' && !conn.Conn().IsClosed() {
			// A connection left in a failed transaction would be thrown away by the pool.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			_, _ = conn.Exec(ctx, "ROLLBACK")
		}
	}()
	if _, err := br.Exec(); err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	if _, err := br.Exec(); err != nil {
		return fmt.Errorf("settings: %w", err)
	}
	rows, err := br.Query()
	if err != nil {
		return err
	}
	for rows.Next() {
		if err := scan(rows); err != nil {
			rows.Close()
			return err
		}
	}
	rows.Close()
	if err := rows.Err(); err != nil {
		return err
	}
	tag, err := br.Exec()
	if err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	if tag.String() != "COMMIT" {
		return fmt.Errorf("commit: the server answered %s", tag)
	}
	return nil
}

// Exec is Query for a statement whose rows nobody reads.
func Exec(ctx context.Context, pool *pgxpool.Pool, sql string, args ...any) error {
	return Query(ctx, pool, sql, args, func(pgx.Rows) error { return nil })
}

// Code returns the SQLSTATE of a Postgres error, or "".
func Code(err error) string {
	var e *pgconn.PgError
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}
