-- +goose Up

-- +goose StatementBegin
DO $roles$
BEGIN
    -- A relay that gives up on a compensation says so in the row.
    IF to_regrole('{{schema}}_relay') IS NOT NULL THEN
        GRANT UPDATE (compensation) ON {{schema}}.task TO {{schema}}_relay;
        GRANT EXECUTE ON FUNCTION {{schema}}.audit_reposition(text, jsonb) TO {{schema}}_relay;
    END IF;

    -- "taskrelay doctor" looks at everything; --fix asks the relay.
    IF to_regrole('{{schema}}_operator') IS NOT NULL THEN
        GRANT SELECT ON {{schema}}.incarnation TO {{schema}}_operator;
        GRANT EXECUTE ON FUNCTION {{schema}}.look_again(bigint[], text), {{schema}}.rescan(text), {{schema}}.replay_letters(text)
            TO {{schema}}_operator;
    END IF;
END $roles$;
-- +goose StatementEnd
