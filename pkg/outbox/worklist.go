package outbox

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
)

// The work list is every row with republish_at: look at this row then. Workers hand long retries and compensations
// back that way, operators requeue and delay, and a row that was on the list stays on it until it is final, so that a
// message lost later is found. A decision (any of these) raises the generation and makes older messages stale; a
// guess (a look that repeats) publishes the same generation under another message id.

const (
	listTick   = 250 * time.Millisecond // the longest between two looks at the list
	listBatch  = 500
	confirmGap = 50 * time.Millisecond
)

// workList is the memory of serveWorkList.
type workList struct {
	mu      sync.Mutex
	confirm []look // answered well: to be looked at again in ten minutes
	giveUp  []look // not stored: to be looked at again at once
	flying  int
}

// A look is one row taken from the list. guard is the exact republish_at that the take wrote.
type look struct {
	id    int64
	gen   int
	guard time.Time
}

// takeListSQL takes due rows of our lanes by moving them 30 s ahead: should we die, the look is repeated then.
// Rows that are not to be published now are put where they belong in the same statement.
const takeListSQL = `-- taskrelay: take work list
WITH due AS (
  SELECT d.id FROM unnest($1::text[], $2::text[]) AS l(biz_type, priority)
  CROSS JOIN LATERAL (
    SELECT t.id FROM {{schema}}.task AS t
    WHERE t.biz_type = l.biz_type AND t.priority = l.priority AND t.republish_at IS NOT NULL AND t.republish_at <= now()
    ORDER BY t.republish_at LIMIT $3::int FOR UPDATE OF t SKIP LOCKED) AS d
)
UPDATE {{schema}}.task AS t SET republish_at = CASE
    WHEN t.status IN ('succeeded', 'dead', 'cancelled') THEN NULL
    WHEN t.status = 'running' AND t.lease_until >= now() THEN t.lease_until + interval '10 seconds'
    WHEN t.status = 'blocked' THEN now() + interval '10 minutes'
    WHEN coalesce(t.next_attempt_at, t.run_at, '-infinity') > now() THEN coalesce(t.next_attempt_at, t.run_at)
    ELSE now() + interval '30 seconds' END
FROM due WHERE t.id = due.id
RETURNING t.id, t.created_at, t.biz_type, t.priority, t.biz_id, t.generation, t.looks, t.phase, coalesce(t.cause, ''),
  nullif(t.headers, '{}'), t.payload, t.republish_at, t.attempt, t.dead_lettered_at IS NOT NULL,
  t.status IN ('pending', 'retrying', 'running') AND NOT (t.status = 'running' AND t.lease_until >= now())
    AND coalesce(t.next_attempt_at, t.run_at, '-infinity') <= now()`

// nextOnListSQL tells how long until the next row of our lanes is due.
const nextOnListSQL = `-- taskrelay: next on work list
SELECT (extract(epoch FROM min(n.republish_at) - clock_timestamp()) * 1000)::bigint
FROM unnest($1::text[], $2::text[]) AS l(biz_type, priority)
CROSS JOIN LATERAL (
  SELECT t.republish_at FROM {{schema}}.task AS t
  WHERE t.biz_type = l.biz_type AND t.priority = l.priority AND t.republish_at IS NOT NULL
  ORDER BY t.republish_at LIMIT 1) AS n`

// confirmListSQL puts rows whose message is stored ten minutes ahead, doubling with each look: if the message is lost,
// it is found then. The exact guard matters: a claim, a hand-back or an operator may have come first. The old dead
// letter of a requeued row is deleted by now, so its mark goes too.
const confirmListSQL = `-- taskrelay: confirm work list
UPDATE {{schema}}.task AS t
SET republish_at = now() + least(interval '10 minutes' * power(2, least(t.looks, 10)), interval '1 day'), looks = t.looks + 1,
  dead_lettered_at = NULL
FROM unnest($1::bigint[], $2::int[], $3::timestamptz[]) AS c(id, generation, guard)
WHERE t.id = c.id AND t.generation = c.generation AND t.republish_at = c.guard`

// giveUpListSQL brings rows whose message was not stored back to the head of the list.
const giveUpListSQL = `-- taskrelay: give up looks
UPDATE {{schema}}.task AS t SET republish_at = now()
FROM unnest($1::bigint[], $2::int[], $3::timestamptz[]) AS c(id, generation, guard)
WHERE t.id = c.id AND t.generation = c.generation AND t.republish_at = c.guard`

// serveWorkList publishes what is due on the list of our lanes. A lane that is full, paused or waiting is not read:
// its rows stay where they are and cost nothing.
func (r *Relay) serveWorkList(ctx context.Context) (time.Duration, error) {
	if err := r.endLooks(ctx); err != nil {
		return 0, err
	}
	if !r.nc.IsConnected() {
		return listTick, nil // readLanes says so
	}
	now := time.Now()
	r.list.mu.Lock()
	flying := r.list.flying
	r.list.mu.Unlock()
	_, types, priorities, _ := r.heldLanes(func(l *lane) bool {
		return now.Before(l.until) && l.waitUntil.IsZero() && r.settings.mayPublish(l.laneKey)
	})
	if len(types) == 0 || flying > publishWindow/2 {
		return confirmGap, nil
	}
	n, err := r.takeList(ctx, types, priorities)
	if err != nil {
		return 0, err
	}
	if n >= listBatch {
		return 0, nil
	}
	var next *int64
	err = r.queryCached(ctx, nextOnListSQL, []any{types, priorities}, func(rows pgx.Rows) error { return rows.Scan(&next) })
	if err != nil {
		return 0, fmt.Errorf("next on work list: %w", err)
	}
	wait := listTick
	if next != nil {
		wait = min(wait, max(time.Duration(*next)*time.Millisecond+time.Millisecond, 2*time.Millisecond))
	}
	if n > 0 {
		wait = min(wait, confirmGap)
	}
	return wait, nil
}

// takeList takes one batch and publishes it. It returns how many rows it looked at.
func (r *Relay) takeList(ctx context.Context, types, priorities []string) (int, error) {
	type taken struct {
		record
		look
		attempt          int
		lettered, wanted bool
	}
	var all []taken
	err := r.query(ctx, takeListSQL, []any{types, priorities, listBatch}, func(rows pgx.Rows) error {
		var t taken
		var guard *time.Time
		if err := rows.Scan(&t.record.id, &t.created, &t.bizType, &t.priority, &t.bizID, &t.generation, &t.looks, &t.phase,
			&t.cause, &t.headers, &t.payload, &guard, &t.attempt, &t.lettered, &t.wanted); err != nil {
			return err
		}
		if guard != nil {
			t.look = look{id: t.record.id, gen: t.generation, guard: *guard}
		}
		all = append(all, t)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("take work list: %w", err)
	}
	for i := range all {
		t := &all[i]
		if !t.wanted {
			continue
		}
		if t.lettered {
			if err := r.deleteLetter(ctx, t.bizType, t.record.id, t.generation); err != nil {
				r.endLook(t.look, false)
				continue
			}
		}
		m, dropped := r.message(&t.record)
		r.mu.Lock()
		r.counts.DroppedHeaders += int64(dropped)
		r.mu.Unlock()
		r.publishLook(m, &t.record, t.look, t.phase == PhaseCompensate && t.attempt == 0 && t.looks == 0)
	}
	return len(all), nil
}

// publishLook publishes a row of the list, with the event that execute has failed when compensation begins with it:
// that event comes from the row, as the dead letter does, so that no crash loses it.
func (r *Relay) publishLook(m *nats.Msg, rec *record, lk look, failed bool) {
	id := messageID(r.installation, rec.id, rec.created.UnixMicro(), rec.generation, rec.looks)
	open, stored := 1, true // guarded by list.mu
	if failed {
		open = 2
	}
	end := func(ok bool) {
		r.list.mu.Lock()
		open--
		stored = stored && ok
		done := open == 0
		r.list.flying--
		r.list.mu.Unlock()
		if done {
			r.endLook(lk, stored)
		}
	}
	r.list.mu.Lock()
	r.list.flying += open
	r.list.mu.Unlock()
	if failed {
		r.pub.publish(r.event(rec, EventFailed), r.names.EventStream(), id+"."+EventFailed, func(res published) {
			end(res.verdict == acked)
		})
	}
	r.pub.publish(m, r.names.Stream(), id, func(res published) {
		r.lookAnswered(rec, res)
		end(res.verdict == acked)
	})
}

func (r *Relay) lookAnswered(rec *record, res published) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.lanes[laneKey{rec.bizType, rec.priority}]
	switch {
	case res.verdict == acked:
		r.counts.Republished++
		if res.duplicate {
			r.counts.Duplicates++
		}
		if l != nil {
			r.noteSequence(l, res.sequence, 0, res.duplicate)
			l.dirty = true
		}
	case l == nil:
	case res.verdict == oversize || tooLarge(res.err):
		r.refusals = append(r.refusals, &parcel{lane: l, task: rec.id, gen: rec.generation, refusal: res.err})
	case res.verdict == waits && l.waitUntil.IsZero():
		l.waitUntil = time.Now().Add(waitFirst)
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

// endLooks writes down how looks ended. What it cannot write is repeated after the take's 30 s anyway.
func (r *Relay) endLooks(ctx context.Context) error {
	r.list.mu.Lock()
	confirm, giveUp := r.list.confirm, r.list.giveUp
	r.list.confirm, r.list.giveUp = nil, nil
	r.list.mu.Unlock()
	if err := r.writeLooks(ctx, confirmListSQL, confirm); err != nil {
		return fmt.Errorf("confirm work list: %w", err)
	}
	if err := r.writeLooks(ctx, giveUpListSQL, giveUp); err != nil {
		return fmt.Errorf("give up looks: %w", err)
	}
	return nil
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
