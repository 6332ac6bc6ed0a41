package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/taskrelay/taskrelay/internal/pg"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/schema"
)

// lookLimit is how many rows and messages of a lane are looked at.
const lookLimit = 10_000

// A row is an unfinished task.
type row struct {
	id           int64
	generation   int
	createdUS    int64
	live         bool // runs under a lease that holds
	message      bool // a message of it should be in the stream
	lookInMS     *int64
	owner        string
	runningForMS int64
}

type laneKey struct{ bizType, priority string }

// A table looks at the rows of one installation.
type table struct {
	pool   *pgxpool.Pool
	schema outbox.Schema
}

func (t table) query(ctx context.Context, sql string, args []any, scan func(pgx.Rows) error) error {
	return pg.Query(ctx, t.pool, t.schema.Render(sql), args, scan)
}

const serverSQL = `-- taskrelay doctor: server
SELECT current_setting('server_version'), clock_timestamp(), pg_is_in_recovery(), i.id::text, i.losses, i.stream_created, i.dead_stream_created,
  i.system_identifier,
  (SELECT count(*) FROM (SELECT FROM {{schema}}.task AS t WHERE t.dead_at IS NOT NULL AND t.dead_lettered_at IS NOT NULL LIMIT $1::int) AS d)
FROM {{schema}}.installation AS i`

const incarnationSQL = `-- taskrelay doctor: incarnation
SELECT n.id::text, n.created_at FROM {{schema}}.incarnation AS n`

const clusterSQL = `-- taskrelay doctor: cluster
SELECT c.system_identifier FROM pg_control_system() AS c`

const foreignRowsSQL = `-- taskrelay doctor: rows of another cluster
SELECT EXISTS (SELECT FROM {{schema}}.lane AS l CROSS JOIN LATERAL (
  SELECT FROM {{schema}}.task AS t WHERE t.biz_type = l.biz_type AND t.priority = l.priority
    AND t.xid >= pg_snapshot_xmax(pg_current_snapshot()) LIMIT 1) AS f)`

// server fills in what Postgres says of itself and reports what is wrong with that.
func (t table) server(ctx context.Context, r *Report) error {
	p := &r.Postgres
	steps, err := schema.Status(ctx, t.pool, schema.Options{Schema: t.schema.String()})
	if err != nil {
		return err
	}
	for _, m := range steps {
		if m.Applied() {
			p.SchemaVersion = max(p.SchemaVersion, m.Version)
		}
	}
	if p.SchemaVersion < schema.Version {
		return schema.Validate(ctx, t.pool, schema.Options{Schema: t.schema.String()})
	}
	var clock time.Time
	var standby bool
	var known *int64
	sent := time.Now()
	err = t.query(ctx, serverSQL, []any{lookLimit}, func(rows pgx.Rows) error {
		return rows.Scan(&p.Version, &clock, &standby, &p.Installation, &p.Losses, &p.streamCreated, &p.deadStreamCreated, &known, &p.deadLettered)
	})
	if err != nil {
		return err
	}
	trip := time.Since(sent)
	r.installation = p.Installation
	ahead := sent.Add(trip / 2).Sub(clock)
	p.ClockAheadMS = ahead.Milliseconds()
	if ahead.Abs() > trip/2+time.Second {
		r.add(Finding{Level: Notice, Code: "clock", Where: "this machine",
			What:  fmt.Sprintf("its clock is %v off Postgres's", ahead.Round(time.Millisecond)),
			Relay: "nothing: Postgres's clock alone decides what is due",
			You:   "set the clock, so that times in logs agree"})
	}
	if standby {
		r.add(Finding{Level: Problem, Code: "standby", Where: "postgres", What: "this server is a standby",
			Relay: "waits until it is promoted or the address leads to the primary", You: "point TASKRELAY_DATABASE_URL to the primary"})
	}
	err = t.query(ctx, incarnationSQL, nil, func(rows pgx.Rows) error { return rows.Scan(&p.Incarnation, &p.Since) })
	if code := pg.Code(err); err != nil && code != "42501" && code != "0A000" { // may not read it, or in recovery
		return err
	}
	var actual *int64
	err = t.query(ctx, clusterSQL, nil, func(rows pgx.Rows) error { return rows.Scan(&actual) })
	if err != nil && pg.Code(err) != "42501" {
		return err
	}
	var foreign bool
	if err := t.query(ctx, foreignRowsSQL, nil, func(rows pgx.Rows) error { return rows.Scan(&foreign) }); err != nil {
		return err
	}
	if other := known != nil && actual != nil && *known != *actual; other || foreign {
		r.add(Finding{Level: Problem, Code: "rows_of_another_cluster", Where: "postgres",
			What:  "rows have transaction ids of another cluster (a restore, a copy): no relay would come to them for months",
			Relay: "gives them a new place when it starts, and every hour",
			You:   `run "taskrelay reposition", or this command with --fix`,
			fix:   &fix{kind: fixReposition}})
	}
	return nil
}

const lanesSQL = `-- taskrelay doctor: lanes
SELECT g.biz_type, g.priority, g.backlog, coalesce(extract(epoch FROM g.oldest_due_age) * 1000, 0)::bigint, g.paused_at IS NOT NULL,
  g.live_workers, coalesce(g.relay, ''), coalesce(l.losses, 0), coalesce(l.max_seq, 0)
FROM {{schema}}.lag AS g LEFT JOIN {{schema}}.lane AS l ON l.biz_type = g.biz_type AND l.priority = g.priority
ORDER BY g.biz_type, g.priority`

const lettersSQL = `-- taskrelay doctor: letters
SELECT d.biz_type, d.priority, count(*), (extract(epoch FROM now() - min(d.dead_at)) * 1000)::bigint
FROM (SELECT t.biz_type, t.priority, t.dead_at FROM {{schema}}.task AS t
  WHERE t.dead_at IS NOT NULL AND t.dead_lettered_at IS NULL ORDER BY t.dead_at LIMIT $1::int) AS d
GROUP BY d.biz_type, d.priority`

// lanes lists all lanes with what is to be published of them.
func (t table) lanes(ctx context.Context, r *Report) error {
	at := make(map[laneKey]int)
	err := t.query(ctx, lanesSQL, nil, func(rows pgx.Rows) error {
		var l Lane
		err := rows.Scan(&l.BizType, &l.Priority, &l.Due, &l.OldestDue, &l.Paused, &l.LiveWorkers, &l.Relay, &l.losses, &l.maxSeq)
		at[laneKey{l.BizType, l.Priority}] = len(r.Lanes)
		r.Lanes = append(r.Lanes, l)
		return err
	})
	if err != nil {
		return err
	}
	return t.query(ctx, lettersSQL, []any{lookLimit}, func(rows pgx.Rows) error {
		var k laneKey
		var n, oldest int64
		if err := rows.Scan(&k.bizType, &k.priority, &n, &oldest); err != nil {
			return err
		}
		if i, ok := at[k]; ok {
			r.Lanes[i].Letters = n
		}
		if oldest > time.Minute.Milliseconds() {
			r.add(Finding{Level: Problem, Code: "letters_late", Where: k.String(),
				What:  fmt.Sprintf("%d dead letters are not out, the oldest for %v", n, ago(oldest)),
				Relay: "publishes them as soon as it has the lane and the dead stream takes them",
				You:   "see below whether a relay has the lane, and whether the dead stream is there"})
		}
		return nil
	})
}

// openSQL reads the unfinished rows of one lane: those behind its low-water, those that have come due since, and those on
// the work list. Below low-water every row is finished or on the list. The message of a row is out if its lane's saved
// position says so, or if its next look lies ten minutes behind its due time, as after a look that went well.
const openSQL = `-- taskrelay doctor: open rows
SELECT t.id, t.generation, (extract(epoch FROM t.created_at) * 1000000)::bigint, t.status = 'running' AND t.lease_until >= now(),
  CASE
    WHEN t.status = 'running' THEN true
    WHEN t.status = 'blocked' THEN false
    WHEN t.republish_at IS NOT NULL THEN CASE WHEN t.next_attempt_at IS NOT NULL THEN t.republish_at >= t.next_attempt_at + interval '10 minutes'
      ELSE t.republish_at > now() + interval '30 seconds' END
    WHEN t.status = 'retrying' OR t.generation > 0 THEN true
    WHEN pg_visible_in_snapshot(t.xid, k.snapshot)
      THEN t.run_at IS NULL OR t.run_at <= k.at OR (t.run_at, t.id) <= (l.key_run_at, l.key_run_id)
    ELSE (t.xid, t.id) <= (l.key_xid, l.key_id) AND pg_visible_in_snapshot(t.xid, l.round_snapshot)
      AND (t.run_at IS NULL OR t.run_at <= l.round_at)
  END IS TRUE,
  CASE WHEN t.republish_at IS NOT NULL
    THEN (extract(epoch FROM least(t.republish_at, now() + interval '10 years') - now()) * 1000)::bigint END,
  CASE WHEN t.status = 'running' THEN coalesce(t.lease_owner, 'unknown') ELSE '' END,
  CASE WHEN t.status = 'running' THEN coalesce((extract(epoch FROM now() - t.started_at) * 1000)::bigint, 0) ELSE 0 END
FROM {{schema}}.known_lane AS k
LEFT JOIN {{schema}}.lane AS l ON l.biz_type = k.biz_type AND l.priority = k.priority
CROSS JOIN LATERAL (
  SELECT u.id FROM (
    (SELECT t.id FROM pg_snapshot_xip(k.low_snapshot) AS x (xid)
     JOIN {{schema}}.task AS t ON t.biz_type = k.biz_type AND t.priority = k.priority AND t.xid = x.xid AND t.finished_at IS NULL LIMIT $3::int)
    UNION
    (SELECT t.id FROM {{schema}}.task AS t
     WHERE t.biz_type = k.biz_type AND t.priority = k.priority AND t.republish_at IS NOT NULL AND t.finished_at IS NULL LIMIT $3::int)
    UNION
    (SELECT t.id FROM {{schema}}.task AS t
     WHERE t.biz_type = k.biz_type AND t.priority = k.priority AND t.run_at > k.low_at AND t.run_at <= now() AND t.finished_at IS NULL LIMIT $3::int)
    UNION
    (SELECT t.id FROM {{schema}}.task AS t
     WHERE t.biz_type = k.biz_type AND t.priority = k.priority AND t.xid >= pg_snapshot_xmax(k.low_snapshot) AND t.finished_at IS NULL
     ORDER BY t.xid, t.id LIMIT $3::int)
  ) AS u LIMIT $3::int
) AS c
JOIN {{schema}}.task AS t ON t.id = c.id
WHERE k.biz_type = $1::text AND k.priority = $2::text`

// open reads the unfinished rows of a lane; more: there are others.
func (t table) open(ctx context.Context, l *Lane) (rows map[int64]row, more bool, err error) {
	rows = make(map[int64]row)
	err = t.query(ctx, openSQL, []any{l.BizType, l.Priority, lookLimit}, func(rs pgx.Rows) error {
		var o row
		err := rs.Scan(&o.id, &o.generation, &o.createdUS, &o.live, &o.message, &o.lookInMS, &o.owner, &o.runningForMS)
		rows[o.id] = o
		return err
	})
	return rows, len(rows) >= lookLimit, err
}

const stillSQL = `-- taskrelay doctor: still open
SELECT t.id, t.generation, t.status = 'running' AND t.lease_until >= now(), t.finished_at IS NOT NULL
FROM {{schema}}.task AS t WHERE t.id = ANY ($1::bigint[])`

// A state is what a row is later.
type state struct {
	generation     int
	live, finished bool
}

func (t table) states(ctx context.Context, ids []int64) (map[int64]state, error) {
	got := make(map[int64]state)
	err := t.query(ctx, stillSQL, []any{ids}, func(rows pgx.Rows) error {
		var id int64
		var s state
		err := rows.Scan(&id, &s.generation, &s.live, &s.finished)
		got[id] = s
		return err
	})
	return got, err
}

const relaysSQL = `-- taskrelay doctor: relays
SELECT p.name, p.host, p.pid, p.version, p.started_at, (extract(epoch FROM now() - p.seen_at) * 1000)::bigint, p.biz_types, p.lanes, 0
FROM {{schema}}.relay AS p ORDER BY p.name`

const workersSQL = `-- taskrelay doctor: workers
SELECT w.name, w.host, w.pid, w.version, w.started_at, (extract(epoch FROM now() - w.seen_at) * 1000)::bigint, w.biz_types, 0, w.running
FROM {{schema}}.worker AS w ORDER BY w.name`

func (t table) members(ctx context.Context, sql string) (all []Member, err error) {
	err = t.query(ctx, sql, nil, func(rows pgx.Rows) error {
		var m Member
		err := rows.Scan(&m.Name, &m.Host, &m.PID, &m.Version, &m.StartedAt, &m.SilentMS, &m.BizTypes, &m.Lanes, &m.Running)
		m.StartedAt = m.StartedAt.UTC()
		all = append(all, m)
		return err
	})
	return all, err
}

func (k laneKey) String() string { return k.bizType + " " + k.priority }

// ago is a duration of so many milliseconds, as people read it.
func ago(ms int64) time.Duration {
	d := time.Duration(ms) * time.Millisecond
	if d > time.Minute {
		return d.Round(time.Second)
	}
	return d.Round(100 * time.Millisecond)
}
