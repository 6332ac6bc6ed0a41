package command

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/pg"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// typeSwitches is what operators set for a type in biz_type, as the worker last read it. The zero value sets nothing.
type typeSwitches struct {
	maxAttempts int  // 0: not set
	concurrency int  // 0: not set; over all workers
	paused      bool // consumers are made, and kept, paused
	keepNothing bool // a task that succeeds is deleted
	policy      string
	workers     int // alive with this type, this one included
}

const readTypesSQL = `-- taskrelay: read biz types
SELECT b.biz_type, coalesce(b.max_attempts, 0), coalesce(b.concurrency, 0), b.paused_at IS NOT NULL,
  coalesce(coalesce(b.retain_succeeded, r.succeeded) = interval '0', false), coalesce(b.policy::text, ''),
  (SELECT count(*) FROM {{schema}}.worker AS w
   WHERE w.seen_at > now() - interval '30 seconds' AND b.biz_type = ANY (w.biz_types))::int
FROM {{schema}}.biz_type AS b CROSS JOIN {{schema}}.retention AS r
WHERE b.biz_type = ANY ($1::text[])`

// readSwitches reads what operators have set and lets the lanes look at their consumers again where that matters.
func (w *Worker) readSwitches(ctx context.Context, types []string) error {
	found := make(map[string]typeSwitches, len(types))
	err := pg.Query(ctx, w.pool, w.sql.readTypes, []any{types}, func(r pgx.Rows) error {
		var name string
		var t typeSwitches
		err := r.Scan(&name, &t.maxAttempts, &t.concurrency, &t.paused, &t.keepNothing, &t.policy, &t.workers)
		found[name] = t
		return err
	})
	if err != nil {
		return err
	}
	for _, d := range w.dispatchers {
		t := found[d.b.bizType]
		d.mu.Lock()
		was := d.set
		d.set = t
		d.mu.Unlock()
		d.keepNothing.Store(t.keepNothing)
		if t.policy != was.policy {
			w.setPolicy(d.b, t.policy)
		}
		if t.concurrency != was.concurrency || t.paused != was.paused {
			for _, l := range d.lanes {
				l.recheck()
			}
		}
	}
	return nil
}

// setPolicy puts the policy of biz_type in the place of the command's own, or takes it away again.
func (w *Worker) setPolicy(b *binding, text string) {
	var p retry.Policy
	if text != "" {
		var err error
		if p, err = parsePolicy(text); err != nil {
			w.log.Error().Err(err).Str("biz_type", b.bizType).Msg("policy in biz_type is none, the command's own goes on: taskrelay types set puts it right")
			p = nil
		}
	}
	if p == nil {
		b.typePolicy.Store(nil)
		return
	}
	b.typePolicy.Store(&p)
	w.log.Info().Str("biz_type", b.bizType).Str("policy", text).Msg("retry policy taken from biz_type")
}

// policy is that of biz_type, else the command's.
func (b *binding) policy() retry.Policy {
	if p := b.typePolicy.Load(); p != nil {
		return *p
	}
	return b.retry
}

// parsePolicy reads {"strategy": "exponential", "base_delay": "5s", "max_delay": "1h", "jitter": 0.2}.
func parsePolicy(text string) (retry.Policy, error) {
	p := struct {
		Strategy  string  `json:"strategy"`
		BaseDelay string  `json:"base_delay"`
		MaxDelay  string  `json:"max_delay"`
		Jitter    float64 `json:"jitter"`
	}{MaxDelay: "1h"}
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return nil, fmt.Errorf("policy %s: %w", text, err)
	}
	base, err := time.ParseDuration(p.BaseDelay)
	if err != nil {
		return nil, fmt.Errorf("policy %s: base_delay: %w", text, err)
	}
	limit, err := time.ParseDuration(p.MaxDelay)
	if err != nil {
		return nil, fmt.Errorf("policy %s: max_delay: %w", text, err)
	}
	return retry.Parse(p.Strategy, base, max(limit, base), p.Jitter)
}

const forgetSQL = `-- taskrelay: forget succeeded
SELECT {{schema}}.forget_succeeded($1::bigint[])`

// forgetLoop deletes what has succeeded of types that keep nothing, just after it was settled and acknowledged. What it
// cannot delete (Postgres away, a locked row) the relay does, by age.
func (w *Worker) forgetLoop(ctx context.Context) {
	var buf []int64
	for {
		batch := w.forgets.take(ctx, batchSize, buf[:0])
		if batch == nil {
			return
		}
		w.forgetRows(batch)
		buf = batch
	}
}

func (w *Worker) forgetRows(ids []int64) {
	if len(ids) == 0 {
		return
	}
	if err := w.try(w.longestPatience(), func(ctx context.Context) error { return pg.Exec(ctx, w.pool, w.sql.forget, ids) }); err != nil {
		w.complain("forget", func() { w.log.Warn().Err(err).Msg("succeeded tasks not deleted, the relay will do it") })
	}
}
