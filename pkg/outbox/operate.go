package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

// Change says what an operation did to one task.
type Change struct {
	ID      int64  `json:"id,string"`
	Changed bool   `json:"changed"`
	WhyNot  string `json:"why_not,omitempty"` // why not; or why not yet, of a running task that is asked to stop
}

// A Flag allows an operation what it refuses otherwise.
type Flag int

const (
	// AllowCompensated lets Requeue and Reset bring back a task whose compensation
	// was done: execute runs again after its effect was undone, under new keys.
	AllowCompensated Flag = iota + 1
	// AllowSucceeded lets Reset run a succeeded task once more.
	AllowSucceeded
)

// The operations are functions in the schema, the same for SQL, the CLI and Go:
// guarded by state, fenced by generation, written to the table audit together
// with their reason. What they would refuse with an error is refused before it is
// sent: db may be the caller's transaction.
var (
	requeueSQL = newStatement(`-- taskrelay: requeue
SELECT coalesce(f.id, 0), f.changed, coalesce(f.why_not, '') FROM {{schema}}.requeue($1::bigint[], $2::text, $3::boolean) AS f`)
	resetSQL = newStatement(`-- taskrelay: reset
SELECT coalesce(f.id, 0), f.changed, coalesce(f.why_not, '') FROM {{schema}}.reset($1::text, $2::text, $3::text, $4::boolean, $5::boolean) AS f`)
	runNowSQL = newStatement(`-- taskrelay: run now
SELECT coalesce(f.id, 0), f.changed, coalesce(f.why_not, '') FROM {{schema}}.run_now($1::bigint[], $2::text) AS f`)
	delaySQL = newStatement(`-- taskrelay: delay
SELECT coalesce(f.id, 0), f.changed, coalesce(f.why_not, '') FROM {{schema}}.delay($1::bigint[], $2::bigint * interval '1 microsecond', $3::text) AS f`)
	cancelSQL = newStatement(`-- taskrelay: cancel
SELECT coalesce(f.id, 0), f.changed, coalesce(f.why_not, '') FROM {{schema}}.cancel($1::bigint[], $2::text) AS f`)
	deleteSQL = newStatement(`-- taskrelay: delete
SELECT coalesce(f.id, 0), f.changed, coalesce(f.why_not, '') FROM {{schema}}.delete_task($1::bigint[], $2::text) AS f`)
)

// Requeue brings dead and cancelled tasks back: attempts are counted anew and the
// command runs from its first phase. A task whose compensation was done needs
// AllowCompensated. It returns one Change for each id.
func Requeue(ctx context.Context, db querier, ids []int64, reason string, flags ...Flag) ([]Change, error) {
	return Schema("").Requeue(ctx, db, ids, reason, flags...)
}

// Requeue is the function Requeue for this schema.
func (s Schema) Requeue(ctx context.Context, db querier, ids []int64, reason string, flags ...Flag) ([]Change, error) {
	compensated, succeeded, err := allowed(flags)
	if err == nil && succeeded {
		err = errors.New("a succeeded task cannot be requeued: use Reset")
	}
	if err != nil {
		return nil, fmt.Errorf("requeue: %w", err)
	}
	return s.operate(ctx, db, "requeue", requeueSQL, reason, notNil(ids), reason, compensated)
}

// Reset makes the task with this biz id run from the start, whatever state it is
// in; a running one is refused, a succeeded one needs AllowSucceeded, and one
// whose compensation was done AllowCompensated. A task that does not exist is
// ErrNotFound.
func Reset(ctx context.Context, db querier, bizType, bizID, reason string, flags ...Flag) (Change, error) {
	return Schema("").Reset(ctx, db, bizType, bizID, reason, flags...)
}

// Reset is the function Reset for this schema.
func (s Schema) Reset(ctx context.Context, db querier, bizType, bizID, reason string, flags ...Flag) (Change, error) {
	compensated, succeeded, err := allowed(flags)
	if err == nil {
		err = ValidateBizType(bizType)
	}
	if err == nil {
		err = validateKey("biz id", bizID, MaxBizID)
	}
	if err != nil {
		return Change{}, fmt.Errorf("reset: %w", err)
	}
	changes, err := s.operate(ctx, db, "reset", resetSQL, reason, bizType, bizID, reason, succeeded, compensated)
	if err != nil {
		return Change{}, err
	}
	if len(changes) == 0 || changes[0].ID == 0 {
		return Change{}, fmt.Errorf("reset: %w: %s/%s", ErrNotFound, bizType, bizID)
	}
	return changes[0], nil
}

// RunNow makes waiting tasks due at once, whatever they wait for: their time, or
// a retry.
func RunNow(ctx context.Context, db querier, ids []int64, reason string) ([]Change, error) {
	return Schema("").RunNow(ctx, db, ids, reason)
}

// RunNow is the function RunNow for this schema.
func (s Schema) RunNow(ctx context.Context, db querier, ids []int64, reason string) ([]Change, error) {
	return s.operate(ctx, db, "run now", runNowSQL, reason, notNil(ids), reason)
}

// Delay makes waiting tasks due after by, more than 0 and at most 366 days,
// counted by Postgres's clock.
func Delay(ctx context.Context, db querier, ids []int64, by time.Duration, reason string) ([]Change, error) {
	return Schema("").Delay(ctx, db, ids, by, reason)
}

// Delay is the function Delay for this schema.
func (s Schema) Delay(ctx context.Context, db querier, ids []int64, by time.Duration, reason string) ([]Change, error) {
	if by < time.Microsecond || by > 366*24*time.Hour {
		return nil, fmt.Errorf("delay: %v is out of range, want more than 0 and at most 366 days: to run tasks at once use RunNow", by)
	}
	return s.operate(ctx, db, "delay", delaySQL, reason, notNil(ids), by.Microseconds(), reason)
}

// Cancel ends unfinished tasks as cancelled; a running one when its worker learns
// of it. Nothing is compensated.
func Cancel(ctx context.Context, db querier, ids []int64, reason string) ([]Change, error) {
	return Schema("").Cancel(ctx, db, ids, reason)
}

// Cancel is the function Cancel for this schema.
func (s Schema) Cancel(ctx context.Context, db querier, ids []int64, reason string) ([]Change, error) {
	return s.operate(ctx, db, "cancel", cancelSQL, reason, notNil(ids), reason)
}

// Delete removes tasks for good, with their dead letters; their attempts stay in
// the log, and their biz ids are free at once. A running task is refused.
func Delete(ctx context.Context, db querier, ids []int64, reason string) ([]Change, error) {
	return Schema("").Delete(ctx, db, ids, reason)
}

// Delete is the function Delete for this schema.
func (s Schema) Delete(ctx context.Context, db querier, ids []int64, reason string) ([]Change, error) {
	return s.operate(ctx, db, "delete", deleteSQL, reason, notNil(ids), reason)
}

func (s Schema) operate(ctx context.Context, db querier, what string, sql statement, reason string, args ...any) ([]Change, error) {
	if strings.TrimSpace(reason) == "" {
		return nil, fmt.Errorf("%s: a reason is required: it is kept in the table audit for whoever asks later", what)
	}
	if !utf8.ValidString(reason) || strings.ContainsRune(reason, 0) {
		return nil, fmt.Errorf("%s: the reason has text that Postgres cannot hold (not valid UTF-8, or a NUL)", what)
	}
	changes, err := query(ctx, s, db, sql.in, func(row pgx.CollectableRow) (c Change, err error) {
		err = row.Scan(&c.ID, &c.Changed, &c.WhyNot)
		return c, err
	}, args...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return changes, nil
}

func allowed(flags []Flag) (compensated, succeeded bool, err error) {
	for _, f := range flags {
		switch f {
		case AllowCompensated:
			compensated = true
		case AllowSucceeded:
			succeeded = true
		default:
			return false, false, fmt.Errorf("unknown flag %d", f)
		}
	}
	return compensated, succeeded, nil
}

// notNil: a nil slice would be sent as null.
func notNil(ids []int64) []int64 {
	if ids == nil {
		return []int64{}
	}
	return ids
}
