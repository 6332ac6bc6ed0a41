package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	// AllowSucceeded lets Reset and Rerun run a succeeded task once more.
	AllowSucceeded
	// Compensate lets Cancel undo what was begun: such a task is compensated and
	// ends as dead with reason cancelled.
	Compensate
	// AllowUncompensated lets Cancel call off a compensation that is on its way:
	// the task ends as cancelled, what it began stays, and its compensation counts
	// as failed.
	AllowUncompensated
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
	resetIDsSQL = newStatement(`-- taskrelay: reset by id
SELECT coalesce(f.id, 0), f.changed, coalesce(f.why_not, '') FROM {{schema}}.reset($1::bigint[], $2::text, $3::boolean, $4::boolean) AS f`)
	rerunSQL = newStatement(`-- taskrelay: rerun
SELECT coalesce(f.id, 0), f.changed, coalesce(f.why_not, '') FROM {{schema}}.rerun($1::bigint[], $2::text, $3::boolean, $4::boolean) AS f`)
	prioritySQL = newStatement(`-- taskrelay: set priority
SELECT coalesce(f.id, 0), f.changed, coalesce(f.why_not, '') FROM {{schema}}.set_priority($1::bigint[], $2::text, $3::text) AS f`)
	cancelSQL = newStatement(`-- taskrelay: cancel
SELECT coalesce(f.id, 0), f.changed, coalesce(f.why_not, '') FROM {{schema}}.cancel($1::bigint[], $2::text, $3::boolean, $4::boolean) AS f`)
	discardSQL = newStatement(`-- taskrelay: discard
SELECT coalesce(f.id, 0), f.changed, coalesce(f.why_not, '') FROM {{schema}}.discard($1::bigint[], $2::text) AS f`)
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
	f, err := allowed(flags, AllowCompensated, AllowSucceeded)
	if err == nil && f.succeeded {
		err = errors.New("a succeeded task cannot be requeued: use Reset")
	}
	if err != nil {
		return nil, fmt.Errorf("requeue: %w", err)
	}
	return s.operate(ctx, db, "requeue", requeueSQL, reason, notNil(ids), reason, f.compensated)
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
	f, err := allowed(flags, AllowCompensated, AllowSucceeded)
	if err == nil {
		err = ValidateBizType(bizType)
	}
	if err == nil {
		err = validateKey("biz id", bizID, MaxBizID)
	}
	if err != nil {
		return Change{}, fmt.Errorf("reset: %w", err)
	}
	changes, err := s.operate(ctx, db, "reset", resetSQL, reason, bizType, bizID, reason, f.succeeded, f.compensated)
	if err != nil {
		return Change{}, err
	}
	if len(changes) == 0 || changes[0].ID == 0 {
		return Change{}, fmt.Errorf("reset: %w: %s/%s", ErrNotFound, bizType, bizID)
	}
	return changes[0], nil
}

// ResetIDs is Reset for tasks that are named by their ids. It returns one Change
// for each id.
func ResetIDs(ctx context.Context, db querier, ids []int64, reason string, flags ...Flag) ([]Change, error) {
	return Schema("").ResetIDs(ctx, db, ids, reason, flags...)
}

// ResetIDs is the function ResetIDs for this schema.
func (s Schema) ResetIDs(ctx context.Context, db querier, ids []int64, reason string, flags ...Flag) ([]Change, error) {
	f, err := allowed(flags, AllowCompensated, AllowSucceeded)
	if err != nil {
		return nil, fmt.Errorf("reset: %w", err)
	}
	return s.operate(ctx, db, "reset", resetIDsSQL, reason, notNil(ids), reason, f.succeeded, f.compensated)
}

// Rerun runs finished tasks once more, from the start. A succeeded one needs
// AllowSucceeded and runs under its first idempotency key, one whose compensation
// was done needs AllowCompensated and runs under a new one.
func Rerun(ctx context.Context, db querier, ids []int64, reason string, flags ...Flag) ([]Change, error) {
	return Schema("").Rerun(ctx, db, ids, reason, flags...)
}

// Rerun is the function Rerun for this schema.
func (s Schema) Rerun(ctx context.Context, db querier, ids []int64, reason string, flags ...Flag) ([]Change, error) {
	f, err := allowed(flags, AllowCompensated, AllowSucceeded)
	if err != nil {
		return nil, fmt.Errorf("rerun: %w", err)
	}
	return s.operate(ctx, db, "rerun", rerunSQL, reason, notNil(ids), reason, f.succeeded, f.compensated)
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

// SetPriority moves waiting tasks to the other lane of their type. They are due
// when they were.
func SetPriority(ctx context.Context, db querier, ids []int64, priority, reason string) ([]Change, error) {
	return Schema("").SetPriority(ctx, db, ids, priority, reason)
}

// SetPriority is the function SetPriority for this schema.
func (s Schema) SetPriority(ctx context.Context, db querier, ids []int64, priority, reason string) ([]Change, error) {
	if priority != PriorityHigh && priority != PriorityLow {
		return nil, fmt.Errorf("set priority: %.20q: want high or low", priority)
	}
	return s.operate(ctx, db, "set priority", prioritySQL, reason, notNil(ids), priority, reason)
}

// Cancel ends unfinished tasks as cancelled; a running one when its worker learns
// of it. Nothing is compensated, unless the flag Compensate asks for it. A task
// that is being compensated is refused, unless AllowUncompensated says that what
// it began shall stay.
func Cancel(ctx context.Context, db querier, ids []int64, reason string, flags ...Flag) ([]Change, error) {
	return Schema("").Cancel(ctx, db, ids, reason, flags...)
}

// Cancel is the function Cancel for this schema.
func (s Schema) Cancel(ctx context.Context, db querier, ids []int64, reason string, flags ...Flag) ([]Change, error) {
	f, err := allowed(flags, Compensate, AllowUncompensated)
	if err != nil {
		return nil, fmt.Errorf("cancel: %w", err)
	}
	return s.operate(ctx, db, "cancel", cancelSQL, reason, notNil(ids), reason, f.compensate, f.uncompensated)
}

// Discard gives dead tasks up for good: they become cancelled, and their letters
// go away. Requeue still brings them back.
func Discard(ctx context.Context, db querier, ids []int64, reason string) ([]Change, error) {
	return Schema("").Discard(ctx, db, ids, reason)
}

// Discard is the function Discard for this schema.
func (s Schema) Discard(ctx context.Context, db querier, ids []int64, reason string) ([]Change, error) {
	return s.operate(ctx, db, "discard", discardSQL, reason, notNil(ids), reason)
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

// maxReason is how many characters of a reason the audit keeps.
const maxReason = 1000

func validateReason(reason string) error {
	if strings.TrimSpace(reason) == "" {
		return errors.New("a reason is required: it is kept in the table audit for whoever asks later")
	}
	if n := utf8.RuneCountInString(reason); n > maxReason {
		return fmt.Errorf("the reason has %d characters, at most %d are kept: name the ticket or the incident that has the details", n, maxReason)
	}
	if !utf8.ValidString(reason) || strings.ContainsRune(reason, 0) {
		return errors.New("the reason has text that Postgres cannot hold (not valid UTF-8, or a NUL)")
	}
	return nil
}

func (s Schema) operate(ctx context.Context, db querier, what string, sql statement, reason string, args ...any) ([]Change, error) {
	if err := validateReason(reason); err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
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

// flagSet is what the flags of an operation allow.
type flagSet struct{ compensated, succeeded, compensate, uncompensated bool }

// allowed refuses flags that the operation does not have.
func allowed(flags []Flag, may ...Flag) (f flagSet, err error) {
	for _, flag := range flags {
		if !slices.Contains(may, flag) {
			return f, fmt.Errorf("it does not take flag %d", flag)
		}
		f.compensated = f.compensated || flag == AllowCompensated
		f.succeeded = f.succeeded || flag == AllowSucceeded
		f.compensate = f.compensate || flag == Compensate
		f.uncompensated = f.uncompensated || flag == AllowUncompensated
	}
	return f, nil
}

// notNil: a nil slice would be sent as null.
func notNil(ids []int64) []int64 {
	if ids == nil {
		return []int64{}
	}
	return ids
}
