-- +goose NO TRANSACTION
-- +goose Up

-- The index of the relay's reads serves only statements that say something of xid. It ends in id, and while the table is
-- small or its statistics are old the planner finds rows by id in it as cheaply as in the primary key: a plan made then
-- and kept read all of it for each row. Now the primary key is the one index in which a row can be found by id, and
-- claim and settle may keep their plans. (That xid is never null is not known to the planner here; "xid >= ..." implies it.)
DROP INDEX CONCURRENTLY IF EXISTS {{schema}}.task_lane_by_xid; -- of a migration that was cut off
CREATE INDEX CONCURRENTLY task_lane_by_xid ON {{schema}}.task (biz_type, priority, xid, id) WHERE xid IS NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS {{schema}}.task_lane;
ALTER INDEX {{schema}}.task_lane_by_xid RENAME TO task_lane;

-- As before, but for what they say of xid.
CREATE OR REPLACE VIEW {{schema}}.known_lane AS
WITH RECURSIVE found AS (
    (SELECT t.biz_type, t.priority FROM {{schema}}.task AS t WHERE t.xid >= '0' ORDER BY t.biz_type, t.priority LIMIT 1)
    UNION ALL
    SELECT n.biz_type, n.priority
    FROM found AS f
    CROSS JOIN LATERAL (
        SELECT t.biz_type, t.priority FROM {{schema}}.task AS t
        WHERE (t.biz_type, t.priority) > (f.biz_type, f.priority) AND t.xid >= '0'
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION {{schema}}.lag_now()
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
             AND t.xid < pg_snapshot_xmax(pg_current_snapshot()) -- no bound, but the index asks for a word on xid
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
