-- +goose Up

-- Five roles without login; grant them to the users of services and people. Roles belong to the whole server, so another
-- database may have made them already, or may be making them at this moment. A user who may not create roles skips what
-- is missing and says so: somebody who may then runs this block ("taskrelay migrate roles" prints it).
-- +goose StatementBegin
DO $roles$
DECLARE
    r       text;
    missing text[] := '{}';
    may     boolean := (SELECT rolsuper OR rolcreaterole FROM pg_catalog.pg_roles WHERE rolname = current_user);
BEGIN
    FOREACH r IN ARRAY ARRAY['{{schema}}_producer', '{{schema}}_relay', '{{schema}}_worker', '{{schema}}_operator', '{{schema}}_viewer'] LOOP
        CONTINUE WHEN to_regrole(r) IS NOT NULL;
        IF may THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', r);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                NULL; -- another database was faster
            END;
        ELSE
            missing := missing || format('CREATE ROLE %I NOLOGIN;', r);
        END IF;
    END LOOP;
    IF missing <> '{}' THEN
        RAISE NOTICE 'user % may not create roles; let somebody who may run: %', current_user, array_to_string(missing, ' ')
            USING HINT = 'Then run the output of "taskrelay migrate roles": it grants the rights.';
    END IF;

    -- A producer writes the producer's columns and sees what became of its tasks.
    IF to_regrole('{{schema}}_producer') IS NOT NULL THEN
        GRANT USAGE ON SCHEMA {{schema}} TO {{schema}}_producer;
        GRANT INSERT (biz_type, biz_id, priority, ordering_key, payload, headers, run_at, max_attempts) ON {{schema}}.task TO {{schema}}_producer;
        GRANT SELECT (id, biz_type, biz_id, status) ON {{schema}}.task TO {{schema}}_producer;
        GRANT SELECT (strict_types) ON {{schema}}.installation TO {{schema}}_producer;
        GRANT SELECT (biz_type, default_priority, known_by) ON {{schema}}.biz_type TO {{schema}}_producer;
        GRANT SELECT ON {{schema}}.schema_version TO {{schema}}_producer;
        GRANT EXECUTE ON FUNCTION {{schema}}.enqueue(text, json, text, text, timestamptz, int, text, jsonb) TO {{schema}}_producer;
    END IF;

    -- A relay hands tasks on, makes dead what the stream refuses, and gives rows of another cluster a transaction id of this one.
    IF to_regrole('{{schema}}_relay') IS NOT NULL THEN
        GRANT USAGE ON SCHEMA {{schema}} TO {{schema}}_relay;
        GRANT SELECT ON {{schema}}.task, {{schema}}.task_attempt, {{schema}}.biz_type, {{schema}}.worker, {{schema}}.schema_version,
            {{schema}}.known_lane, {{schema}}.lag, {{schema}}.stuck TO {{schema}}_relay;
        GRANT EXECUTE ON FUNCTION {{schema}}.lag_now(), {{schema}}.stuck_now() TO {{schema}}_relay; -- behind the views lag and stuck
        GRANT UPDATE (xid, status, generation, looks, republish_at, next_attempt_at, finished_at, dead_at, dead_reason, dead_lettered_at,
            last_error, error_class) ON {{schema}}.task TO {{schema}}_relay;
        GRANT SELECT, INSERT, UPDATE, DELETE ON {{schema}}.lane, {{schema}}.relay TO {{schema}}_relay;
        GRANT SELECT, DELETE ON {{schema}}.letter_purge TO {{schema}}_relay;
        GRANT SELECT, INSERT, DELETE ON {{schema}}.incarnation TO {{schema}}_relay;
        GRANT SELECT ON {{schema}}.installation TO {{schema}}_relay;
        GRANT UPDATE (system_identifier, stream_created, dead_stream_created, losses) ON {{schema}}.installation TO {{schema}}_relay;
    END IF;

    -- A worker claims and settles, logs attempts, and makes its biz types known.
    IF to_regrole('{{schema}}_worker') IS NOT NULL THEN
        GRANT USAGE ON SCHEMA {{schema}} TO {{schema}}_worker;
        GRANT SELECT ON {{schema}}.task, {{schema}}.lane, {{schema}}.installation, {{schema}}.schema_version TO {{schema}}_worker;
        GRANT UPDATE (status, phase, generation, attempt, looks, lease_owner, lease_token, lease_until, next_attempt_at, republish_at,
            started_at, first_started_at, finished_at, dead_at, dead_reason, dead_lettered_at, cancel_requested_at,
            last_error, error_class, cause, execute_attempts, compensation, compensations, result) ON {{schema}}.task TO {{schema}}_worker;
        GRANT SELECT, INSERT, UPDATE ON {{schema}}.task_attempt, {{schema}}.biz_type TO {{schema}}_worker;
        GRANT SELECT, INSERT, UPDATE, DELETE ON {{schema}}.worker TO {{schema}}_worker;
    END IF;

    -- An operator reads everything and acts through functions, which guard and audit.
    IF to_regrole('{{schema}}_operator') IS NOT NULL THEN
        GRANT USAGE ON SCHEMA {{schema}} TO {{schema}}_operator;
        GRANT SELECT ON {{schema}}.task_view, {{schema}}.attempt_view, {{schema}}.dead, {{schema}}.stuck, {{schema}}.lag, {{schema}}.known_lane,
            {{schema}}.task, {{schema}}.task_attempt, {{schema}}.lane, {{schema}}.biz_type, {{schema}}.installation,
            {{schema}}.worker, {{schema}}.relay, {{schema}}.audit, {{schema}}.schema_version TO {{schema}}_operator;
        GRANT INSERT, UPDATE ON {{schema}}.biz_type TO {{schema}}_operator;
        GRANT UPDATE (strict_types) ON {{schema}}.installation TO {{schema}}_operator;
        GRANT EXECUTE ON FUNCTION {{schema}}.lag_now(), {{schema}}.stuck_now(),
            {{schema}}.requeue(bigint[], text, boolean), {{schema}}.requeue(bigint, text, boolean),
            {{schema}}.reset(text, text, text, boolean, boolean),
            {{schema}}.run_now(bigint[], text), {{schema}}.run_now(bigint, text),
            {{schema}}.delay(bigint[], interval, text), {{schema}}.delay(bigint, interval, text),
            {{schema}}.cancel(bigint[], text), {{schema}}.cancel(bigint, text),
            {{schema}}.delete_task(bigint[], text), {{schema}}.delete_task(bigint, text) TO {{schema}}_operator;
    END IF;

    -- A viewer sees no payload, headers or result.
    IF to_regrole('{{schema}}_viewer') IS NOT NULL THEN
        GRANT USAGE ON SCHEMA {{schema}} TO {{schema}}_viewer;
        GRANT SELECT ON {{schema}}.task_view, {{schema}}.attempt_view, {{schema}}.dead, {{schema}}.stuck, {{schema}}.lag, {{schema}}.known_lane,
            {{schema}}.task_attempt, {{schema}}.lane, {{schema}}.worker, {{schema}}.relay, {{schema}}.schema_version TO {{schema}}_viewer;
        GRANT EXECUTE ON FUNCTION {{schema}}.lag_now(), {{schema}}.stuck_now() TO {{schema}}_viewer;
    END IF;
END $roles$;
-- +goose StatementEnd
