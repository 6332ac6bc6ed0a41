package outbox

import (
	"context"
	"fmt"
	"hash/fnv"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/taskrelay/taskrelay/internal/process"
)

// A lane is one biz type at one priority. A relay leases lanes; for each it holds, it keeps the position in memory and
// saves it, fenced, only when all that it covers has been acknowledged by the stream.
type lane struct {
	laneKey
	fence int64
	until time.Time // our lease, on the monotonic clock, counted from before it was asked for

	pos   position
	round *round  // open, if any
	pages []*page // published, not yet acknowledged whole, oldest first
	dirty bool    // differs from what is saved
	seq   uint64  // highest sequence the stream has answered

	low     position  // all before it is finished or on the work list (reconcile.go)
	mark    *mark     // what low becomes when the stream has no older message left
	skipped []int64   // rows below the mark that somebody had locked when they were scanned
	losses  int       // losses of the stream that low has been restarted for
	orphans time.Time // since when the subject has held messages that its consumer does not know

	again     []*parcel // to be published again: the lane could not take them, or nobody knows
	waitUntil time.Time // zero: not waiting
	waitStep  time.Duration
	trouble   error // why it waits, when that is not that it is full
	notice    notices
	burst     int  // how many of again go out next: one after a refusal, then twice as many each time
	resent    int  // how many of them have no answer yet
	listLimit int  // how many rows of the work list are taken next, in the same manner; 0: as many as ever
	rowBytes  int  // what a row of the last page took, on average
	leaving   int  // for how many ticks another relay has been due to have it: it is read no further
	flows     bool // its consumer was seen not to be paused by us (switch.go)
	dropped   bool // no longer ours: late answers change nothing
	tally     *tally
}

type laneKey struct{ bizType, priority string }

// A page is what one read gave of a lane.
type page struct {
	end  pageKey
	last bool
	left int // messages without an answer
	sent pageSent
}

const (
	laneLease    = 6 * time.Second
	laneRenew    = 2 * time.Second
	laneTick     = 250 * time.Millisecond
	saveInterval = 300 * time.Millisecond
)

// keepLanes finds new lanes, renews and shares leases, saves positions and buries what was refused.
func (r *Relay) keepLanes(ctx context.Context) (time.Duration, error) {
	k := &r.keeper
	now := time.Now()
	if now.Sub(k.saved) >= saveInterval {
		if err := r.savePositions(ctx); err != nil {
			return 0, err
		}
		k.saved = now
	}
	if now.Sub(k.settled) >= laneRenew {
		if err := r.heartbeat(ctx); err != nil {
			return 0, err
		}
		if err := r.readSettings(ctx); err != nil {
			return 0, err
		}
		if err := r.renewLanes(ctx); err != nil {
			return 0, err
		}
		k.settled = now
	}
	// Without a commit there is no new type; a relay may have died all the same.
	moves := r.moves()
	if now = time.Now(); moves != k.seen && now.After(k.discover) {
		if err := r.discoverLanes(ctx); err != nil {
			return 0, err
		}
		// The scan costs with the number of types: it may take a few percent of the time.
		k.discover = time.Now().Add(min(max(20*time.Since(now), laneTick), time.Second))
		k.seen, k.shared = moves, time.Time{}
	}
	if now.Sub(k.shared) >= time.Second {
		if err := r.shareLanes(ctx, false); err != nil {
			return 0, err
		}
		k.shared = now
	}
	if err := r.buryRefused(ctx); err != nil {
		return 0, err
	}
	return laneTick, nil
}

// keeper is the memory of keepLanes, which alone uses it.
type keeper struct {
	saved, settled, discover time.Time
	shared                   time.Time
	seen                     uint64                // moves at the last discovery
	unowned                  map[laneKey]time.Time // since when a lane that is not for us has had no owner
}

const heartbeatSQL = `-- taskrelay: relay heartbeat
WITH gone AS (DELETE FROM {{schema}}.relay WHERE seen_at < now() - interval '1 hour')
INSERT INTO {{schema}}.relay (name, host, pid, version, lanes, biz_types) VALUES ($1::text, $2::text, $3::int, $4::text, $5::int, coalesce($6::text[], '{}'))
ON CONFLICT (name) DO UPDATE SET seen_at = now(), lanes = excluded.lanes`

func (r *Relay) heartbeat(ctx context.Context) error {
	r.mu.Lock()
	n := len(r.lanes)
	r.mu.Unlock()
	if err := r.exec(ctx, heartbeatSQL, r.cfg.Name, process.Host(), os.Getpid(), r.cfg.Version, n, r.cfg.BizTypes); err != nil {
		return fmt.Errorf("relay heartbeat: %w", err)
	}
	return nil
}

// discoverSQL walks task_lane (which asks for a word on xid) from one type to the next instead of over its rows, and makes
// both lanes of each type that is new, also of types that workers have registered: then the first task of a lane does not
// wait to be found.
const discoverSQL = `-- taskrelay: discover lanes
WITH RECURSIVE found AS (
  (SELECT t.biz_type FROM {{schema}}.task AS t WHERE t.xid >= '0' ORDER BY t.biz_type LIMIT 1)
  UNION ALL
  SELECT n.biz_type FROM found AS f CROSS JOIN LATERAL (
    SELECT t.biz_type FROM {{schema}}.task AS t WHERE t.biz_type > f.biz_type AND t.xid >= '0' ORDER BY t.biz_type LIMIT 1) AS n
)
INSERT INTO {{schema}}.lane (biz_type, priority)
SELECT d.biz_type, p.priority
FROM (SELECT f.biz_type FROM found AS f UNION SELECT b.biz_type FROM {{schema}}.biz_type AS b) AS d
CROSS JOIN (VALUES ('high'), ('low')) AS p(priority)
WHERE NOT EXISTS (SELECT FROM {{schema}}.lane AS l WHERE l.biz_type = d.biz_type AND l.priority = p.priority)
ON CONFLICT DO NOTHING`

func (r *Relay) discoverLanes(ctx context.Context) error {
	if err := r.exec(ctx, discoverSQL); err != nil {
		return fmt.Errorf("discover lanes: %w", err)
	}
	return nil
}

const censusSQL = `-- taskrelay: count lanes and relays
SELECT l.biz_type, l.priority, coalesce(l.owner, ''), coalesce(l.owner_until BETWEEN now() AND now() + interval '1 minute', false)
FROM {{schema}}.lane AS l WHERE $1::text[] IS NULL OR l.biz_type = ANY ($1::text[])`

const peersSQL = `-- taskrelay: list relays
SELECT p.name, p.biz_types FROM {{schema}}.relay AS p
WHERE p.seen_at BETWEEN now() - $1::bigint * interval '1 millisecond' AND now() + interval '1 minute'`

// shareLanes takes lanes that are for us and free, takes what has been left lying by others, and gives back what is
// now for another relay.
func (r *Relay) shareLanes(ctx context.Context, all bool) error {
	peers := []peer{{name: r.cfg.Name, bizTypes: r.cfg.BizTypes}}
	err := r.query(ctx, peersSQL, []any{laneLease.Milliseconds()}, func(rows pgx.Rows) error {
		var p peer
		if err := rows.Scan(&p.name, &p.bizTypes); err != nil {
			return err
		}
		if p.name != r.cfg.Name {
			peers = append(peers, p)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list relays: %w", err)
	}

	now := time.Now()
	unowned := make(map[laneKey]time.Time)
	var take, give []laneKey
	var elsewhere int64
	var types []string
	if len(r.cfg.BizTypes) > 0 {
		types = r.cfg.BizTypes
	}
	r.mu.Lock()
	held := maps.Clone(r.lanes)
	r.mu.Unlock()
	err = r.query(ctx, censusSQL, []any{types}, func(rows pgx.Rows) error {
		var k laneKey
		var owner string
		var live bool
		if err := rows.Scan(&k.bizType, &k.priority, &owner, &live); err != nil {
			return err
		}
		forUs := all || chooseRelay(r.home(k), peers) == r.cfg.Name
		switch {
		case held[k] != nil:
			if r.mayGive(held[k], forUs) {
				give = append(give, k)
			}
		case owner != "" && live && owner != r.cfg.Name:
			elsewhere++
		case forUs:
			take = append(take, k)
		default: // its relay should take it within a tick or two; if it does not, we do
			since, ok := r.keeper.unowned[k]
			if !ok {
				since = now
			}
			unowned[k] = since
			if now.Sub(since) > laneLease {
				take = append(take, k)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("count lanes: %w", err)
	}
	r.keeper.unowned = unowned
	r.mu.Lock()
	r.counts.LanesElsewhere = elsewhere
	r.mu.Unlock()
	if len(give) > 0 {
		if err := r.giveLanes(ctx, give); err != nil {
			return err
		}
	}
	if len(take) > 0 {
		return r.takeLanes(ctx, take)
	}
	return nil
}

// leaveTicks bounds how long a lane waits for its answers before it goes to another relay: a full one may get none.
const leaveTicks = 8

// mayGive reports whether a lane that is for another relay can go. It is read no further, and goes when all that it has
// in flight is acknowledged: else the other one would publish that again.
func (r *Relay) mayGive(l *lane, forUs bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if forUs {
		l.leaving = 0
		return false
	}
	l.leaving++
	return len(l.pages) == 0 || l.leaving > leaveTicks
}

type peer struct {
	name     string
	bizTypes []string // empty: all
}

// chooseRelay gives each lane to the living relay with the highest hash of both names (rendezvous hashing): a fair
// share, and when a relay comes or goes only its own lanes move.
func chooseRelay(k laneKey, peers []peer) string {
	var best string
	var most uint64
	for _, p := range peers {
		if len(p.bizTypes) > 0 && !slices.Contains(p.bizTypes, k.bizType) {
			continue
		}
		h := fnv.New64a()
		_, _ = h.Write([]byte(p.name + "\x00" + k.bizType + "\x00" + k.priority))
		sum := h.Sum64()
		sum ^= sum >> 33 // FNV's high bits barely depend on the last bytes
		sum *= 0xff51afd7ed558ccd
		sum ^= sum >> 33
		if best == "" || sum > most || sum == most && p.name > best {
			best, most = p.name, sum
		}
	}
	return best
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

// heldLanes lists lanes we hold, in one order everywhere, with the columns that name them in a statement.
func (r *Relay) heldLanes(want func(*lane) bool) (held []*lane, types, priorities []string, fences []int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.lanes {
		if want(l) {
			held = append(held, l)
		}
	}
	slices.SortFunc(held, func(a, b *lane) int { return compareKeys(a.laneKey, b.laneKey) })
	for _, l := range held {
		types, priorities, fences = append(types, l.bizType), append(priorities, l.priority), append(fences, l.fence)
	}
	return held, types, priorities, fences
}

func compareKeys(a, b laneKey) int {
	if c := strings.Compare(a.bizType, b.bizType); c != 0 {
		return c
	}
	return strings.Compare(a.priority, b.priority)
}

func splitKeys(keys []laneKey) (types, priorities []string) {
	slices.SortFunc(keys, compareKeys)
	for _, k := range keys {
		types, priorities = append(types, k.bizType), append(priorities, k.priority)
	}
	return types, priorities
}

func (r *Relay) returnedKeys(ctx context.Context, sql string, args ...any) (map[laneKey]bool, error) {
	got := make(map[laneKey]bool)
	err := r.query(ctx, sql, args, func(rows pgx.Rows) error {
		var k laneKey
		if err := rows.Scan(&k.bizType, &k.priority); err != nil {
			return err
		}
		got[k] = true
		return nil
	})
	return got, err
}

// dropLane forgets a lane; r.mu is held. What was in flight will be read again from the saved position by the owner.
func (r *Relay) dropLane(l *lane, why string) {
	if l.dropped {
		return
	}
	l.dropped = true
	delete(r.lanes, l.laneKey)
	r.log.Debug().Str("biz_type", l.bizType).Str("priority", l.priority).Str("reason", why).Msg("lane dropped")
}

func (r *Relay) dropAllLanes() {
	for _, l := range r.lanes {
		r.dropLane(l, "all lanes are read again")
	}
}
