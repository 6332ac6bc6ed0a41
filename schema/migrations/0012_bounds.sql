-- +goose Up

-- No statement of a bulk looks at more than some thousand rows, however many the table has; retention knows what it will
-- have to come back for; and times that were written before Postgres's clock was set back hold nothing up.

ALTER TABLE {{schema}}.bulk ADD COLUMN at_least boolean NOT NULL DEFAULT false; -- expected is only as far as it was counted

-- Whether a task is one that the filter means, but for its state and age.
CREATE FUNCTION {{schema}}.bulk_finds(filter jsonb, biz_type text, error_class text, dead_reason text, error text) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN (filter ->> 'type' IS NULL OR biz_type = filter ->> 'type')
    AND (filter ->> 'error_class' IS NULL OR error_class = filter ->> 'error_class')
    AND (filter ->> 'dead_reason' IS NULL OR dead_reason = filter ->> 'dead_reason')
    AND (filter ->> 'error' IS NULL OR strpos(error, filter ->> 'error') > 0)
    AND (filter ->> 'group' IS NULL OR {{schema}}.error_group(biz_type, error_class, error) = filter ->> 'group');

-- The next n tasks of a normal filter behind a cursor, from at most 10,000 rows: a filter that finds one among millions
-- goes through them in as many calls as that takes. Dead tasks come from their own index, in the order of their death: by id
-- the whole table would be read for some thousand of them. All others come by id, upwards, or downwards for a count.
-- ended: there is nothing behind these. Only along an index: without statistics the planner read all dead tasks of a type for
-- fifty of them, and sorted them [600,000 rows: 670 ms against 6 a batch].
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.bulk_page(filter jsonb, as_of timestamptz, last_id bigint, cursor_at timestamptz, cursor_id bigint, n int, down boolean)
RETURNS TABLE (ids bigint[], next_at timestamptz, next_id bigint, ended boolean)
LANGUAGE plpgsql STABLE ROWS 1 SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $$
#variable_conflict use_column
DECLARE
    span     constant int := 10000;
    looked   int;
    the_type text := filter ->> 'type';
    states   text[] := ARRAY(SELECT jsonb_array_elements_text(filter -> 'status'));
    to_at    timestamptz := as_of - coalesce((filter ->> 'older_than')::interval, '0');
    from_at  timestamptz := coalesce(as_of - (filter ->> 'newer_than')::interval, '-infinity');
BEGIN
    next_at := bulk_page.cursor_at;
    IF states = '{dead}' THEN
        SELECT array_agg(f.id ORDER BY f.dead_at, f.id), coalesce(max(f.dead_at), next_at) INTO ids, next_at
        FROM (
            SELECT w.id, w.dead_at
            FROM (
                SELECT t.id, t.dead_at, t.biz_type, t.error_class, t.dead_reason, t.last_error FROM {{schema}}.task AS t
                WHERE t.dead_at IS NOT NULL AND t.status = 'dead'
                    AND t.dead_at >= greatest(bulk_page.cursor_at, from_at) AND (t.dead_at, t.id) > (bulk_page.cursor_at, bulk_page.cursor_id)
                    AND t.dead_at <= to_at AND (the_type IS NULL OR t.biz_type = the_type COLLATE "C")
                ORDER BY t.dead_at, t.id LIMIT span
            ) AS w
            WHERE {{schema}}.bulk_finds(bulk_page.filter, w.biz_type, w.error_class, w.dead_reason, w.last_error)
            ORDER BY w.dead_at, w.id LIMIT n
        ) AS f;
        IF cardinality(ids) < n OR ids IS NULL THEN
            SELECT coalesce(max(w.dead_at), next_at), (array_agg(w.id ORDER BY w.dead_at DESC, w.id DESC))[1], count(*) INTO next_at, next_id, looked
            FROM (
                SELECT t.id, t.dead_at FROM {{schema}}.task AS t
                WHERE t.dead_at IS NOT NULL AND t.status = 'dead'
                    AND t.dead_at >= greatest(bulk_page.cursor_at, from_at) AND (t.dead_at, t.id) > (bulk_page.cursor_at, bulk_page.cursor_id)
                    AND t.dead_at <= to_at AND (the_type IS NULL OR t.biz_type = the_type COLLATE "C")
                ORDER BY t.dead_at, t.id LIMIT span
            ) AS w;
        END IF;
    ELSIF NOT down THEN
        SELECT array_agg(f.id ORDER BY f.id) INTO ids
        FROM (
            SELECT w.id
            FROM (
                SELECT t.id, t.status, t.biz_type, t.error_class, t.dead_reason, t.last_error, coalesce(t.finished_at, t.created_at) AS since
                FROM {{schema}}.task AS t
                WHERE t.id > bulk_page.cursor_id AND t.id <= bulk_page.last_id
                ORDER BY t.id LIMIT span
            ) AS w
            WHERE w.status = ANY (states) AND w.since BETWEEN from_at AND to_at
                AND {{schema}}.bulk_finds(bulk_page.filter, w.biz_type, w.error_class, w.dead_reason, w.last_error)
            ORDER BY w.id LIMIT n
        ) AS f;
        IF cardinality(ids) < n OR ids IS NULL THEN
            SELECT max(w.id), count(*) INTO next_id, looked
            FROM (SELECT t.id FROM {{schema}}.task AS t WHERE t.id > bulk_page.cursor_id AND t.id <= bulk_page.last_id ORDER BY t.id LIMIT span) AS w;
        END IF;
    ELSE
        SELECT array_agg(f.id ORDER BY f.id DESC) INTO ids
        FROM (
            SELECT w.id
            FROM (
                SELECT t.id, t.status, t.biz_type, t.error_class, t.dead_reason, t.last_error, coalesce(t.finished_at, t.created_at) AS since
                FROM {{schema}}.task AS t
                WHERE t.id < bulk_page.cursor_id
                ORDER BY t.id DESC LIMIT span
            ) AS w
            WHERE w.status = ANY (states) AND w.since BETWEEN from_at AND to_at
                AND {{schema}}.bulk_finds(bulk_page.filter, w.biz_type, w.error_class, w.dead_reason, w.last_error)
            ORDER BY w.id DESC LIMIT n
        ) AS f;
        IF cardinality(ids) < n OR ids IS NULL THEN
            SELECT min(w.id), count(*) INTO next_id, looked
            FROM (SELECT t.id FROM {{schema}}.task AS t WHERE t.id < bulk_page.cursor_id ORDER BY t.id DESC LIMIT span) AS w;
        END IF;
    END IF;
    ended := coalesce(looked < span, false); -- null: n were found before the end of the rows
    next_id := coalesce(next_id, ids[n], bulk_page.cursor_id);
    RETURN NEXT;
END $$;
-- +goose StatementEnd

-- How many tasks a normal filter finds, and the first of them: counted page by page, until at_most are found or the time
-- is over. complete: these are all. Unfinished tasks are the newest of a table, so what is not dead is counted from the end, and
-- from the beginning where the filter asks for old rows.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.bulk_count(filter jsonb, as_of timestamptz, at_most bigint, within interval)
RETURNS TABLE (matching bigint, sample bigint[], complete boolean)
LANGUAGE plpgsql STABLE ROWS 1 SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    until timestamptz := clock_timestamp() + within;
    down  boolean := filter -> 'status' <> '["dead"]' AND NOT filter ? 'older_than';
    page  record;
BEGIN
    SELECT '-infinity'::timestamptz AS next_at, CASE WHEN down THEN 9223372036854775807 ELSE 0 END AS next_id INTO page;
    matching := 0;
    sample := '{}';
    LOOP
        SELECT * INTO page
        FROM {{schema}}.bulk_page(filter, as_of, 9223372036854775807, page.next_at, page.next_id, least(at_most - matching, 10000)::int, down);
        matching := matching + coalesce(cardinality(page.ids), 0);
        sample := (sample || page.ids)[1:5];
        complete := page.ended;
        EXIT WHEN complete OR matching >= at_most OR clock_timestamp() >= until;
    END LOOP;
    RETURN NEXT;
END $$;
-- +goose StatementEnd

-- How many tasks a bulk would find now, counted up to at_most and for two seconds, and the first of them. complete: these
-- are all there are. Changes nothing.
DROP FUNCTION {{schema}}.preview_bulk(text, jsonb, int); -- made anew for its new column
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.preview_bulk(action text, filter jsonb, at_most int DEFAULT 10000)
RETURNS TABLE (matching bigint, sample bigint[], normal jsonb, complete boolean)
LANGUAGE plpgsql STABLE SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    f jsonb := {{schema}}.bulk_filter(preview_bulk.action, preview_bulk.filter);
BEGIN
    RETURN QUERY
    SELECT c.matching, c.sample, f, c.complete FROM {{schema}}.bulk_count(f, now(), preview_bulk.at_most, interval '2 s') AS c;
END $$;
-- +goose StatementEnd

-- As before, but by pages, and with times that end.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION {{schema}}.bulk_step(relay text, lease interval)
RETURNS TABLE (id bigint, action text, state text, looked int, changed int, wait interval)
LANGUAGE plpgsql SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_custom_plan SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    b        {{schema}}.bulk;
    ahead    boolean;
    room     int;
    n        int;
    found_id bigint[];
    locked   bigint[];
    results  jsonb := '{}';
    finished boolean;
    one      bigint;
BEGIN
    -- No relay takes a bulk for longer than seconds, and none rests for longer than one task takes at its rate: what lies
    -- further ahead was written before Postgres's clock was set back.
    SELECT * INTO b FROM {{schema}}.bulk AS o
    WHERE o.state = 'open' AND (o.owner IS NULL OR o.owner = bulk_step.relay
        OR o.owner_until NOT BETWEEN clock_timestamp() AND clock_timestamp() + interval '1 minute')
    ORDER BY CASE WHEN o.next_at <= clock_timestamp() + make_interval(secs => 60 + 1 / greatest(o.rate, 0.001)) THEN o.next_at ELSE '-infinity' END, o.id
    LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    ahead := b.next_at > clock_timestamp() + make_interval(secs => 60 + 1 / greatest(b.rate, 0.001));
    IF b.next_at > clock_timestamp() AND NOT ahead THEN
        RETURN QUERY SELECT b.id, b.action, b.state, 0, 0, b.next_at - clock_timestamp();
        RETURN;
    END IF;
    IF b.started_at IS NULL AND b.filter -> 'status' = '["dead"]' THEN
        SELECT c.matching, NOT c.complete INTO b.expected, b.at_least
        FROM {{schema}}.bulk_count(b.filter, b.created_at, 1000000, interval '500 ms') AS c;
    END IF;

    n := least(500, greatest(1, ceil(b.rate / 10)));
    b.held_back := 0;
    IF b.action IN ('requeue', 'reset', 'rerun', 'run_now') THEN
        room := least(10000, greatest(20, b.rate / 5)); -- and as many rows are looked at to know
        SELECT count(*) INTO b.held_back
        FROM (SELECT u.task_id FROM {{schema}}.audit AS u WHERE u.bulk_id = b.id AND u.task_id IS NOT NULL ORDER BY u.id DESC LIMIT room) AS u
        JOIN {{schema}}.task AS t ON t.id = u.task_id
        JOIN {{schema}}.biz_type AS y ON y.biz_type = t.biz_type
        WHERE t.status IN ('pending', 'retrying') AND t.next_attempt_at <= now() AND y.paused_at IS NULL
            AND EXISTS (SELECT FROM {{schema}}.worker AS w WHERE w.seen_at > now() - interval '1 minute' AND t.biz_type = ANY (w.biz_types));
        n := least(n, room - b.held_back);
    END IF;
    IF n < 1 THEN
        UPDATE {{schema}}.bulk AS o
        SET owner = bulk_step.relay, owner_until = clock_timestamp() + bulk_step.lease, held_back = b.held_back,
            next_at = clock_timestamp() + interval '100 ms'
        WHERE o.id = b.id;
        RETURN QUERY SELECT b.id, b.action, b.state, 0, 0, interval '100 ms';
        RETURN;
    END IF;
    b.held_back := 0; -- it goes on

    SELECT p.ids, p.next_at, p.next_id, p.ended INTO found_id, b.cursor_at, b.cursor_id, finished
    FROM {{schema}}.bulk_page(b.filter, b.created_at, b.last_id, b.cursor_at, b.cursor_id, n, false) AS p;

    -- A row that somebody holds is not waited for: this transaction holds others, which their workers would wait for.
    locked := ARRAY(SELECT t.id FROM {{schema}}.task AS t WHERE t.id = ANY (found_id) ORDER BY t.id FOR UPDATE SKIP LOCKED);
    BEGIN
        SELECT coalesce(jsonb_object_agg(c.why, c.n), '{}') INTO results FROM (
            SELECT CASE WHEN o.changed THEN '' ELSE o.why_not END AS why, count(*) AS n
            FROM {{schema}}.operate(b.action, locked, b.reason, b.options, b.actor, b.id) AS o GROUP BY 1) AS c;
    EXCEPTION WHEN data_exception OR integrity_constraint_violation OR raise_exception THEN
        -- One row that cannot be changed must not stop the rest for ever.
        results := '{}';
        FOREACH one IN ARRAY locked LOOP
            BEGIN
                SELECT results || jsonb_object_agg(k.why, coalesce((results ->> k.why)::bigint, 0) + 1) INTO results
                FROM (SELECT CASE WHEN o.changed THEN '' ELSE o.why_not END AS why
                      FROM {{schema}}.operate(b.action, ARRAY[one], b.reason, b.options, b.actor, b.id) AS o) AS k;
            EXCEPTION WHEN data_exception OR integrity_constraint_violation OR raise_exception THEN
                results := results || jsonb_build_object(SQLERRM, coalesce((results ->> SQLERRM)::bigint, 0) + 1);
            END;
        END LOOP;
    END;
    IF cardinality(found_id) > cardinality(locked) THEN
        results := results || jsonb_build_object('its row was locked by another transaction: start the bulk again',
            cardinality(found_id) - cardinality(locked));
    END IF;

    looked := coalesce(cardinality(found_id), 0);
    changed := coalesce((results ->> '')::int, 0);
    b.state := CASE WHEN finished THEN 'done' ELSE 'open' END;
    UPDATE {{schema}}.bulk AS o
    SET state = b.state, started_at = coalesce(o.started_at, clock_timestamp()),
        finished_at = CASE WHEN finished THEN clock_timestamp() END, expected = b.expected, at_least = b.at_least, cursor_at = b.cursor_at, cursor_id = b.cursor_id,
        done = o.done + looked, changed = o.changed + bulk_step.changed, skipped = o.skipped + looked - bulk_step.changed,
        skipped_why = o.skipped_why || coalesce((
            SELECT jsonb_object_agg(r.key, coalesce((o.skipped_why ->> r.key)::bigint, 0) + r.value::bigint)
            FROM jsonb_each_text(results) AS r WHERE r.key <> ''), '{}'),
        held_back = b.held_back,
        -- Where the filter found nothing, the next rows are looked at at once.
        next_at = clock_timestamp() + make_interval(secs => looked / b.rate),
        owner = CASE WHEN NOT finished THEN bulk_step.relay END,
        owner_until = CASE WHEN NOT finished THEN clock_timestamp() + bulk_step.lease END
    WHERE o.id = b.id;
    RETURN QUERY SELECT b.id, b.action, b.state, looked, bulk_step.changed, make_interval(secs => looked / b.rate);
END $$;
-- +goose StatementEnd

DROP FUNCTION {{schema}}.bulk_next(jsonb, timestamptz, bigint, timestamptz, bigint, int, bigint); -- bulk_page now

-- As before, and with open_id: the first task that is unfinished and was written within ten minutes. It may well end soon,
-- and the next look begins there. One that stays unfinished for longer holds nothing up: the full pass finds it.
DROP FUNCTION {{schema}}.purge_page(bigint, int, int, boolean, text[], text[], interval, text); -- made anew for its new column
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.purge_page(after bigint, scan int, batch int, dry_run boolean, types text[] DEFAULT NULL,
    statuses text[] DEFAULT NULL, older_than interval DEFAULT NULL, reason text DEFAULT NULL)
RETURNS TABLE (biz_type text, status text, verdict text, tasks bigint, last_id bigint, young_id bigint, open_id bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
BEGIN
    IF purge_page.older_than IS NOT NULL AND NOT purge_page.dry_run THEN -- a person's wish, not the ages that are set
        PERFORM {{schema}}.audit_reason(purge_page.reason);
    END IF;
    RETURN QUERY
    WITH page AS MATERIALIZED (
        SELECT t.id, t.biz_type, t.status, t.created_at, t.finished_at, t.dead_lettered_at, t.ordering_key IS NOT NULL AS keyed
        FROM {{schema}}.task AS t
        WHERE t.id > purge_page.after
        ORDER BY t.id
        LIMIT purge_page.scan
    ), judged AS MATERIALIZED (
        SELECT p.*, CASE
            WHEN p.biz_type <> ALL (purge_page.types) OR p.status <> ALL (purge_page.statuses) THEN 'not asked for'
            WHEN p.finished_at IS NULL THEN 'unfinished'
            WHEN a.keep IS NULL THEN 'kept until a person decides'
            WHEN p.status = 'dead' AND p.dead_lettered_at IS NULL THEN 'dead letter not out'
            WHEN p.status = 'dead' AND p.keyed THEN 'others of its ordering key may wait for it'
            WHEN p.finished_at > now() - a.keep THEN 'too young'
            ELSE 'due' END AS verdict
        FROM page AS p
        LEFT JOIN {{schema}}.biz_type AS b ON b.biz_type = p.biz_type
        CROSS JOIN {{schema}}.retention AS r
        CROSS JOIN LATERAL (SELECT coalesce(purge_page.older_than, CASE p.status
            WHEN 'succeeded' THEN coalesce(b.retain_succeeded, r.succeeded)
            WHEN 'cancelled' THEN coalesce(b.retain_cancelled, r.cancelled)
            WHEN 'dead' THEN coalesce(b.retain_dead, r.dead) END) AS keep) AS a
    ), cut AS MATERIALIZED (
        SELECT coalesce((SELECT j.id FROM judged AS j WHERE j.verdict = 'due' ORDER BY j.id OFFSET purge_page.batch - 1 LIMIT 1),
            (SELECT max(p.id) FROM page AS p)) AS id
    ), locked AS MATERIALIZED (
        SELECT k.tid
        FROM judged AS j
        CROSS JOIN cut
        CROSS JOIN LATERAL (
            SELECT t.ctid AS tid FROM {{schema}}.task AS t
            WHERE t.id = j.id AND t.status = j.status AND t.finished_at = j.finished_at
                AND t.dead_lettered_at IS NOT DISTINCT FROM j.dead_lettered_at
            FOR UPDATE SKIP LOCKED
        ) AS k
        WHERE j.verdict = 'due' AND j.id <= cut.id AND NOT purge_page.dry_run
    ), gone AS (
        DELETE FROM {{schema}}.task AS t USING locked AS k WHERE t.ctid = k.tid
        RETURNING t.id, t.biz_type, t.status
    ), letters AS (
        INSERT INTO {{schema}}.letter_purge (task_id, biz_type)
        SELECT g.id, g.biz_type FROM gone AS g WHERE g.status = 'dead'
        ON CONFLICT DO NOTHING
    ), logged AS (
        INSERT INTO {{schema}}.audit (actor, action, reason, after)
        SELECT {{schema}}.audit_actor(), 'purge', purge_page.reason, jsonb_object_agg(c.what, c.n)
        FROM (SELECT g.biz_type || ' ' || g.status AS what, count(*) AS n FROM gone AS g GROUP BY 1) AS c
        HAVING count(*) > 0 AND purge_page.reason IS NOT NULL
    )
    SELECT j.biz_type, j.status,
        CASE WHEN j.verdict <> 'due' OR purge_page.dry_run THEN j.verdict WHEN g.id IS NOT NULL THEN 'deleted' ELSE 'busy' END,
        count(*), cut.id, (SELECT min(y.id) FROM judged AS y WHERE y.verdict = 'too young' AND y.id <= cut.id),
        (SELECT min(y.id) FROM judged AS y WHERE y.verdict = 'unfinished' AND y.id <= cut.id
            AND y.created_at BETWEEN now() - interval '10 minutes' AND now() + interval '1 minute')
    FROM judged AS j
    CROSS JOIN cut
    LEFT JOIN gone AS g ON g.id = j.id
    WHERE j.id <= cut.id
    GROUP BY 1, 2, 3, cut.id;
END $$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION
    {{schema}}.bulk_finds(jsonb, text, text, text, text),
    {{schema}}.bulk_page(jsonb, timestamptz, bigint, timestamptz, bigint, int, boolean),
    {{schema}}.bulk_count(jsonb, timestamptz, bigint, interval),
    {{schema}}.preview_bulk(text, jsonb, int),
    {{schema}}.purge_page(bigint, int, int, boolean, text[], text[], interval, text)
FROM PUBLIC;

-- +goose StatementBegin
DO $roles$
BEGIN
    IF to_regrole('{{schema}}_relay') IS NOT NULL THEN
        GRANT EXECUTE ON FUNCTION {{schema}}.purge_page(bigint, int, int, boolean, text[], text[], interval, text) TO {{schema}}_relay;
    END IF;
    IF to_regrole('{{schema}}_operator') IS NOT NULL THEN
        GRANT EXECUTE ON FUNCTION {{schema}}.preview_bulk(text, jsonb, int),
            {{schema}}.purge_page(bigint, int, int, boolean, text[], text[], interval, text) TO {{schema}}_operator;
    END IF;
END $roles$;
-- +goose StatementEnd
