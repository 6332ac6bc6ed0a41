package outbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// ErrNotFound is returned, wrapped, by Get when there is no such task.
var ErrNotFound = errors.New("task not found")

// MaxTime and MinTime are what a time outside the years 1 to 9999 reads as,
// infinity included. Postgres knows later years (a plain INSERT may set run_at to
// 294276-12-31), Go's JSON does not: such a task is shown as due at the end of
// 9999 rather than make a whole list fail. The row keeps what was written.
var (
	MaxTime = time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC)
	MinTime = time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)
)

// Task is a row of the table task. What is null in the row is the zero value
// here, a nil pointer for times. Times are in UTC, by Postgres's clock, and lie
// between MinTime and MaxTime.
//
// Its JSON has the names of the columns, ids as strings (JavaScript rounds
// numbers above 2^53), and can always be made: a payload that Go cannot read as
// JSON (nested more than 10,000 deep) becomes a JSON string of its text.
type Task struct {
	ID          int64           `json:"id,string"`
	BizType     string          `json:"biz_type"`
	BizID       string          `json:"biz_id,omitempty"`
	Priority    string          `json:"priority"`
	OrderingKey string          `json:"ordering_key,omitempty"`
	Status      string          `json:"status"`
	Phase       string          `json:"phase"`
	Generation  int             `json:"generation"`
	Attempt     int             `json:"attempt"` // of this phase, the running one included
	MaxAttempts int             `json:"max_attempts,omitempty"`
	Payload     json.RawMessage `json:"payload,omitempty"` // Get only
	Headers     json.RawMessage `json:"headers,omitempty"` // Get only
	Result      json.RawMessage `json:"result,omitempty"`  // Get only

	CreatedAt         time.Time  `json:"created_at"`
	RunAt             *time.Time `json:"run_at,omitempty"`
	NextAttemptAt     *time.Time `json:"next_attempt_at,omitempty"`
	RepublishAt       *time.Time `json:"republish_at,omitempty"` // the relay looks at the row then
	Looks             int        `json:"looks"`
	FirstStartedAt    *time.Time `json:"first_started_at,omitempty"`
	StartedAt         *time.Time `json:"started_at,omitempty"` // of this attempt
	FinishedAt        *time.Time `json:"finished_at,omitempty"`
	ExpiresAt         *time.Time `json:"expires_at,omitempty"`
	CancelRequestedAt *time.Time `json:"cancel_requested_at,omitempty"`
	CancelCompensates bool       `json:"cancel_compensates,omitempty"` // the request asks for compensation

	LeaseOwner string     `json:"lease_owner,omitempty"`
	LeaseToken *int64     `json:"lease_token,omitempty,string"`
	LeaseUntil *time.Time `json:"lease_until,omitempty"`

	LastError       string     `json:"last_error,omitempty"`
	ErrorClass      string     `json:"error_class,omitempty"`
	Compensation    string     `json:"compensation"`
	Compensations   int        `json:"compensations"`
	Cause           string     `json:"cause,omitempty"` // the error that compensation is about
	ExecuteAttempts *int       `json:"execute_attempts,omitempty"`
	DeadAt          *time.Time `json:"dead_at,omitempty"`
	DeadReason      string     `json:"dead_reason,omitempty"`
	DeadLetteredAt  *time.Time `json:"dead_lettered_at,omitempty"`

	ParentID *int64 `json:"parent_id,omitempty,string"`
	XID      string `json:"xid"` // of the transaction that wrote the row
}

// MarshalJSON never fails: see Task.
func (t Task) MarshalJSON() ([]byte, error) {
	type plain Task // without this method
	p := plain(t)
	p.Payload, p.Headers, p.Result = readable(p.Payload), readable(p.Headers), readable(p.Result)
	return json.Marshal(p)
}

// nesting is how deep Go's JSON reads, less what a list of tasks puts around a
// payload: a list that nobody can read again is no better than none.
const nesting = 10_000 - 100

func readable(b json.RawMessage) json.RawMessage {
	if len(b) == 0 || json.Valid(b) && depth(b) <= nesting {
		return b
	}
	quoted, _ := json.Marshal(string(b)) // of a string: cannot fail
	return quoted
}

// depth of valid JSON.
func depth(b []byte) (deepest int) {
	level, inString := 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			level++
			deepest = max(deepest, level)
		case c == '}' || c == ']':
			level--
		}
	}
	return deepest
}

// Due is when the task may start: at the next attempt, else at RunAt, else at
// once, which is CreatedAt.
func (t Task) Due() time.Time {
	for _, at := range []*time.Time{t.NextAttemptAt, t.RunAt} {
		if at != nil {
			return *at
		}
	}
	return t.CreatedAt
}

// querier is a *pgxpool.Pool, a *pgx.Conn or a pgx.Tx.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// clamped reads a time between MinTime and MaxTime. Not with greatest and least:
// these pass over null.
func clamped(column string) string {
	const lo, hi = `'0001-01-01 00:00:00+00'::timestamptz`, `'9999-12-31 23:59:59.999999+00'::timestamptz`
	return "CASE WHEN " + column + " > " + hi + " THEN " + hi + " WHEN " + column + " < " + lo + " THEN " + lo + " ELSE " + column + " END"
}

func columns(clampedTimes []string, others string) string {
	var b strings.Builder
	for _, c := range clampedTimes {
		b.WriteString(clamped(c) + ",\n       ")
	}
	return b.String() + others
}

// The columns of a Task in the order of its scan; payload, headers and result
// are the last ones.
var taskColumns = columns([]string{
	"t.created_at", "t.run_at", "t.next_attempt_at", "t.republish_at", "t.first_started_at", "t.started_at",
	"t.finished_at", "t.expires_at", "t.cancel_requested_at", "t.lease_until", "t.dead_at", "t.dead_lettered_at",
}, `t.id, t.biz_type, coalesce(t.biz_id, ''), t.priority, coalesce(t.ordering_key, ''), t.status, t.phase,
       t.generation, t.attempt, coalesce(t.max_attempts, 0), t.looks,
       coalesce(t.lease_owner, ''), t.lease_token, coalesce(t.last_error, ''), coalesce(t.error_class, ''),
       t.compensation, t.compensations, coalesce(t.cause, ''), t.execute_attempts, coalesce(t.dead_reason, ''),
       t.parent_id, t.xid::text, coalesce(t.cancel_compensates, false)`)

var getSQL = newStatement(`-- taskrelay: get task
SELECT ` + taskColumns + `, t.payload::text, t.headers::text, coalesce(t.result::text, '')
FROM {{schema}}.task AS t
WHERE t.id = $1::bigint`)

func scanTask(row pgx.CollectableRow) (t Task, err error) {
	var payload, headers, result string
	if err := row.Scan(&t.CreatedAt, &t.RunAt, &t.NextAttemptAt, &t.RepublishAt, &t.FirstStartedAt, &t.StartedAt,
		&t.FinishedAt, &t.ExpiresAt, &t.CancelRequestedAt, &t.LeaseUntil, &t.DeadAt, &t.DeadLetteredAt,
		&t.ID, &t.BizType, &t.BizID, &t.Priority, &t.OrderingKey, &t.Status, &t.Phase,
		&t.Generation, &t.Attempt, &t.MaxAttempts, &t.Looks,
		&t.LeaseOwner, &t.LeaseToken, &t.LastError, &t.ErrorClass,
		&t.Compensation, &t.Compensations, &t.Cause, &t.ExecuteAttempts, &t.DeadReason,
		&t.ParentID, &t.XID, &t.CancelCompensates, &payload, &headers, &result); err != nil {
		return t, err
	}
	t.Payload, t.Headers, t.Result = raw(payload), raw(headers), raw(result)
	t.CreatedAt = t.CreatedAt.UTC()
	for _, at := range []*time.Time{t.RunAt, t.NextAttemptAt, t.RepublishAt, t.FirstStartedAt, t.StartedAt,
		t.FinishedAt, t.ExpiresAt, t.CancelRequestedAt, t.LeaseUntil, t.DeadAt, t.DeadLetteredAt} {
		if at != nil {
			*at = at.UTC()
		}
	}
	return t, nil
}

func raw(text string) json.RawMessage {
	if text == "" {
		return nil
	}
	return json.RawMessage(text)
}

// Get returns the task with this id, payload, headers and result included, from
// the default schema. db is a *pgxpool.Pool, a *pgx.Conn or a pgx.Tx.
func Get(ctx context.Context, db querier, id int64) (Task, error) {
	return Schema("").Get(ctx, db, id)
}

// Get is the function Get for this schema.
func (s Schema) Get(ctx context.Context, db querier, id int64) (Task, error) {
	tasks, err := query(ctx, s, db, getSQL.in, scanTask, id)
	if err != nil {
		return Task{}, fmt.Errorf("get task %d: %w", id, err)
	}
	if len(tasks) == 0 {
		return Task{}, fmt.Errorf("%w: %d", ErrNotFound, id)
	}
	return tasks[0], nil
}

// Statuses lists the states of a task.
func Statuses() []string {
	return []string{"pending", "running", "retrying", "succeeded", "dead", "cancelled", "blocked"}
}

func query[T any](ctx context.Context, s Schema, db querier, sql func(Schema) string, scan pgx.RowToFunc[T], args ...any) ([]T, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	rows, err := db.Query(ctx, sql(s), args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scan)
}
