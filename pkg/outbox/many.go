package outbox

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
)

// NewTask is one task for EnqueueMany; the fields are Enqueue's parameters.
type NewTask struct {
	BizType string   // Required.
	Payload any      // Optional, by default {}.
	Options []Option // Optional.
}

// Validate returns the error that EnqueueMany would refuse the task with before it
// sends anything.
func (t NewTask) Validate() error {
	_, err := newTaskRow(t.BizType, t.Payload, t.Options)
	return err
}

// EnqueueMany writes many tasks into the caller's transaction, thousands in one
// statement, and returns a Ref for each, in their order. Rows get their ids in
// that order too. A BizID that exists already, or that occurs twice in tasks, is
// as with Enqueue: the first one counts, the others are returned with New false.
//
// All tasks are checked before anything is sent; the error names the index of the
// first bad one.
//
// Two transactions that insert the same new BizIDs in opposite order may deadlock
// (SQLSTATE 40P01: run it again). Where that is likely, sort tasks by BizID.
func EnqueueMany(ctx context.Context, tx pgx.Tx, tasks []NewTask) ([]Ref, error) {
	return Schema("").EnqueueMany(ctx, tx, tasks)
}

// The check of types is over all tasks, not row by row: either all are inserted
// or none.
//
// ORDER BY before the identity is drawn: ids follow the order of the tasks.
var enqueueManySQL = newStatement(`-- taskrelay: enqueue many
INSERT INTO {{schema}}.task (biz_type, biz_id, priority, payload, headers, run_at, max_attempts)
SELECT u.biz_type, u.biz_id, coalesce(u.priority, b.default_priority, 'low'), u.payload::json, u.headers::jsonb,
       coalesce(u.run_at::timestamptz, clock_timestamp() + u.delay * interval '1 microsecond'),
       u.max_attempts::int
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bigint[], $8::bigint[])
     WITH ORDINALITY AS u(biz_type, biz_id, priority, payload, headers, run_at, delay, max_attempts, ord)
LEFT JOIN {{schema}}.biz_type AS b ON b.biz_type = u.biz_type
WHERE NOT EXISTS (
    SELECT FROM {{schema}}.installation AS i, unnest($9::text[]) AS x(biz_type)
    WHERE i.strict_types AND NOT EXISTS (SELECT FROM {{schema}}.biz_type AS k WHERE k.biz_type = x.biz_type AND k.known_by IS NOT NULL))
ORDER BY u.ord
ON CONFLICT (biz_type, biz_id) DO NOTHING
RETURNING id, biz_type, biz_id`)

var unknownTypesSQL = newStatement(`-- taskrelay: enqueue many, unknown types
SELECT x.biz_type
FROM {{schema}}.installation AS i, unnest($1::text[]) AS x(biz_type)
WHERE i.strict_types AND NOT EXISTS (SELECT FROM {{schema}}.biz_type AS k WHERE k.biz_type = x.biz_type AND k.known_by IS NOT NULL)`)

var enqueueManyExistingSQL = newStatement(`-- taskrelay: enqueue many, existing
SELECT t.id, t.biz_type, t.biz_id
FROM unnest($1::text[], $2::text[]) AS u(biz_type, biz_id)
JOIN {{schema}}.task AS t ON t.biz_type = u.biz_type AND t.biz_id = u.biz_id`)

// A statement of EnqueueMany takes at most this much, so that neither side holds
// too large a message at once.
const (
	manyRows  = 5000
	manyBytes = 8 << 20
)

// EnqueueMany is the function EnqueueMany for this schema.
func (s Schema) EnqueueMany(ctx context.Context, tx pgx.Tx, tasks []NewTask) ([]Ref, error) {
	if tx == nil {
		return nil, errNilTx
	}
	if err := s.Validate(); err != nil {
		return nil, fmt.Errorf("enqueue many: %w", err)
	}
	span, extra := createSpan(ctx, oneType(tasks), nil, len(tasks))
	b, err := newBatch(tasks, extra...)
	if err == nil {
		err = s.enqueueBatch(ctx, tx, b)
	}
	if err != nil {
		span.end(nil, err)
		return nil, err
	}
	span.end(b.refs, nil)
	return b.refs, nil
}

func (s Schema) enqueueBatch(ctx context.Context, tx pgx.Tx, b *manyBatch) error {
	for _, part := range b.parts() {
		if err := s.enqueuePart(ctx, tx, b, part); err != nil {
			return fmt.Errorf("enqueue many: %w", err)
		}
	}
	for i, first := range b.repeats {
		b.refs[i] = Ref{ID: b.refs[first].ID}
	}
	return nil
}

// enqueuePart inserts the rows with these indexes and fills in their refs.
func (s Schema) enqueuePart(ctx context.Context, tx pgx.Tx, b *manyBatch, part []int) error {
	for range enqueueTries {
		missing, err := s.insertPart(ctx, tx, b, part)
		if err != nil || len(missing) == 0 {
			return err
		}
		if err := s.refuseUnknownTypes(ctx, tx, b); err != nil {
			return err
		}
		if part, err = s.findExisting(ctx, tx, b, missing); err != nil || len(part) == 0 {
			return err
		}
		// What is still missing was deleted between the statements: insert it again.
	}
	return fmt.Errorf("task %d: found a task with this biz id and lost it again, %d times: is it being deleted in a loop?",
		part[0], enqueueTries)
}

// insertPart returns the indexes of the rows that were not inserted.
func (s Schema) insertPart(ctx context.Context, tx pgx.Tx, b *manyBatch, part []int) (missing []int, err error) {
	var unnamed []int // rows without a biz id come back in their order
	for _, i := range part {
		if b.rows[i].bizID == nil {
			unnamed = append(unnamed, i)
		}
	}
	rows, err := tx.Query(ctx, enqueueManySQL.in(s), b.columns(part)...)
	if err != nil {
		return nil, err
	}
	var id int64
	var bizType string
	var bizID *string
	_, err = pgx.ForEachRow(rows, []any{&id, &bizType, &bizID}, func() error {
		if bizID != nil {
			b.refs[b.first[bizKey{bizType, *bizID}]] = Ref{ID: id, New: true}
			return nil
		}
		if len(unnamed) == 0 {
			return fmt.Errorf("row %d came back without the biz id it was sent with: does a trigger change it?", id)
		}
		b.refs[unnamed[0]] = Ref{ID: id, New: true}
		unnamed = unnamed[1:]
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, i := range part {
		if b.refs[i].ID == 0 {
			missing = append(missing, i)
		}
	}
	return missing, nil
}

func (s Schema) refuseUnknownTypes(ctx context.Context, tx pgx.Tx, b *manyBatch) error {
	rows, err := tx.Query(ctx, unknownTypesSQL.in(s), b.types)
	if err != nil {
		return err
	}
	unknown, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(unknown) == 0 {
		return err
	}
	for i := range b.rows {
		if b.rows[i].bizType == unknown[0] {
			return fmt.Errorf("task %d: %w", i, s.unknownType(unknown[0]))
		}
	}
	return s.unknownType(unknown[0])
}

// findExisting looks up the rows that were not inserted, and returns the indexes
// of those that are gone again.
func (s Schema) findExisting(ctx context.Context, tx pgx.Tx, b *manyBatch, missing []int) (gone []int, err error) {
	types, ids := make([]string, len(missing)), make([]string, len(missing))
	for n, i := range missing {
		if b.rows[i].bizID == nil {
			return nil, fmt.Errorf("task %d: it has no biz id and was not inserted: does a trigger or rule drop it?", i)
		}
		types[n], ids[n] = b.rows[i].bizType, *b.rows[i].bizID
	}
	rows, err := tx.Query(ctx, enqueueManyExistingSQL.in(s), types, ids)
	if err != nil {
		return nil, err
	}
	var id int64
	var k bizKey
	_, err = pgx.ForEachRow(rows, []any{&id, &k.bizType, &k.bizID}, func() error {
		b.refs[b.first[k]] = Ref{ID: id}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, i := range missing {
		if b.refs[i].ID == 0 {
			gone = append(gone, i)
		}
	}
	return gone, nil
}

type bizKey struct{ bizType, bizID string }

// A manyBatch is the checked rows of one EnqueueMany, by the index of their task.
type manyBatch struct {
	rows    []newRow
	refs    []Ref
	types   []string       // each once
	first   map[bizKey]int // where a biz id occurs first
	repeats map[int]int    // where it occurs again: not sent, the first one's ref counts
}

func newBatch(tasks []NewTask, extra ...Option) (*manyBatch, error) {
	b := &manyBatch{
		rows: make([]newRow, len(tasks)), refs: make([]Ref, len(tasks)),
		first: map[bizKey]int{}, repeats: map[int]int{},
	}
	seen := map[string]bool{}
	for i, t := range tasks {
		r, err := newTaskRow(t.BizType, t.Payload, slices.Concat(t.Options, extra))
		if err != nil {
			return nil, fmt.Errorf("enqueue many: task %d: %w", i, err)
		}
		b.rows[i] = r
		if !seen[r.bizType] {
			seen[r.bizType] = true
			b.types = append(b.types, r.bizType)
		}
		if r.bizID == nil {
			continue
		}
		k := bizKey{r.bizType, *r.bizID}
		if first, ok := b.first[k]; ok {
			b.repeats[i] = first
		} else {
			b.first[k] = i
		}
	}
	return b, nil
}

// parts splits the rows to send into statements.
func (b *manyBatch) parts() (parts [][]int) {
	var part []int
	size := 0
	for i := range b.rows {
		if _, repeated := b.repeats[i]; repeated {
			continue
		}
		n := len(b.rows[i].payload) + len(b.rows[i].headers)
		if len(part) == manyRows || len(part) > 0 && size+n > manyBytes {
			parts, part, size = append(parts, part), nil, 0
		}
		part, size = append(part, i), size+n
	}
	if len(part) > 0 {
		parts = append(parts, part)
	}
	return parts
}

// columns are the arguments of enqueueManySQL.
func (b *manyBatch) columns(part []int) []any {
	n := len(part)
	types, payloads, headers := make([]string, n), make([]string, n), make([]string, n)
	bizIDs, priorities, runAts := make([]*string, n), make([]*string, n), make([]*string, n)
	delays, maxAttempts := make([]*int64, n), make([]*int64, n)
	for j, i := range part {
		r := &b.rows[i]
		types[j], payloads[j], headers[j] = r.bizType, r.payload, r.headers
		bizIDs[j], priorities[j], runAts[j] = r.bizID, r.priority, r.runAt
		delays[j], maxAttempts[j] = r.delay, r.maxAttempts
	}
	return []any{types, bizIDs, priorities, payloads, headers, runAts, delays, maxAttempts, b.types}
}
