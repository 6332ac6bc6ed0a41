package outbox

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/metric"
)

const backlogSQL = `-- taskrelay: backlog for metrics
SELECT l.biz_type, l.backlog, l.on_work_list, coalesce(extract(epoch FROM l.oldest_due_age), 0)::float8,
  l.paused_at IS NOT NULL, l.live_workers
FROM {{schema}}.lag AS l`

// backlogCache is the view lag, added up by type.
type backlogCache struct {
	tasks, workers, paused metric.Int64ObservableGauge
	orphans                metric.Int64ObservableGauge
	oldest                 metric.Float64ObservableGauge

	mu     sync.Mutex
	readAt time.Time
	types  map[string]typeBacklog // nil: could not be read
}

type typeBacklog struct {
	backlog, onList int64
	oldest          float64
	paused          bool
	workers         int64
}

func (o *observer) backlog(c *backlogCache) {
	c.tasks = o.gauge("taskrelay.outbox.tasks", "{task}",
		"Due tasks that are not on their way to a worker, by where they are: waiting (for the relay) or work_list. Counted up to 10000 per lane and place.")
	c.oldest = o.floatGauge("taskrelay.outbox.oldest_due.age", "s", "How long the oldest of these has been due.")
	c.workers = o.gauge("taskrelay.biz_type.workers", "{worker}", "Live workers that know the type.")
	c.paused = o.gauge("taskrelay.biz_type.paused", "", "1 while an operator has paused the type.")
	c.orphans = o.gauge("taskrelay.tasks.without_worker", "{task}",
		"Tasks that wait, published or not, although no live worker knows their type.")
}

// read returns the backlog by type; r.mu must not be held.
func (c *backlogCache) read(ctx context.Context, r *Relay) map[string]typeBacklog {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.readAt.IsZero() && time.Since(c.readAt) < gaugeEvery {
		return c.types
	}
	ctx, cancel := context.WithTimeout(onBehalfOf(ctx, asksGauges), gaugeWait)
	defer cancel()
	types := map[string]typeBacklog{}
	err := r.query(ctx, backlogSQL, nil, func(rows pgx.Rows) error {
		var bizType string
		var t typeBacklog
		if err := rows.Scan(&bizType, &t.backlog, &t.onList, &t.oldest, &t.paused, &t.workers); err != nil {
			return err
		}
		types[bizType] = types[bizType].plus(t)
		return nil
	})
	if err != nil {
		r.log.Debug().Err(err).Msg("backlog not read for metrics")
		types = nil
	}
	c.types, c.readAt = types, time.Now()
	return types
}

func (b typeBacklog) plus(o typeBacklog) typeBacklog {
	return typeBacklog{backlog: b.backlog + o.backlog, onList: b.onList + o.onList, oldest: max(b.oldest, o.oldest),
		paused: b.paused || o.paused, workers: max(b.workers, o.workers)}
}
