package command

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/taskrelay/taskrelay/internal/pg"
)

// settleSucceededSQL is settleSQL for what most batches are made of: first phase, succeeded. It changes each row once
// (see claimSQL), computes nothing, and expects that no attempt of its token is logged, which the row's being under
// that token implies. What it does not return is left to settleSQL. [13.7 µs of Postgres a task against 21 to 26.]
const settleSucceededSQL = `-- taskrelay: settle succeeded
WITH settled AS (
  UPDATE {{schema}}.task AS t
  SET status = 'succeeded', lease_owner = NULL, lease_token = NULL, lease_until = NULL, next_attempt_at = NULL,
    republish_at = NULL, last_error = NULL, error_class = NULL, result = m.result::json, finished_at = now(),
    dead_lettered_at = NULL, dead_reason = NULL
  FROM unnest($1::bigint[], $2::bigint[], $3::text[]) WITH ORDINALITY AS m(id, token, result, ord)
  CROSS JOIN LATERAL (SELECT i.ctid FROM {{schema}}.task AS i WHERE i.id = m.id OFFSET 0) AS p
  WHERE t.ctid = p.ctid
    AND t.lease_token = m.token
    AND t.status = 'running'
    AND t.phase = 'execute'
  RETURNING m.ord, m.token, t.id, t.biz_type, t.biz_id, t.generation, t.attempt, t.started_at
), written AS (
  INSERT INTO {{schema}}.task_attempt (task_id, lease_token, biz_type, biz_id, generation, phase, attempt, worker,
    outcome, started_at, finished_at)
  SELECT s.id, s.token, s.biz_type, s.biz_id, s.generation, 'execute', s.attempt, $4::text, 'succeeded',
    coalesce(s.started_at, now()), now()
  FROM settled AS s
)
SELECT s.ord FROM settled AS s`

// settleSQL writes back a batch of outcomes and logs the attempts, where the row still runs under the attempt's
// token. What it does not return was locked, has moved on, or was settled already.
//
// A row that once had republish_at keeps one until it is final, so that a message lost later is found. One that never
// had any gets none: then a success changes no indexed column and the update is HOT.
const settleSQL = `-- taskrelay: settle
WITH picked AS (
  SELECT m.*, t.*,
    CASE
      WHEN t.undo AND m.action IN ('nak', 'handback', 'cancelled') THEN 'compensate'
      WHEN t.cancel AND m.action IN ('nak', 'handback') THEN 'cancelled'
      WHEN m.action <> 'fail' THEN m.action
      -- This worker has no Compensate, but another one may: a rolling deploy.
      WHEN t.phase = 'execute' AND EXISTS (
        SELECT FROM {{schema}}.biz_type AS b WHERE b.biz_type = t.biz_type AND b.compensates) THEN 'compensate'
      ELSE 'dead'
    END AS act
  FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::text[], $8::text[],
      $9::text[], $10::text[], $11::boolean[], $12::boolean[])
    WITH ORDINALITY AS m(id, token, action, outcome, delay_us, class, error, stack, result, reason, logged, counted, ord)
  CROSS JOIN LATERAL (
    SELECT t.ctid AS tid, t.biz_type, t.biz_id, t.phase, t.cancel_requested_at IS NOT NULL AS cancel,
      t.cancel_requested_at IS NOT NULL AND t.cancel_compensates IS TRUE AND t.phase = 'execute' AS undo,
      t.generation AS was_generation, t.attempt AS was_attempt, t.lease_owner AS owner, t.started_at AS began,
      -- What is to be undone need not wait for the retry it does not get, but for a handler that may still be at it.
      least(now() + m.delay_us * interval '1 microsecond', CASE WHEN t.cancel_requested_at IS NOT NULL AND t.cancel_compensates IS TRUE
        AND t.phase = 'execute' AND m.action IN ('nak', 'handback') THEN greatest(t.lease_until, now()) END) AS due
    FROM {{schema}}.task AS t
    WHERE t.id = m.id
      AND t.lease_token = m.token
      AND t.status = 'running'
    FOR UPDATE {{skip}}
  ) AS t
), settled AS (
  UPDATE {{schema}}.task AS t
  SET status = CASE p.act WHEN 'succeeded' THEN 'succeeded' WHEN 'dead' THEN 'dead' WHEN 'cancelled' THEN 'cancelled'
      WHEN 'compensate' THEN 'pending' ELSE 'retrying' END,
    generation = t.generation + CASE WHEN p.act IN ('handback', 'compensate') THEN 1 ELSE 0 END,
    looks = CASE WHEN p.act IN ('handback', 'compensate') THEN 0 ELSE t.looks END,
    attempt = CASE WHEN p.act = 'compensate' THEN 0 WHEN p.counted THEN t.attempt ELSE t.attempt - 1 END,
    phase = CASE WHEN p.act = 'compensate' THEN 'compensate' ELSE t.phase END,
    -- A request to cancel ends retries; it must not call off the undoing of what was done.
    cancel_requested_at = CASE WHEN p.act = 'compensate' THEN NULL ELSE t.cancel_requested_at END,
    lease_owner = NULL, lease_token = NULL, lease_until = NULL,
    next_attempt_at = CASE WHEN p.act IN ('nak', 'handback', 'compensate') THEN p.due END,
    republish_at = CASE
      WHEN p.act IN ('handback', 'compensate') THEN p.due
      -- Not later than the reconciler has asked for: the message that is given back may be one the stream has lost.
      WHEN p.act = 'nak' AND t.republish_at IS NOT NULL
        THEN greatest(p.due, least(t.republish_at, p.due + interval '10 minutes')) END,
    last_error = CASE
      WHEN p.act = 'succeeded' THEN NULL
      WHEN p.act = 'dead' AND p.outcome = 'succeeded' THEN t.cause
      ELSE coalesce(p.error, t.last_error) END,
    error_class = CASE WHEN p.act = 'succeeded' THEN NULL ELSE coalesce(p.class, t.error_class) END,
    result = CASE WHEN p.act = 'succeeded' THEN p.result::json ELSE t.result END,
    finished_at = CASE WHEN p.act IN ('succeeded', 'dead', 'cancelled') THEN now() END,
    dead_at = CASE WHEN p.act = 'dead' THEN now() END,
    dead_lettered_at = CASE WHEN p.act IN ('succeeded', 'dead', 'cancelled') THEN NULL ELSE t.dead_lettered_at END,
    dead_reason = CASE
      WHEN p.act = 'compensate' THEN coalesce(p.reason, 'cancelled')
      WHEN p.act = 'dead' AND p.outcome = 'succeeded' THEN t.dead_reason
      WHEN p.act = 'dead' THEN p.reason
      WHEN p.act = 'succeeded' THEN NULL
      ELSE t.dead_reason END,
    compensation = CASE
      WHEN p.act = 'compensate' THEN 'pending'
      WHEN p.act = 'dead' AND p.phase = 'compensate' THEN CASE p.outcome WHEN 'succeeded' THEN 'done' ELSE 'failed' END
      ELSE t.compensation END,
    compensations = t.compensations
      + CASE WHEN p.act = 'dead' AND p.phase = 'compensate' AND p.outcome = 'succeeded' THEN 1 ELSE 0 END,
    cause = CASE WHEN p.act = 'compensate' THEN coalesce(p.error, t.last_error) ELSE t.cause END,
    execute_attempts = CASE WHEN p.act = 'compensate'
      THEN CASE WHEN p.counted THEN t.attempt ELSE t.attempt - 1 END ELSE t.execute_attempts END
  FROM picked AS p
  WHERE t.ctid = p.tid
  RETURNING p.ord, p.act, p.logged, t.id, p.token, p.biz_type, p.biz_id, p.phase, p.was_generation, p.was_attempt,
    p.owner, p.outcome, p.class, p.error, p.stack, p.began
), written AS (
  INSERT INTO {{schema}}.task_attempt (task_id, lease_token, biz_type, biz_id, generation, phase, attempt, worker,
    outcome, error_class, error, stack, started_at, finished_at)
  SELECT s.id, s.token, s.biz_type, s.biz_id, s.was_generation, s.phase, s.was_attempt, s.owner, s.outcome, s.class,
    s.error, s.stack, coalesce(s.began, now()), now()
  FROM settled AS s
  WHERE s.logged
  ON CONFLICT (task_id, lease_token) DO NOTHING
)
SELECT s.ord, s.act FROM settled AS s`

// settleLoop settles batches until ctx ends.
func (w *Worker) settleLoop(ctx context.Context) {
	var buf []*settlement
	for {
		batch := w.settles.take(ctx, batchSize, buf[:0])
		if batch == nil {
			return
		}
		w.settle(ctx, batch)
		clear(batch)
		buf = batch
	}
}

// lockedLoop settles, one at a time and waiting for the lock, what a batch found locked: by the transaction of a
// Complete, an operator's statement, or a person in psql. It goes round until the lock is gone.
func (w *Worker) lockedLoop(ctx context.Context) {
	var buf []*settlement
	for {
		batch := w.locked.take(ctx, 1, buf[:0])
		if batch == nil {
			return
		}
		s := batch[0]
		var acts []string
		err := w.try(w.longestPatience(), func(ctx context.Context) (err error) {
			acts, err = w.settleRows(ctx, batch, w.sql.settleLocked, pg.QueryLocked)
			return err
		})
		switch {
		case err == nil && acts[0] != "":
			w.settled(s, acts[0])
		case err == nil:
			w.lookUp(ctx, batch)
		case refused(err):
			w.mendRefused(s, err)
		case pg.Locked(err):
			w.locked.put(s)
		default:
			w.complain("locked settle", func() { w.log.Warn().Err(err).Int64("task_id", s.a.id).Msg("settle failed, trying again") })
			w.locked.put(s)
			sleep(ctx, time.Second)
		}
		buf = batch
	}
}

// settle writes back a batch and answers its messages.
func (w *Worker) settle(ctx context.Context, batch []*settlement) {
	if len(batch) > 1 && resultBytes(batch) > settleBytes {
		w.settle(ctx, batch[:len(batch)/2])
		w.settle(ctx, batch[len(batch)/2:])
		return
	}
	w.settleAny(ctx, w.settleSucceeded(ctx, batch))
}

// settleSucceeded settles what it can by the short statement, and returns the rest.
func (w *Worker) settleSucceeded(ctx context.Context, batch []*settlement) (rest []*settlement) {
	plain := make([]*settlement, 0, len(batch))
	for _, s := range batch {
		if s.action == actSucceeded && s.a.phase == PhaseExecute && s.logged && s.counted {
			plain = append(plain, s)
		} else {
			rest = append(rest, s)
		}
	}
	if len(plain) == 0 {
		return rest
	}
	n := len(plain)
	ids, tokens, results := make([]int64, n), make([]int64, n), make([]*string, n)
	for i, s := range plain {
		ids[i], tokens[i], results[i] = s.a.id, s.a.token, s.resultText()
	}
	done := make([]bool, n)
	err := w.insist(ctx, partSettle, func(ctx context.Context) error {
		err := pg.QueryBrief(ctx, w.pool, w.sql.settleSucceeded, []any{ids, tokens, results, w.cfg.Name}, func(r pgx.Rows) error {
			var ord int64
			if err := r.Scan(&ord); err != nil {
				return err
			}
			done[ord-1] = true
			return nil
		})
		if err != nil {
			clear(done)
		}
		if pg.Locked(err) {
			return nil
		}
		return err
	})
	if err != nil && !refused(err) {
		return nil // the worker is stopping and Postgres is away: the leases end, the attempts count as lost
	}
	var settled counts
	for i, s := range plain {
		if !done[i] {
			rest = append(rest, s)
			continue
		}
		w.answer(s, actSucceeded)
		settled.add(s)
	}
	settled.report()
	return rest
}

// settleAny settles outcomes of any kind.
func (w *Worker) settleAny(ctx context.Context, batch []*settlement) {
	if len(batch) == 0 {
		return
	}
	var acts []string
	err := w.insist(ctx, partSettle, func(ctx context.Context) (err error) {
		acts, err = w.settleRows(ctx, batch, w.sql.settle, pg.QueryCached)
		return err
	})
	if err != nil && refused(err) {
		// One row's value was refused, and the statement with it. Halving finds it without keeping its neighbours
		// waiting for long.
		if len(batch) == 1 {
			w.mendRefused(batch[0], err)
			return
		}
		w.settleAny(ctx, batch[:len(batch)/2])
		w.settleAny(ctx, batch[len(batch)/2:])
		return
	}
	if err != nil {
		return // as above
	}
	var open []*settlement
	var settled counts
	for i, s := range batch {
		if acts[i] == "" {
			open = append(open, s)
			continue
		}
		w.answer(s, acts[i])
		settled.add(s)
	}
	settled.report()
	w.lookUp(ctx, open)
}

// settleBytes bounds the results of one statement. Postgres takes no message above 1 GiB: it closes the connection, and
// a batch that is sent again and again would keep every other one waiting.
const settleBytes = 16 << 20

func resultBytes(batch []*settlement) (n int) {
	for _, s := range batch {
		n += len(s.result)
	}
	return n
}

// queryFunc is pg.Query or a variant of it.
type queryFunc func(context.Context, *pgxpool.Pool, string, []any, func(pgx.Rows) error) error

// settleRows runs a settle statement and returns, by position, what it did ("": nothing).
func (w *Worker) settleRows(ctx context.Context, batch []*settlement, sql string, query queryFunc) ([]string, error) {
	n := len(batch)
	ids, tokens, delays := make([]int64, n), make([]int64, n), make([]int64, n)
	actions, outcomes := make([]string, n), make([]string, n)
	classes, texts, stacks := make([]*string, n), make([]*string, n), make([]*string, n)
	results, reasons := make([]*string, n), make([]*string, n)
	logged, counted := make([]bool, n), make([]bool, n)
	for i, s := range batch {
		ids[i], tokens[i], delays[i] = s.a.id, s.a.token, s.delay.Microseconds()
		actions[i], outcomes[i] = s.action, s.outcome
		classes[i], texts[i], stacks[i] = orNull(s.class), orNull(s.text), orNull(s.stack)
		results[i] = s.resultText()
		reasons[i], logged[i], counted[i] = orNull(s.reason), s.logged, s.counted
	}
	args := []any{ids, tokens, actions, outcomes, delays, classes, texts, stacks, results, reasons, logged, counted}
	acts := make([]string, n)
	err := query(ctx, w.pool, sql, args, func(r pgx.Rows) error {
		var ord int64
		var act string
		if err := r.Scan(&ord, &act); err != nil {
			return err
		}
		acts[ord-1] = act
		return nil
	})
	return acts, err
}

func (s *settlement) resultText() *string {
	if s.result == nil {
		return nil
	}
	r := string(s.result)
	return &r
}

func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// mendRefused makes a failed attempt of a settlement whose values Postgres would not store.
func (w *Worker) mendRefused(s *settlement, cause error) {
	w.stats.Refused.Add(1)
	log := w.log.Error().Err(cause).Int64("task_id", s.a.id).Str("biz_type", s.a.lane.bizType).Int("attempt", s.a.number)
	if s.refused {
		log.Msg("settle refused twice, left to the end of its lease")
		w.forget(s)
		return
	}
	log.Msg("outcome refused by Postgres, settled as a failed attempt")
	d := s.a.lane.d
	end := ending{outcome: outcomeFailed, err: &classError{class: classResult,
		err: fmt.Errorf("outcome refused by Postgres: %w", cause)}}
	mended := decide(s.a, d.b, end, w.cfg.Lease, s.a.lane.park)
	mended.elapsed, mended.refused = s.elapsed, true
	w.settles.put(mended)
}

// forget ends the worker's part in an attempt without answering its message.
func (w *Worker) forget(s *settlement) {
	w.held.release(s.a)
	s.a.lane.d.settled(1)
}

// settled answers a single attempt.
func (w *Worker) settled(s *settlement, act string) {
	w.answer(s, act)
	s.a.lane.d.settled(1)
}

// answer acknowledges the message of a settled attempt, or parks it until its retry.
func (w *Worker) answer(s *settlement, act string) {
	a := s.a
	w.held.release(a) // before the nak: its copy may come back at once
	if act == actNak {
		a.nak(s.delay)
	} else {
		a.ack()
	}
	w.report(s, act)
}

// counts adds up settled attempts by type, so that a batch takes each dispatcher's lock once.
type counts struct {
	d *dispatcher
	n int
}

func (c *counts) add(s *settlement) {
	if d := s.a.lane.d; d != c.d {
		c.report()
		c.d = d
	}
	c.n++
}

func (c *counts) report() {
	if c.n > 0 {
		c.d.settled(c.n)
	}
	c.n = 0
}
