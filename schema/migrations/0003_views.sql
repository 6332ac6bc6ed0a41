-- +goose Up

-- What people and tools read. No view shows payload, headers or result: they may hold secrets. Views run with their
-- owner's rights, so a reader needs no right on the table.

-- Every lane there is: those that relays keep, and those that have tasks but no relay yet.
-- A loose index scan: one probe per lane, however many tasks.
CREATE VIEW {{schema}}.known_lane AS
WITH RECURSIVE found AS (
    (SELECT t.biz_type, t.priority FROM {{schema}}.task AS t ORDER BY t.biz_type, t.priority LIMIT 1)
    UNION ALL
    SELECT n.biz_type, n.priority
    FROM found AS f
    CROSS JOIN LATERAL (
        SELECT t.biz_type, t.priority FROM {{schema}}.task AS t
        WHERE (t.biz_type, t.priority) > (f.biz_type, f.priority)
        ORDER BY t.biz_type, t.priority LIMIT 1
    ) AS n
)
SELECT biz_type, priority,
    coalesce(l.snapshot, '1:1:') AS snapshot, coalesce(l.at, '-infinity') AS at,
    -- What comes next: the page key of the open round, if there is one.
    coalesce(l.key_xid, '0') AS key_xid, coalesce(l.key_id, -1) AS key_id,
    coalesce(l.key_run_at, l.at, '-infinity') AS key_run_at, coalesce(l.key_run_id, 9223372036854775807) AS key_run_id,
    coalesce(l.low_snapshot, '1:1:') AS low_snapshot, coalesce(l.low_at, '-infinity') AS low_at,
    CASE WHEN l.owner_until > now() THEN l.owner END AS relay,
    b.paused_at,
    (SELECT count(*) FROM {{schema}}.worker AS w
     WHERE w.seen_at > now() - interval '1 minute' AND biz_type = ANY (w.biz_types))::int AS live_workers
FROM found
FULL JOIN {{schema}}.lane AS l USING (biz_type, priority)
LEFT JOIN {{schema}}.biz_type AS b USING (biz_type);

-- One row per task. delivery tells where an unfinished task is on its way.
CREATE VIEW {{schema}}.task_view AS
SELECT t.id, t.biz_type, t.biz_id, t.priority, t.ordering_key, t.status, t.phase,
    t.attempt, coalesce(t.max_attempts, b.max_attempts) AS max_attempts, -- null: the worker's own limit
    coalesce(t.next_attempt_at, t.run_at, t.created_at) AS due_at,
    CASE
        WHEN t.finished_at IS NOT NULL THEN NULL
        WHEN t.status = 'running' THEN 'published'
        WHEN t.status = 'blocked' THEN 'blocked'
        WHEN b.paused_at IS NOT NULL THEN 'paused'
        WHEN b.known_by IS NULL THEN 'unknown type'
        -- Once its message is out, or parked as a nak, the next look lies ten minutes and more behind the due time. A row put
        -- on the list by the reconciler has no due time of its own: there a look behind the take's 30 s tells.
        WHEN t.republish_at IS NOT NULL THEN
            CASE WHEN CASE WHEN t.next_attempt_at IS NOT NULL THEN t.republish_at >= t.next_attempt_at + interval '10 minutes'
                          ELSE t.republish_at > now() + interval '30 seconds' END THEN 'published' ELSE 'on work list' END
        WHEN t.status = 'retrying' OR t.generation > 0 THEN 'published'
        -- Read from the lane's position; in an open round the page key tells how much of it is out.
        WHEN CASE WHEN pg_visible_in_snapshot(t.xid, l.snapshot)
                THEN t.run_at IS NULL OR t.run_at <= l.at OR (t.run_at, t.id) <= (l.key_run_at, l.key_run_id)
                ELSE (t.xid, t.id) <= (l.key_xid, l.key_id) AND pg_visible_in_snapshot(t.xid, l.round_snapshot)
                    AND (t.run_at IS NULL OR t.run_at <= l.round_at) END THEN 'published'
        ELSE 'waiting for relay'
    END AS delivery,
    t.generation, t.lease_owner, t.lease_until, t.last_error, t.error_class,
    t.compensation, t.compensations, t.cause, t.execute_attempts, t.dead_reason,
    t.created_at, t.run_at, t.next_attempt_at, t.republish_at, t.first_started_at, t.started_at, t.finished_at,
    t.dead_at, t.dead_lettered_at, t.cancel_requested_at, t.expires_at, t.parent_id
FROM {{schema}}.task AS t
LEFT JOIN {{schema}}.biz_type AS b ON b.biz_type = t.biz_type
LEFT JOIN {{schema}}.lane AS l ON l.biz_type = t.biz_type AND l.priority = t.priority;

-- One row per attempt.
CREATE VIEW {{schema}}.attempt_view AS
SELECT a.task_id, a.biz_type, a.biz_id, a.phase, a.generation, a.attempt, a.outcome, a.worker,
    a.started_at, a.finished_at,
    greatest(round(extract(epoch FROM a.finished_at - a.started_at) * 1000, 1), 0) AS duration_ms,
    a.error_class, a.error, a.stack, a.lease_token
FROM {{schema}}.task_attempt AS a;

-- Dead tasks, with what the person who looks at them needs next.
CREATE VIEW {{schema}}.dead AS
SELECT t.id, t.biz_type, t.biz_id, t.priority, t.dead_at, t.dead_reason,
    coalesce(t.execute_attempts, t.attempt) AS attempts, t.error_class, t.last_error, t.compensation, t.compensations, t.cause,
    b.title, b.runbook_url, t.dead_lettered_at, t.created_at, t.first_started_at, t.generation
FROM {{schema}}.task AS t
LEFT JOIN {{schema}}.biz_type AS b ON b.biz_type = t.biz_type
WHERE t.dead_at IS NOT NULL;

-- For the newest dead of all types; task_dead finds those of one type.
CREATE INDEX task_dead_at ON {{schema}}.task (dead_at) WHERE dead_at IS NOT NULL;

-- Per lane: what is due and not yet published, counted up to 10,000 per source so that the view stays fast when the
-- relay is down and millions wait. Reads forward from the lane's position and the work list only. In a function, because
-- only there settings hold the plan: as a plain view it read the whole backlog to sort it, and compiled itself first
-- [660 ms of JIT for 5 ms of work].
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.lag_now()
RETURNS TABLE (biz_type text, priority text, backlog bigint, on_work_list bigint, oldest_due_age interval,
    paused_at timestamptz, live_workers int, relay text)
LANGUAGE sql STABLE SECURITY DEFINER ROWS 20
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
BEGIN ATOMIC
SELECT k.biz_type, k.priority,
    listed.n + fresh.n + scheduled.n AS backlog, -- 10000 and more: at least that many
    listed.n AS on_work_list,
    greatest(now() - least(listed.oldest, fresh.oldest, scheduled.oldest), interval '0') AS oldest_due_age,
    k.paused_at, k.live_workers, k.relay
FROM {{schema}}.known_lane AS k
CROSS JOIN LATERAL (
    SELECT count(*) AS n, min(w.republish_at) AS oldest
    FROM (
        SELECT t.republish_at FROM {{schema}}.task AS t
        WHERE t.biz_type = k.biz_type AND t.priority = k.priority AND t.republish_at <= now()
        ORDER BY t.republish_at LIMIT 10000
    ) AS w
) AS listed
CROSS JOIN LATERAL (
    SELECT count(*) AS n, min(f.due) AS oldest
    FROM (
        -- Transactions that were open when the position was taken, one probe each: = ANY is no ordered index condition before PG 17.
        SELECT r.due
        FROM pg_snapshot_xip(k.snapshot) AS x (xid)
        CROSS JOIN LATERAL (
            SELECT coalesce(t.run_at, t.created_at) AS due FROM {{schema}}.task AS t
            WHERE t.biz_type = k.biz_type AND t.priority = k.priority
                -- A range, not an equality: with that the planner may walk the primary key.
                AND (t.xid, t.id) > (x.xid, CASE WHEN x.xid = k.key_xid THEN k.key_id ELSE -1 END) AND t.xid <= x.xid
                AND t.status = 'pending' AND t.generation = 0 AND t.republish_at IS NULL AND (t.run_at IS NULL OR t.run_at <= now())
            ORDER BY t.xid, t.id LIMIT 10000
        ) AS r
        WHERE x.xid >= k.key_xid
        UNION ALL
        (SELECT coalesce(t.run_at, t.created_at)
         FROM {{schema}}.task AS t
         WHERE t.biz_type = k.biz_type AND t.priority = k.priority
             AND (t.xid, t.id) > (greatest(k.key_xid, pg_snapshot_xmax(k.snapshot)),
                                  CASE WHEN k.key_xid >= pg_snapshot_xmax(k.snapshot) THEN k.key_id ELSE -1 END)
             AND t.status = 'pending' AND t.generation = 0 AND t.republish_at IS NULL AND (t.run_at IS NULL OR t.run_at <= now())
         ORDER BY t.xid, t.id LIMIT 10000)
    ) AS f
) AS fresh
CROSS JOIN LATERAL (
    SELECT count(*) AS n, min(s.run_at) AS oldest
    FROM (
        SELECT t.run_at FROM {{schema}}.task AS t
        WHERE t.biz_type = k.biz_type AND t.priority = k.priority AND t.run_at IS NOT NULL
            AND (t.run_at, t.id) > (k.key_run_at, k.key_run_id) AND t.run_at <= now()
            AND pg_visible_in_snapshot(t.xid, k.snapshot)
            AND t.status = 'pending' AND t.generation = 0 AND t.republish_at IS NULL
        ORDER BY t.run_at, t.id LIMIT 10000
    ) AS s
) AS scheduled;
END;
-- +goose StatementEnd

CREATE VIEW {{schema}}.lag AS SELECT * FROM {{schema}}.lag_now();

-- Tasks that should have moved and have not, with the reason. Reads the work list, the dead letters that are not out,
-- and the lanes from their low-water on: below it every task is finished or on the work list.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.stuck_now()
RETURNS TABLE (id bigint, biz_type text, biz_id text, priority text, status text, phase text, attempt int, due_at timestamptz,
    delivery text, reason text, since timestamptz, lease_owner text, last_error text)
LANGUAGE sql STABLE SECURITY DEFINER ROWS 20
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off
BEGIN ATOMIC
SELECT s.id, s.biz_type, s.biz_id, s.priority, s.status, s.phase, s.attempt, s.due_at, s.delivery, s.reason, s.since, s.lease_owner, s.last_error
FROM (
    SELECT v.*,
        CASE
            WHEN v.status = 'blocked' OR v.delivery = 'paused' THEN NULL
            WHEN v.status = 'running' THEN
                CASE WHEN v.lease_until < now() - interval '1 minute' THEN 'its worker is gone and no other has taken it over' END
            WHEN v.due_at > now() - interval '1 minute' THEN NULL
            WHEN k.live_workers = 0 THEN 'no live worker knows its biz type'
            WHEN v.delivery = 'on work list' AND v.republish_at < now() - interval '1 minute' OR v.delivery = 'waiting for relay' THEN 'no relay has published it'
            WHEN v.due_at < now() - interval '10 minutes' THEN 'published, but no worker has started it'
        END AS reason,
        CASE WHEN v.status = 'running' THEN v.lease_until ELSE v.due_at END AS since
    FROM {{schema}}.known_lane AS k
    CROSS JOIN LATERAL (
        SELECT t.id FROM {{schema}}.task AS t
        WHERE t.biz_type = k.biz_type AND t.priority = k.priority AND t.xid >= pg_snapshot_xmax(k.low_snapshot) AND t.finished_at IS NULL
        UNION
        SELECT t.id FROM pg_snapshot_xip(k.low_snapshot) AS x (xid)
        JOIN {{schema}}.task AS t ON t.biz_type = k.biz_type AND t.priority = k.priority AND t.xid = x.xid AND t.finished_at IS NULL
        UNION
        SELECT t.id FROM {{schema}}.task AS t
        WHERE t.biz_type = k.biz_type AND t.priority = k.priority AND t.run_at > k.low_at AND t.run_at <= now() AND t.finished_at IS NULL
        UNION
        SELECT t.id FROM {{schema}}.task AS t
        WHERE t.biz_type = k.biz_type AND t.priority = k.priority AND t.republish_at IS NOT NULL AND t.finished_at IS NULL
    ) AS c
    JOIN {{schema}}.task_view AS v ON v.id = c.id
    UNION ALL
    SELECT v.*, 'its dead letter is not published', v.dead_at
    FROM {{schema}}.task_view AS v
    WHERE v.dead_at < now() - interval '1 minute' AND v.dead_lettered_at IS NULL
) AS s
WHERE s.reason IS NOT NULL;
END;
-- +goose StatementEnd

CREATE VIEW {{schema}}.stuck AS SELECT * FROM {{schema}}.stuck_now();

REVOKE ALL ON FUNCTION {{schema}}.lag_now(), {{schema}}.stuck_now() FROM PUBLIC;
