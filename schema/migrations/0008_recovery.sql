-- +goose Up

-- What "taskrelay doctor --fix" asks of the relay. Each is a guess about messages: no generation is raised, so a message
-- that is there after all stays good, and the claim drops the second one.

-- Has the relay look at unfinished tasks at once instead of when it would by itself; same shape as the operating functions.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.look_again(ids bigint[], reason text)
RETURNS TABLE (id bigint, changed boolean, why_not text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    PERFORM {{schema}}.audit_reason(look_again.reason);
    PERFORM t.id FROM {{schema}}.task AS t WHERE t.id = ANY (look_again.ids) ORDER BY t.id FOR UPDATE;
    RETURN QUERY
    WITH before AS MATERIALIZED (
        SELECT t.id, t.republish_at,
            CASE
                WHEN t.finished_at IS NOT NULL THEN format('it is %s already', t.status)
                WHEN t.status = 'blocked' THEN 'it is blocked behind an earlier task of its ordering key'
                WHEN t.status <> 'running' AND coalesce(t.next_attempt_at, t.run_at, '-infinity') > now() THEN 'it is not due yet'
            END AS why_not
        FROM {{schema}}.task AS t
        WHERE t.id = ANY (look_again.ids)
    ), after AS (
        UPDATE {{schema}}.task AS t
        SET republish_at = CASE WHEN t.status = 'running' AND t.lease_until > now() THEN t.lease_until ELSE now() END,
            looks = t.looks + 1 -- an id of its own, else the server may take it for the message it has lost
        FROM before AS b
        WHERE t.id = b.id AND b.why_not IS NULL AND t.finished_at IS NULL
        RETURNING t.id, t.biz_type, t.biz_id, t.republish_at
    ), logged AS (
        INSERT INTO {{schema}}.audit (actor, action, task_id, biz_type, biz_id, reason, before, after)
        SELECT {{schema}}.audit_actor(), 'look_again', a.id, a.biz_type, a.biz_id, look_again.reason,
            jsonb_build_object('republish_at', b.republish_at), jsonb_build_object('republish_at', a.republish_at)
        FROM after AS a JOIN before AS b ON b.id = a.id
    )
    SELECT w.id, a.id IS NOT NULL,
        CASE WHEN a.id IS NOT NULL THEN NULL WHEN b.id IS NULL THEN 'no such task' ELSE coalesce(b.why_not, 'it changed meanwhile: try again') END
    FROM (SELECT DISTINCT u.id FROM unnest(look_again.ids) AS u (id) WHERE u.id IS NOT NULL) AS w
    LEFT JOIN before AS b ON b.id = w.id
    LEFT JOIN after AS a ON a.id = w.id
    ORDER BY w.id;
END $$;
-- +goose StatementEnd

-- Has all relays compare every lane with the stream from the start, as after a loss of the stream: each unfinished task
-- that is due gets a message anew. Returns the number of losses counted so far.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.rescan(reason text) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    n int;
BEGIN
    PERFORM {{schema}}.audit_reason(rescan.reason);
    UPDATE {{schema}}.installation AS i SET losses = i.losses + 1 RETURNING i.losses INTO n;
    INSERT INTO {{schema}}.audit (actor, action, reason, before, after)
    VALUES ({{schema}}.audit_actor(), 'rescan', rescan.reason, jsonb_build_object('losses', n - 1), jsonb_build_object('losses', n));
    RETURN n;
END $$;
-- +goose StatementEnd

-- Has a relay publish all dead letters again. They carry Task-Replayed, and no notice is sent for them.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.replay_letters(reason text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM {{schema}}.audit_reason(replay_letters.reason);
    UPDATE {{schema}}.installation SET dead_stream_created = 'epoch';
    INSERT INTO {{schema}}.audit (actor, action, reason)
    VALUES ({{schema}}.audit_actor(), 'replay_letters', replay_letters.reason);
END $$;
-- +goose StatementEnd

-- Writes down that somebody gave rows of another cluster a new place: that runs page by page, outside one transaction.
-- +goose StatementBegin
CREATE FUNCTION {{schema}}.audit_reposition(reason text, result jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM {{schema}}.audit_reason(audit_reposition.reason);
    INSERT INTO {{schema}}.audit (actor, action, reason, after)
    VALUES ({{schema}}.audit_actor(), 'reposition', audit_reposition.reason, audit_reposition.result);
END $$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION
    {{schema}}.look_again(bigint[], text), {{schema}}.rescan(text), {{schema}}.replay_letters(text), {{schema}}.audit_reposition(text, jsonb)
FROM PUBLIC;
