package outbox

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
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
	for _, p := range l.pages {
		p.sent.left(why)
	}
	r.log.Debug().Str("biz_type", l.bizType).Str("priority", l.priority).Str("reason", why).Msg("lane dropped")
}

func (r *Relay) dropAllLanes() {
	for _, l := range r.lanes {
		r.dropLane(l, "all lanes are read again")
	}
}
