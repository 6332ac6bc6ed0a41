package command

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/pg"
)

// lookUpSQL tells of attempts that a settle did not return whether the row still waits for it (it was locked), or
// how the attempt is logged.
const lookUpSQL = `-- taskrelay: look up attempts
SELECT m.ord,
  EXISTS (SELECT FROM {{schema}}.task AS t WHERE t.id = m.id AND t.lease_token = m.token AND t.status = 'running'),
  coalesce((SELECT a.outcome FROM {{schema}}.task_attempt AS a WHERE a.task_id = m.id AND a.lease_token = m.token), '')
FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS m(id, token, ord)`

// staleSQL logs a result that came after its lease was lost: nothing else may remember that the call was made.
const staleSQL = `-- taskrelay: log stale attempt
INSERT INTO {{schema}}.task_attempt AS a (task_id, lease_token, biz_type, biz_id, generation, phase, attempt, worker,
  outcome, error_class, error, stack, started_at, finished_at)
VALUES ($1::bigint, $2::bigint, $3::text, nullif($4::text, ''), $5::int, $6::text, $7::int, $8::text,
  'stale', $9::text, $10::text, $11::text, now() - $12::bigint * interval '1 microsecond', now())
ON CONFLICT (task_id, lease_token) DO UPDATE
SET outcome = 'stale', error_class = excluded.error_class, error = excluded.error, stack = excluded.stack,
  finished_at = excluded.finished_at
WHERE a.outcome = 'lost'
RETURNING a.xmax = 0`

// lookUp finds out why attempts were not settled. Locked ones wait for their lock; those that this very token has
// settled (the answer was lost, or Complete did it) are answered; the rest is stale.
func (w *Worker) lookUp(ctx context.Context, open []*settlement) {
	if len(open) == 0 {
		return
	}
	ids, tokens := make([]int64, len(open)), make([]int64, len(open))
	for i, s := range open {
		ids[i], tokens[i] = s.a.id, s.a.token
	}
	waiting, outcomes := make([]bool, len(open)), make([]string, len(open))
	err := w.insist(ctx, "look up", func(ctx context.Context) error {
		return pg.QueryCached(ctx, w.pool, w.sql.lookUp, []any{ids, tokens}, func(r pgx.Rows) error {
			var ord int64
			var held bool
			var outcome string
			if err := r.Scan(&ord, &held, &outcome); err != nil {
				return err
			}
			waiting[ord-1], outcomes[ord-1] = held, outcome
			return nil
		})
	})
	if err != nil {
		return
	}
	for i, s := range open {
		switch {
		case waiting[i]:
			w.locked.put(s)
		case outcomes[i] != "" && outcomes[i] != outcomeLost && outcomes[i] != outcomeStale:
			act := s.action
			if outcomes[i] == outcomeSucceeded && s.outcome != outcomeSucceeded { // the transaction of Complete
				act, s.outcome, s.text = actSucceeded, outcomeSucceeded, ""
			}
			w.settled(s, act)
		default:
			w.stale(ctx, s)
		}
	}
}

// stale logs a result that came too late. The message is not acknowledged: it belongs to whoever has the row now.
func (w *Worker) stale(ctx context.Context, s *settlement) {
	a := s.a
	if s.logged {
		w.stats.Stale.Add(1)
		w.log.Warn().Int64("task_id", a.id).Str("biz_type", a.lane.bizType).Int("attempt", a.number).
			Str("outcome", s.outcome).Msg("result came after its lease was lost, logged as stale")
		var added bool // a row of its own; else it took the place of a lost one, which is counted
		err := w.insist(ctx, partStale, func(ctx context.Context) error {
			args := []any{a.id, a.token, a.lane.bizType, a.bizID, a.generation, a.phase, a.number, w.cfg.Name,
				orNull(s.class), orNull(s.text), orNull(s.stack), s.elapsed.Microseconds()}
			return pg.Query(ctx, w.pool, w.sql.stale, args, func(r pgx.Rows) error { return r.Scan(&added) })
		})
		if err != nil {
			w.log.Warn().Err(err).Int64("task_id", a.id).Msg("stale attempt not logged")
		}
		if added {
			a.lane.d.tally.attempt(a.phase, outcomeStale)
		}
	}
	w.forget(s)
}
