package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/nats-io/nats.go/jetstream"
)

// Reconciling finds tasks whose message the stream has lost. A mark is a position and the highest sequence the lane
// had been given there. When the stream holds no older message of the lane, whatever is unfinished below the mark and
// not on the work list has no message: it is put on the list, and low-water becomes the mark. So low-water always
// moves and each row is looked at once. A guess never raises the generation, so a good message is never made stale.

// A mark is what low-water becomes when the lane's messages up to seq are gone from the stream.
type mark struct {
	position
	seq   uint64
	taken time.Time
}

const (
	// A message parked or running for longer than this does not hold its mark: its row goes on the work list.
	markPatience = time.Hour
	rescanBatch  = 5000
)

// origin is before every row.
var origin = position{snapshot: "1:1:", at: pgtype.Timestamptz{Valid: true, InfinityModifier: pgtype.NegativeInfinity}}

// reconcileOrWait reconciles, then waits until it is time again or a loss has been seen.
func (r *Relay) reconcileOrWait(ctx context.Context) (time.Duration, error) {
	// Here and not beside the leases of the lanes: it may read the whole table.
	if time.Since(r.repositioned) > time.Hour {
		if err := r.reposition(ctx); err != nil {
			return 0, err
		}
		r.repositioned = time.Now()
	}
	wait, err := r.reconcile(ctx)
	if err != nil {
		return 0, err
	}
	t := time.NewTimer(min(wait, 10*time.Second))
	defer t.Stop()
	for end := time.Now().Add(wait); ; t.Reset(min(time.Until(end), 10*time.Second)) {
		select {
		case <-ctx.Done():
			return 0, nil
		case <-r.compare:
			return 0, nil
		case <-t.C:
			if time.Until(end) <= 0 {
				return 0, nil
			}
			r.turned(loopReconcile)
		}
	}
}

// reconcile compares each lane we hold with the stream.
func (r *Relay) reconcile(ctx context.Context) (time.Duration, error) {
	if !r.nc.IsConnected() {
		return r.cfg.Reconcile, nil
	}
	held, _, _, _ := r.heldLanes(func(l *lane) bool { return time.Now().Before(l.until) })
	if len(held) == 0 {
		return min(r.cfg.Reconcile, time.Second), nil
	}
	s, err := r.js.Stream(ctx, r.names.Stream())
	if err != nil {
		return 0, fmt.Errorf("reconcile: %w", err)
	}
	var first error // one lane that cannot be compared must not keep the others from it
	for _, l := range held {
		if err := r.reconcileLane(ctx, s, l); err != nil && first == nil {
			first = fmt.Errorf("reconcile %s.%s: %w", l.bizType, l.priority, err)
		}
		if ctx.Err() != nil || !r.nc.IsConnected() {
			return 0, first
		}
		r.turned(loopReconcile)
	}
	if err := r.findOrphans(ctx, s, held); err != nil && first == nil {
		first = fmt.Errorf("reconcile: %w", err)
	}
	return r.cfg.Reconcile, first
}

func (r *Relay) reconcileLane(ctx context.Context, s jetstream.Stream, l *lane) error {
	m, err := r.markOf(ctx, s, l)
	if err != nil || m == nil {
		return err
	}
	n, err := r.rescan(ctx, l, *m)
	if n > 0 {
		l.tally.reconciled.Add(int64(n))
		r.log.Warn().Str("biz_type", l.bizType).Str("priority", l.priority).Int("count", n).
			Msg("tasks without a message found, publishing them again")
	}
	return err
}

// markOf returns the lane's mark when it is clear, else nil. It takes the next mark when there is none.
func (r *Relay) markOf(ctx context.Context, s jetstream.Stream, l *lane) (*mark, error) {
	r.mu.Lock()
	r.restartLow(l)
	if l.mark == nil && l.pos != l.low {
		l.mark = &mark{position: l.pos, seq: l.seq, taken: time.Now()}
		l.dirty = true // also of an idle lane, so that a successor need not read again what is not due for long
	}
	m := l.mark
	if m != nil && r.settings.paused[l.bizType] {
		m.taken = time.Now() // its messages wait on purpose
	}
	r.mu.Unlock()
	if m == nil {
		return nil, nil
	}
	clear := m.seq == 0 || time.Since(m.taken) > markPatience
	if !clear {
		var err error
		if clear, err = r.goneUpTo(ctx, s, l.laneKey, m.seq); err != nil {
			return nil, err
		}
	}
	if !clear {
		return nil, nil
	}
	return m, nil
}

// restartLow begins again from the start when the stream has lost messages since; r.mu is held.
func (r *Relay) restartLow(l *lane) {
	if l.losses < r.settings.losses {
		l.low, l.seq, l.losses = origin, 0, r.settings.losses
		l.mark = &mark{position: l.pos, taken: time.Now()}
		l.skipped = nil
		l.dirty = true
	}
}

// goneUpTo reports whether the stream holds no message of the lane up to the sequence: by the consumer's ack floor, by
// nothing being left for the consumer at all, or by the subject's first message. All of it is answered by leaders: a
// follower may not know the newest.
//
// The floor alone does not tell: when messages that are out are taken away by a limit or by hand, it can stay behind for
// as long as the lane is busy. [Three minutes of load in tests/faults, until there was no message out for a moment.]
func (r *Relay) goneUpTo(ctx context.Context, s jetstream.Stream, k laneKey, seq uint64) (bool, error) {
	c, err := s.Consumer(ctx, r.names.Consumer(k.bizType, k.priority))
	if err == nil {
		i := c.CachedInfo()
		if i.AckFloor.Stream >= seq || i.NumPending == 0 && i.NumAckPending == 0 {
			return true, nil
		}
	} else if !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return false, err
	}
	first, err := r.firstSequence(ctx, r.names.Subject(k.bizType, k.priority))
	return err == nil && (first == 0 || first > seq), err
}

// firstSequence asks the stream's leader for the first message of a subject; 0 when there is none.
func (r *Relay) firstSequence(ctx context.Context, subject string) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	m, err := r.askLeader(ctx, r.names.Stream(), map[string]any{"seq": 1, "next_by_subj": subject})
	if err != nil {
		return 0, fmt.Errorf("first message of %s: %w", subject, err)
	}
	if m == nil {
		return 0, nil
	}
	return m.sequence, nil
}

// rescanSQL is the round's own read, from low-water to the mark, of rows that are unfinished and not on the work list.
// It puts them there: now, at the end of their lease, or when they are due. Locked rows are skipped and named: to wait
// for one while holding all before it would keep workers from renewing their leases. The number of rows read, not of
// those found, bounds a statement: most of a large table is finished.
//
// A scan from the very start ($11) follows a loss of the stream: then rows that are on the list already are looked at
// now too. Their next look is ten minutes away and more, for as long as their message was believed to be there.
const rescanSQL = `-- taskrelay: rescan
WITH l AS (
  SELECT $3::pg_snapshot AS s, $4::pg_snapshot AS s2, $5::timestamptz AS t2, $6::xid8 AS kx, $7::bigint AS ki,
    $8::timestamptz AS kr, $9::bigint AS kri, pg_snapshot_xmax($3::pg_snapshot) AS smax, pg_snapshot_xmax($4::pg_snapshot) AS s2max
), found AS MATERIALIZED (
  SELECT r.*, row_number() OVER () AS n FROM l CROSS JOIN LATERAL (
    (SELECT 1 AS part, f.* FROM (SELECT x FROM pg_snapshot_xip(l.s) AS x WHERE x >= l.kx ORDER BY x) AS p(x)
     CROSS JOIN LATERAL (
       SELECT t.id, t.xid, t.run_at, t.finished_at IS NULL AND (t.republish_at IS NULL
           OR $11::boolean AND t.republish_at > greatest(now(), t.next_attempt_at)) AS open FROM {{schema}}.task AS t
       WHERE t.biz_type = $1::text AND t.priority = $2::text AND (t.xid, t.id) > (p.x, CASE WHEN p.x = l.kx THEN l.ki ELSE -1 END) AND t.xid <= p.x
         AND pg_visible_in_snapshot(t.xid, l.s2) AND (t.run_at IS NULL OR t.run_at <= l.t2)
       ORDER BY t.xid, t.id LIMIT $10::int) AS f
     LIMIT $10::int)
    UNION ALL
    (SELECT 2, t.id, t.xid, t.run_at, t.finished_at IS NULL AND (t.republish_at IS NULL
         OR $11::boolean AND t.republish_at > greatest(now(), t.next_attempt_at)) FROM {{schema}}.task AS t
     WHERE t.biz_type = $1::text AND t.priority = $2::text
       AND (t.xid, t.id) > (greatest(l.kx, l.smax), CASE WHEN l.kx >= l.smax THEN l.ki ELSE -1 END) AND t.xid < l.s2max
       AND pg_visible_in_snapshot(t.xid, l.s2) AND (t.run_at IS NULL OR t.run_at <= l.t2)
     ORDER BY t.xid, t.id LIMIT $10::int)
    UNION ALL
    (SELECT 3, t.id, t.xid, t.run_at, t.finished_at IS NULL AND (t.republish_at IS NULL
         OR $11::boolean AND t.republish_at > greatest(now(), t.next_attempt_at)) FROM {{schema}}.task AS t
     WHERE t.biz_type = $1::text AND t.priority = $2::text AND t.run_at IS NOT NULL
       AND (t.run_at, t.id) > (l.kr, l.kri) AND t.run_at <= l.t2 AND pg_visible_in_snapshot(t.xid, l.s)
     ORDER BY t.run_at, t.id LIMIT $10::int)
    LIMIT $10::int) AS r
), locked AS MATERIALIZED (
  SELECT t.id, $11::boolean AS wide FROM (SELECT f.id FROM found AS f WHERE f.open ORDER BY f.id) AS o
  JOIN {{schema}}.task AS t ON t.id = o.id ORDER BY t.id FOR UPDATE OF t SKIP LOCKED
), ` + putSQL + `
SELECT f.part, f.id, f.xid::text, f.run_at, f.n, (SELECT count(*) FROM put),
  ARRAY(SELECT o.id FROM found AS o WHERE o.open EXCEPT SELECT k.id FROM locked AS k)
FROM found AS f ORDER BY f.n DESC LIMIT 1`

const putSQL = `put AS (
  UPDATE {{schema}}.task AS t SET republish_at = CASE
      WHEN t.status = 'running' AND t.lease_until > now() THEN t.lease_until
      ELSE greatest(now(), t.next_attempt_at) END,
    looks = t.looks + 1 -- a guess has an id of its own, else the server may take it for the message it has lost
  FROM locked AS k
  WHERE t.id = k.id AND t.finished_at IS NULL AND (t.republish_at IS NULL
    OR k.wide AND t.republish_at > greatest(now(), t.next_attempt_at))
  RETURNING t.id
)`

// rescanSkippedSQL does what rescanSQL does for rows that were locked then.
const rescanSkippedSQL = `-- taskrelay: rescan skipped
WITH locked AS MATERIALIZED (
  SELECT t.id, $2::boolean AS wide FROM unnest($1::bigint[]) AS o(id)
  JOIN {{schema}}.task AS t ON t.id = o.id ORDER BY t.id FOR UPDATE OF t SKIP LOCKED
), ` + putSQL + `
SELECT (SELECT count(*) FROM put),
  ARRAY(SELECT t.id FROM unnest($1::bigint[]) AS o(id) JOIN {{schema}}.task AS t ON t.id = o.id EXCEPT SELECT k.id FROM locked AS k)`

// rescan moves low-water to the mark and returns how many rows it put on the work list. Where rows were locked,
// low-water stays, and the next turn looks at these again: a row it passes is never looked at again.
func (r *Relay) rescan(ctx context.Context, l *lane, m mark) (int, error) {
	r.mu.Lock()
	low, incarnation, losses, skipped := l.low, r.incarnation, l.losses, l.skipped
	r.mu.Unlock()
	if incarnation == "" {
		return 0, errOtherIncarnation
	}
	var put int
	var err error
	if len(skipped) > 0 {
		put, skipped, err = r.rescanSkipped(ctx, skipped, low == origin)
	} else {
		put, skipped, err = r.rescanAll(ctx, l, low, m)
	}
	if err != nil {
		return put, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if l.dropped || l.losses != losses || r.incarnation != incarnation {
		return put, nil // what was done is done; low-water is somebody else's, or begins anew
	}
	if l.skipped = skipped; len(skipped) > 0 {
		return put, nil
	}
	l.low, l.mark = m.position, nil
	l.dirty = l.dirty || put > 0 || m.seq > 0
	return put, nil
}

// rescanAll scans from low-water to the mark, page by page.
func (r *Relay) rescanAll(ctx context.Context, l *lane, low position, m mark) (put int, skipped []int64, err error) {
	key := firstKey(low)
	for {
		var last pageRow
		var read, found int
		var locked []int64
		err := r.query(ctx, rescanSQL, []any{l.bizType, l.priority, low.snapshot, m.snapshot, m.at,
			key.xid, key.id, key.runAt, key.runID, rescanBatch, low == origin}, func(rows pgx.Rows) error {
			return rows.Scan(&last.part, &last.id, &last.xid, &last.runAt, &read, &found, &locked)
		})
		if err != nil {
			return put, nil, err
		}
		put, skipped = put+found, append(skipped, locked...)
		if read < rescanBatch {
			return put, skipped, nil
		}
		key = last.keyAfter(key, snapshotMax(m.snapshot))
		r.turned(loopReconcile)
		r.mu.Lock()
		dropped := l.dropped
		r.mu.Unlock()
		if dropped {
			return put, skipped, nil // its next relay scans it
		}
	}
}

func (r *Relay) rescanSkipped(ctx context.Context, ids []int64, wide bool) (put int, skipped []int64, err error) {
	err = r.query(ctx, rescanSkippedSQL, []any{ids, wide}, func(rows pgx.Rows) error { return rows.Scan(&put, &skipped) })
	return put, skipped, err
}

// findOrphans deletes a consumer that does not know messages its subject holds: after a torn crash they are below its
// ack floor, are never delivered, and fill the lane. [Seen on nats-server 2.15.3.] Workers make the consumer anew; it
// delivers all that is there, and claims make that safe.
//
// One lane that cannot be looked at, such as one whose consumer has no leader, does not keep the others from it. The error
// is that of the first.
func (r *Relay) findOrphans(ctx context.Context, s jetstream.Stream, held []*lane) error {
	var failure error
	failed := func(l *lane, err error) {
		failure = cmp.Or(failure, fmt.Errorf("orphans of %s.%s: %w", l.bizType, l.priority, err))
	}
	first := make(map[laneKey]*jetstream.ConsumerInfo)
	for _, l := range held {
		if ctx.Err() != nil || !r.nc.IsConnected() {
			return failure
		}
		r.turned(loopReconcile)
		c, err := s.Consumer(ctx, r.names.Consumer(l.bizType, l.priority))
		if errors.Is(err, jetstream.ErrConsumerNotFound) {
			continue
		}
		if err != nil {
			failed(l, err)
			continue
		}
		first[l.laneKey] = c.CachedInfo()
		r.mu.Lock()
		l.flows = l.flows && !c.CachedInfo().Paused // switch.go looks whose pause it is
		r.mu.Unlock()
	}
	info, err := s.Info(ctx, jetstream.WithSubjectFilter(r.names.subject("tasks.>")))
	if err != nil {
		return cmp.Or(failure, err)
	}
	for _, l := range held {
		a := first[l.laneKey]
		if a == nil {
			continue
		}
		if ctx.Err() != nil || !r.nc.IsConnected() {
			return failure
		}
		r.turned(loopReconcile)
		holds := info.State.Subjects[r.names.Subject(l.bizType, l.priority)]
		if holds <= a.NumPending+uint64(a.NumAckPending) {
			l.orphans = time.Time{}
			continue
		}
		// More than before we counted: published meanwhile, or orphans. What it knows after tells.
		c, err := s.Consumer(ctx, a.Name)
		if errors.Is(err, jetstream.ErrConsumerNotFound) {
			continue
		}
		if err != nil {
			failed(l, err)
			continue
		}
		b := c.CachedInfo()
		orphaned := false
		if holds > b.NumPending+uint64(b.NumAckPending) {
			if orphaned, err = r.orphaned(ctx, l.laneKey, a, b); err != nil {
				failed(l, err)
				continue
			}
		}
		switch {
		case !orphaned:
			l.orphans = time.Time{}
		case l.orphans.IsZero():
			l.orphans = time.Now()
		case time.Since(l.orphans) > 2*a.Config.AckWait:
			l.orphans = time.Time{}
			if err := s.DeleteConsumer(ctx, a.Name); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
				failed(l, err)
				continue
			}
			r.log.Warn().Str("biz_type", l.bizType).Str("priority", l.priority).
				Uint64("count", holds-b.NumPending-uint64(b.NumAckPending)).
				Msg("stream holds messages its consumer does not know, consumer deleted to be made anew")
		}
	}
	return failure
}

// orphaned makes sure of it, where a subject holds more than its consumer knew before (a) and after (b) it was counted.
// On a busy lane the three numbers differ by chance. [One count in three; deleting its consumer then would make every
// running task's message come again.] It is true if nothing moved between a and b, or if there is a message that the
// consumer has done with.
func (r *Relay) orphaned(ctx context.Context, k laneKey, a, b *jetstream.ConsumerInfo) (bool, error) {
	if a.Delivered.Consumer == b.Delivered.Consumer && a.AckFloor.Consumer == b.AckFloor.Consumer &&
		a.NumPending == b.NumPending && a.NumAckPending == b.NumAckPending {
		return true, nil
	}
	first, err := r.firstSequence(ctx, r.names.Subject(k.bizType, k.priority))
	return first > 0 && first <= a.AckFloor.Stream, err
}
