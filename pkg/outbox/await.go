package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/pause"
)

// finalSQL asks as little as there is to ask: most answers are "not yet".
var finalSQL = newStatement(`-- taskrelay: await task
SELECT t.finished_at IS NOT NULL FROM {{schema}}.task AS t WHERE t.id = $1::bigint`)

const (
	awaitFirst   = 10 * time.Millisecond
	awaitLongest = 500 * time.Millisecond
)

// Await waits until a task is final (succeeded, dead or cancelled) and returns it:
// its Status, what its command returned as Result, its LastError. Call it after the
// commit, with a *pgxpool.Pool: in a transaction a task is not worked on, and one
// connection would be held all the time.
//
// It reads the row, at first every few milliseconds and in the end twice a second.
// A request to a person's browser should bound ctx. When ctx ends, Await returns
// its error and the task lives on: ask again later, or Get it.
//
// A task that was deleted meanwhile, as one that succeeded is where nothing is kept
// (RETAIN_SUCCEEDED=0), is ErrNotFound.
func Await(ctx context.Context, db querier, id int64) (Task, error) {
	return Schema("").Await(ctx, db, id)
}

// Await is the function Await for this schema.
func (s Schema) Await(ctx context.Context, db querier, id int64) (Task, error) {
	pauses := pause.Growing(awaitFirst, awaitLongest)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return Task{}, fmt.Errorf("await task %d: %w", id, context.Cause(ctx))
		case <-timer.C:
		}
		final, err := query(ctx, s, db, finalSQL.in, pgx.RowTo[bool], id)
		switch {
		case err != nil:
			return Task{}, fmt.Errorf("await task %d: %w", id, err)
		case len(final) == 0:
			return Task{}, fmt.Errorf("await: %w: %d", ErrNotFound, id)
		case final[0]:
			return s.Get(ctx, db, id)
		}
		timer.Reset(pauses.NextBackOff())
	}
}
