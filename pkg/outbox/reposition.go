package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/taskrelay/taskrelay/internal/pg"
)

// Transaction ids mean something only in the cluster that gave them out. After a dump and restore, or when rows were
// copied in from elsewhere, a position or a row's xid may lie ahead of everything: such rows would be in no round for
// months. Repositioning gives them a place again.

// Repositioned says what Reposition did.
type Repositioned struct {
	Cluster     bool  `json:"cluster"`      // another cluster than last time: all lanes begin anew
	ForeignRows bool  `json:"foreign_rows"` // rows with transaction ids of another cluster were found
	Rows        int64 `json:"rows"`         // rows that were given a new place
}

const clusterSQL = `-- taskrelay: check cluster
SELECT i.system_identifier,
  EXISTS (SELECT FROM {{schema}}.lane AS l CROSS JOIN LATERAL (
    SELECT FROM {{schema}}.task AS t WHERE t.biz_type = l.biz_type AND t.priority = l.priority
      AND t.xid >= pg_snapshot_xmax(pg_current_snapshot()) LIMIT 1) AS f)
FROM {{schema}}.installation AS i`

const identifierSQL = `-- taskrelay: read system identifier
SELECT c.system_identifier FROM pg_control_system() AS c`

// repositionSQL does one range of ids: pending rows that were never handed back become new to every lane, all other
// unfinished ones go on the work list, and no row keeps an xid that this cluster has not given out yet.
const repositionSQL = `-- taskrelay: reposition
WITH page AS (
  SELECT t.id FROM {{schema}}.task AS t WHERE t.id > $1::bigint ORDER BY t.id LIMIT 5000
), put AS (
  UPDATE {{schema}}.task AS t SET
    xid = CASE WHEN t.xid >= pg_snapshot_xmax(pg_current_snapshot())
        OR t.status = 'pending' AND t.generation = 0 AND t.republish_at IS NULL THEN pg_current_xact_id() ELSE t.xid END,
    republish_at = CASE
      WHEN t.finished_at IS NOT NULL OR t.republish_at IS NOT NULL OR t.status = 'pending' AND t.generation = 0 THEN t.republish_at
      WHEN t.status = 'running' AND t.lease_until > now() THEN t.lease_until
      ELSE greatest(now(), coalesce(t.next_attempt_at, t.run_at)) END
  FROM page AS p
  WHERE t.id = p.id AND (t.xid >= pg_snapshot_xmax(pg_current_snapshot()) OR $2::boolean AND t.finished_at IS NULL)
  RETURNING 1
)
SELECT (SELECT max(p.id) FROM page AS p), (SELECT count(*) FROM put)`

// restartLanesSQL begins each lane at this moment: what repositioning gives a new transaction id lies behind it, the
// rest goes on the work list. [From the very start a read would walk past all finished rows in one statement: 30 s for
// 10 million.] Low-water begins at the start, for its scan goes page by page.
const restartLanesSQL = `-- taskrelay: restart lanes
UPDATE {{schema}}.lane AS l SET snapshot = pg_current_snapshot(), at = now(), round_snapshot = NULL, round_at = NULL,
  key_xid = NULL, key_id = NULL, key_run_at = NULL, key_run_id = NULL, low_snapshot = '1:1:', low_at = '-infinity',
  mark_snapshot = NULL, mark_at = NULL, mark_seq = NULL, owner = NULL, owner_until = NULL, fence = l.fence + 1`

const adoptClusterSQL = `-- taskrelay: adopt cluster
UPDATE {{schema}}.installation AS i SET system_identifier = $1::bigint`

// Reposition makes an installation whole after its rows came from another cluster: a restore, a copy, a logical
// replica. A relay does it by itself at start-up and every hour; force is for after a restore in place, which nothing
// shows. It is safe while relays and workers run, and to repeat: the worst are messages that the claim drops.
func (s Schema) Reposition(ctx context.Context, pool *pgxpool.Pool, force bool) (Repositioned, error) {
	return s.reposition(ctx, pool, force, func(context.Context) (func(), error) { return func() {}, nil }, func() {})
}

// reposition asks for a place before each statement, and calls turned after each page: on a large table it takes its time.
func (s Schema) reposition(ctx context.Context, pool *pgxpool.Pool, force bool, takePlace func(context.Context) (func(), error),
	turned func()) (Repositioned, error) {
	if err := s.Validate(); err != nil {
		return Repositioned{}, err
	}
	// Bounded each: a connection that hangs must not hold the relay for ever.
	query := func(sql string, args []any, scan func(pgx.Rows) error) error {
		leave, err := takePlace(ctx)
		if err != nil {
			return err
		}
		defer leave()
		ctx, cancel := context.WithTimeout(ctx, queryTimeout)
		defer cancel()
		return pg.Query(ctx, pool, s.Render(sql), args, scan)
	}
	nothing := func(pgx.Rows) error { return nil }
	var did Repositioned
	var known, actual *int64
	err := query(clusterSQL, nil, func(rows pgx.Rows) error { return rows.Scan(&known, &did.ForeignRows) })
	if err != nil {
		return did, fmt.Errorf("reposition: %w", err)
	}
	err = query(identifierSQL, nil, func(rows pgx.Rows) error { return rows.Scan(&actual) })
	if err != nil && pg.Code(err) != "42501" { // not everybody may read it; then only the rows can tell
		return did, fmt.Errorf("reposition: %w", err)
	}
	did.Cluster = force || known != nil && actual != nil && *known != *actual
	if known == nil && actual != nil {
		if err := query(adoptClusterSQL, []any{*actual}, nothing); err != nil {
			return did, fmt.Errorf("reposition: %w", err)
		}
	}
	if !did.Cluster && !did.ForeignRows {
		return did, nil
	}
	// First, for a row's new xid must lie beyond what the lanes say they have read.
	if did.Cluster {
		if err := query(restartLanesSQL, nil, nothing); err != nil {
			return did, fmt.Errorf("reposition: restart lanes: %w", err)
		}
	}
	for after := int64(-1 << 62); ; {
		var last *int64
		var n int64
		err := query(repositionSQL, []any{after, did.Cluster}, func(rows pgx.Rows) error { return rows.Scan(&last, &n) })
		if err != nil {
			return did, fmt.Errorf("reposition rows after %d: %w", after, err)
		}
		did.Rows += n
		if last == nil {
			break
		}
		after = *last
		turned()
	}
	if did.Cluster && actual != nil { // only now is it done: until then a relay that starts does it again
		if err := query(adoptClusterSQL, []any{*actual}, nothing); err != nil {
			return did, fmt.Errorf("reposition: %w", err)
		}
	}
	return did, nil
}

// reposition is Schema.Reposition for a relay, with a log line when it did something.
func (r *Relay) reposition(ctx context.Context) error {
	did, err := r.cfg.Schema.reposition(ctx, r.pool, false, r.takePlace, func() { r.turned(loopReconcile) })
	if err != nil {
		return err
	}
	if did.Cluster || did.ForeignRows {
		r.log.Warn().Bool("other_cluster", did.Cluster).Bool("foreign_rows", did.ForeignRows).Int64("count", did.Rows).
			Msg("rows came from another cluster, they were given a new place")
	}
	return nil
}
