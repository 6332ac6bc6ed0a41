package command

import (
	"context"
	"math"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/pg"
)

// batchSize bounds a claim and a settle.
const batchSize = 500

// skippedNak: somebody held the row's lock at the moment of the claim.
const skippedNak = 100 * time.Millisecond

// unknownNak: this worker cannot run the task, another one may.
const unknownNak = 30 * time.Second

// claimSQL takes the rows that are due and free, each under the token made for it: one change of each row, nothing else.
// What it does not return is left to takeOverSQL.
//
// A row is found by primary key, one lateral lookup per message, and updated by ctid: a join that the planner may order
// would, with the statistics of an empty table, read all of it for each batch. What must hold is asked of the row that
// is updated, because Postgres looks at those conditions again when it had to wait for a lock, and at the ctid not.
//
// Rows never handed back have no republish_at and keep none: their claim changes no indexed column, so it is HOT.
const claimSQL = `-- taskrelay: claim
UPDATE {{schema}}.task AS t
SET status = 'running', attempt = t.attempt + 1, lease_owner = $6::text, lease_token = m.token,
  lease_until = now() + $7::bigint * interval '1 microsecond', started_at = now(),
  first_started_at = coalesce(t.first_started_at, now()), next_attempt_at = NULL,
  republish_at = CASE WHEN t.republish_at IS NOT NULL
    THEN now() + $7::bigint * interval '1 microsecond' + interval '10 minutes' END
FROM unnest($1::bigint[], $2::int[], $3::bigint[], $4::bigint[], $5::boolean[])
  WITH ORDINALITY AS m(id, generation, created_us, token, compensates, ord)
CROSS JOIN LATERAL (SELECT i.ctid FROM {{schema}}.task AS i WHERE i.id = m.id OFFSET 0) AS p
WHERE t.ctid = p.ctid
  AND t.generation = m.generation
  AND t.created_at = 'epoch'::timestamptz + m.created_us * interval '1 microsecond'
  AND coalesce(t.next_attempt_at, t.run_at, '-infinity') <= now()
  AND t.status IN ('pending', 'retrying')
  AND t.cancel_requested_at IS NULL
  AND (t.phase = 'execute' OR m.compensates)
RETURNING m.ord, false, t.phase, t.attempt, coalesce(t.max_attempts, 0), coalesce(t.biz_id, ''),
  coalesce(t.cause, ''), t.compensations, false, false,
  date_part('epoch', now()) - date_part('epoch', greatest(t.run_at, t.created_at))`

// takeOverSQL takes what the claim has left, where it may be taken: a row whose lease has ended (logged as lost), one
// with a request to cancel, one of our own whose answer was lost, and the free neighbours of a locked row.
//
// A lease that began in the future is over too: Postgres's clock was ahead then, and has been set back.
//
// A lease under our own token is ours from a claim whose answer was lost: it is taken again and not counted twice.
const takeOverSQL = `-- taskrelay: take over
WITH picked AS (
  SELECT m.ord, m.token, t.*
  FROM unnest($1::bigint[], $2::int[], $3::bigint[], $4::bigint[], $5::boolean[])
    WITH ORDINALITY AS m(id, generation, created_us, token, compensates, ord)
  CROSS JOIN LATERAL (
    SELECT t.ctid AS tid, t.status AS was, t.lease_token AS lost_token, t.lease_owner AS lost_owner,
      t.attempt AS lost_attempt, t.started_at AS lost_started,
      t.cancel_requested_at IS NOT NULL AS asked,
      t.cancel_requested_at IS NOT NULL AND NOT (t.cancel_compensates IS TRUE AND t.phase = 'execute') AS cancel,
      t.status = 'running' AND t.lease_token IS NOT DISTINCT FROM m.token AS mine
    FROM {{schema}}.task AS t
    WHERE t.id = m.id
      AND t.generation = m.generation
      AND t.created_at = 'epoch'::timestamptz + m.created_us * interval '1 microsecond'
      AND coalesce(t.next_attempt_at, t.run_at, '-infinity') <= now()
      AND (t.status IN ('pending', 'retrying')
        OR (t.status = 'running' AND (t.lease_until < now() OR t.lease_token = m.token OR t.started_at > now() + interval '1 minute')))
      AND (t.phase = 'execute' OR m.compensates)
    FOR UPDATE SKIP LOCKED
  ) AS t
), claimed AS (
  UPDATE {{schema}}.task AS t
  SET status = CASE WHEN p.cancel THEN 'cancelled' ELSE 'running' END,
    attempt = t.attempt + CASE WHEN p.cancel THEN 0 ELSE 1 END - CASE WHEN p.mine THEN 1 ELSE 0 END,
    lease_owner = CASE WHEN p.cancel THEN NULL ELSE $6::text END,
    lease_token = CASE WHEN p.cancel THEN NULL ELSE p.token END,
    lease_until = CASE WHEN p.cancel THEN NULL ELSE now() + $7::bigint * interval '1 microsecond' END,
    started_at = CASE WHEN p.cancel THEN t.started_at ELSE now() END,
    first_started_at = CASE WHEN p.cancel THEN t.first_started_at ELSE coalesce(t.first_started_at, now()) END,
    finished_at = CASE WHEN p.cancel THEN now() END,
    next_attempt_at = NULL,
    republish_at = CASE WHEN p.cancel OR t.republish_at IS NULL THEN NULL
      ELSE now() + $7::bigint * interval '1 microsecond' + interval '10 minutes' END
  FROM picked AS p
  WHERE t.ctid = p.tid
  RETURNING p.ord, t.id, t.status, t.phase, t.attempt, t.max_attempts, t.biz_type, t.biz_id, t.cause, t.compensations,
    t.generation, t.run_at, t.created_at, p.was, p.mine, p.lost_token, p.lost_owner, p.lost_attempt, p.lost_started, p.asked
), lost AS (
  INSERT INTO {{schema}}.task_attempt (task_id, lease_token, biz_type, biz_id, generation, phase, attempt, worker,
    outcome, error_class, error, started_at, finished_at)
  SELECT c.id, coalesce(c.lost_token, 0), c.biz_type, c.biz_id, c.generation, c.phase, c.lost_attempt, c.lost_owner,
    'lost', 'lost', 'lease ended without a result: the worker died, was paused or lost its database',
    coalesce(c.lost_started, now()), now()
  FROM claimed AS c
  WHERE c.was = 'running' AND NOT c.mine
  ON CONFLICT (task_id, lease_token) DO NOTHING
)
SELECT c.ord, c.status = 'cancelled', c.phase, c.attempt, coalesce(c.max_attempts, 0), coalesce(c.biz_id, ''),
  coalesce(c.cause, ''), c.compensations, c.was = 'running' AND NOT c.mine, c.asked,
  date_part('epoch', now()) - date_part('epoch', greatest(c.run_at, c.created_at))
FROM claimed AS c`

// claimLoop claims batches until ctx ends; what is still in its hands then is given back.
func (w *Worker) claimLoop(ctx context.Context) {
	var buf []*attempt
	for {
		batch := w.claims.take(ctx, batchSize, buf[:0])
		if batch == nil {
			return
		}
		w.claim(ctx, w.unique(batch))
		clear(batch)
		buf = batch
	}
}

// unique reserves the tasks of a batch and gives back further copies: two handlers of one row would share a token.
func (w *Worker) unique(batch []*attempt) []*attempt {
	keep := batch[:0]
	for _, a := range batch {
		if held := w.held.reserve(a); held != nil {
			wait := w.cfg.Lease
			// Handed back by a settle whose answer we are just reading; or another row, which got its id after a failover.
			if held.generation != a.generation || held.createdMicros != a.createdMicros {
				wait = skippedNak
			}
			a.nak(wait)
			a.lane.d.refused(a)
			continue
		}
		a.token = rand.Int64N(math.MaxInt64) + 1 // 0 stands for a lease without a token
		keep = append(keep, a)
	}
	return keep
}

// claimRow is what the claim says of a row it took.
type claimRow struct {
	ord                         int64
	cancelled, lost, undo       bool // undo: to be cancelled and compensated
	phase, bizID, cause         string
	number, maxAttempts, undone int
	age                         float64 // seconds since the task was due first
}

// claim takes what it may of a batch and answers the rest.
func (w *Worker) claim(ctx context.Context, batch []*attempt) {
	rest := w.claimBy(ctx, w.sql.claim, pg.QueryBrief, firstPatience, batch)
	// Patient: what it skips because a try of its own that was cut off holds it still, would be given back.
	rest = w.claimBy(ctx, w.sql.takeOver, pg.QueryCached, w.longestPatience(), rest)
	w.classify(ctx, rest)
}

// claimBy runs a claiming statement until it is answered, and returns what it did not take. The tokens stay the same,
// so a claim whose answer was lost is found again. One that was cut off may be at its commit still: then the lock that
// the next try meets is our own, and what it holds must not be given back, or it would be lost for a lease.
func (w *Worker) claimBy(ctx context.Context, sql string, query queryFunc, patience time.Duration, batch []*attempt) (rest []*attempt) {
	if len(batch) == 0 {
		return nil
	}
	n := len(batch)
	ids, generations, created := make([]int64, n), make([]int32, n), make([]int64, n)
	tokens, compensates := make([]int64, n), make([]bool, n)
	for i, a := range batch {
		ids[i], generations[i], created[i], tokens[i] = a.id, int32(a.generation), a.createdMicros, a.token
		compensates[i] = a.lane.d.b.compensate != nil
	}
	args := []any{ids, generations, created, tokens, compensates, w.cfg.Name, w.cfg.Lease.Microseconds()}
	rows := make([]claimRow, 0, n)
	var sent, cutOff time.Duration
	err := w.insistFor(ctx, partClaim, patience, func(ctx context.Context) error {
		rows = rows[:0]
		sent = w.now()
		err := query(ctx, w.pool, sql, args, func(r pgx.Rows) error {
			var c claimRow
			err := r.Scan(&c.ord, &c.cancelled, &c.phase, &c.number, &c.maxAttempts, &c.bizID, &c.cause, &c.undone, &c.lost, &c.undo, &c.age)
			rows = append(rows, c)
			return err
		})
		if pg.Locked(err) && (cutOff == 0 || sent-cutOff > w.cfg.Lease) {
			rows = rows[:0]
			return nil
		}
		if err != nil && pg.Code(err) == "" {
			cutOff = w.now()
		}
		return err
	})
	if err != nil { // stopping: if the claim was committed all the same, the lease ends and counts as lost
		for _, a := range batch {
			w.giveUp(a, 0)
		}
		return nil
	}
	for i := range rows {
		c := &rows[i]
		a := batch[c.ord-1]
		batch[c.ord-1] = nil
		w.claimed(a, c, sent)
	}
	for _, a := range batch {
		if a != nil {
			rest = append(rest, a)
		}
	}
	return rest
}

// claimed takes an attempt whose claim was answered.
func (w *Worker) claimed(a *attempt, c *claimRow, sent time.Duration) {
	d := a.lane.d
	if c.lost {
		w.stats.Lost.Add(1)
		d.tally.attempt(c.phase, outcomeLost)
		w.log.Warn().Int64("task_id", a.id).Str("biz_type", a.lane.bizType).Int("attempt", c.number-1).
			Msg("lease of an earlier attempt had ended, logged as lost")
	}
	if c.cancelled {
		w.log.Info().Int64("task_id", a.id).Str("biz_type", a.lane.bizType).Msg("task cancelled as requested")
		a.ack()
		w.held.release(a)
		d.refused(a)
		return
	}
	w.stats.Claimed.Add(1)
	a.phase, a.number, a.bizID, a.cause = c.phase, c.number, c.bizID, c.cause
	a.limit = d.limit(c.maxAttempts)
	a.key = taskKey(w.installation, a.id, c.phase, c.undone)
	a.claimed, a.age = w.now(), c.age
	a.leaseFrom.Store(int64(sent))
	a.stage.Store(stageClaimed)
	if c.undo || a.number > a.limit {
		a.ended.Store(true)
		a.stage.Store(stageSettling)
		d.unstarted(a)
		s := usedUp(a, d.b, w.cfg.Lease)
		if c.undo {
			s.reason, s.text = reasonCancelled, "cancelled on request; the attempt that ran was lost with its worker"
		}
		w.settles.put(s)
		return
	}
	if !d.granted(a) {
		w.releaseUnstarted(a)
	}
}

// limit is how many attempts a task of the type has: the row's, else biz_type's, else the command's.
func (d *dispatcher) limit(row int) int {
	if row > 0 {
		return row
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.set.maxAttempts > 0 {
		return d.set.maxAttempts
	}
	return d.b.maxAttempts
}

// giveUp returns a message whose row was not claimed.
func (w *Worker) giveUp(a *attempt, delay time.Duration) {
	w.held.release(a)
	a.nak(delay)
	a.lane.d.refused(a)
}
