package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Ref is a task as its producer knows it.
type Ref struct {
	ID  int64 `json:"id,string"` // the row's id
	New bool  `json:"new"`       // false: a task of this biz type and BizID was there already
}

// ErrUnknownType is returned, wrapped, when the installation's strict_types is on
// and neither a worker nor an operator has made the biz type known.
var ErrUnknownType = errors.New("unknown biz type")

// Enqueue writes a task into the caller's transaction: it will be worked on if
// and only if tx commits. It uses the default schema; for another one call the
// method of Schema.
//
// payload is sent to the worker as JSON. A []byte, json.RawMessage or string is
// JSON already and goes through byte for byte; nil means {}; anything else is
// encoded. At most 512 KiB.
//
// With BizID a task is made once: when it exists already, Enqueue returns it with
// New false, changes nothing, and the transaction goes on. It does not look at
// the state: the task may be finished, dead or cancelled (see Get, Reset and
// Requeue). When another open transaction has just inserted the same BizID,
// Enqueue waits for its end.
//
// What Enqueue can check by itself it checks before it sends anything, so that
// such an error leaves the transaction usable. It sets no savepoint. Under
// REPEATABLE READ and SERIALIZABLE a duplicate that the transaction cannot see is
// a serialization failure (SQLSTATE 40001, a *pgconn.PgError for errors.As):
// roll back and run the transaction again.
func Enqueue(ctx context.Context, tx pgx.Tx, bizType string, payload any, opts ...Option) (Ref, error) {
	return Schema("").Enqueue(ctx, tx, bizType, payload, opts...)
}

// EnqueueSQL is Enqueue for database/sql, with any Postgres driver.
func EnqueueSQL(ctx context.Context, tx *sql.Tx, bizType string, payload any, opts ...Option) (Ref, error) {
	return Schema("").EnqueueSQL(ctx, tx, bizType, payload, opts...)
}

// Enqueue is the function Enqueue for this schema.
func (s Schema) Enqueue(ctx context.Context, tx pgx.Tx, bizType string, payload any, opts ...Option) (Ref, error) {
	if tx == nil {
		return Ref{}, errNilTx
	}
	span, opts := createSpan(ctx, bizType, opts, 1)
	ref, err := s.enqueue(func(sql string, args []any, dest ...any) error {
		return tx.QueryRow(ctx, sql, args...).Scan(dest...)
	}, bizType, payload, opts)
	span.end([]Ref{ref}, err)
	return ref, err
}

// EnqueueSQL is the function EnqueueSQL for this schema.
func (s Schema) EnqueueSQL(ctx context.Context, tx *sql.Tx, bizType string, payload any, opts ...Option) (Ref, error) {
	if tx == nil {
		return Ref{}, errNilTx
	}
	span, opts := createSpan(ctx, bizType, opts, 1)
	ref, err := s.enqueue(func(sql string, args []any, dest ...any) error {
		return tx.QueryRowContext(ctx, sql, args...).Scan(dest...)
	}, bizType, payload, opts)
	span.end([]Ref{ref}, err)
	return ref, err
}

var errNilTx = errors.New("enqueue: the transaction is nil: begin one, and commit it together with your own rows")

// The priority is asked of the type only where none was named, and types are
// looked up only where they are strict. Parameters are text, integers and nulls
// with a cast each: the same statement works prepared, in pgx's exec and simple
// modes, and with other drivers.
var enqueueSQL = newStatement(`-- taskrelay: enqueue
INSERT INTO {{schema}}.task (biz_type, biz_id, priority, payload, headers, run_at, max_attempts)
SELECT $1::text, $2::text,
       coalesce($3::text, (SELECT b.default_priority FROM {{schema}}.biz_type AS b WHERE b.biz_type = $1::text), 'low'),
       $4::text::json, $5::text::jsonb,
       coalesce($6::text::timestamptz, clock_timestamp() + $7::bigint * interval '1 microsecond'),
       $8::int
WHERE NOT EXISTS (
    SELECT FROM {{schema}}.installation AS i
    WHERE i.strict_types AND NOT EXISTS (SELECT FROM {{schema}}.biz_type AS b WHERE b.biz_type = $1::text AND b.known_by IS NOT NULL))
ON CONFLICT (biz_type, biz_id) DO NOTHING
RETURNING id`)

// A statement of its own sees the row that the INSERT has waited for; a CTE with
// both would not.
var enqueueExistingSQL = newStatement(`-- taskrelay: enqueue, existing
SELECT coalesce((SELECT t.id FROM {{schema}}.task AS t WHERE t.biz_type = $1::text AND t.biz_id = $2::text), 0),
       EXISTS (
           SELECT FROM {{schema}}.installation AS i
           WHERE i.strict_types AND NOT EXISTS (SELECT FROM {{schema}}.biz_type AS b WHERE b.biz_type = $1::text AND b.known_by IS NOT NULL))`)

// enqueueTries bounds the loop over duplicates that are deleted between the two
// statements.
const enqueueTries = 10

func (s Schema) enqueue(queryRow func(sql string, args []any, dest ...any) error, bizType string, payload any, opts []Option) (Ref, error) {
	if err := s.Validate(); err != nil {
		return Ref{}, fmt.Errorf("enqueue: %w", err)
	}
	r, err := newTaskRow(bizType, payload, opts)
	if err != nil {
		return Ref{}, fmt.Errorf("enqueue: %w", err)
	}
	args := []any{r.bizType, r.bizID, r.priority, r.payload, r.headers, r.runAt, r.delay, r.maxAttempts}
	for range enqueueTries {
		var id int64
		err := queryRow(enqueueSQL.in(s), args, &id)
		if err == nil {
			return Ref{ID: id, New: true}, nil
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return Ref{}, fmt.Errorf("enqueue %s: %w", bizType, err)
		}
		var refused bool
		if err := queryRow(enqueueExistingSQL.in(s), []any{r.bizType, r.bizID}, &id, &refused); err != nil {
			return Ref{}, fmt.Errorf("enqueue %s: look for the existing task: %w", bizType, err)
		}
		if refused {
			return Ref{}, s.unknownType(bizType)
		}
		if id != 0 {
			return Ref{ID: id}, nil
		}
	}
	return Ref{}, fmt.Errorf("enqueue %s: found a task with this biz id and lost it again, %d times: is it being deleted in a loop?",
		bizType, enqueueTries)
}

func (s Schema) unknownType(bizType string) error {
	return fmt.Errorf("enqueue: %w %q (strict_types is on): start a worker that registers it once, or as an operator "+
		"run: taskrelay types add %[2]s --reason '…', or in SQL: SELECT * FROM %[3]s.set_type('%[2]s', '{}', 'why', add => true)",
		ErrUnknownType, bizType, s)
}
