package command

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/pg"
)

// classifySQL tells why messages were not claimed. Rests are clamped to a day: infinite instants cannot be
// subtracted.
const classifySQL = `-- taskrelay: classify
SELECT m.ord, t.status, t.phase, t.generation, t.created_us, t.lease_us, t.due_us
FROM unnest($1::bigint[]) WITH ORDINALITY AS m(id, ord)
CROSS JOIN LATERAL (
  SELECT t.status, t.phase, t.generation, (extract(epoch FROM t.created_at) * 1000000)::bigint AS created_us,
    (extract(epoch FROM least(greatest(coalesce(t.lease_until, '-infinity'), now() - interval '1 day'),
      now() + interval '1 day') - now()) * 1000000)::bigint AS lease_us,
    (extract(epoch FROM least(greatest(coalesce(t.next_attempt_at, t.run_at, '-infinity'), now() - interval '1 day'),
      now() + interval '1 day') - now()) * 1000000)::bigint AS due_us
  FROM {{schema}}.task AS t
  WHERE t.id = m.id
  OFFSET 0 -- one lookup per message, whatever the statistics say
) AS t`

// handBackEarlySQL returns tasks that are not due for long to the table: parked in JetStream they would fill the
// lane's MaxAckPending and stop it.
const handBackEarlySQL = `-- taskrelay: hand back early
WITH picked AS (
  SELECT m.ord, t.tid
  FROM unnest($1::bigint[], $2::int[], $3::bigint[]) WITH ORDINALITY AS m(id, generation, created_us, ord)
  CROSS JOIN LATERAL (
    SELECT t.ctid AS tid
    FROM {{schema}}.task AS t
    WHERE t.id = m.id
      AND t.generation = m.generation
      AND t.created_at = 'epoch'::timestamptz + m.created_us * interval '1 microsecond'
      AND t.status IN ('pending', 'retrying')
      AND coalesce(t.next_attempt_at, t.run_at, '-infinity') > now()
    FOR UPDATE SKIP LOCKED
  ) AS t
)
UPDATE {{schema}}.task AS t
SET generation = t.generation + 1, looks = 0,
  next_attempt_at = coalesce(t.next_attempt_at, t.run_at),
  republish_at = coalesce(t.next_attempt_at, t.run_at)
FROM picked AS p
WHERE t.ctid = p.tid
RETURNING p.ord`

// rowState is what classify found for a message.
type rowState struct {
	found         bool
	status, phase string
	generation    int
	createdMicros int64
	lease, due    time.Duration // from now; negative: past
}

// answer is what becomes of an unclaimed message.
type answer int

const (
	answerNak answer = iota
	answerAck
	answerTerm
	answerHandBack
)

// answerTo says what to do with a message whose row was not claimed, and why.
func answerTo(a *attempt, r rowState, compensates bool, lease, nakMax time.Duration) (answer, time.Duration, string) {
	switch {
	case !r.found:
		return answerTerm, 0, "row missing"
	case r.createdMicros != a.createdMicros:
		return answerTerm, 0, "row missing (its id was given out again)"
	case r.status == "succeeded" || r.status == "dead" || r.status == "cancelled":
		return answerAck, 0, "finished"
	case r.generation > a.generation:
		return answerAck, 0, "older than its row"
	case r.generation < a.generation:
		return answerAck, 0, reasonNewer
	case r.status == "blocked":
		return answerNak, lease, "blocked"
	case r.status == "running" && r.lease >= 0:
		return answerNak, min(r.lease+50*time.Millisecond, lease), "running"
	case r.status != "running" && r.due > nakMax:
		return answerHandBack, 0, "early"
	case r.status != "running" && r.due > 0:
		return answerNak, r.due + time.Millisecond, "early"
	case r.phase == PhaseCompensate && !compensates:
		return answerNak, unknownNak, reasonCannotCompensate
	}
	return answerNak, skippedNak, "locked" // it would have been claimed: somebody held it
}

const (
	reasonNewer            = "newer than its row"
	reasonCannotCompensate = "no Compensate here"
)

// classify answers messages that were not claimed.
func (w *Worker) classify(ctx context.Context, rest []*attempt) {
	if len(rest) == 0 {
		return
	}
	ids := make([]int64, len(rest))
	for i, a := range rest {
		ids[i] = a.id
	}
	states := make([]rowState, len(rest))
	err := w.insist(ctx, "classify", func(ctx context.Context) error {
		clear(states)
		return pg.QueryCached(ctx, w.pool, w.sql.classify, []any{ids}, func(r pgx.Rows) error {
			var ord, created, leaseMicros, dueMicros int64
			var s rowState
			if err := r.Scan(&ord, &s.status, &s.phase, &s.generation, &created, &leaseMicros, &dueMicros); err != nil {
				return err
			}
			s.found, s.createdMicros = true, created
			s.lease, s.due = time.Duration(leaseMicros)*time.Microsecond, time.Duration(dueMicros)*time.Microsecond
			states[ord-1] = s
			return nil
		})
	})
	if err != nil {
		for _, a := range rest {
			w.giveUp(a, 0)
		}
		return
	}
	var early []*attempt
	for i, a := range rest {
		what, delay, why := answerTo(a, states[i], a.lane.d.b.compensate != nil, w.cfg.Lease, w.cfg.NakMax)
		switch what {
		case answerHandBack:
			early = append(early, a)
			continue
		case answerNak:
			a.lane.parked.add(w.now(), delay, math.MaxInt)
			a.nak(delay)
		case answerTerm:
			w.stats.Terminated.Add(1)
			w.log.Warn().Int64("task_id", a.id).Str("biz_type", a.lane.bizType).Int("generation", a.generation).
				Msg("message dropped: its row is missing")
			a.term(why)
		case answerAck:
			a.ack()
		}
		switch why {
		case reasonNewer:
			w.stats.Newer.Add(1)
			w.log.Warn().Int64("task_id", a.id).Str("biz_type", a.lane.bizType).Int("generation", a.generation).
				Msg("message dropped: it is newer than its row, the database has lost its end")
		case reasonCannotCompensate:
			w.complain("compensate "+a.lane.bizType, func() {
				w.log.Warn().Int64("task_id", a.id).Str("biz_type", a.lane.bizType).
					Msg("task waits for compensation and this worker has no Compensate for it: left to another worker")
			})
		}
		w.held.release(a)
		a.lane.d.refused(a)
	}
	w.handBackEarly(ctx, early)
}

// handBackEarly returns tasks that came long before their time to the relay's work list.
func (w *Worker) handBackEarly(ctx context.Context, early []*attempt) {
	if len(early) == 0 {
		return
	}
	ids, generations, created := make([]int64, len(early)), make([]int32, len(early)), make([]int64, len(early))
	for i, a := range early {
		ids[i], generations[i], created[i] = a.id, int32(a.generation), a.createdMicros
	}
	done := make([]bool, len(early))
	err := w.insist(ctx, "hand back", func(ctx context.Context) error {
		return pg.QueryCached(ctx, w.pool, w.sql.handBackEarly, []any{ids, generations, created}, func(r pgx.Rows) error {
			var ord int64
			if err := r.Scan(&ord); err != nil {
				return fmt.Errorf("scan: %w", err)
			}
			done[ord-1] = true
			return nil
		})
	})
	for i, a := range early {
		// Not handed back: locked or changed meanwhile. The next claim will see.
		if err == nil && done[i] {
			w.held.release(a)
			a.ack()
			a.lane.d.refused(a)
			continue
		}
		w.giveUp(a, skippedNak)
	}
}
