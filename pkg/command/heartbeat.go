package command

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/pg"
)

// heartbeatSQL renews leases. It skips rows that are locked: one of them must not end everybody's lease. A row that
// is still ours but was skipped is tried again in the next beat; what is not ours any more is lost.
const heartbeatSQL = `-- taskrelay: heartbeat
WITH picked AS (
  SELECT m.ord, t.tid
  FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS m(id, token, ord)
  CROSS JOIN LATERAL (
    SELECT t.ctid AS tid
    FROM {{schema}}.task AS t
    WHERE t.id = m.id
      AND t.lease_token = m.token
      AND t.status = 'running'
    FOR UPDATE SKIP LOCKED
  ) AS t
), renewed AS (
  UPDATE {{schema}}.task AS t
  SET lease_until = now() + $3::bigint * interval '1 microsecond'
  FROM picked AS p
  WHERE t.ctid = p.tid
  RETURNING p.ord, t.cancel_requested_at IS NOT NULL AS cancel
)
SELECT r.ord, true, r.cancel FROM renewed AS r
UNION ALL
SELECT m.ord, false, t.cancel
FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS m(id, token, ord)
CROSS JOIN LATERAL (
  SELECT t.cancel_requested_at IS NOT NULL AS cancel
  FROM {{schema}}.task AS t
  WHERE t.id = m.id
    AND t.lease_token = m.token
    AND t.status = 'running'
  OFFSET 0
) AS t`

// beatState is what a beat learned of a lease.
type beatState struct{ ours, renewed, cancel bool }

// heartbeatLoop renews the leases of whatever the worker holds, whether its handler runs, waits or settles.
func (w *Worker) heartbeatLoop(ctx context.Context) {
	every := min(w.cfg.Lease/6, 5*time.Second)
	var held []*attempt
	for {
		w.beatAt.Store(int64(w.now()))
		sleep(ctx, every)
		if ctx.Err() != nil {
			return
		}
		held = w.held.appendAll(held[:0])
		w.sayInProgress(held)
		due := held[:0]
		oldest := w.now() - w.cfg.Lease/3
		for _, a := range held {
			if a.stage.Load() != stageClaiming && time.Duration(a.leaseFrom.Load()) <= oldest {
				due = append(due, a)
			}
		}
		if len(due) == 0 {
			w.health.clear("heartbeat") // what could not be renewed is settled by now; no later beat would say so
		}
		for len(due) > 0 && ctx.Err() == nil {
			n := min(len(due), batchSize)
			w.beat(ctx, due[:n])
			w.beatAt.Store(int64(w.now()))
			due = due[n:]
		}
		clear(held[:cap(held)])
	}
}

// sayInProgress keeps JetStream from delivering again what is held here. It is fire and forget; where it gets lost,
// the lease in the row keeps the second delivery from running.
func (w *Worker) sayInProgress(held []*attempt) {
	now := w.now()
	for _, a := range held {
		every := w.cfg.Lease
		if wait := time.Duration(a.lane.ackWait.Load()); wait > 0 {
			every = min(every, wait)
		}
		if now-time.Duration(a.progress.Load()) >= every/3 {
			a.inProgress()
			a.progress.Store(int64(now))
		}
	}
}

func (w *Worker) beat(ctx context.Context, due []*attempt) {
	ids, tokens := make([]int64, len(due)), make([]int64, len(due))
	for i, a := range due {
		ids[i], tokens[i] = a.id, a.token
	}
	states := make([]beatState, len(due))
	sent := w.now()
	ctx, cancel := context.WithTimeout(ctx, max(w.cfg.Lease/3, time.Second))
	defer cancel()
	err := pg.QueryCached(ctx, w.pool, w.sql.heartbeat, []any{ids, tokens, w.cfg.Lease.Microseconds()}, func(r pgx.Rows) error {
		var ord int64
		var renewed, cancel bool
		if err := r.Scan(&ord, &renewed, &cancel); err != nil {
			return err
		}
		s := &states[ord-1]
		s.ours, s.renewed, s.cancel = true, s.renewed || renewed, s.cancel || cancel
		return nil
	})
	if err != nil {
		w.health.set("heartbeat", err, 0)
		w.complain("heartbeat", func() { w.log.Warn().Err(err).Int("count", len(due)).Msg("heartbeat failed, leases not renewed") })
		return
	}
	w.health.clear("heartbeat")
	for i, a := range due {
		s := states[i]
		if s.renewed {
			a.leaseFrom.Store(int64(sent))
		}
		switch running := a.stage.Load() == stageRunning && !a.ended.Load(); {
		case !s.ours && a.completed.Load(): // final by its own transaction
		case !s.ours:
			if a.lost.CompareAndSwap(false, true) && running {
				w.log.Warn().Int64("task_id", a.id).Str("biz_type", a.lane.bizType).Int("attempt", a.number).
					Msg("lease lost, handler's context cancelled")
				a.cancel(ErrLeaseLost)
			}
		case s.cancel && running:
			a.cancel(ErrCancelled)
		}
	}
}

// sweepLoop does what is due by time alone, apart from Postgres: messages and tasks that wait too long, handlers
// that ignore their timeout, pulls that the server has lost.
func (w *Worker) sweepLoop(ctx context.Context) {
	every := min(500*time.Millisecond, w.cfg.Lease/3)
	var held []*attempt
	for {
		now := w.now()
		w.sweptAt.Store(int64(now))
		held = w.held.appendAll(held[:0])
		for _, a := range held {
			if a.stage.Load() == stageRunning && now > a.deadline+w.cfg.Lease {
				w.leak(a)
			}
		}
		clear(held)
		for _, d := range w.dispatchers {
			d.sweep(now)
			for _, l := range d.lanes {
				l.watch(now)
			}
		}
		sleep(ctx, every)
		if ctx.Err() != nil {
			return
		}
	}
}

var errLeaked = errors.New("attempt timed out and its handler ignored that for one more lease: it may still be running")

// leak settles an attempt on behalf of a handler that ignores its context, and frees its slot. The goroutine stays.
func (w *Worker) leak(a *attempt) {
	if !a.ended.CompareAndSwap(false, true) {
		return
	}
	w.stats.Leaked.Add(1)
	w.log.Error().Int64("task_id", a.id).Str("biz_type", a.lane.bizType).Int("attempt", a.number).
		Dur("elapsed", w.now()-a.started).
		Msg("handler leaked: it ignores its context, its task goes on without it")
	w.finish(a, ending{err: errLeaked, outcome: outcomeTimeout, leaked: true})
	a.lane.d.restart()
}
