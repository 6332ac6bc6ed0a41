package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgtype"
)

const saveSQL = `-- taskrelay: save positions
UPDATE {{schema}}.lane AS l
SET snapshot = v.s::pg_snapshot, at = v.at, round_snapshot = v.rs::pg_snapshot, round_at = v.rat,
  key_xid = v.kx::xid8, key_id = v.ki, key_run_at = v.kr, key_run_id = v.kri,
  max_seq = v.seq, low_snapshot = v.ls::pg_snapshot, low_at = v.lat,
  mark_snapshot = v.ms::pg_snapshot, mark_at = v.mat, mark_seq = v.mseq, losses = v.losses, saved_at = now()
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[], $5::timestamptz[], $6::text[], $7::timestamptz[],
  $8::text[], $9::bigint[], $10::timestamptz[], $11::bigint[], $12::bigint[],
  $13::text[], $14::timestamptz[], $15::text[], $16::timestamptz[], $17::bigint[], $18::int[])
  AS v(biz_type, priority, fence, s, at, rs, rat, kx, ki, kr, kri, seq, ls, lat, ms, mat, mseq, losses)
WHERE l.biz_type = v.biz_type AND l.priority = v.priority AND l.owner = $19::text AND l.fence = v.fence
  AND EXISTS (SELECT FROM {{schema}}.incarnation WHERE id = $20::uuid)
RETURNING l.biz_type, l.priority`

// savePositions stores what has been acknowledged since the last time. A lane that the statement does not find is
// another relay's by now, or the database is not the one the positions were taken from.
func (r *Relay) savePositions(ctx context.Context) error {
	held, types, priorities, fences := r.heldLanes(func(l *lane) bool { return l.dirty })
	if len(held) == 0 {
		return nil
	}
	n := len(held)
	s, at := make([]string, n), make([]pgtype.Timestamptz, n)
	rs, rat := make([]*string, n), make([]pgtype.Timestamptz, n)
	kx, ki := make([]*string, n), make([]*int64, n)
	kr, kri, seq := make([]pgtype.Timestamptz, n), make([]*int64, n), make([]int64, n)
	ls, lat := make([]string, n), make([]pgtype.Timestamptz, n)
	ms, mat, mseq, losses := make([]*string, n), make([]pgtype.Timestamptz, n), make([]*int64, n), make([]int32, n)
	r.mu.Lock()
	incarnation := r.incarnation
	for i, l := range held {
		s[i], at[i], seq[i] = l.pos.snapshot, l.pos.at, int64(l.seq)
		ls[i], lat[i], losses[i] = l.low.snapshot, l.low.at, int32(l.losses)
		if m := l.mark; m != nil {
			q := int64(m.seq)
			ms[i], mat[i], mseq[i] = &m.snapshot, m.at, &q
		}
		if l.round != nil {
			target, k := l.round.target, l.round.acked
			rs[i], rat[i], kx[i], ki[i], kr[i], kri[i] = &target.snapshot, target.at, &k.xid, &k.id, k.runAt, &k.runID
		}
		l.dirty = false
	}
	r.mu.Unlock()
	if incarnation == "" {
		return nil // the lanes have been dropped meanwhile
	}
	kept, err := r.returnedKeys(ctx, saveSQL, types, priorities, fences, s, at, rs, rat, kx, ki, kr, kri, seq,
		ls, lat, ms, mat, mseq, losses, r.cfg.Name, incarnation)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range held {
		switch {
		case err != nil:
			l.dirty = true
		case !kept[l.laneKey]:
			r.dropLane(l, "position not saved: lease lost or Postgres crashed")
		}
	}
	if err != nil {
		return fmt.Errorf("save positions: %w", err)
	}
	return nil
}
