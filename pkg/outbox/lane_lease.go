package outbox

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/taskrelay/taskrelay/internal/process"
)

// A relay holds a lane by a lease in its row: it takes one, keeps it, and gives it back.

const heartbeatSQL = `-- taskrelay: relay heartbeat
WITH gone AS (DELETE FROM {{schema}}.relay WHERE seen_at < now() - interval '1 hour')
INSERT INTO {{schema}}.relay (name, host, pid, version, lanes, biz_types, notifiers)
VALUES ($1::text, $2::text, $3::int, $4::text, $5::int, coalesce($6::text[], '{}'), $7::text[])
ON CONFLICT (name) DO UPDATE SET seen_at = now(), lanes = excluded.lanes, notifiers = excluded.notifiers`

func (r *Relay) heartbeat(ctx context.Context) error {
	r.mu.Lock()
	n := len(r.lanes)
	r.mu.Unlock()
	if err := r.exec(ctx, heartbeatSQL, r.cfg.Name, process.Host(), os.Getpid(), r.cfg.Version, n, r.cfg.BizTypes, r.cfg.notifierNames()); err != nil {
		return fmt.Errorf("relay heartbeat: %w", err)
	}
	return nil
}

// takeSQL takes lanes that nobody holds. A lease that ends in more than a minute is none: Postgres's clock was ahead when
// it was given, and has been set back.
const takeSQL = `-- taskrelay: take lanes
UPDATE {{schema}}.lane AS l
SET owner = $3::text, owner_until = now() + $4::bigint * interval '1 millisecond', fence = l.fence + 1
FROM (
  SELECT c.biz_type, c.priority FROM {{schema}}.lane AS c
  JOIN unnest($1::text[], $2::text[]) AS w(biz_type, priority) ON c.biz_type = w.biz_type AND c.priority = w.priority
  WHERE c.owner IS NULL OR c.owner = $3::text OR c.owner_until NOT BETWEEN now() AND now() + interval '1 minute'
  FOR UPDATE OF c SKIP LOCKED
) AS free
WHERE l.biz_type = free.biz_type AND l.priority = free.priority
  AND EXISTS (SELECT FROM {{schema}}.incarnation WHERE id = $5::uuid)
RETURNING l.biz_type, l.priority, l.fence, l.snapshot::text, l.at,
  l.round_snapshot::text, l.round_at, l.key_xid::text, l.key_id, l.key_run_at, l.key_run_id, l.max_seq,
  l.low_snapshot::text, l.low_at, l.mark_snapshot::text, l.mark_at, l.mark_seq, l.losses`

func (r *Relay) takeLanes(ctx context.Context, keys []laneKey) error {
	asked := time.Now()
	r.mu.Lock()
	incarnation := r.incarnation
	r.mu.Unlock()
	if incarnation == "" {
		return errOtherIncarnation
	}
	types, priorities := splitKeys(keys)
	var taken []*lane
	err := r.query(ctx, takeSQL, []any{types, priorities, r.cfg.Name, laneLease.Milliseconds(), incarnation},
		func(rows pgx.Rows) error {
			l := &lane{until: asked.Add(laneLease)}
			var roundSnapshot, keyXID *string
			var roundAt, keyRunAt pgtype.Timestamptz
			var keyID, keyRunID *int64
			var seq int64
			var markSnapshot *string
			var markAt pgtype.Timestamptz
			var markSeq *int64
			if err := rows.Scan(&l.bizType, &l.priority, &l.fence, &l.pos.snapshot, &l.pos.at,
				&roundSnapshot, &roundAt, &keyXID, &keyID, &keyRunAt, &keyRunID, &seq,
				&l.low.snapshot, &l.low.at, &markSnapshot, &markAt, &markSeq, &l.losses); err != nil {
				return err
			}
			if markSnapshot != nil && markSeq != nil {
				l.mark = &mark{position: position{snapshot: *markSnapshot, at: markAt}, seq: uint64(*markSeq), taken: asked}
			}
			l.seq = uint64(seq)
			if roundSnapshot != nil && keyXID != nil && keyID != nil && keyRunID != nil {
				k := pageKey{xid: *keyXID, id: *keyID, runAt: keyRunAt, runID: *keyRunID}
				l.round = &round{target: position{snapshot: *roundSnapshot, at: roundAt}, read: k, acked: k}
			}
			taken = append(taken, l)
			return nil
		})
	if err != nil {
		return fmt.Errorf("take lanes: %w", inRecovery(err))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.incarnation != incarnation {
		return errOtherIncarnation
	}
	for _, l := range taken {
		r.restartLow(l) // before it publishes anything: what it will publish is not lost
		l.tally = r.meter.of(l.bizType)
		r.lanes[l.laneKey] = l
		r.stir()
		r.log.Debug().Str("biz_type", l.bizType).Str("priority", l.priority).Int64("fence", l.fence).Msg("lane taken")
	}
	return nil
}

const renewSQL = `-- taskrelay: renew lanes
UPDATE {{schema}}.lane AS l
SET owner_until = now() + $5::bigint * interval '1 millisecond'
FROM unnest($1::text[], $2::text[], $3::bigint[]) AS h(biz_type, priority, fence)
WHERE l.biz_type = h.biz_type AND l.priority = h.priority AND l.owner = $4::text AND l.fence = h.fence
RETURNING l.biz_type, l.priority`

func (r *Relay) renewLanes(ctx context.Context) error {
	asked := time.Now()
	held, types, priorities, fences := r.heldLanes(func(*lane) bool { return true })
	if len(held) == 0 {
		return nil
	}
	kept, err := r.returnedKeys(ctx, renewSQL, types, priorities, fences, r.cfg.Name, laneLease.Milliseconds())
	if err != nil {
		return fmt.Errorf("renew lanes: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range held {
		if kept[l.laneKey] {
			l.until = asked.Add(laneLease)
		} else {
			r.dropLane(l, "lease lost")
		}
	}
	return nil
}

const giveSQL = `-- taskrelay: give lanes back
UPDATE {{schema}}.lane AS l SET owner = NULL, owner_until = NULL
FROM unnest($1::text[], $2::text[], $3::bigint[]) AS h(biz_type, priority, fence)
WHERE l.biz_type = h.biz_type AND l.priority = h.priority AND l.owner = $4::text AND l.fence = h.fence
RETURNING l.biz_type, l.priority`

// giveLanes hands lanes over: what is acknowledged is saved first; what is still in flight will be published again by
// the next owner under the same ids.
func (r *Relay) giveLanes(ctx context.Context, keys []laneKey) error {
	if err := r.savePositions(ctx); err != nil {
		return err
	}
	give := make(map[laneKey]bool, len(keys))
	for _, k := range keys {
		give[k] = true
	}
	held, types, priorities, fences := r.heldLanes(func(l *lane) bool { return give[l.laneKey] })
	if len(held) == 0 {
		return nil
	}
	r.mu.Lock()
	for _, l := range held {
		r.dropLane(l, "given to another relay")
	}
	r.mu.Unlock()
	if _, err := r.returnedKeys(ctx, giveSQL, types, priorities, fences, r.cfg.Name); err != nil {
		return fmt.Errorf("give lanes back: %w", err)
	}
	return nil
}

const leaveSQL = `-- taskrelay: relay leaves
DELETE FROM {{schema}}.relay WHERE name = $1::text`

// leave ends a relay's work: answers still on their way are waited for, positions saved, lanes given back.
func (r *Relay) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	r.pub.drain(ctx, 2*time.Second)
	r.mu.Lock()
	keys := slices.Collect(maps.Keys(r.lanes))
	r.mu.Unlock()
	err := r.giveLanes(ctx, keys)
	if err == nil {
		err = r.exec(ctx, leaveSQL, r.cfg.Name)
	}
	if err == nil {
		err = r.exec(ctx, leavePurgeSQL, r.cfg.Name)
	}
	if err != nil {
		r.log.Warn().Err(err).Msg("lanes could not be given back, their leases will end")
	}
	r.log.Info().Msg("relay stopped")
}
