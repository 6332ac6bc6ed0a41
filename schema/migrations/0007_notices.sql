-- +goose Up

-- What people are still to be told. The relays copy events from the stream TASKS_EVENTS into notice, and delete them
-- there when a notifier has taken them: the outbox, once more. So a notifier that is down, a relay that is killed and a
-- stream that is lost cost nothing but time, and whoever looks sees what waits.
CREATE TABLE {{schema}}.notice (
    id           text COLLATE "C" PRIMARY KEY,   -- the event's message id: an event that is delivered twice is one notice
    biz_type     text COLLATE "C" NOT NULL,
    event        text NOT NULL,                  -- failed, dead, compensation_failed
    task_id      bigint NOT NULL,
    biz_id       text,
    attempts     int NOT NULL,
    reason       text NOT NULL,
    error        text NOT NULL,                  -- one line, at most 1 KiB
    error_class  text NOT NULL,
    compensation text NOT NULL,
    happened_at  timestamptz NOT NULL,
    added_at     timestamptz NOT NULL DEFAULT now(),
    fence        bigint                          -- the turn that is telling it
);
CREATE INDEX notice_biz_type ON {{schema}}.notice (biz_type, happened_at, id);

-- One row per type: when its next message may go out, whatever relay sends it.
CREATE TABLE {{schema}}.notice_turn (
    biz_type    text COLLATE "C" PRIMARY KEY,
    next_at     timestamptz NOT NULL,
    sent_at     timestamptz,                     -- the last message
    notifier    text,                            -- and by what it went, or was tried
    tries       int NOT NULL DEFAULT 0,          -- in vain, since then
    last_error  text,
    fence       bigint NOT NULL DEFAULT 0,       -- grows with each turn: what a late relay writes changes nothing
    taken_by    text,
    taken_until timestamptz
) WITH (fillfactor = 50);

-- +goose StatementBegin
DO $roles$
BEGIN
    IF to_regrole('{{schema}}_relay') IS NOT NULL THEN
        GRANT SELECT, INSERT, UPDATE, DELETE ON {{schema}}.notice, {{schema}}.notice_turn TO {{schema}}_relay;
    END IF;
    IF to_regrole('{{schema}}_operator') IS NOT NULL THEN
        GRANT SELECT ON {{schema}}.notice, {{schema}}.notice_turn TO {{schema}}_operator;
    END IF;
    IF to_regrole('{{schema}}_viewer') IS NOT NULL THEN
        GRANT SELECT ON {{schema}}.notice, {{schema}}.notice_turn TO {{schema}}_viewer;
    END IF;
END $roles$;
-- +goose StatementEnd
