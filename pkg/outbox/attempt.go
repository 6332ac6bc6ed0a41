package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Attempt is one line of the log of attempts: a call of the command or of its
// compensation, or an attempt whose worker was lost. The log outlives its task.
type Attempt struct {
	TaskID     int64     `json:"task_id,string"`
	LeaseToken int64     `json:"lease_token,string"`
	BizType    string    `json:"biz_type"`
	BizID      string    `json:"biz_id,omitempty"`
	Phase      string    `json:"phase"`
	Generation int       `json:"generation"`
	Attempt    int       `json:"attempt"`
	Outcome    string    `json:"outcome"` // succeeded, failed, timeout, panic, lost, snoozed, released, cancelled or stale
	Worker     string    `json:"worker,omitempty"`
	StartedAt  time.Time `json:"started_at"`
	FinishedAt time.Time `json:"finished_at"`
	ErrorClass string    `json:"error_class,omitempty"`
	Error      string    `json:"error,omitempty"`
	Stack      string    `json:"stack,omitempty"`
}

// Duration is how long the attempt took, by Postgres's clock. It is never
// negative, also where a failover set that clock back.
func (a Attempt) Duration() time.Duration { return max(0, a.FinishedAt.Sub(a.StartedAt)) }

var attemptsSQL = newStatement(`-- taskrelay: attempts of a task
SELECT ` + columns([]string{"a.started_at", "a.finished_at"},
	`a.task_id, a.lease_token, a.biz_type, coalesce(a.biz_id, ''), a.phase, a.generation, a.attempt, a.outcome,
       coalesce(a.worker, ''), coalesce(a.error_class, ''), coalesce(a.error, ''), coalesce(a.stack, '')`) + `
FROM {{schema}}.task_attempt AS a
WHERE a.task_id = $1::bigint
ORDER BY a.started_at, a.finished_at, a.lease_token`)

// Attempts returns the log of a task's attempts from the default schema, the
// first one first; none for a task that never started or does not exist. db is a
// *pgxpool.Pool, a *pgx.Conn or a pgx.Tx.
func Attempts(ctx context.Context, db querier, id int64) ([]Attempt, error) {
	return Schema("").Attempts(ctx, db, id)
}

// Attempts is the function Attempts for this schema.
func (s Schema) Attempts(ctx context.Context, db querier, id int64) ([]Attempt, error) {
	attempts, err := query(ctx, s, db, attemptsSQL.in, scanAttempt, id)
	if err != nil {
		return nil, fmt.Errorf("attempts of task %d: %w", id, err)
	}
	return attempts, nil
}

func scanAttempt(row pgx.CollectableRow) (a Attempt, err error) {
	err = row.Scan(&a.StartedAt, &a.FinishedAt, &a.TaskID, &a.LeaseToken, &a.BizType, &a.BizID, &a.Phase, &a.Generation,
		&a.Attempt, &a.Outcome, &a.Worker, &a.ErrorClass, &a.Error, &a.Stack)
	a.StartedAt, a.FinishedAt = a.StartedAt.UTC(), a.FinishedAt.UTC()
	return a, err
}
