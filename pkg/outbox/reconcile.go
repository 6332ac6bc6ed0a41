package outbox

import (
	"context"
	"encoding/json"
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
			r.turned("reconcile")
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
	ctx, cancel := context.WithTimeout(ctx, max(r.cfg.Reconcile, 30*time.Second))
	defer cancel()
	s, err := r.js.Stream(ctx, r.names.Stream())
	if err != nil {
		return 0, fmt.Errorf("reconcile: %w", err)
	}
	for _, l := range held {
		m, err := r.markOf(ctx, s, l)
		if err != nil {
			return 0, fmt.Errorf("reconcile %s.%s: %w", l.bizType, l.priority, err)
		}
		if m == nil {
			continue
		}
		n, err := r.rescan(ctx, l, *m)
		if err != nil {
			return 0, fmt.Errorf("reconcile %s.%s: %w", l.bizType, l.priority, err)
		}
		if n > 0 {
			r.log.Warn().Str("biz_type", l.bizType).Str("priority", l.priority).Int("count", n).
				Msg("tasks without a message found, publishing them again")
		}
	}
	if err := r.findOrphans(ctx, s, held); err != nil {
		return 0, fmt.Errorf("reconcile: %w", err)
	}
	return r.cfg.Reconcile, nil
}

// markOf returns the lane's mark when it is clear, else nil. It takes the next mark when there is none.
func (r *Relay) markOf(ctx context.Context, s jetstream.Stream, l *lane) (*mark, error) {
	r.mu.Lock()
	r.restartLow(l)
	if l.mark == nil && l.pos != l.low {
		l.mark = &mark{position: l.pos, seq: l.seq, taken: time.Now()}
		l.dirty = l.dirty || l.seq > 0
	}
	m := l.mark
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
		l.dirty = true
	}
}

// goneUpTo reports whether the stream holds no message of the lane up to the sequence: by the consumer's ack floor, by
// nothing being left for the consumer at all, or, without a consumer, by the subject's first message. All of it is
// answered by leaders: a follower may not know the newest.
func (r *Relay) goneUpTo(ctx context.Context, s jetstream.Stream, k laneKey, seq uint64) (bool, error) {
	c, err := s.Consumer(ctx, r.names.Consumer(k.bizType, k.priority))
	if err == nil {
		i := c.CachedInfo()
		return i.AckFloor.Stream >= seq || i.NumPending == 0 && i.NumAckPending == 0, nil
	}
	if !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return false, err
	}
	first, err := r.firstSequence(ctx, r.names.Subject(k.bizType, k.priority))
	return err == nil && (first == 0 || first > seq), err
}

// firstSequence asks the stream's leader for the first message of a subject; 0 when there is none. nats.go's GetMsg
// would ask a follower, since the stream allows direct gets.
func (r *Relay) firstSequence(ctx context.Context, subject string) (uint64, error) {
	req, err := json.Marshal(map[string]any{"seq": 1, "next_by_subj": subject})
	if err != nil {
		return 0, err
	}
	m, err := r.nc.RequestWithContext(ctx, "$JS.API.STREAM.MSG.GET."+r.names.Stream(), req)
	if err != nil {
		return 0, fmt.Errorf("first message of %s: %w", subject, err)
	}
	var a struct {
		Error   *jetstream.APIError `json:"error"`
		Message *struct {
			Seq uint64 `json:"seq"`
		} `json:"message"`
	}
	if err := json.Unmarshal(m.Data, &a); err != nil {
		return 0, fmt.Errorf("first message of %s: %w", subject, err)
	}
	switch {
	case a.Error != nil && a.Error.ErrorCode == 10037: // no message found
		return 0, nil
	case a.Error != nil:
		return 0, fmt.Errorf("first message of %s: %w", subject, a.Error)
	case a.Message == nil:
		return 0, fmt.Errorf("first message of %s: answer without a message", subject)
	}
	return a.Message.Seq, nil
}

// rescanSQL is the round's own read, from low-water to the mark, of rows that are unfinished and not on the work list.
// It puts them there: now, at the end of their lease, or when they are due. Rows are locked in id order, as everybody
// does, and waited for: a row skipped here would never be looked at again.
const rescanSQL = `-- taskrelay: rescan
WITH l AS (
  SELECT $3::pg_snapshot AS s, $4::pg_snapshot AS s2, $5::timestamptz AS t2, $6::xid8 AS kx, $7::bigint AS ki,
    $8::timestamptz AS kr, $9::bigint AS kri, pg_snapshot_xmax($3::pg_snapshot) AS smax, pg_snapshot_xmax($4::pg_snapshot) AS s2max
), found AS MATERIALIZED (
  SELECT r.*, row_number() OVER () AS n FROM l CROSS JOIN LATERAL (
    (SELECT 1 AS part, f.* FROM (SELECT x FROM pg_snapshot_xip(l.s) AS x WHERE x >= l.kx ORDER BY x) AS p(x)
     CROSS JOIN LATERAL (
       SELECT t.id, t.xid, t.run_at, t.finished_at IS NULL AND t.republish_at IS NULL AS open FROM {{schema}}.task AS t
       WHERE t.biz_type = $1::text AND t.priority = $2::text AND t.xid = p.x
         AND t.id > CASE WHEN p.x = l.kx THEN l.ki ELSE -1 END
         AND pg_visible_in_snapshot(t.xid, l.s2) AND (t.run_at IS NULL OR t.run_at <= l.t2)
       ORDER BY t.id LIMIT $10::int) AS f
     LIMIT $10::int)
    UNION ALL
    (SELECT 2, t.id, t.xid, t.run_at, t.finished_at IS NULL AND t.republish_at IS NULL FROM {{schema}}.task AS t
     WHERE t.biz_type = $1::text AND t.priority = $2::text
       AND (t.xid, t.id) > (greatest(l.kx, l.smax), CASE WHEN l.kx >= l.smax THEN l.ki ELSE -1 END) AND t.xid < l.s2max
       AND pg_visible_in_snapshot(t.xid, l.s2) AND (t.run_at IS NULL OR t.run_at <= l.t2)
     ORDER BY t.xid, t.id LIMIT $10::int)
    UNION ALL
    (SELECT 3, t.id, t.xid, t.run_at, t.finished_at IS NULL AND t.republish_at IS NULL FROM {{schema}}.task AS t
     WHERE t.biz_type = $1::text AND t.priority = $2::text AND t.run_at IS NOT NULL
       AND (t.run_at, t.id) > (l.kr, l.kri) AND t.run_at <= l.t2 AND pg_visible_in_snapshot(t.xid, l.s)
     ORDER BY t.run_at, t.id LIMIT $10::int)
    LIMIT $10::int) AS r
), locked AS MATERIALIZED (
  SELECT t.id FROM (SELECT f.id FROM found AS f WHERE f.open ORDER BY f.id) AS o
  JOIN {{schema}}.task AS t ON t.id = o.id ORDER BY t.id FOR UPDATE OF t
), put AS (
  UPDATE {{schema}}.task AS t SET republish_at = CASE
      WHEN t.status = 'running' AND t.lease_until > now() THEN t.lease_until
      ELSE greatest(now(), t.next_attempt_at) END,
    looks = t.looks + 1 -- a guess has an id of its own, else the server may take it for the message it has lost
  FROM locked AS k
  WHERE t.id = k.id AND t.finished_at IS NULL AND t.republish_at IS NULL
  RETURNING t.id
)
SELECT f.part, f.id, f.xid::text, f.run_at, f.n, (SELECT count(*) FROM put)
FROM found AS f ORDER BY f.n DESC LIMIT 1`

// rescan moves low-water to the mark and returns how many rows it put on the work list.
func (r *Relay) rescan(ctx context.Context, l *lane, m mark) (int, error) {
	r.mu.Lock()
	low, incarnation, losses := l.low, r.incarnation, l.losses
	r.mu.Unlock()
	if incarnation == "" {
		return 0, errOtherIncarnation
	}
	key := firstKey(low)
	var put int
	for {
		var last pageRow
		var read, found int
		err := r.query(ctx, rescanSQL, []any{l.bizType, l.priority, low.snapshot, m.snapshot, m.at,
			key.xid, key.id, key.runAt, key.runID, rescanBatch}, func(rows pgx.Rows) error {
			return rows.Scan(&last.part, &last.id, &last.xid, &last.runAt, &read, &found)
		})
		if err != nil {
			return put, err
		}
		put += found
		if read < rescanBatch {
			break
		}
		key = last.keyAfter(key, snapshotMax(m.snapshot))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if l.dropped || l.losses != losses || r.incarnation != incarnation {
		return put, nil // what was done is done; low-water is somebody else's, or begins anew
	}
	l.low, l.mark = m.position, nil
	l.dirty = l.dirty || put > 0 || m.seq > 0
	return put, nil
}

// findOrphans deletes a consumer that does not know messages its subject holds: after a torn crash they are below its
// ack floor, are never delivered, and fill the lane. [Seen on nats-server 2.15.3.] Workers make the consumer anew; it
// delivers all that is there, and claims make that safe.
func (r *Relay) findOrphans(ctx context.Context, s jetstream.Stream, held []*lane) error {
	first := make(map[laneKey]*jetstream.ConsumerInfo)
	for _, l := range held {
		c, err := s.Consumer(ctx, r.names.Consumer(l.bizType, l.priority))
		if errors.Is(err, jetstream.ErrConsumerNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		first[l.laneKey] = c.CachedInfo()
	}
	info, err := s.Info(ctx, jetstream.WithSubjectFilter(r.names.subject("tasks.>")))
	if err != nil {
		return err
	}
	for _, l := range held {
		a := first[l.laneKey]
		if a == nil {
			continue
		}
		holds := info.State.Subjects[r.names.Subject(l.bizType, l.priority)]
		if holds <= a.NumPending+uint64(a.NumAckPending) {
			l.orphans = time.Time{}
			continue
		}
		// More than before we counted: published meanwhile, or orphans. What it knows after tells.
		c, err := s.Consumer(ctx, a.Name)
		if err != nil {
			return err
		}
		b := c.CachedInfo()
		switch {
		case holds <= b.NumPending+uint64(b.NumAckPending):
			l.orphans = time.Time{}
		case l.orphans.IsZero():
			l.orphans = time.Now()
		case time.Since(l.orphans) > 2*a.Config.AckWait:
			l.orphans = time.Time{}
			if err := s.DeleteConsumer(ctx, a.Name); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
				return err
			}
			r.log.Warn().Str("biz_type", l.bizType).Str("priority", l.priority).
				Uint64("count", holds-b.NumPending-uint64(b.NumAckPending)).
				Msg("stream holds messages its consumer does not know, consumer deleted to be made anew")
		}
	}
	return nil
}
