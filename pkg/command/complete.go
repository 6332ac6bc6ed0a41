package command

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// completeSQL settles one task as succeeded (a compensation: as dead, undone) inside the handler's own transaction.
// It waits for the row's lock, which at most a heartbeat of this worker holds.
const completeSQL = `-- taskrelay: complete
WITH done AS (
  UPDATE {{schema}}.task AS t
  SET status = CASE t.phase WHEN 'compensate' THEN 'dead' ELSE 'succeeded' END,
    lease_owner = NULL, lease_token = NULL, lease_until = NULL, next_attempt_at = NULL, republish_at = NULL,
    last_error = CASE t.phase WHEN 'compensate' THEN t.cause END,
    error_class = CASE t.phase WHEN 'compensate' THEN t.error_class END,
    dead_reason = CASE t.phase WHEN 'compensate' THEN t.dead_reason END,
    finished_at = now(),
    dead_at = CASE t.phase WHEN 'compensate' THEN now() END,
    dead_lettered_at = CASE t.phase WHEN 'compensate' THEN NULL ELSE t.dead_lettered_at END,
    compensation = CASE t.phase WHEN 'compensate' THEN 'done' ELSE t.compensation END,
    compensations = t.compensations + CASE t.phase WHEN 'compensate' THEN 1 ELSE 0 END
  WHERE t.id = $1::bigint
    AND t.lease_token = $2::bigint
    AND t.status = 'running'
  RETURNING t.id, t.biz_type, t.biz_id, t.generation, t.phase, t.attempt, t.started_at
), written AS (
  INSERT INTO {{schema}}.task_attempt (task_id, lease_token, biz_type, biz_id, generation, phase, attempt, worker,
    outcome, started_at, finished_at)
  SELECT d.id, $2::bigint, d.biz_type, d.biz_id, d.generation, d.phase, d.attempt, $3::text, 'succeeded',
    coalesce(d.started_at, now()), clock_timestamp()
  FROM done AS d
)
SELECT count(*) FROM done`

// Complete settles the task as succeeded in the handler's own transaction, so that its business rows and the end of
// the task commit together or not at all. Call it last, then commit tx, then return nil; a result is not stored.
//
// A handler that called Complete and returns nil without having committed has a failed attempt (class
// not_committed). One that committed is done, whatever it returns afterwards.
//
// tx must be READ COMMITTED, the default: in a stricter transaction that began before a heartbeat renewed the lease,
// the update could never succeed. ErrLeaseLost means that the task may run elsewhere by now: roll back.
func Complete[P any](ctx context.Context, tx pgx.Tx, t *Task[P]) error {
	a := t.attempt
	if a == nil {
		return errors.New("complete: this task was not handed out by a worker")
	}
	var level string
	if err := tx.QueryRow(ctx, "SELECT current_setting('transaction_isolation')").Scan(&level); err != nil {
		return fmt.Errorf("complete task %d: %w", t.ID, err)
	}
	if level != "read committed" {
		return fmt.Errorf("complete task %d: the transaction is %s, it must be read committed: begin it with pgx.TxOptions{IsoLevel: pgx.ReadCommitted}", t.ID, level)
	}
	var n int
	// Not a cached statement: its plan is to be made for the table as it is now.
	if err := tx.QueryRow(ctx, a.lane.w.sql.complete, pgx.QueryExecModeExec, a.id, a.token, a.lane.w.cfg.Name).Scan(&n); err != nil {
		return fmt.Errorf("complete task %d: %w", t.ID, err)
	}
	if n == 0 {
		return fmt.Errorf("complete task %d: %w", t.ID, ErrLeaseLost)
	}
	a.completed.Store(true)
	return nil
}
