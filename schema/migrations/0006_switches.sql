-- +goose Up

-- Switches of a biz type, and how long finished rows are kept.

ALTER TABLE {{schema}}.biz_type
    ADD COLUMN paused_by text,
    ADD CONSTRAINT retention_is_not_negative CHECK (
        retain_succeeded >= interval '0' AND retain_cancelled >= interval '0' AND retain_dead >= interval '0');

-- One row. What the relays are configured to keep, for all who must agree with them: the worker deletes on success
-- where succeeded is 0, and purge counts by the same ages. Null: kept until a person decides, as before any relay came.
CREATE TABLE {{schema}}.retention (
    only_one    boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    succeeded   interval,
    cancelled   interval,
    dead        interval,
    attempts    interval,
    audit       interval,
    owner       text,                       -- the relay that deletes
    owner_until timestamptz,
    task_low    bigint NOT NULL DEFAULT 0,  -- up to these ids nothing becomes deletable before the next full pass
    attempt_low bigint NOT NULL DEFAULT 0,
    audit_low   bigint NOT NULL DEFAULT 0,
    full_at     timestamptz,                -- when the last full pass ended
    tasks       bigint NOT NULL DEFAULT 0,  -- deleted so far
    log_rows    bigint NOT NULL DEFAULT 0
);
INSERT INTO {{schema}}.retention DEFAULT VALUES;

-- Every biz type that an operator, a worker or a task has named, with its switches.
CREATE VIEW {{schema}}.types AS
SELECT k.biz_type, b.paused_at, b.paused_reason, b.paused_by, b.rate, b.concurrency, b.default_priority, b.max_attempts, b.policy,
    coalesce(b.retain_succeeded, r.succeeded) AS retain_succeeded, coalesce(b.retain_cancelled, r.cancelled) AS retain_cancelled,
    coalesce(b.retain_dead, r.dead) AS retain_dead, -- null: until a person decides
    coalesce(b.compensates, false) AS compensates, b.notifier, b.title, b.runbook_url, b.known_by, b.known_at,
    i.strict_types AND b.known_by IS NULL AS refused,
    (SELECT count(*) FROM {{schema}}.worker AS w
     WHERE w.seen_at > now() - interval '1 minute' AND k.biz_type = ANY (w.biz_types))::int AS live_workers
FROM (SELECT b.biz_type FROM {{schema}}.biz_type AS b UNION SELECT l.biz_type FROM {{schema}}.known_lane AS l) AS k
LEFT JOIN {{schema}}.biz_type AS b ON b.biz_type = k.biz_type
CROSS JOIN {{schema}}.installation AS i
CROSS JOIN {{schema}}.retention AS r;

-- A name nobody knows is more likely a slip than a new type: a pause of it would stop nothing.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.type_is_known(the_type text) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM {{schema}}.biz_type AS b WHERE b.biz_type = the_type COLLATE "C")
        OR EXISTS (SELECT FROM {{schema}}.task AS t WHERE t.biz_type = the_type COLLATE "C")
$$;
-- +goose StatementEnd

-- Pause and resume: relays and consumers follow within seconds. The row is locked first, so of two at once one is second.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.switch_pause(the_type text, pause boolean, reason text)
RETURNS TABLE (changed boolean, why_not text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    was     {{schema}}.biz_type;
    becomes {{schema}}.biz_type;
BEGIN
    PERFORM {{schema}}.audit_reason(reason);
    changed := false;
    IF the_type IS NULL OR NOT {{schema}}.type_is_known(the_type) THEN
        why_not := 'no such biz type';
        RETURN NEXT;
        RETURN;
    END IF;
    INSERT INTO {{schema}}.biz_type (biz_type) VALUES (the_type) ON CONFLICT DO NOTHING;
    SELECT * INTO was FROM {{schema}}.biz_type AS b WHERE b.biz_type = the_type COLLATE "C" FOR UPDATE;
    IF pause = (was.paused_at IS NOT NULL) THEN
        why_not := CASE WHEN pause THEN format('it is paused already, since %s by %s: %s', date_trunc('second', was.paused_at),
            coalesce(was.paused_by, 'somebody'), coalesce(was.paused_reason, 'no reason given')) ELSE 'it is not paused' END;
        RETURN NEXT;
        RETURN;
    END IF;
    UPDATE {{schema}}.biz_type AS b
    SET paused_at = CASE WHEN pause THEN now() END,
        paused_reason = CASE WHEN pause THEN reason END,
        paused_by = CASE WHEN pause THEN {{schema}}.audit_actor() END
    WHERE b.biz_type = was.biz_type
    RETURNING * INTO becomes;
    INSERT INTO {{schema}}.audit (actor, action, biz_type, reason, before, after)
    VALUES ({{schema}}.audit_actor(), CASE WHEN pause THEN 'pause' ELSE 'resume' END, was.biz_type, reason,
        jsonb_build_object('paused_at', was.paused_at, 'paused_reason', was.paused_reason, 'paused_by', was.paused_by),
        jsonb_build_object('paused_at', becomes.paused_at, 'paused_reason', becomes.paused_reason, 'paused_by', becomes.paused_by));
    changed := true;
    RETURN NEXT;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION {{schema}}.pause(biz_type text, reason text) RETURNS TABLE (changed boolean, why_not text)
LANGUAGE sql SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp
AS $$ SELECT s.changed, s.why_not FROM {{schema}}.switch_pause(pause.biz_type, true, pause.reason) AS s $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION {{schema}}.resume(biz_type text, reason text) RETURNS TABLE (changed boolean, why_not text)
LANGUAGE sql SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp
AS $$ SELECT s.changed, s.why_not FROM {{schema}}.switch_pause(resume.biz_type, false, resume.reason) AS s $$;
-- +goose StatementEnd

-- Sets a biz type: '{"rate": 50, "retain_succeeded": "7 days"}'. Null clears a setting, so that the worker's or the
-- relay's own holds again. "forever" keeps rows whatever the relay is told. add makes a type known that no worker has.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.set_type(biz_type text, settings jsonb, reason text, add boolean DEFAULT false)
RETURNS TABLE (changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    known   text[] := ARRAY['rate', 'concurrency', 'default_priority', 'max_attempts', 'policy', 'retain_succeeded', 'retain_cancelled',
                            'retain_dead', 'compensates', 'notifier', 'title', 'runbook_url', 'known'];
    unknown text;
    wanted  jsonb := set_type.settings -> 'policy';
    was     {{schema}}.biz_type;
    becomes {{schema}}.biz_type;
    clean   jsonb := set_type.settings;
    k       text;
BEGIN
    PERFORM {{schema}}.audit_reason(set_type.reason);
    IF jsonb_typeof(set_type.settings) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'settings must be an object such as {"rate": 50}' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT string_agg(o.key, ', ') INTO unknown FROM jsonb_object_keys(set_type.settings) AS o (key) WHERE o.key <> ALL (known);
    IF unknown IS NOT NULL THEN
        RAISE EXCEPTION 'unknown setting: %', unknown
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Known: ' || array_to_string(known, ', ');
    END IF;
    FOREACH k IN ARRAY ARRAY['retain_succeeded', 'retain_cancelled', 'retain_dead'] LOOP
        IF clean ->> k = 'forever' THEN
            clean := jsonb_set(clean, ARRAY[k], '"1000 years"');
        END IF;
    END LOOP;
    IF jsonb_typeof(wanted) = 'null' THEN
        wanted := NULL;
    ELSIF wanted IS NOT NULL AND (
        jsonb_typeof(wanted) <> 'object'
        OR coalesce(wanted ->> 'strategy', '') NOT IN ('fixed', 'exponential', 'random')
        OR coalesce(wanted ->> 'base_delay', '') !~ '^([0-9]+([.][0-9]+)?(ms|s|m|h))+$'
        OR coalesce(wanted ->> 'max_delay', '1h') !~ '^([0-9]+([.][0-9]+)?(ms|s|m|h))+$'
        OR jsonb_typeof(coalesce(wanted -> 'jitter', '0')) <> 'number'
        OR coalesce(wanted ->> 'jitter', '0')::numeric NOT BETWEEN 0 AND 1) THEN
        RAISE EXCEPTION 'policy % is none', wanted USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Such as {"strategy": "exponential", "base_delay": "5s", "max_delay": "1h", "jitter": 0.2}; strategies are fixed, exponential and random.';
    END IF;
    IF (clean ->> 'rate')::float8 > 1000000 THEN -- so is NaN, for Postgres
        RAISE EXCEPTION 'rate % is out of range: it must be above 0 and at most 1000000 messages a second', clean ->> 'rate'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    changed := false;
    IF set_type.add THEN
        INSERT INTO {{schema}}.biz_type AS b (biz_type, known_by, known_at) VALUES (set_type.biz_type, {{schema}}.audit_actor(), now())
        ON CONFLICT (biz_type) DO NOTHING;
    ELSIF set_type.biz_type IS NULL OR NOT {{schema}}.type_is_known(set_type.biz_type) THEN
        why_not := 'no such biz type';
        RETURN NEXT;
        RETURN;
    ELSE
        INSERT INTO {{schema}}.biz_type AS b (biz_type) VALUES (set_type.biz_type) ON CONFLICT (biz_type) DO NOTHING;
    END IF;
    SELECT * INTO was FROM {{schema}}.biz_type AS b WHERE b.biz_type = set_type.biz_type COLLATE "C" FOR UPDATE;
    UPDATE {{schema}}.biz_type AS b
    SET rate             = CASE WHEN clean ? 'rate' THEN (clean ->> 'rate')::float8 ELSE b.rate END,
        concurrency      = CASE WHEN clean ? 'concurrency' THEN (clean ->> 'concurrency')::int ELSE b.concurrency END,
        default_priority = CASE WHEN clean ? 'default_priority' THEN clean ->> 'default_priority' ELSE b.default_priority END,
        max_attempts     = CASE WHEN clean ? 'max_attempts' THEN (clean ->> 'max_attempts')::int ELSE b.max_attempts END,
        policy           = CASE WHEN clean ? 'policy' THEN wanted ELSE b.policy END,
        retain_succeeded = CASE WHEN clean ? 'retain_succeeded' THEN (clean ->> 'retain_succeeded')::interval ELSE b.retain_succeeded END,
        retain_cancelled = CASE WHEN clean ? 'retain_cancelled' THEN (clean ->> 'retain_cancelled')::interval ELSE b.retain_cancelled END,
        retain_dead      = CASE WHEN clean ? 'retain_dead' THEN (clean ->> 'retain_dead')::interval ELSE b.retain_dead END,
        compensates      = CASE WHEN clean ? 'compensates' THEN coalesce((clean ->> 'compensates')::boolean, false) ELSE b.compensates END,
        notifier         = CASE WHEN clean ? 'notifier' THEN clean ->> 'notifier' ELSE b.notifier END,
        title            = CASE WHEN clean ? 'title' THEN clean ->> 'title' ELSE b.title END,
        runbook_url      = CASE WHEN clean ? 'runbook_url' THEN clean ->> 'runbook_url' ELSE b.runbook_url END,
        known_by         = CASE WHEN set_type.add OR (clean ->> 'known')::boolean THEN coalesce(b.known_by, {{schema}}.audit_actor())
                                WHEN clean ? 'known' THEN NULL ELSE b.known_by END,
        known_at         = CASE WHEN set_type.add OR (clean ->> 'known')::boolean THEN coalesce(b.known_at, now())
                                WHEN clean ? 'known' THEN NULL ELSE b.known_at END
    WHERE b.biz_type = was.biz_type
    RETURNING * INTO becomes;
    IF becomes IS NOT DISTINCT FROM was AND NOT set_type.add THEN
        why_not := 'it is set so already';
        RETURN NEXT;
        RETURN;
    END IF;
    INSERT INTO {{schema}}.audit (actor, action, biz_type, reason, before, after)
    VALUES ({{schema}}.audit_actor(), CASE WHEN set_type.add THEN 'add type' ELSE 'set type' END, was.biz_type, set_type.reason,
        jsonb_strip_nulls(to_jsonb(was)), jsonb_strip_nulls(to_jsonb(becomes)));
    changed := true;
    RETURN NEXT;
END $$;
-- +goose StatementEnd

-- Known types only, or all. On: enqueue refuses, and relays do not publish, what no worker and no operator has made known.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.set_strict_types(strict boolean, reason text) RETURNS TABLE (changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    was boolean;
BEGIN
    PERFORM {{schema}}.audit_reason(set_strict_types.reason);
    SELECT i.strict_types INTO was FROM {{schema}}.installation AS i FOR UPDATE;
    changed := was IS DISTINCT FROM coalesce(set_strict_types.strict, was);
    IF NOT changed THEN
        why_not := format('strict types are %s already', CASE WHEN was THEN 'on' ELSE 'off' END);
    ELSE
        UPDATE {{schema}}.installation SET strict_types = set_strict_types.strict;
        INSERT INTO {{schema}}.audit (actor, action, reason, before, after)
        VALUES ({{schema}}.audit_actor(), 'strict types', set_strict_types.reason,
            jsonb_build_object('strict_types', was), jsonb_build_object('strict_types', set_strict_types.strict));
    END IF;
    RETURN NEXT;
END $$;
-- +goose StatementEnd

-- Looks at the next tasks behind an id and deletes, or in a dry run counts, those whose age is reached: at most batch of
-- them. It answers per type, state and verdict, with the last id it looked at and the first one that is only too young.
-- Only final rows go, dead ones only once their letter is out, and that letter with them. Locked rows are passed by:
-- a delete waits for nobody, and nobody waits for it but an enqueue of the very same biz id.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.purge_page(after bigint, scan int, batch int, dry_run boolean, types text[] DEFAULT NULL,
    statuses text[] DEFAULT NULL, older_than interval DEFAULT NULL, reason text DEFAULT NULL)
RETURNS TABLE (biz_type text, status text, verdict text, tasks bigint, last_id bigint, young_id bigint)
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
        SELECT t.id, t.biz_type, t.status, t.finished_at, t.dead_lettered_at, t.ordering_key IS NOT NULL AS keyed
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
        count(*), cut.id, (SELECT min(y.id) FROM judged AS y WHERE y.verdict = 'too young' AND y.id <= cut.id)
    FROM judged AS j
    CROSS JOIN cut
    LEFT JOIN gone AS g ON g.id = j.id
    WHERE j.id <= cut.id
    GROUP BY 1, 2, 3, cut.id;
END $$;
-- +goose StatementEnd

-- The same for the attempt log and the audit, which go by their own age.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.purge_attempts_page(after_task bigint, after_token bigint, scan int, batch int, dry_run boolean)
RETURNS TABLE (deleted bigint, last_task bigint, last_token bigint, young_task bigint)
LANGUAGE plpgsql SECURITY DEFINER ROWS 1
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    RETURN QUERY
    WITH page AS MATERIALIZED (
        SELECT a.task_id, a.lease_token, a.finished_at <= now() - r.attempts AS due
        FROM {{schema}}.retention AS r
        CROSS JOIN LATERAL (
            SELECT a.task_id, a.lease_token, a.finished_at FROM {{schema}}.task_attempt AS a
            WHERE (a.task_id, a.lease_token) > (after_task, after_token)
            ORDER BY a.task_id, a.lease_token
            LIMIT scan
        ) AS a
    ), numbered AS MATERIALIZED (
        SELECT p.*, count(*) FILTER (WHERE p.due) OVER (ORDER BY p.task_id, p.lease_token) AS n FROM page AS p
    ), locked AS MATERIALIZED (
        SELECT k.tid
        FROM numbered AS p
        CROSS JOIN LATERAL (
            SELECT a.ctid AS tid FROM {{schema}}.task_attempt AS a
            WHERE a.task_id = p.task_id AND a.lease_token = p.lease_token
            FOR UPDATE SKIP LOCKED
        ) AS k
        WHERE p.due AND p.n <= batch AND NOT dry_run
    ), gone AS (
        DELETE FROM {{schema}}.task_attempt AS a USING locked AS k WHERE a.ctid = k.tid RETURNING 1
    ), seen AS (
        SELECT p.* FROM numbered AS p WHERE p.n <= batch
    )
    SELECT CASE WHEN dry_run THEN (SELECT count(*) FROM seen AS s WHERE s.due) ELSE (SELECT count(*) FROM gone) END,
        l.task_id, l.lease_token, (SELECT min(s.task_id) FROM seen AS s WHERE NOT s.due)
    FROM (SELECT s.task_id, s.lease_token FROM seen AS s ORDER BY s.task_id DESC, s.lease_token DESC LIMIT 1) AS l;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION {{schema}}.purge_audit_page(after bigint, scan int, batch int, dry_run boolean)
RETURNS TABLE (deleted bigint, last_id bigint, young_id bigint)
LANGUAGE plpgsql SECURITY DEFINER ROWS 1
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    RETURN QUERY
    WITH page AS MATERIALIZED (
        SELECT a.id, a.at <= now() - r.audit AS due
        FROM {{schema}}.retention AS r
        CROSS JOIN LATERAL (SELECT a.id, a.at FROM {{schema}}.audit AS a WHERE a.id > purge_audit_page.after ORDER BY a.id LIMIT scan) AS a
    ), seen AS MATERIALIZED (
        SELECT n.id, n.due FROM (SELECT p.*, count(*) FILTER (WHERE p.due) OVER (ORDER BY p.id) AS n FROM page AS p) AS n WHERE n.n <= batch
    ), gone AS (
        DELETE FROM {{schema}}.audit AS a USING seen AS s WHERE a.id = s.id AND s.due AND NOT dry_run RETURNING 1
    )
    SELECT CASE WHEN dry_run THEN (SELECT count(*) FROM seen AS s WHERE s.due) ELSE (SELECT count(*) FROM gone) END,
        max(s.id), min(s.id) FILTER (WHERE NOT coalesce(s.due, false))
    FROM seen AS s
    HAVING count(*) > 0;
END $$;
-- +goose StatementEnd

-- Keep-nothing mode: what a worker has just settled goes at once where the type's retention is 0, and frees its biz id.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.forget_succeeded(ids bigint[]) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    n bigint;
BEGIN
    WITH locked AS MATERIALIZED (
        SELECT k.tid
        FROM (SELECT DISTINCT u.id FROM unnest(ids) AS u (id) ORDER BY u.id) AS u
        CROSS JOIN LATERAL (
            SELECT t.ctid AS tid FROM {{schema}}.task AS t
            WHERE t.id = u.id AND t.status = 'succeeded'
                AND interval '0' = (SELECT coalesce(b.retain_succeeded, r.succeeded)
                    FROM {{schema}}.retention AS r LEFT JOIN {{schema}}.biz_type AS b ON b.biz_type = t.biz_type)
            FOR UPDATE OF t SKIP LOCKED
        ) AS k
    )
    DELETE FROM {{schema}}.task AS t USING locked AS k WHERE t.ctid = k.tid;
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END $$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION
    {{schema}}.type_is_known(text), {{schema}}.switch_pause(text, boolean, text),
    {{schema}}.pause(text, text), {{schema}}.resume(text, text),
    {{schema}}.set_type(text, jsonb, text, boolean), {{schema}}.set_strict_types(boolean, text),
    {{schema}}.purge_page(bigint, int, int, boolean, text[], text[], interval, text),
    {{schema}}.purge_attempts_page(bigint, bigint, int, int, boolean), {{schema}}.purge_audit_page(bigint, int, int, boolean),
    {{schema}}.forget_succeeded(bigint[])
FROM PUBLIC;

-- +goose StatementBegin
DO $roles$
BEGIN
    IF to_regrole('{{schema}}_relay') IS NOT NULL THEN
        GRANT SELECT, UPDATE ON {{schema}}.retention TO {{schema}}_relay;
        GRANT EXECUTE ON FUNCTION {{schema}}.purge_page(bigint, int, int, boolean, text[], text[], interval, text),
            {{schema}}.purge_attempts_page(bigint, bigint, int, int, boolean), {{schema}}.purge_audit_page(bigint, int, int, boolean) TO {{schema}}_relay;
    END IF;
    IF to_regrole('{{schema}}_worker') IS NOT NULL THEN
        GRANT SELECT ON {{schema}}.retention TO {{schema}}_worker;
        GRANT EXECUTE ON FUNCTION {{schema}}.forget_succeeded(bigint[]) TO {{schema}}_worker;
    END IF;
    IF to_regrole('{{schema}}_operator') IS NOT NULL THEN
        GRANT SELECT ON {{schema}}.types, {{schema}}.retention TO {{schema}}_operator;
        GRANT EXECUTE ON FUNCTION {{schema}}.pause(text, text), {{schema}}.resume(text, text),
            {{schema}}.set_type(text, jsonb, text, boolean), {{schema}}.set_strict_types(boolean, text),
            {{schema}}.purge_page(bigint, int, int, boolean, text[], text[], interval, text),
            {{schema}}.purge_attempts_page(bigint, bigint, int, int, boolean), {{schema}}.purge_audit_page(bigint, int, int, boolean) TO {{schema}}_operator;
    END IF;
    IF to_regrole('{{schema}}_viewer') IS NOT NULL THEN
        GRANT SELECT ON {{schema}}.types, {{schema}}.retention TO {{schema}}_viewer;
    END IF;
END $roles$;
-- +goose StatementEnd
