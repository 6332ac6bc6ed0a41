-- +goose Up

-- Operating: every change that a person makes to tasks, by id or in bulk. All goes through operate(), so that guard, fence
-- and audit are written once; the named functions say what may be asked.

-- What a cancel request wants of the worker that runs the task: stop, or stop and be undone.
ALTER TABLE {{schema}}.task ADD COLUMN cancel_compensates boolean;

-- A letter is deleted only when it is older than the change that took it back: the task may have died anew meanwhile.
ALTER TABLE {{schema}}.letter_purge ADD COLUMN generation int; -- null: whatever is there

ALTER TABLE {{schema}}.audit ADD COLUMN bulk_id bigint;
CREATE INDEX audit_bulk ON {{schema}}.audit (bulk_id, id) WHERE bulk_id IS NOT NULL;

-- Changes tasks, all or none of the call's: locks the rows in id order (two calls never deadlock), then, as a new
-- statement that sees what the lock waited for, judges, changes and logs them. Only rows that were locked are touched.
-- A change that hands the row back to the relay sets generation + 1, so every message published before is stale.
-- options: by (interval, delay), priority (set_priority), allow_succeeded, allow_compensated, compensate (booleans).
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.operate(action text, ids bigint[], reason text, options jsonb DEFAULT '{}', actor text DEFAULT NULL, bulk_id bigint DEFAULT NULL)
RETURNS TABLE (id bigint, changed boolean, why_not text)
-- Hash joins on, whatever the session says: the relay's has them off, and the answers of 500 rows took 100 ms by nested loop.
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_hashjoin = on SET enable_sort = on SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    allow_succeeded   boolean := coalesce((options ->> 'allow_succeeded')::boolean, false);
    allow_compensated boolean := coalesce((options ->> 'allow_compensated')::boolean, false);
    compensate        boolean := coalesce((options ->> 'compensate')::boolean, false);
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
            || CASE WHEN operate.action = 'set_priority' THEN jsonb_build_object('priority', t.priority) ELSE '{}' END AS state,
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
            dead_lettered_at = NULL
        FROM unnest(found_id, way) AS w (id, way)
        WHERE t.id = ANY (may) AND t.id = w.id AND w.way = 'end' AND t.status IN ('pending', 'retrying', 'blocked');
        UPDATE {{schema}}.task AS t
        SET cancel_requested_at = coalesce(t.cancel_requested_at, now()), cancel_compensates = nullif(compensate, false)
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
             || CASE WHEN operate.action = 'set_priority' THEN jsonb_build_object('priority', t.priority) ELSE '{}' END
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
            WHEN f.way = 'ask' AND compensate THEN 'it is running: its worker is asked to stop, then it is compensated'
            WHEN f.way = 'ask' THEN 'it is running: its worker is asked to stop'
            WHEN f.way = 'undo' THEN 'it is compensated first, and ends as dead with reason cancelled'
        END
    FROM (SELECT DISTINCT u.id FROM unnest(operate.ids) AS u (id) WHERE u.id IS NOT NULL) AS w
    LEFT JOIN unnest(found_id, refused, way) AS f (id, refused, way) ON f.id = w.id
    ORDER BY w.id;
END $$;
-- +goose StatementEnd

-- Starts dead and cancelled tasks anew.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION {{schema}}.requeue(ids bigint[], reason text, allow_compensated boolean DEFAULT false)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT o.id, o.changed, o.why_not
    FROM {{schema}}.operate('requeue', requeue.ids, requeue.reason, jsonb_build_object('allow_compensated', requeue.allow_compensated)) AS o;
END $$;
-- +goose StatementEnd

-- Starts tasks over from any state but running; succeeded ones only when told so.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.reset(ids bigint[], reason text, allow_succeeded boolean DEFAULT false, allow_compensated boolean DEFAULT false)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT o.id, o.changed, o.why_not
    FROM {{schema}}.operate('reset', reset.ids, reset.reason,
        jsonb_build_object('allow_succeeded', reset.allow_succeeded, 'allow_compensated', reset.allow_compensated)) AS o;
END $$;
-- +goose StatementEnd

-- The same for the task with a business id.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION {{schema}}.reset(biz_type text, biz_id text, reason text, allow_succeeded boolean DEFAULT false, allow_compensated boolean DEFAULT false)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    the_id bigint;
BEGIN
    PERFORM {{schema}}.audit_reason(reset.reason);
    SELECT t.id INTO the_id FROM {{schema}}.task AS t
    WHERE t.biz_type = reset.biz_type COLLATE "C" AND t.biz_id = reset.biz_id COLLATE "C";
    IF the_id IS NULL THEN
        RETURN QUERY SELECT NULL::bigint, false, 'no such task';
        RETURN;
    END IF;
    RETURN QUERY SELECT o.id, o.changed, o.why_not
    FROM {{schema}}.operate('reset', ARRAY[the_id], reset.reason,
        jsonb_build_object('allow_succeeded', reset.allow_succeeded, 'allow_compensated', reset.allow_compensated)) AS o;
END $$;
-- +goose StatementEnd

-- Runs finished tasks once more; succeeded ones, and those whose compensation was done, only when told so.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.rerun(ids bigint[], reason text, allow_succeeded boolean DEFAULT false, allow_compensated boolean DEFAULT false)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT o.id, o.changed, o.why_not
    FROM {{schema}}.operate('rerun', rerun.ids, rerun.reason,
        jsonb_build_object('allow_succeeded', rerun.allow_succeeded, 'allow_compensated', rerun.allow_compensated)) AS o;
END $$;
-- +goose StatementEnd

-- Makes pending and retrying tasks due now; the attempt count stays.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION {{schema}}.run_now(ids bigint[], reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT o.id, o.changed, o.why_not FROM {{schema}}.operate('run_now', run_now.ids, run_now.reason) AS o;
END $$;
-- +goose StatementEnd

-- Makes pending and retrying tasks due that much later than now.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION {{schema}}.delay(ids bigint[], by interval, reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT o.id, o.changed, o.why_not
    FROM {{schema}}.operate('delay', delay.ids, delay.reason, jsonb_build_object('by', delay.by)) AS o;
END $$;
-- +goose StatementEnd

-- Moves pending and retrying tasks to the other lane of their type: high or low.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.set_priority(ids bigint[], priority text, reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT o.id, o.changed, o.why_not
    FROM {{schema}}.operate('set_priority', set_priority.ids, set_priority.reason, jsonb_build_object('priority', set_priority.priority)) AS o;
END $$;
-- +goose StatementEnd

-- Cancels unfinished tasks: at once when they wait, by asking the worker when they run. With compensate, what was begun is
-- undone: such a task is compensated and ends as dead with reason cancelled.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.cancel(ids bigint[], reason text, compensate boolean)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT o.id, o.changed, o.why_not
    FROM {{schema}}.operate('cancel', cancel.ids, cancel.reason, jsonb_build_object('compensate', cancel.compensate)) AS o;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION {{schema}}.cancel(ids bigint[], reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT o.id, o.changed, o.why_not FROM {{schema}}.operate('cancel', cancel.ids, cancel.reason) AS o;
END $$;
-- +goose StatementEnd

-- Deletes tasks for good, with their dead letters; their attempts stay in the log. The biz id is free again at once.
-- A running one is refused: its worker would find no row for its result.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION {{schema}}.delete_task(ids bigint[], reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT o.id, o.changed, o.why_not FROM {{schema}}.operate('delete', delete_task.ids, delete_task.reason) AS o;
END $$;
-- +goose StatementEnd

-- Gives dead tasks up for good: they become cancelled, and their letters go away. requeue still brings them back.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.discard(ids bigint[], reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT o.id, o.changed, o.why_not FROM {{schema}}.operate('discard', discard.ids, discard.reason) AS o;
END $$;
-- +goose StatementEnd

DROP FUNCTION {{schema}}.move_due(text, bigint[], timestamptz, text); -- run_now and delay were its only callers

-- The same for one task each.
CREATE FUNCTION {{schema}}.reset(task_id bigint, reason text, allow_succeeded boolean DEFAULT false, allow_compensated boolean DEFAULT false)
RETURNS TABLE (id bigint, changed boolean, why_not text) LANGUAGE sql ROWS 1
AS $$ SELECT r.id, r.changed, r.why_not FROM {{schema}}.reset(ARRAY[task_id], reason, allow_succeeded, allow_compensated) AS r $$;

CREATE FUNCTION {{schema}}.rerun(task_id bigint, reason text, allow_succeeded boolean DEFAULT false, allow_compensated boolean DEFAULT false)
RETURNS TABLE (id bigint, changed boolean, why_not text) LANGUAGE sql ROWS 1
AS $$ SELECT r.id, r.changed, r.why_not FROM {{schema}}.rerun(ARRAY[task_id], reason, allow_succeeded, allow_compensated) AS r $$;

CREATE FUNCTION {{schema}}.set_priority(task_id bigint, priority text, reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text) LANGUAGE sql ROWS 1
AS $$ SELECT r.id, r.changed, r.why_not FROM {{schema}}.set_priority(ARRAY[task_id], priority, reason) AS r $$;

CREATE FUNCTION {{schema}}.cancel(task_id bigint, reason text, compensate boolean)
RETURNS TABLE (id bigint, changed boolean, why_not text) LANGUAGE sql ROWS 1
AS $$ SELECT r.id, r.changed, r.why_not FROM {{schema}}.cancel(ARRAY[task_id], reason, compensate) AS r $$;

CREATE FUNCTION {{schema}}.discard(task_id bigint, reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text) LANGUAGE sql ROWS 1
AS $$ SELECT r.id, r.changed, r.why_not FROM {{schema}}.discard(ARRAY[task_id], reason) AS r $$;

-- Bulk work: one action on all tasks that a filter finds. A row is made by start_bulk; a relay works it off in batches.
-- Cursor, counts and the changes of a batch are one transaction, so a relay that dies in the middle loses nothing and
-- does nothing twice.
CREATE TABLE {{schema}}.bulk (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    action      text NOT NULL,
    filter      jsonb NOT NULL,
    options     jsonb NOT NULL,
    reason      text NOT NULL,
    actor       text NOT NULL,
    rate        double precision NOT NULL,          -- tasks a second
    state       text NOT NULL DEFAULT 'open',
    created_at  timestamptz NOT NULL DEFAULT now(), -- tasks that die later are not meant
    last_id     bigint NOT NULL,                    -- nor those written later
    started_at  timestamptz,
    finished_at timestamptz,
    cursor_at   timestamptz NOT NULL DEFAULT '-infinity', -- dead tasks are gone through by dead_at, all others by id
    cursor_id   bigint NOT NULL DEFAULT 0,
    expected    bigint,                             -- counted when it began; null: not known
    done        bigint NOT NULL DEFAULT 0,          -- found by the filter so far; changed + skipped
    changed     bigint NOT NULL DEFAULT 0,
    skipped     bigint NOT NULL DEFAULT 0,
    skipped_why jsonb NOT NULL DEFAULT '{}',        -- why_not → how many
    held_back   int NOT NULL DEFAULT 0,             -- tasks it brought back that no worker has started yet, when it waits for them
    next_at     timestamptz NOT NULL DEFAULT now(), -- of the next batch
    owner       text,                               -- the relay that works on it
    owner_until timestamptz,
    ended_by    text,                               -- who cancelled it, and why
    end_reason  text,
    CONSTRAINT state_is_known CHECK (state IN ('open', 'done', 'cancelled')),
    CONSTRAINT rate_is_positive CHECK (rate > 0 AND rate <= 1000000)
) WITH (fillfactor = 50);
-- The same press twice is the same bulk.
CREATE UNIQUE INDEX bulk_open ON {{schema}}.bulk (action, md5(filter::text || options::text)) WHERE state = 'open';

-- What tasks died of, by a name for all that died of the same: type, class and the error without what differs from task to
-- task. Ids, numbers and times become #, so that "timeout after 1031 ms (request 4f0c…)" is one group and not thousands.
-- Words of hex digits need a digit in them, else "feedback" were one. Only the first 300 characters: the rest is detail.
CREATE FUNCTION {{schema}}.error_shape(error text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN left(btrim(regexp_replace(regexp_replace(left(coalesce(error, ''), 300),
    E'\\m(?=[a-f-]*[0-9])[0-9a-f-]{8,}\\M|[0-9]+', '#', 'gi'), E'\\s+', ' ', 'g')), 200);

CREATE FUNCTION {{schema}}.error_group(biz_type text, error_class text, error text) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN left(md5(concat_ws(E'\n', biz_type, error_class, {{schema}}.error_shape(error))), 10);

-- The filter as it is kept: known keys only, with the states that the action is for when none is named.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.bulk_filter(action text, filter jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    f    jsonb := jsonb_strip_nulls(coalesce(filter, '{}'));
    key  text;
    able text[] := CASE action
        WHEN 'requeue' THEN '{dead,cancelled}' WHEN 'discard' THEN '{dead}'
        WHEN 'rerun' THEN '{dead,cancelled,succeeded}' WHEN 'delete' THEN '{dead,cancelled,succeeded,pending,retrying,blocked}'
        WHEN 'reset' THEN '{dead,cancelled,succeeded,pending,retrying,blocked}'
        WHEN 'run_now' THEN '{pending,retrying}' WHEN 'delay' THEN '{pending,retrying}' WHEN 'set_priority' THEN '{pending,retrying}'
        WHEN 'cancel' THEN '{pending,retrying,blocked,running}' END;
    -- What somebody cancelled stays cancelled, and nothing is deleted or started over, unless the filter names that state.
    usual text[] := CASE WHEN action IN ('requeue', 'discard') THEN '{dead}' WHEN action IN ('rerun', 'reset', 'delete') THEN NULL ELSE able END;
    states text[];
BEGIN
    IF able IS NULL THEN
        RAISE EXCEPTION 'there is no bulk action "%"', action USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Actions are requeue, reset, rerun, run_now, delay, set_priority, cancel, delete, discard.';
    END IF;
    IF jsonb_typeof(f) <> 'object' THEN
        RAISE EXCEPTION 'the filter is no JSON object' USING ERRCODE = 'invalid_parameter_value', HINT = 'Such as {"type": "ORDER_PAYMENT"}.';
    END IF;
    FOR key IN SELECT k FROM jsonb_object_keys(f) AS k LOOP
        IF key NOT IN ('type', 'status', 'error', 'error_class', 'group', 'dead_reason', 'older_than', 'newer_than', 'all') THEN
            RAISE EXCEPTION 'the filter has an unknown key "%"', key USING ERRCODE = 'invalid_parameter_value',
                HINT = 'Known are type, status, error, error_class, group, dead_reason, older_than, newer_than and all.';
        ELSIF key IN ('type', 'error', 'error_class', 'group', 'dead_reason', 'older_than', 'newer_than') AND jsonb_typeof(f -> key) <> 'string' THEN
            RAISE EXCEPTION 'the filter''s "%" is no string', key USING ERRCODE = 'invalid_parameter_value';
        ELSIF key IN ('older_than', 'newer_than') AND ((f ->> key)::interval > '0' AND (f ->> key)::interval <= '100 years') IS NOT TRUE THEN
            -- What is out of Postgres's range would end each batch with an error, and no other bulk would get its turn.
            RAISE EXCEPTION 'the filter''s "%" is not more than 0 and at most 100 years: %', key, f ->> key
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Such as "90 minutes".';
        END IF;
    END LOOP;
    -- An empty filter is more often a mistake than a wish.
    IF (f - 'all' - 'status') = '{}' AND (f -> 'all') IS DISTINCT FROM 'true'::jsonb THEN
        RAISE EXCEPTION 'the filter is empty' USING ERRCODE = 'invalid_parameter_value', HINT = 'To mean all of them say {"all": true}.';
    END IF;
    states := CASE jsonb_typeof(f -> 'status')
        WHEN 'string' THEN ARRAY[f ->> 'status']
        WHEN 'array' THEN ARRAY(SELECT DISTINCT s FROM jsonb_array_elements_text(f -> 'status') AS s ORDER BY s)
        ELSE CASE WHEN f ? 'dead_reason' AND 'dead' = ANY (able) THEN '{dead}' ELSE usual END END;
    IF states IS NULL OR states = '{}' THEN
        RAISE EXCEPTION '% in bulk needs a status in its filter', action USING ERRCODE = 'invalid_parameter_value',
            HINT = format('Such as {"status": "%s"}.', able[1]);
    END IF;
    IF NOT states <@ able THEN
        RAISE EXCEPTION '% is not for tasks that are %', action, array_to_string(ARRAY(SELECT s FROM unnest(states) AS s WHERE s <> ALL (able)), ', ')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is for ' || array_to_string(able, ', ') || '.';
    END IF;
    RETURN (f - 'all') || jsonb_build_object('status', to_jsonb(states));
END $$;
-- +goose StatementEnd

-- The next n tasks of a normal filter, behind a cursor. Dead tasks come from their own index, in the order of their death:
-- by id the whole table would be read for some thousand of them. All others come by id, from the next scan rows.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.bulk_next(filter jsonb, as_of timestamptz, last_id bigint, cursor_at timestamptz, cursor_id bigint, n int, scan_to bigint)
RETURNS TABLE (id bigint, dead_at timestamptz)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
AS $$
#variable_conflict use_column
DECLARE
    the_type text := filter ->> 'type';
    text_in  text := filter ->> 'error';
    class    text := filter ->> 'error_class';
    of_group text := filter ->> 'group';
    died_of  text := filter ->> 'dead_reason';
    states   text[] := ARRAY(SELECT jsonb_array_elements_text(filter -> 'status'));
    to_at    timestamptz := as_of - coalesce((filter ->> 'older_than')::interval, '0');
    from_at  timestamptz := coalesce(as_of - (filter ->> 'newer_than')::interval, '-infinity');
BEGIN
    IF states = '{dead}' THEN
        RETURN QUERY
        SELECT t.id, t.dead_at FROM {{schema}}.task AS t
        WHERE t.dead_at IS NOT NULL AND t.status = 'dead'
            AND t.dead_at >= greatest(bulk_next.cursor_at, from_at) AND (t.dead_at, t.id) > (bulk_next.cursor_at, bulk_next.cursor_id)
            AND t.dead_at <= to_at
            AND (the_type IS NULL OR t.biz_type = the_type COLLATE "C")
            AND (class IS NULL OR t.error_class = class) AND (died_of IS NULL OR t.dead_reason = died_of)
            AND (text_in IS NULL OR strpos(t.last_error, text_in) > 0)
            AND (of_group IS NULL OR {{schema}}.error_group(t.biz_type, t.error_class, t.last_error) = of_group)
        ORDER BY t.dead_at, t.id LIMIT n;
    ELSE
        RETURN QUERY
        SELECT t.id, NULL::timestamptz FROM {{schema}}.task AS t
        WHERE t.id > bulk_next.cursor_id AND t.id <= least(bulk_next.last_id, bulk_next.scan_to)
            AND t.status = ANY (states)
            AND coalesce(t.finished_at, t.created_at) BETWEEN from_at AND to_at
            AND (the_type IS NULL OR t.biz_type = the_type COLLATE "C")
            AND (class IS NULL OR t.error_class = class) AND (died_of IS NULL OR t.dead_reason = died_of)
            AND (text_in IS NULL OR strpos(t.last_error, text_in) > 0)
            AND (of_group IS NULL OR {{schema}}.error_group(t.biz_type, t.error_class, t.last_error) = of_group)
        ORDER BY t.id LIMIT n;
    END IF;
END $$;
-- +goose StatementEnd

-- How many tasks a bulk would find now, counted up to at_most, and the first of them. Changes nothing.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.preview_bulk(action text, filter jsonb, at_most int DEFAULT 10000)
RETURNS TABLE (matching bigint, sample bigint[], normal jsonb)
LANGUAGE plpgsql STABLE SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    f jsonb := {{schema}}.bulk_filter(preview_bulk.action, preview_bulk.filter);
BEGIN
    RETURN QUERY
    SELECT count(*), (array_agg(b.id ORDER BY b.dead_at, b.id))[1:5], f
    FROM {{schema}}.bulk_next(f, now(), 9223372036854775807, '-infinity', 0, preview_bulk.at_most, 9223372036854775807) AS b;
END $$;
-- +goose StatementEnd

-- Starts a bulk, or finds the open one that does the same. A relay works it off, at rate tasks a second.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.start_bulk(action text, filter jsonb, reason text, options jsonb DEFAULT '{}', rate double precision DEFAULT 500)
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
        WHEN 'cancel' THEN '{compensate}' ELSE '{}' END;
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

-- Ends a bulk before its end. What it has changed stays changed.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.cancel_bulk(bulk_id bigint, reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    was text;
BEGIN
    PERFORM {{schema}}.audit_reason(cancel_bulk.reason);
    SELECT b.state INTO was FROM {{schema}}.bulk AS b WHERE b.id = cancel_bulk.bulk_id FOR UPDATE;
    UPDATE {{schema}}.bulk AS b
    SET state = 'cancelled', finished_at = clock_timestamp(), ended_by = {{schema}}.audit_actor(), end_reason = cancel_bulk.reason,
        owner = NULL, owner_until = NULL, held_back = 0
    WHERE b.id = cancel_bulk.bulk_id AND b.state = 'open';
    IF FOUND THEN
        INSERT INTO {{schema}}.audit (actor, action, reason, bulk_id)
        VALUES ({{schema}}.audit_actor(), 'cancel_bulk', cancel_bulk.reason, cancel_bulk.bulk_id);
        RETURN QUERY SELECT cancel_bulk.bulk_id, true, NULL::text;
    ELSE
        RETURN QUERY SELECT cancel_bulk.bulk_id, false, CASE WHEN was IS NULL THEN 'no such bulk' ELSE 'it is ' || was || ' already' END;
    END IF;
END $$;
-- +goose StatementEnd

-- Does one batch of the open bulk that is next, for a relay. In the same transaction: the changes, their audit, the cursor
-- and the counts. It returns nothing when there is no bulk for this relay, else how long until the next batch.
--
-- A batch is a tenth of a second's worth of the rate. An action that brings tasks back waits for the workers: of what
-- it has brought back, at most a fifth of a second's worth may be unstarted, or all other tasks of these lanes would wait
-- behind fifty thousand. [With a second's worth, on a machine that was busy otherwise, p95 of other tasks rose from 0.24 to
-- 2.3 s.] Types that are paused or have no live worker are not waited for: nothing else of theirs runs either.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.bulk_step(relay text, lease interval)
RETURNS TABLE (id bigint, action text, state text, looked int, changed int, wait interval)
LANGUAGE plpgsql SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_custom_plan SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    b        {{schema}}.bulk;
    by_death boolean;
    room     int;
    n        int;
    found_id bigint[];
    death    timestamptz;
    locked   bigint[];
    scanned  bigint;
    results  jsonb := '{}';
    finished boolean;
    one      bigint;
BEGIN
    SELECT * INTO b FROM {{schema}}.bulk AS o
    WHERE o.state = 'open' AND (o.owner IS NULL OR o.owner = bulk_step.relay OR o.owner_until < clock_timestamp())
    ORDER BY o.next_at, o.id LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF b.next_at > clock_timestamp() THEN
        RETURN QUERY SELECT b.id, b.action, b.state, 0, 0, b.next_at - clock_timestamp();
        RETURN;
    END IF;
    by_death := b.filter -> 'status' = '["dead"]';
    IF b.started_at IS NULL AND by_death THEN
        SELECT count(*) INTO b.expected FROM {{schema}}.bulk_next(b.filter, b.created_at, b.last_id, '-infinity', 0, 1000000, 0);
    END IF;

    n := least(500, greatest(1, ceil(b.rate / 10)));
    b.held_back := 0;
    IF b.action IN ('requeue', 'reset', 'rerun', 'run_now') THEN
        room := greatest(20, b.rate / 5);
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

    IF by_death THEN
        SELECT array_agg(x.id ORDER BY x.dead_at, x.id), max(x.dead_at) INTO found_id, death
        FROM {{schema}}.bulk_next(b.filter, b.created_at, b.last_id, b.cursor_at, b.cursor_id, n, 0) AS x;
        finished := coalesce(cardinality(found_id), 0) < n;
        b.cursor_at := coalesce(death, b.cursor_at);
        b.cursor_id := coalesce(found_id[cardinality(found_id)], b.cursor_id);
    ELSE
        SELECT max(s.id) INTO scanned
        FROM (SELECT t.id FROM {{schema}}.task AS t WHERE t.id > b.cursor_id AND t.id <= b.last_id ORDER BY t.id LIMIT 10000) AS s;
        SELECT array_agg(x.id ORDER BY x.id) INTO found_id
        FROM {{schema}}.bulk_next(b.filter, b.created_at, b.last_id, '-infinity', b.cursor_id, n, coalesce(scanned, 0)) AS x;
        finished := scanned IS NULL;
        b.cursor_id := CASE WHEN cardinality(found_id) = n THEN found_id[n] ELSE coalesce(scanned, b.cursor_id) END;
    END IF;

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
        finished_at = CASE WHEN finished THEN clock_timestamp() END, expected = b.expected, cursor_at = b.cursor_at, cursor_id = b.cursor_id,
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

REVOKE ALL ON FUNCTION
    {{schema}}.operate(text, bigint[], text, jsonb, text, bigint),
    {{schema}}.reset(bigint[], text, boolean, boolean), {{schema}}.reset(bigint, text, boolean, boolean),
    {{schema}}.rerun(bigint[], text, boolean, boolean), {{schema}}.rerun(bigint, text, boolean, boolean),
    {{schema}}.set_priority(bigint[], text, text), {{schema}}.set_priority(bigint, text, text),
    {{schema}}.cancel(bigint[], text, boolean), {{schema}}.cancel(bigint, text, boolean),
    {{schema}}.discard(bigint[], text), {{schema}}.discard(bigint, text),
    {{schema}}.error_shape(text), {{schema}}.error_group(text, text, text), {{schema}}.bulk_filter(text, jsonb),
    {{schema}}.bulk_next(jsonb, timestamptz, bigint, timestamptz, bigint, int, bigint),
    {{schema}}.preview_bulk(text, jsonb, int),
    {{schema}}.start_bulk(text, jsonb, text, jsonb, double precision),
    {{schema}}.cancel_bulk(bigint, text),
    {{schema}}.bulk_step(text, interval)
FROM PUBLIC;

-- +goose StatementBegin
DO $roles$
BEGIN
    IF to_regrole('{{schema}}_relay') IS NOT NULL THEN
        GRANT EXECUTE ON FUNCTION {{schema}}.bulk_step(text, interval) TO {{schema}}_relay;
    END IF;
    IF to_regrole('{{schema}}_operator') IS NOT NULL THEN
        GRANT SELECT ON {{schema}}.bulk TO {{schema}}_operator;
        GRANT EXECUTE ON FUNCTION
            {{schema}}.reset(bigint[], text, boolean, boolean), {{schema}}.reset(bigint, text, boolean, boolean),
            {{schema}}.rerun(bigint[], text, boolean, boolean), {{schema}}.rerun(bigint, text, boolean, boolean),
            {{schema}}.set_priority(bigint[], text, text), {{schema}}.set_priority(bigint, text, text),
            {{schema}}.cancel(bigint[], text, boolean), {{schema}}.cancel(bigint, text, boolean),
            {{schema}}.discard(bigint[], text), {{schema}}.discard(bigint, text),
            {{schema}}.error_shape(text), {{schema}}.error_group(text, text, text), {{schema}}.preview_bulk(text, jsonb, int),
            {{schema}}.start_bulk(text, jsonb, text, jsonb, double precision),
            {{schema}}.cancel_bulk(bigint, text) TO {{schema}}_operator;
    END IF;
    IF to_regrole('{{schema}}_viewer') IS NOT NULL THEN
        GRANT SELECT ON {{schema}}.bulk TO {{schema}}_viewer;
        GRANT EXECUTE ON FUNCTION {{schema}}.error_shape(text), {{schema}}.error_group(text, text, text) TO {{schema}}_viewer;
    END IF;
END $roles$;
-- +goose StatementEnd
