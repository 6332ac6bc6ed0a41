package outbox

import (
	"context"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// Lanes are found in the table and shared among the relays that are alive.

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
