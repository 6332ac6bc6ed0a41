-- +goose Up

-- Tasks of one key one after the other (ordering) are not built yet: a key that is accepted and ignored would be worse than none.
ALTER TABLE {{schema}}.task ADD CONSTRAINT ordering_keys_are_not_supported_yet CHECK (ordering_key IS NULL);

-- Every function below runs with its owner's rights and a search path of its own, so that nobody can slip in
-- a function or operator of the same name.

-- Inserts a task, or finds the one that holds this biz_id; it never raises on a duplicate.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.enqueue(
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
                  HINT = 'Start a worker that registers it once, or as an operator: INSERT INTO {{schema}}.biz_type (biz_type, known_by) '
                         || format('VALUES (%L, session_user) ON CONFLICT (biz_type) DO UPDATE SET known_by = session_user', enqueue.biz_type);
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

-- What the audit keeps of a task, before and after.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.audit_state(t_status text, t_phase text, t_generation int, t_attempt int, t_due timestamptz, t_cancel timestamptz)
RETURNS jsonb LANGUAGE sql STABLE
AS $$
    SELECT pg_catalog.jsonb_build_object('status', t_status, 'phase', t_phase, 'generation', t_generation,
        'attempt', t_attempt, 'due_at', t_due, 'cancel_requested_at', t_cancel)
$$;
-- +goose StatementEnd

-- Who acts: the login, and in front of it whom a program acts for (SET LOCAL taskrelay.actor = 'cli:bob').
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.audit_actor() RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(left(nullif(btrim(current_setting('taskrelay.actor', true)), ''), 200) || ' (as ' || session_user || ')', session_user::text)
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION {{schema}}.audit_reason(reason text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF reason IS NULL OR reason !~ '[^[:space:]]' THEN -- no backslash: with standard_conforming_strings off it would vanish
        RAISE EXCEPTION 'a reason is required'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is kept in {{schema}}.audit for whoever asks later.';
    END IF;
END $$;
-- +goose StatementEnd

-- The operating functions below share one shape. First the rows are locked in id order: two calls never deadlock.
-- Then, as a new statement that sees what the lock waited for, rows are judged, changed and logged. The change sets
-- generation + 1, so every message published before is stale, and hands the row back to the relay.

-- Starts a dead or cancelled task anew.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.requeue(ids bigint[], reason text, allow_compensated boolean DEFAULT false)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    PERFORM {{schema}}.audit_reason(requeue.reason);
    PERFORM t.id FROM {{schema}}.task AS t WHERE t.id = ANY (requeue.ids) ORDER BY t.id FOR UPDATE;
    RETURN QUERY
    WITH before AS MATERIALIZED (
        SELECT t.id, {{schema}}.audit_state(t.status, t.phase, t.generation, t.attempt, t.next_attempt_at, t.cancel_requested_at) AS state,
            CASE
                WHEN t.status = 'succeeded' THEN 'it has succeeded: reset with allow_succeeded starts it over'
                WHEN t.status NOT IN ('dead', 'cancelled') THEN format('it is %s: only dead and cancelled tasks are requeued', t.status)
                WHEN t.compensation = 'done' AND requeue.allow_compensated IS NOT TRUE THEN format(
                    'its compensation was done, so this would execute it again, under a new idempotency key ending in -r%s: '
                    'allow_compensated says that downstream can take it', t.compensations)
            END AS why_not
        FROM {{schema}}.task AS t
        WHERE t.id = ANY (requeue.ids)
    ), after AS (
        UPDATE {{schema}}.task AS t
        SET status = 'pending', phase = 'execute', attempt = 0, generation = t.generation + 1, looks = 0,
            republish_at = now(), next_attempt_at = now(),
            -- By dead_lettered_at the relay deletes the old letter, also one that is on its way at this moment.
            dead_lettered_at = coalesce(t.dead_lettered_at, t.dead_at),
            finished_at = NULL, dead_at = NULL, dead_reason = NULL,
            lease_owner = NULL, lease_token = NULL, lease_until = NULL, started_at = NULL,
            cancel_requested_at = NULL, expires_at = NULL, result = NULL,
            cause = NULL, execute_attempts = NULL, compensation = 'none' -- last_error stays for the reader until the next success
        FROM before AS b
        WHERE t.id = b.id AND b.why_not IS NULL AND t.status IN ('dead', 'cancelled')
        RETURNING t.id, t.biz_type, t.biz_id,
            {{schema}}.audit_state(t.status, t.phase, t.generation, t.attempt, t.next_attempt_at, t.cancel_requested_at) AS state
    ), logged AS (
        INSERT INTO {{schema}}.audit (actor, action, task_id, biz_type, biz_id, reason, before, after)
        SELECT {{schema}}.audit_actor(), 'requeue', a.id, a.biz_type, a.biz_id, requeue.reason, b.state, a.state
        FROM after AS a JOIN before AS b ON b.id = a.id
    )
    SELECT w.id, a.id IS NOT NULL,
        CASE WHEN a.id IS NOT NULL THEN NULL WHEN b.id IS NULL THEN 'no such task' ELSE coalesce(b.why_not, 'it changed meanwhile: try again') END
    FROM (SELECT DISTINCT u.id FROM unnest(requeue.ids) AS u (id) WHERE u.id IS NOT NULL) AS w
    LEFT JOIN before AS b ON b.id = w.id
    LEFT JOIN after AS a ON a.id = w.id
    ORDER BY w.id;
END $$;
-- +goose StatementEnd

-- Starts a task over from any state but running; a succeeded one only when told so.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.reset(biz_type text, biz_id text, reason text, allow_succeeded boolean DEFAULT false, allow_compensated boolean DEFAULT false)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    the_id bigint;
BEGIN
    PERFORM {{schema}}.audit_reason(reset.reason);
    SELECT t.id INTO the_id FROM {{schema}}.task AS t
    WHERE t.biz_type = reset.biz_type COLLATE "C" AND t.biz_id = reset.biz_id COLLATE "C" FOR UPDATE;
    RETURN QUERY
    WITH before AS MATERIALIZED (
        SELECT t.id, {{schema}}.audit_state(t.status, t.phase, t.generation, t.attempt, t.next_attempt_at, t.cancel_requested_at) AS state,
            CASE
                WHEN t.status = 'running' THEN 'it is running: cancel it first, or wait until it ends'
                WHEN t.status = 'succeeded' AND reset.allow_succeeded IS NOT TRUE THEN
                    'it has succeeded, so this would execute it again, under its first idempotency key: allow_succeeded says that this is meant'
                WHEN t.compensation = 'done' AND reset.allow_compensated IS NOT TRUE THEN format(
                    'its compensation was done, so this would execute it again, under a new idempotency key ending in -r%s: '
                    'allow_compensated says that downstream can take it', t.compensations)
            END AS why_not
        FROM {{schema}}.task AS t
        WHERE t.id = the_id
    ), after AS (
        UPDATE {{schema}}.task AS t
        SET status = 'pending', phase = 'execute', attempt = 0, generation = t.generation + 1, looks = 0,
            republish_at = now(), next_attempt_at = now(),
            dead_lettered_at = coalesce(t.dead_lettered_at, t.dead_at),
            finished_at = NULL, dead_at = NULL, dead_reason = NULL,
            lease_owner = NULL, lease_token = NULL, lease_until = NULL, started_at = NULL,
            cancel_requested_at = NULL, expires_at = NULL, result = NULL,
            cause = NULL, execute_attempts = NULL, compensation = 'none'
        FROM before AS b
        WHERE t.id = b.id AND b.why_not IS NULL AND t.status <> 'running'
        RETURNING t.id, t.biz_type, t.biz_id,
            {{schema}}.audit_state(t.status, t.phase, t.generation, t.attempt, t.next_attempt_at, t.cancel_requested_at) AS state
    ), logged AS (
        INSERT INTO {{schema}}.audit (actor, action, task_id, biz_type, biz_id, reason, before, after)
        SELECT {{schema}}.audit_actor(), 'reset', a.id, a.biz_type, a.biz_id, reset.reason, b.state, a.state
        FROM after AS a JOIN before AS b ON b.id = a.id
    )
    SELECT b.id, a.id IS NOT NULL,
        CASE WHEN a.id IS NOT NULL THEN NULL WHEN b.id IS NULL THEN 'no such task' ELSE coalesce(b.why_not, 'it changed meanwhile: try again') END
    FROM (VALUES (the_id)) AS w (id)
    LEFT JOIN before AS b ON b.id = w.id
    LEFT JOIN after AS a ON a.id = w.id;
END $$;
-- +goose StatementEnd

-- Moves the due time of pending and retrying tasks; run_now and delay are this with their names.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.move_due(action text, ids bigint[], due timestamptz, reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    PERFORM {{schema}}.audit_reason(move_due.reason);
    PERFORM t.id FROM {{schema}}.task AS t WHERE t.id = ANY (move_due.ids) ORDER BY t.id FOR UPDATE;
    RETURN QUERY
    WITH before AS MATERIALIZED (
        SELECT t.id, {{schema}}.audit_state(t.status, t.phase, t.generation, t.attempt, coalesce(t.next_attempt_at, t.run_at), t.cancel_requested_at) AS state,
            CASE t.status
                WHEN 'pending' THEN NULL
                WHEN 'retrying' THEN NULL
                WHEN 'running' THEN 'it is running'
                WHEN 'blocked' THEN 'it is blocked behind an earlier task of its ordering key'
                WHEN 'succeeded' THEN 'it has succeeded'
                ELSE format('it is %s: requeue it', t.status)
            END AS why_not
        FROM {{schema}}.task AS t
        WHERE t.id = ANY (move_due.ids)
    ), after AS (
        -- The claim asks for coalesce(next_attempt_at, run_at), so next_attempt_at overrules the producer's run_at.
        UPDATE {{schema}}.task AS t
        SET generation = t.generation + 1, looks = 0, republish_at = move_due.due, next_attempt_at = move_due.due
        FROM before AS b
        WHERE t.id = b.id AND b.why_not IS NULL AND t.status IN ('pending', 'retrying')
        RETURNING t.id, t.biz_type, t.biz_id,
            {{schema}}.audit_state(t.status, t.phase, t.generation, t.attempt, t.next_attempt_at, t.cancel_requested_at) AS state
    ), logged AS (
        INSERT INTO {{schema}}.audit (actor, action, task_id, biz_type, biz_id, reason, before, after)
        SELECT {{schema}}.audit_actor(), move_due.action, a.id, a.biz_type, a.biz_id, move_due.reason, b.state, a.state
        FROM after AS a JOIN before AS b ON b.id = a.id
    )
    SELECT w.id, a.id IS NOT NULL,
        CASE WHEN a.id IS NOT NULL THEN NULL WHEN b.id IS NULL THEN 'no such task' ELSE coalesce(b.why_not, 'it changed meanwhile: try again') END
    FROM (SELECT DISTINCT u.id FROM unnest(move_due.ids) AS u (id) WHERE u.id IS NOT NULL) AS w
    LEFT JOIN before AS b ON b.id = w.id
    LEFT JOIN after AS a ON a.id = w.id
    ORDER BY w.id;
END $$;
-- +goose StatementEnd

-- Makes pending and retrying tasks due now; the attempt count stays.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.run_now(ids bigint[], reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT m.id, m.changed, m.why_not FROM {{schema}}.move_due('run_now', run_now.ids, now(), run_now.reason) AS m;
END $$;
-- +goose StatementEnd

-- Makes pending and retrying tasks due that much later than now.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.delay(ids bigint[], by interval, reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (delay.by > interval '0' AND delay.by <= interval '366 days') IS NOT TRUE THEN
        RAISE EXCEPTION 'delay by % is out of range: it must be more than 0 and at most 366 days', coalesce(delay.by::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- Elapsed time: adding an interval of 1 day would make it 23 or 25 hours when the clocks change.
    RETURN QUERY SELECT m.id, m.changed, m.why_not
    FROM {{schema}}.move_due('delay', delay.ids, now() + make_interval(secs => extract(epoch FROM delay.by)::float8), delay.reason) AS m;
END $$;
-- +goose StatementEnd

-- Cancels unfinished tasks: at once when they wait, by asking the worker when they run.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.cancel(ids bigint[], reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    PERFORM {{schema}}.audit_reason(cancel.reason);
    PERFORM t.id FROM {{schema}}.task AS t WHERE t.id = ANY (cancel.ids) ORDER BY t.id FOR UPDATE;
    RETURN QUERY
    WITH before AS MATERIALIZED (
        SELECT t.id, t.status,
            {{schema}}.audit_state(t.status, t.phase, t.generation, t.attempt, coalesce(t.next_attempt_at, t.run_at), t.cancel_requested_at) AS state,
            CASE
                WHEN t.status = 'succeeded' THEN 'it has succeeded'
                WHEN t.status IN ('dead', 'cancelled') THEN format('it is %s already', t.status)
                WHEN t.status = 'running' AND t.cancel_requested_at IS NOT NULL THEN 'it is running, and its worker was asked to stop already'
            END AS why_not
        FROM {{schema}}.task AS t
        WHERE t.id = ANY (cancel.ids)
    ), after AS (
        -- A running task belongs to its lease: it is asked only, and keeps its generation.
        UPDATE {{schema}}.task AS t
        SET status              = CASE WHEN t.status = 'running' THEN t.status ELSE 'cancelled' END,
            finished_at         = CASE WHEN t.status = 'running' THEN t.finished_at ELSE now() END,
            generation          = CASE WHEN t.status = 'running' THEN t.generation ELSE t.generation + 1 END,
            looks               = CASE WHEN t.status = 'running' THEN t.looks ELSE 0 END,
            republish_at        = CASE WHEN t.status = 'running' THEN t.republish_at END,
            next_attempt_at     = CASE WHEN t.status = 'running' THEN t.next_attempt_at END,
            cancel_requested_at = CASE WHEN t.status = 'running' THEN now() ELSE t.cancel_requested_at END
        FROM before AS b
        WHERE t.id = b.id AND b.why_not IS NULL AND t.status = b.status
        RETURNING t.id, t.biz_type, t.biz_id,
            {{schema}}.audit_state(t.status, t.phase, t.generation, t.attempt, t.next_attempt_at, t.cancel_requested_at) AS state
    ), logged AS (
        INSERT INTO {{schema}}.audit (actor, action, task_id, biz_type, biz_id, reason, before, after)
        SELECT {{schema}}.audit_actor(), 'cancel', a.id, a.biz_type, a.biz_id, cancel.reason, b.state, a.state
        FROM after AS a JOIN before AS b ON b.id = a.id
    )
    SELECT w.id, a.id IS NOT NULL,
        CASE WHEN a.id IS NOT NULL THEN CASE WHEN b.status = 'running' THEN 'it is running: its worker is asked to stop' END
            WHEN b.id IS NULL THEN 'no such task' ELSE coalesce(b.why_not, 'it changed meanwhile: try again') END
    FROM (SELECT DISTINCT u.id FROM unnest(cancel.ids) AS u (id) WHERE u.id IS NOT NULL) AS w
    LEFT JOIN before AS b ON b.id = w.id
    LEFT JOIN after AS a ON a.id = w.id
    ORDER BY w.id;
END $$;
-- +goose StatementEnd

-- Deletes tasks for good, with their dead letters; their attempts stay in the log. The biz id is free again at once.
-- A running one is refused: its worker would find no row for its result.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.delete_task(ids bigint[], reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    PERFORM {{schema}}.audit_reason(delete_task.reason);
    PERFORM t.id FROM {{schema}}.task AS t WHERE t.id = ANY (delete_task.ids) ORDER BY t.id FOR UPDATE;
    RETURN QUERY
    WITH before AS MATERIALIZED (
        SELECT t.id, t.status, t.dead_lettered_at IS NOT NULL OR t.status = 'dead' AS lettered,
            {{schema}}.audit_state(t.status, t.phase, t.generation, t.attempt, coalesce(t.next_attempt_at, t.run_at), t.cancel_requested_at) AS state
        FROM {{schema}}.task AS t
        WHERE t.id = ANY (delete_task.ids)
    ), gone AS (
        DELETE FROM {{schema}}.task AS t USING before AS b
        WHERE t.id = b.id AND b.status <> 'running' AND t.status = b.status
        RETURNING t.id, t.biz_type, t.biz_id, b.lettered, b.state
    ), purge AS (
        INSERT INTO {{schema}}.letter_purge (task_id, biz_type)
        SELECT g.id, g.biz_type FROM gone AS g WHERE g.lettered
        ON CONFLICT DO NOTHING
    ), logged AS (
        INSERT INTO {{schema}}.audit (actor, action, task_id, biz_type, biz_id, reason, before)
        SELECT {{schema}}.audit_actor(), 'delete', g.id, g.biz_type, g.biz_id, delete_task.reason, g.state FROM gone AS g
    )
    SELECT w.id, g.id IS NOT NULL,
        CASE WHEN g.id IS NOT NULL THEN NULL WHEN b.id IS NULL THEN 'no such task'
            WHEN b.status = 'running' THEN 'it is running: cancel it first, or wait until it ends'
            ELSE 'it changed meanwhile: try again' END
    FROM (SELECT DISTINCT u.id FROM unnest(delete_task.ids) AS u (id) WHERE u.id IS NOT NULL) AS w
    LEFT JOIN before AS b ON b.id = w.id
    LEFT JOIN gone AS g ON g.id = w.id
    ORDER BY w.id;
END $$;
-- +goose StatementEnd

-- The same for one task each.
CREATE FUNCTION {{schema}}.delete_task(task_id bigint, reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text) LANGUAGE sql ROWS 1
AS $$ SELECT r.id, r.changed, r.why_not FROM {{schema}}.delete_task(ARRAY[task_id], reason) AS r $$;

CREATE FUNCTION {{schema}}.requeue(task_id bigint, reason text, allow_compensated boolean DEFAULT false)
RETURNS TABLE (id bigint, changed boolean, why_not text) LANGUAGE sql ROWS 1
AS $$ SELECT r.id, r.changed, r.why_not FROM {{schema}}.requeue(ARRAY[task_id], reason, allow_compensated) AS r $$;

CREATE FUNCTION {{schema}}.run_now(task_id bigint, reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text) LANGUAGE sql ROWS 1
AS $$ SELECT r.id, r.changed, r.why_not FROM {{schema}}.run_now(ARRAY[task_id], reason) AS r $$;

CREATE FUNCTION {{schema}}.delay(task_id bigint, by interval, reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text) LANGUAGE sql ROWS 1
AS $$ SELECT r.id, r.changed, r.why_not FROM {{schema}}.delay(ARRAY[task_id], by, reason) AS r $$;

CREATE FUNCTION {{schema}}.cancel(task_id bigint, reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text) LANGUAGE sql ROWS 1
AS $$ SELECT r.id, r.changed, r.why_not FROM {{schema}}.cancel(ARRAY[task_id], reason) AS r $$;

-- Postgres lets everybody execute a new function; roles get theirs in the roles file.
REVOKE ALL ON FUNCTION
    {{schema}}.enqueue(text, json, text, text, timestamptz, int, text, jsonb),
    {{schema}}.audit_state(text, text, int, int, timestamptz, timestamptz),
    {{schema}}.audit_actor(),
    {{schema}}.audit_reason(text),
    {{schema}}.move_due(text, bigint[], timestamptz, text),
    {{schema}}.requeue(bigint[], text, boolean), {{schema}}.requeue(bigint, text, boolean),
    {{schema}}.reset(text, text, text, boolean, boolean),
    {{schema}}.run_now(bigint[], text), {{schema}}.run_now(bigint, text),
    {{schema}}.delay(bigint[], interval, text), {{schema}}.delay(bigint, interval, text),
    {{schema}}.cancel(bigint[], text), {{schema}}.cancel(bigint, text),
    {{schema}}.delete_task(bigint[], text), {{schema}}.delete_task(bigint, text)
FROM PUBLIC;
