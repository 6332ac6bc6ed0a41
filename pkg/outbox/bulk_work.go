package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	bulkTick  = 500 * time.Millisecond // between two looks for a bulk that somebody has started
	bulkLease = 6 * time.Second        // after which another relay goes on with it
)

// bulkStepSQL does one batch of the bulk that is next: all of it in one statement, so that a relay may die at any line.
const bulkStepSQL = `-- taskrelay: bulk step
SELECT s.id, s.action, s.state, s.looked, s.changed, (extract(epoch FROM s.wait) * 1000000)::bigint
FROM {{schema}}.bulk_step($1::text, $2::bigint * interval '1 millisecond') AS s`

// bulkWork is the memory of workOffBulks.
type bulkWork struct {
	seen uint64 // moves at the last look that found no open bulk
}

// A bulkStep is what one batch did.
type bulkStep struct {
	id              int64
	action, state   string
	looked, changed int
	wait            time.Duration
}

// workOffBulks does the open bulks, batch by batch, each at its own rate. It needs the table alone: with NATS away, what
// is brought back waits on the work list.
func (r *Relay) workOffBulks(ctx context.Context) (time.Duration, error) {
	moves := r.moves()
	if moves == r.bulks.seen && r.nc.IsConnected() { // without NATS no lane is read, and nobody counts the commits
		return bulkTick, nil
	}
	began := time.Now()
	step, open, err := r.stepBulk(ctx)
	if err != nil {
		return 0, err
	}
	took := time.Since(began)
	if !open {
		r.bulks.seen = moves
		return bulkTick, nil
	}
	// At most half of the time, also where a filter finds nothing in millions of rows: publishing needs Postgres too.
	return min(max(step.wait, took), bulkTick), nil
}

// stepBulk does one batch; open is false when there is no bulk for this relay.
func (r *Relay) stepBulk(ctx context.Context) (step bulkStep, open bool, err error) {
	err = r.query(ctx, bulkStepSQL, []any{r.cfg.Name, bulkLease.Milliseconds()}, func(rows pgx.Rows) error {
		var wait int64
		err := rows.Scan(&step.id, &step.action, &step.state, &step.looked, &step.changed, &wait)
		step.wait, open = time.Duration(wait)*time.Microsecond, true
		return err
	})
	if err != nil {
		return step, false, fmt.Errorf("bulk step: %w", err)
	}
	if step.state != "" && step.state != "open" {
		r.log.Info().Int64("bulk_id", step.id).Str("action", step.action).Msg("bulk done")
	}
	return step, open, nil
}
