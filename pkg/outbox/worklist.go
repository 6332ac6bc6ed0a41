package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// The work list is every row with republish_at: look at this row then. Workers hand long retries and compensations
// back that way, operators requeue and delay, and a row that was on the list stays on it until it is final, so that a
// message lost later is found. A decision (any of these) raises the generation and makes older messages stale; a
// guess (a look that repeats) publishes the same generation under another message id.

const (
	listTick   = 250 * time.Millisecond // the longest between two looks at the list
	listBatch  = 500                    // rows of a lane
	listFirst  = 64                     // as long as the size of its payloads is not known
	listBytes  = 8 << 20                // of a lane's payloads
	confirmGap = 50 * time.Millisecond

	// listGuard is how far a take moves its rows: the next relay looks at them then, should this one die. Short, for that
	// is all that their tasks wait for; a look that takes longer here is remembered in inHand and not taken twice.
	listGuard = 8 * time.Second
)

// workList is the memory of serveWorkList.
type workList struct {
	seen uint64    // moves at the last look
	next time.Time // when the next row is due, if nobody commits before

	mu      sync.Mutex
	confirm []look // answered well: to be looked at again in ten minutes
	giveUp  []look // not stored: to be looked at again at once
	flying  int
	inHand  map[int64]time.Time // rows taken, and when, until the end of their look is written down
}

// A look is one row taken from the list. guard is the exact republish_at that the take wrote.
type look struct {
	id    int64
	gen   int
	guard time.Time
}

// takeListSQL takes due rows of our lanes by moving them ahead by listGuard: should we die, the look is repeated then.
// Rows that are not to be published now are put where they belong in the same statement. $4 are rows whose guard is about
// to end while we are still at them: a full window of a slow NATS takes its time.
const takeListSQL = `-- taskrelay: take work list
WITH due AS (
  SELECT d.id FROM unnest($1::text[], $2::text[], $3::int[]) AS l(biz_type, priority, n)
  CROSS JOIN LATERAL (
    SELECT t.id FROM {{schema}}.task AS t
    WHERE t.biz_type = l.biz_type AND t.priority = l.priority AND t.republish_at IS NOT NULL AND t.republish_at <= now()
      AND t.id <> ALL ($4::bigint[])
    ORDER BY t.republish_at LIMIT l.n FOR UPDATE OF t SKIP LOCKED) AS d
)
UPDATE {{schema}}.task AS t SET republish_at = CASE
    WHEN t.status IN ('succeeded', 'dead', 'cancelled') THEN NULL
    WHEN t.status = 'running' AND t.lease_until >= now() THEN t.lease_until + interval '10 seconds'
    WHEN t.status = 'blocked' THEN now() + interval '10 minutes'
    WHEN coalesce(t.next_attempt_at, t.run_at, '-infinity') > now() THEN coalesce(t.next_attempt_at, t.run_at)
    ELSE now() + $5::bigint * interval '1 millisecond' END
FROM due WHERE t.id = due.id
RETURNING t.id, t.created_at, t.biz_type, t.priority, t.biz_id, t.generation, t.looks, t.phase, coalesce(t.cause, ''),
  nullif(t.headers, '{}'), t.payload, t.republish_at, t.attempt, t.dead_lettered_at IS NOT NULL,
  coalesce(t.execute_attempts, 0), coalesce(t.dead_reason, ''), coalesce(t.error_class, ''), t.first_started_at, t.compensation,
  t.status IN ('pending', 'retrying', 'running') AND NOT (t.status = 'running' AND t.lease_until >= now())
    AND coalesce(t.next_attempt_at, t.run_at, '-infinity') <= now()`

// nextOnListSQL tells how long until the next row of our lanes is due.
const nextOnListSQL = `-- taskrelay: next on work list
SELECT (extract(epoch FROM least(min(n.republish_at), clock_timestamp() + interval '1 day') - clock_timestamp()) * 1000)::bigint
FROM unnest($1::text[], $2::text[]) AS l(biz_type, priority)
CROSS JOIN LATERAL (
  SELECT t.republish_at FROM {{schema}}.task AS t
  WHERE t.biz_type = l.biz_type AND t.priority = l.priority AND t.republish_at IS NOT NULL AND t.id <> ALL ($3::bigint[])
  ORDER BY t.republish_at LIMIT 1) AS n`

// confirmListSQL puts rows whose message is stored ten minutes ahead, doubling with each look: if the message is lost,
// it is found then. The exact guard matters: a claim, a hand-back or an operator may have come first. The old dead
// letter of a requeued row is deleted by now, so its mark goes too.
const confirmListSQL = `-- taskrelay: confirm work list
` + looksSQL + `
UPDATE {{schema}}.task AS t
SET republish_at = now() + least(interval '10 minutes' * power(2, least(t.looks, 10)), interval '1 day'), looks = t.looks + 1,
  dead_lettered_at = NULL
FROM mine WHERE t.id = mine.id`

// giveUpListSQL brings rows whose message was not stored back to the head of the list.
const giveUpListSQL = `-- taskrelay: give up looks
` + looksSQL + `
UPDATE {{schema}}.task AS t SET republish_at = now()
FROM mine WHERE t.id = mine.id`

// looksSQL locks the rows that are still as the take left them. One that somebody else has locked is skipped: it is
// looked at again when its guard ends, and must not keep the looks of all lanes waiting. IS NOT DISTINCT FROM, because
// an equality would allow the planner the index on republish_at.
const looksSQL = `WITH mine AS (
  SELECT k.id FROM unnest($1::bigint[], $2::int[], $3::timestamptz[]) AS c(id, generation, guard)
  CROSS JOIN LATERAL (
    SELECT t.id FROM {{schema}}.task AS t
    WHERE t.id = c.id AND t.generation = c.generation AND t.republish_at IS NOT DISTINCT FROM c.guard
    FOR UPDATE OF t SKIP LOCKED) AS k
)`

// serveWorkList publishes what is due on the list of our lanes. A lane that is full, paused or waiting is not read:
// its rows stay where they are and cost nothing.
func (r *Relay) serveWorkList(ctx context.Context) (time.Duration, error) {
	if err := r.endLooks(ctx); err != nil {
		return 0, err
	}
	if !r.nc.IsConnected() || r.halted() {
		return listTick, nil // readLanes says so
	}
	now, moves := time.Now(), r.moves()
	if rest := r.list.next.Sub(now); moves == r.list.seen && rest > 0 {
		return min(rest, listTick), nil // nobody has committed since, so nothing is due before
	}
	r.list.mu.Lock()
	flying := r.list.flying
	r.list.mu.Unlock()
	skipped := false
	lanes, types, priorities, _ := r.heldLanes(func(l *lane) bool {
		may := now.Before(l.until) && l.waitUntil.IsZero() && r.mayLook(l.bizType, now) >= 1
		skipped = skipped || !may
		return may && r.settings.mayPublish(l.laneKey)
	})
	if len(types) == 0 || flying > publishWindow/2 {
		return confirmGap, nil
	}
	n, more, err := r.takeList(ctx, lanes, types, priorities)
	if err != nil {
		return 0, err
	}
	if more {
		return 0, nil
	}
	var ms *int64
	err = r.queryCached(ctx, nextOnListSQL, []any{types, priorities, r.list.overdue(time.Now())}, func(rows pgx.Rows) error { return rows.Scan(&ms) })
	if err != nil {
		return 0, fmt.Errorf("next on work list: %w", err)
	}
	next := time.Hour
	if ms != nil {
		next = max(time.Duration(*ms)*time.Millisecond+time.Millisecond, 2*time.Millisecond)
	}
	if !skipped { // a lane that waits ends its wait without a commit
		r.list.seen, r.list.next = moves, now.Add(next)
	}
	wait := min(next, listTick)
	if n > 0 {
		wait = min(wait, confirmGap)
	}
	return wait, nil
}

// takeList takes one batch and publishes it. It returns how many rows it looked at, and whether a lane has more.
func (r *Relay) takeList(ctx context.Context, lanes []*lane, types, priorities []string) (n int, more bool, err error) {
	type taken struct {
		deadTask // what is said of it should compensation begin
		look
		attempt          int
		lettered, wanted bool
	}
	limits := make([]int32, len(lanes))
	r.mu.Lock()
	for i, l := range lanes {
		l.listLimit = cmp.Or(l.listLimit, listFirst)
		limits[i] = int32(min(l.listLimit, r.mayLook(l.bizType, time.Now())))
	}
	r.mu.Unlock()
	var all []taken
	sizes := make(map[laneKey]batchSize)
	asked := time.Now()
	err = r.query(ctx, takeListSQL, []any{types, priorities, limits, r.list.overdue(time.Now()), listGuard.Milliseconds()}, func(rows pgx.Rows) error {
		var t taken
		var guard *time.Time
		if err := rows.Scan(&t.record.id, &t.created, &t.bizType, &t.priority, &t.bizID, &t.generation, &t.looks, &t.phase,
			&t.cause, &t.headers, &t.payload, &guard, &t.attempt, &t.lettered,
			&t.attempts, &t.reason, &t.errorClass, &t.firstAttempt, &t.compensation, &t.wanted); err != nil {
			return err
		}
		if guard != nil {
			t.look = look{id: t.record.id, gen: t.generation, guard: *guard}
		}
		all = append(all, t)
		key := laneKey{t.bizType, t.priority}
		s := sizes[key]
		sizes[key] = batchSize{s.rows + 1, s.bytes + len(t.payload)}
		return nil
	})
	if err != nil {
		return 0, false, fmt.Errorf("take work list: %w", err)
	}
	for i := range all {
		if t := &all[i]; t.wanted {
			r.list.take(t.look, asked)
		}
	}
	r.mu.Lock()
	for i, l := range lanes {
		s := sizes[l.laneKey]
		r.spendLooks(l.bizType, s.rows)
		more = more || s.rows == int(limits[i])
		if l.listLimit == int(limits[i]) { // else an answer has come meanwhile: the lane is full
			l.listLimit = s.next(l.listLimit)
		}
	}
	r.mu.Unlock()
	var failure error
	for i := range all {
		t := &all[i]
		if !t.wanted {
			continue
		}
		if t.lettered {
			err := failure
			if !errors.Is(err, context.DeadlineExceeded) { // else each of hundreds would keep all lanes waiting for as long
				err = r.deleteLetter(ctx, t.bizType, t.record.id, t.generation)
			}
			if err != nil {
				failure = err
				r.endLook(t.look, false)
				continue
			}
		}
		var failed *deadTask
		if t.phase == PhaseCompensate && t.attempt == 0 && t.looks == 0 {
			t.lastError = t.cause
			failed = &t.deadTask
		}
		r.publishLook(&t.record, t.look, failed)
	}
	return len(all), more, failure
}

// batchSize is what a take has brought of one lane.
type batchSize struct{ rows, bytes int }

// next is how many rows the next take may bring, after one that was limited to this many: twice as many, as long as
// their payloads are small.
func (s batchSize) next(limit int) int {
	if s.bytes > listBytes {
		return max(limit/2, 1)
	}
	if s.rows == limit && s.bytes <= listBytes/2 {
		return min(2*limit, listBatch)
	}
	return limit
}

// publishLook publishes a row of the list, with the event that execute has failed (not nil) when compensation begins with it:
// that event comes from the row, as the dead letter does, so that no crash loses it.
func (r *Relay) publishLook(rec *record, lk look, failed *deadTask) {
	id := messageID(r.installation, rec.id, rec.created.UnixMicro(), rec.generation, rec.looks)
	open, stored, final := 1, true, false // guarded by list.mu
	if failed != nil {
		open = 2
	}
	end := func(v verdict) {
		r.list.mu.Lock()
		open--
		stored = stored && v == acked
		final = final || v == refused || v == oversize
		done := open == 0
		r.list.flying--
		r.list.mu.Unlock()
		switch {
		case !done:
		case stored || !final:
			r.endLook(lk, stored)
		default: // a refused one is looked at again when its guard ends, unless it is buried before
			r.list.release([]look{lk})
		}
	}
	r.list.mu.Lock()
	r.list.flying += open
	r.list.mu.Unlock()
	if failed != nil {
		r.pub.publish(r.event(EventFailed, failed), r.names.EventStream(), id+"."+EventFailed, func(res published) {
			v := res.verdict
			if errors.As(res.err, new(noPermissionError)) { // the lane goes on, so this look must not come again and again
				v = refused
			}
			end(v)
		})
	}
	e := envelopes.Get().(*envelope)
	defer envelopes.Put(e)
	m, dropped := r.message(e, rec)
	r.mu.Lock()
	r.counts.DroppedHeaders += int64(dropped)
	r.mu.Unlock()
	r.pub.publish(m, r.names.Stream(), id, func(res published) {
		r.lookAnswered(rec, res)
		end(res.verdict)
	})
}

func (r *Relay) lookAnswered(rec *record, res published) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.lanes[laneKey{rec.bizType, rec.priority}]
	r.meter.of(rec.bizType).looked(res)
	switch {
	case res.verdict == acked:
		r.counts.Republished++
		if res.duplicate {
			r.counts.Duplicates++
		}
		if l != nil {
			r.noteSequence(l, res.sequence, 0, res.duplicate)
			l.dirty = true
			l.waitStep, l.trouble = 0, nil
		}
	case l == nil:
	case res.verdict == oversize || tooLarge(res.err):
		r.refusals = append(r.refusals, &parcel{lane: l, rec: rec, refusal: r.sized(res.err, rec)})
	case res.verdict == refused:
		if now := time.Now(); l.notice.due(now) {
			r.log.Error().Err(res.err).Int64("task_id", rec.id).Str("biz_type", rec.bizType).Dur("delay", listGuard).Msg("message refused, trying again")
		}
	case res.verdict == waits:
		r.wait(l, res.err)
	}
}

func (r *Relay) endLook(lk look, stored bool) {
	r.list.mu.Lock()
	defer r.list.mu.Unlock()
	if stored {
		r.list.confirm = append(r.list.confirm, lk)
	} else {
		r.list.giveUp = append(r.list.giveUp, lk)
	}
}

// endLooks writes down how looks ended. What it cannot write is repeated when its guard ends anyway.
func (r *Relay) endLooks(ctx context.Context) error {
	r.list.mu.Lock()
	confirm, giveUp := r.list.confirm, r.list.giveUp
	r.list.confirm, r.list.giveUp = nil, nil
	r.list.mu.Unlock()
	defer r.list.release(confirm, giveUp)
	if err := r.writeLooks(ctx, confirmListSQL, confirm); err != nil {
		return fmt.Errorf("confirm work list: %w", err)
	}
	if err := r.writeLooks(ctx, giveUpListSQL, giveUp); err != nil {
		return fmt.Errorf("give up looks: %w", err)
	}
	return nil
}

// take remembers a row as in hand.
func (w *workList) take(lk look, at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.inHand == nil {
		w.inHand = make(map[int64]time.Time)
	}
	w.inHand[lk.id] = at
}

// release forgets rows whose look is over.
func (w *workList) release(looks ...[]look) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, some := range looks {
		for _, lk := range some {
			delete(w.inHand, lk.id)
		}
	}
}

// overdue lists the rows in hand whose guard is over or about to be, in one order.
func (w *workList) overdue(now time.Time) []int64 {
	ids := []int64{}
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, at := range w.inHand {
		if now.Sub(at) > listGuard-time.Second {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

func (r *Relay) writeLooks(ctx context.Context, sql string, looks []look) error {
	if len(looks) == 0 {
		return nil
	}
	// In id order, as everybody who locks several tasks: no deadlock.
	slices.SortFunc(looks, func(a, b look) int { return cmp.Compare(a.id, b.id) })
	ids, gens, guards := make([]int64, len(looks)), make([]int32, len(looks)), make([]time.Time, len(looks))
	for i, l := range looks {
		ids[i], gens[i], guards[i] = l.id, int32(l.gen), l.guard
	}
	return r.exec(ctx, sql, ids, gens, guards)
}
