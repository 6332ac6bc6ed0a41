-- +goose Up

-- Nothing is changed without a line in the audit, nothing ends as if it had been undone, and what people write has a length.

-- Which notifiers a relay has: set_type refuses a name that none has. A relay of a version before says nothing.
ALTER TABLE {{schema}}.relay ADD COLUMN notifiers text[] NOT NULL DEFAULT '{}';

-- As before, but for the hint: it names the function, which writes down who has let the type in.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION {{schema}}.enqueue(
    biz_type     text,
    payload      json        DEFAULT '{}',
    biz_id       text        DEFAULT NULL,
    priority     text        DEFAULT NULL,
    run_at       timestamptz DEFAULT NULL,
    max_attempts int         DEFAULT NULL,
    ordering_key text        DEFAULT NULL,
    headers      jsonb       DEFAULT '{}'
) RETURNS TABLE (id bigint, is_new boolean)
LANGUAGE plpgsql SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    unknown boolean;
    prio    text;
BEGIN
    IF enqueue.ordering_key IS NOT NULL THEN
        RAISE EXCEPTION 'ordering_key is not supported yet'
            USING ERRCODE = 'feature_not_supported', CONSTRAINT = 'ordering_keys_are_not_supported_yet',
                  HINT = 'Leave ordering_key out, or have the handler find out whether it comes too early.';
    END IF;

    SELECT i.strict_types AND b.known_by IS NULL, coalesce(enqueue.priority, b.default_priority, 'low')
    INTO unknown, prio
    FROM {{schema}}.installation AS i
    LEFT JOIN {{schema}}.biz_type AS b ON b.biz_type = enqueue.biz_type COLLATE "C";

    IF unknown THEN
        RAISE EXCEPTION 'biz_type "%" is not known to any worker, and this installation takes known types only', enqueue.biz_type
            USING ERRCODE = 'check_violation', CONSTRAINT = 'strict_types_refuses_unknown_biz_types',
                  HINT = 'Start a worker that registers it once, or as an operator: '
                         || format('SELECT * FROM {{schema}}.set_type(%L, ''{}'', ''why'', add => true)', enqueue.biz_type);
    END IF;

    LOOP
        INSERT INTO {{schema}}.task AS t (biz_type, biz_id, priority, payload, headers, run_at, max_attempts)
        VALUES (enqueue.biz_type, enqueue.biz_id, prio, enqueue.payload, coalesce(enqueue.headers, '{}'), enqueue.run_at, enqueue.max_attempts)
        ON CONFLICT ON CONSTRAINT task_biz_id_key DO NOTHING
        RETURNING t.id INTO id;
        IF FOUND THEN
            is_new := true;
            RETURN NEXT;
            RETURN;
        END IF;
        -- The insert has waited for the other's commit, which its own snapshot does not show: look with a new one.
        -- Under REPEATABLE READ the insert raises 40001 instead, as it must.
        SELECT t.id INTO id FROM {{schema}}.task AS t
        WHERE t.biz_type = enqueue.biz_type COLLATE "C" AND t.biz_id = enqueue.biz_id COLLATE "C";
        IF FOUND THEN
            is_new := false;
            RETURN NEXT;
            RETURN;
        END IF;
        -- Deleted in between: the biz_id is free again.
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION {{schema}}.audit_reason(reason text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF reason IS NULL OR reason !~ '[^[:space:]]' THEN -- no backslash: with standard_conforming_strings off it would vanish
        RAISE EXCEPTION 'a reason is required'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is kept in {{schema}}.audit for whoever asks later.';
    ELSIF char_length(reason) > 1000 THEN
        RAISE EXCEPTION 'the reason has % characters, at most 1000 are kept', char_length(reason)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name the ticket or the incident that has the details.';
    END IF;
END $$;
-- +goose StatementEnd

-- As before, but that a cancel does not call off a compensation by the way: the task would be cancelled, and what it began
-- stay. allow_uncompensated says that this is meant, for somebody who has undone it by hand; compensation is failed then.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION {{schema}}.operate(action text, ids bigint[], reason text, options jsonb DEFAULT '{}', actor text DEFAULT NULL, bulk_id bigint DEFAULT NULL)
RETURNS TABLE (id bigint, changed boolean, why_not text)
-- Hash joins on, whatever the session says: the relay's has them off, and the answers of 500 rows took 100 ms by nested loop.
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_hashjoin = on SET enable_sort = on SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    allow_succeeded   boolean := coalesce((options ->> 'allow_succeeded')::boolean, false);
    allow_compensated boolean := coalesce((options ->> 'allow_compensated')::boolean, false);
    compensate        boolean := coalesce((options ->> 'compensate')::boolean, false);
    allow_uncompensated boolean := coalesce((options ->> 'allow_uncompensated')::boolean, false);
    wanted            text    := options ->> 'priority';
    late              interval := (options ->> 'by')::interval;
    due               timestamptz := now();
    locked            bigint[];
    may               bigint[];
    found_id          bigint[];
    found_type        text[];
    found_biz_id      text[];
    was               jsonb[];
    refused           text[];
    way               text[];
BEGIN
    PERFORM {{schema}}.audit_reason(operate.reason);
    IF operate.action NOT IN ('requeue', 'reset', 'rerun', 'run_now', 'delay', 'set_priority', 'cancel', 'delete', 'discard') THEN
        RAISE EXCEPTION 'there is no action "%"', operate.action USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Actions are requeue, reset, rerun, run_now, delay, set_priority, cancel, delete, discard.';
    END IF;
    IF operate.action = 'delay' THEN
        IF (late > interval '0' AND late <= interval '366 days') IS NOT TRUE THEN
            RAISE EXCEPTION 'delay by % is out of range: it must be more than 0 and at most 366 days', coalesce(late::text, 'NULL')
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        -- Elapsed time: adding an interval of 1 day would make it 23 or 25 hours when the clocks change.
        due := now() + make_interval(secs => extract(epoch FROM late)::float8);
    END IF;
    IF operate.action = 'set_priority' AND (wanted IN ('high', 'low')) IS NOT TRUE THEN
        RAISE EXCEPTION 'priority is %: it must be high or low', coalesce(quote_literal(wanted), 'NULL')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    locked := ARRAY(SELECT t.id FROM {{schema}}.task AS t WHERE t.id = ANY (operate.ids) ORDER BY t.id FOR UPDATE);

    SELECT array_agg(j.id), array_agg(j.biz_type), array_agg(j.biz_id), array_agg(j.state), array_agg(j.refused), array_agg(j.way),
        array_agg(j.id) FILTER (WHERE j.refused IS NULL)
    INTO found_id, found_type, found_biz_id, was, refused, way, may
    FROM (
        SELECT t.id, t.biz_type, t.biz_id,
            {{schema}}.audit_state(t.status, t.phase, t.generation, t.attempt,
                CASE WHEN t.finished_at IS NULL THEN coalesce(t.next_attempt_at, t.run_at) ELSE t.next_attempt_at END, t.cancel_requested_at)
            || CASE WHEN operate.action = 'set_priority' THEN jsonb_build_object('priority', t.priority)
                    WHEN operate.action = 'cancel' AND t.phase = 'compensate' THEN jsonb_build_object('compensation', t.compensation)
                    ELSE '{}' END AS state,
            CASE
                WHEN operate.action IN ('requeue', 'reset', 'rerun') THEN CASE
                    WHEN operate.action = 'requeue' AND t.status = 'succeeded' THEN 'it has succeeded: reset with allow_succeeded starts it over'
                    WHEN operate.action = 'requeue' AND t.status NOT IN ('dead', 'cancelled') THEN
                        format('it is %s: only dead and cancelled tasks are requeued', t.status)
                    WHEN operate.action = 'rerun' AND t.finished_at IS NULL THEN format('it is %s: only finished tasks are run once more', t.status)
                    WHEN t.status = 'running' THEN 'it is running: cancel it first, or wait until it ends'
                    WHEN t.status = 'succeeded' AND NOT allow_succeeded THEN
                        'it has succeeded, so this would execute it again, under its first idempotency key: allow_succeeded says that this is meant'
                    WHEN t.compensation = 'done' AND NOT allow_compensated THEN format(
                        'its compensation was done, so this would execute it again, under a new idempotency key ending in -r%s: '
                        'allow_compensated says that downstream can take it', t.compensations)
                    END
                WHEN operate.action IN ('run_now', 'delay', 'set_priority') THEN CASE t.status
                    WHEN 'running' THEN 'it is running'
                    WHEN 'blocked' THEN 'it is blocked behind an earlier task of its ordering key'
                    WHEN 'succeeded' THEN 'it has succeeded'
                    WHEN 'dead' THEN 'it is dead: requeue it'
                    WHEN 'cancelled' THEN 'it is cancelled: requeue it'
                    ELSE CASE WHEN operate.action = 'set_priority' AND t.priority = wanted THEN format('its priority is %s already', wanted) END
                    END
                WHEN operate.action = 'cancel' THEN CASE
                    WHEN t.status = 'succeeded' THEN 'it has succeeded'
                    WHEN t.status IN ('dead', 'cancelled') THEN format('it is %s already', t.status)
                    WHEN compensate AND t.phase = 'compensate' THEN 'its compensation is on its way already'
                    WHEN t.phase = 'compensate' AND NOT allow_uncompensated THEN
                        'it is being compensated, and what it began would stay as it is: allow_uncompensated says that this is meant'
                    -- Of a task that was never started there is nothing to undo.
                    WHEN compensate AND t.first_started_at IS NOT NULL AND b.compensates IS NOT TRUE THEN
                        'its type has no compensation: cancel it without'
                    WHEN t.status = 'running' AND t.cancel_requested_at IS NOT NULL AND (NOT compensate OR t.cancel_compensates IS TRUE) THEN
                        'it is running, and its worker was asked to stop already'
                    END
                WHEN operate.action = 'delete' THEN
                    CASE WHEN t.status = 'running' THEN 'it is running: cancel it first, or wait until it ends' END
                WHEN operate.action = 'discard' THEN CASE
                    WHEN t.status = 'dead' THEN NULL
                    WHEN t.status = 'cancelled' THEN 'it is cancelled already'
                    ELSE format('it is %s: only dead tasks are discarded', t.status)
                    END
            END AS refused,
            -- A running task belongs to its lease: it is asked only, and keeps its generation.
            CASE
                WHEN t.status = 'running' THEN 'ask'
                WHEN compensate AND t.first_started_at IS NOT NULL THEN 'undo'
                ELSE 'end'
            END AS way
        FROM {{schema}}.task AS t
        LEFT JOIN {{schema}}.biz_type AS b ON b.biz_type = t.biz_type
        WHERE t.id = ANY (locked)
    ) AS j;

    IF operate.action IN ('requeue', 'reset', 'rerun') THEN
        UPDATE {{schema}}.task AS t
        SET status = 'pending', phase = 'execute', attempt = 0, generation = t.generation + 1, looks = 0,
            republish_at = now(), next_attempt_at = now(),
            -- By dead_lettered_at the relay deletes the old letter, also one that is on its way at this moment.
            dead_lettered_at = coalesce(t.dead_lettered_at, t.dead_at),
            finished_at = NULL, dead_at = NULL, dead_reason = NULL,
            lease_owner = NULL, lease_token = NULL, lease_until = NULL, started_at = NULL,
            cancel_requested_at = NULL, cancel_compensates = NULL, expires_at = NULL, result = NULL,
            cause = NULL, execute_attempts = NULL, compensation = 'none' -- last_error stays for the reader until the next success
        WHERE t.id = ANY (may) AND t.status <> 'running';

    ELSIF operate.action IN ('run_now', 'delay') THEN
        -- The claim asks for coalesce(next_attempt_at, run_at), so next_attempt_at overrules the producer's run_at.
        UPDATE {{schema}}.task AS t
        SET generation = t.generation + 1, looks = 0, republish_at = due, next_attempt_at = due
        WHERE t.id = ANY (may) AND t.status IN ('pending', 'retrying');

    ELSIF operate.action = 'set_priority' THEN
        -- The other lane's position knows nothing of this row, so it goes by the work list, at the time it was due anyway.
        UPDATE {{schema}}.task AS t
        SET priority = wanted, generation = t.generation + 1, looks = 0,
            republish_at = coalesce(t.next_attempt_at, t.run_at, now()), next_attempt_at = coalesce(t.next_attempt_at, t.run_at, now())
        WHERE t.id = ANY (may) AND t.status IN ('pending', 'retrying');

    ELSIF operate.action = 'cancel' THEN
        -- Requeued and cancelled before the relay has looked at it: nobody else would take its old letter away.
        INSERT INTO {{schema}}.letter_purge AS p (task_id, biz_type, generation)
        SELECT t.id, t.biz_type, t.generation + 1 FROM {{schema}}.task AS t
        WHERE t.id = ANY (may) AND t.dead_lettered_at IS NOT NULL AND t.status IN ('pending', 'retrying', 'blocked')
        ON CONFLICT (task_id) DO UPDATE SET generation = greatest(p.generation, excluded.generation);
        UPDATE {{schema}}.task AS t
        SET status = 'cancelled', finished_at = now(), generation = t.generation + 1, looks = 0, republish_at = NULL, next_attempt_at = NULL,
            dead_lettered_at = NULL, compensation = CASE WHEN t.phase = 'compensate' THEN 'failed' ELSE t.compensation END
        FROM unnest(found_id, way) AS w (id, way)
        WHERE t.id = ANY (may) AND t.id = w.id AND w.way = 'end' AND t.status IN ('pending', 'retrying', 'blocked');
        UPDATE {{schema}}.task AS t
        SET cancel_requested_at = coalesce(t.cancel_requested_at, now()), cancel_compensates = nullif(compensate, false),
            -- It stays so if the worker stops it, or is gone; a compensation that ends well all the same makes it done.
            compensation = CASE WHEN t.phase = 'compensate' THEN 'failed' ELSE t.compensation END
        FROM unnest(found_id, way) AS w (id, way)
        WHERE t.id = ANY (may) AND t.id = w.id AND w.way = 'ask' AND t.status = 'running';
        -- As after the last attempt: execute is over, compensation is handed to the relay, and the task will end as dead.
        UPDATE {{schema}}.task AS t
        SET status = 'pending', phase = 'compensate', compensation = 'pending', generation = t.generation + 1, looks = 0,
            execute_attempts = t.attempt, attempt = 0, republish_at = now(), next_attempt_at = now(),
            cause = left('cancelled: ' || operate.reason, 1000), dead_reason = 'cancelled'
        FROM unnest(found_id, way) AS w (id, way)
        WHERE t.id = ANY (may) AND t.id = w.id AND w.way = 'undo' AND t.status IN ('pending', 'retrying', 'blocked') AND t.phase = 'execute';

    ELSIF operate.action = 'discard' THEN
        INSERT INTO {{schema}}.letter_purge AS p (task_id, biz_type, generation)
        SELECT t.id, t.biz_type, t.generation + 1 FROM {{schema}}.task AS t WHERE t.id = ANY (may)
        ON CONFLICT (task_id) DO UPDATE SET generation = greatest(p.generation, excluded.generation);
        -- The reason of its death and its errors stay for the reader.
        UPDATE {{schema}}.task AS t
        SET status = 'cancelled', finished_at = now(), dead_at = NULL, dead_lettered_at = NULL, generation = t.generation + 1, looks = 0,
            republish_at = NULL, next_attempt_at = NULL
        WHERE t.id = ANY (may) AND t.status = 'dead';

    ELSE -- delete
        INSERT INTO {{schema}}.letter_purge AS p (task_id, biz_type)
        SELECT t.id, t.biz_type FROM {{schema}}.task AS t
        WHERE t.id = ANY (may) AND (t.status = 'dead' OR t.dead_lettered_at IS NOT NULL)
        ON CONFLICT (task_id) DO UPDATE SET generation = NULL;
        DELETE FROM {{schema}}.task AS t WHERE t.id = ANY (may) AND t.status <> 'running';
    END IF;

    INSERT INTO {{schema}}.audit (actor, action, task_id, biz_type, biz_id, reason, before, after, bulk_id)
    SELECT coalesce(operate.actor, {{schema}}.audit_actor()), operate.action, f.id, f.biz_type, f.biz_id, operate.reason, f.state,
        (SELECT {{schema}}.audit_state(t.status, t.phase, t.generation, t.attempt, t.next_attempt_at, t.cancel_requested_at)
             || CASE WHEN operate.action = 'set_priority' THEN jsonb_build_object('priority', t.priority)
                     WHEN operate.action = 'cancel' AND t.phase = 'compensate' THEN jsonb_build_object('compensation', t.compensation)
                     ELSE '{}' END
         FROM {{schema}}.task AS t WHERE t.id = f.id),
        operate.bulk_id
    FROM unnest(found_id, found_type, found_biz_id, was, refused) AS f (id, biz_type, biz_id, state, refused)
    WHERE f.refused IS NULL
    ORDER BY f.id;

    RETURN QUERY
    SELECT w.id, f.id IS NOT NULL AND f.refused IS NULL,
        CASE
            WHEN f.id IS NULL THEN 'no such task'
            WHEN f.refused IS NOT NULL THEN f.refused
            WHEN operate.action <> 'cancel' THEN NULL
            WHEN f.state ->> 'phase' = 'compensate' AND f.way = 'ask' THEN
                'its compensation is running: its worker is asked to stop it, and what it began is not undone, unless that ends well first'
            WHEN f.state ->> 'phase' = 'compensate' THEN 'its compensation is called off: what it began is not undone'
            WHEN f.way = 'ask' AND compensate THEN 'it is running: its worker is asked to stop, then it is compensated'
            WHEN f.way = 'ask' THEN 'it is running: its worker is asked to stop'
            WHEN f.way = 'undo' THEN 'it is compensated first, and ends as dead with reason cancelled'
        END
    FROM (SELECT DISTINCT u.id FROM unnest(operate.ids) AS u (id) WHERE u.id IS NOT NULL) AS w
    LEFT JOIN unnest(found_id, refused, way, was) AS f (id, refused, way, state) ON f.id = w.id
    ORDER BY w.id;
END $$;
-- +goose StatementEnd

-- With allow_uncompensated a compensation is called off: the task ends as cancelled, and what it began stays.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.cancel(ids bigint[], reason text, compensate boolean, allow_uncompensated boolean)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT o.id, o.changed, o.why_not
    FROM {{schema}}.operate('cancel', cancel.ids, cancel.reason,
        jsonb_build_object('compensate', cancel.compensate, 'allow_uncompensated', cancel.allow_uncompensated)) AS o;
END $$;
-- +goose StatementEnd

CREATE FUNCTION {{schema}}.cancel(task_id bigint, reason text, compensate boolean, allow_uncompensated boolean)
RETURNS TABLE (id bigint, changed boolean, why_not text) LANGUAGE sql ROWS 1
AS $$ SELECT r.id, r.changed, r.why_not FROM {{schema}}.cancel(ARRAY[task_id], reason, compensate, allow_uncompensated) AS r $$;

-- As before, and a bulk of cancel takes allow_uncompensated.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION {{schema}}.start_bulk(action text, filter jsonb, reason text, options jsonb DEFAULT '{}', rate double precision DEFAULT 500)
RETURNS TABLE (id bigint, is_new boolean)
LANGUAGE plpgsql SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    f    jsonb := {{schema}}.bulk_filter(start_bulk.action, start_bulk.filter);
    o    jsonb := jsonb_strip_nulls(coalesce(start_bulk.options, '{}'));
    key  text;
    able text[] := CASE start_bulk.action
        WHEN 'requeue' THEN '{allow_compensated}' WHEN 'reset' THEN '{allow_succeeded,allow_compensated}'
        WHEN 'rerun' THEN '{allow_succeeded,allow_compensated}' WHEN 'delay' THEN '{by}' WHEN 'set_priority' THEN '{priority}'
        WHEN 'cancel' THEN '{compensate,allow_uncompensated}' ELSE '{}' END;
BEGIN
    FOR key IN SELECT k FROM jsonb_object_keys(o) AS k WHERE k <> ALL (able) LOOP
        RAISE EXCEPTION '% has no option "%"', start_bulk.action, key USING ERRCODE = 'invalid_parameter_value',
            HINT = CASE WHEN able = '{}' THEN 'It has none.' ELSE 'It has ' || array_to_string(able, ', ') || '.' END;
    END LOOP;
    o := coalesce((SELECT jsonb_object_agg(e.key, e.value) FROM jsonb_each(o) AS e WHERE e.value <> 'false'), '{}');
    PERFORM {{schema}}.operate(start_bulk.action, '{}', start_bulk.reason, o); -- it refuses what it would refuse of each batch
    IF (start_bulk.rate >= 0.001 AND start_bulk.rate <= 1000000) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate % is out of range: it must be 0.001 to 1000000 tasks a second', coalesce(start_bulk.rate::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    LOOP
        INSERT INTO {{schema}}.bulk AS b (action, filter, options, reason, actor, rate, last_id)
        VALUES (start_bulk.action, f, o, start_bulk.reason, {{schema}}.audit_actor(), start_bulk.rate,
            coalesce((SELECT max(t.id) FROM {{schema}}.task AS t), 0))
        ON CONFLICT (action, md5(filter::text || options::text)) WHERE state = 'open' DO NOTHING
        RETURNING b.id INTO id;
        IF FOUND THEN
            INSERT INTO {{schema}}.audit (actor, action, biz_type, reason, after, bulk_id)
            VALUES ({{schema}}.audit_actor(), 'start_bulk', f ->> 'type', start_bulk.reason,
                jsonb_build_object('action', start_bulk.action, 'filter', f, 'options', o), id);
            is_new := true;
            RETURN NEXT;
            RETURN;
        END IF;
        SELECT b.id INTO id FROM {{schema}}.bulk AS b
        WHERE b.state = 'open' AND b.action = start_bulk.action AND b.filter = f AND b.options = o;
        IF FOUND THEN
            is_new := false;
            RETURN NEXT;
            RETURN;
        END IF;
        -- Ended in between: a new one is meant.
    END LOOP;
END $$;
-- +goose StatementEnd

-- As before, but that texts have a length and a notifier must exist.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION {{schema}}.set_type(biz_type text, settings jsonb, reason text, add boolean DEFAULT false)
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
    most    int;
    theirs  text[];
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

    FOR k, most IN VALUES ('title', 200), ('runbook_url', 2000), ('notifier', 63) LOOP
        IF char_length(clean ->> k) > most THEN
            RAISE EXCEPTION '% has % characters, at most % are kept', k, char_length(clean ->> k), most USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END LOOP;
    -- A misspelled notifier would tell nobody but a log. Which there are beside the stock relay's, the relays say
    -- themselves; as long as none has said so, any name may be one of theirs.
    theirs := ARRAY(SELECT DISTINCT n FROM {{schema}}.relay AS r, unnest(r.notifiers) AS n ORDER BY n);
    IF theirs <> '{}' AND nullif(clean ->> 'notifier', '') <> ALL (theirs || '{log,webhook,email,dingtalk,chat}'::text[]) THEN
        RAISE EXCEPTION 'no relay has a notifier "%"', clean ->> 'notifier' USING ERRCODE = 'invalid_parameter_value',
            HINT = format('There are log, webhook, email, dingtalk and chat; the relays that run have %s. One of your own is known once a relay that registers it has started.',
                array_to_string(theirs, ', '));
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

-- Writes down that somebody deleted a consumer: that is done in NATS.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.audit_consumer(biz_type text, consumer text, reason text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM {{schema}}.audit_reason(audit_consumer.reason);
    INSERT INTO {{schema}}.audit (actor, action, biz_type, reason, before)
    VALUES ({{schema}}.audit_actor(), 'delete_consumer', audit_consumer.biz_type, audit_consumer.reason,
        jsonb_build_object('consumer', audit_consumer.consumer));
END $$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION
    {{schema}}.cancel(bigint[], text, boolean, boolean), {{schema}}.cancel(bigint, text, boolean, boolean),
    {{schema}}.audit_consumer(text, text, text)
FROM PUBLIC;

-- +goose StatementBegin
DO $roles$
BEGIN
    IF to_regrole('{{schema}}_operator') IS NOT NULL THEN
        -- What set_type, set_strict_types, pause and resume do is guarded and audited.
        REVOKE INSERT, UPDATE ON {{schema}}.biz_type FROM {{schema}}_operator;
        REVOKE UPDATE (strict_types) ON {{schema}}.installation FROM {{schema}}_operator;
        GRANT EXECUTE ON FUNCTION
            {{schema}}.cancel(bigint[], text, boolean, boolean), {{schema}}.cancel(bigint, text, boolean, boolean),
            {{schema}}.audit_consumer(text, text, text) TO {{schema}}_operator;
    END IF;
END $roles$;
-- +goose StatementEnd
