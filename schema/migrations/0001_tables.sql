-- +goose Up

-- One row per task: written once by the producer, then only by relay, workers and operators.
-- Column order is by alignment, so that a row of a short payload stays small.
CREATE TABLE {{schema}}.task (
    id                  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    xid                 xid8        NOT NULL DEFAULT pg_current_xact_id(),
    run_at              timestamptz,
    lease_token         bigint,
    lease_until         timestamptz,
    next_attempt_at     timestamptz,
    republish_at        timestamptz,
    started_at          timestamptz,
    first_started_at    timestamptz,
    finished_at         timestamptz,
    dead_at             timestamptz,
    dead_lettered_at    timestamptz,
    cancel_requested_at timestamptz,
    expires_at          timestamptz,
    parent_id           bigint,
    max_attempts        int,
    generation          int  NOT NULL DEFAULT 0,
    attempt             int  NOT NULL DEFAULT 0,
    looks               int  NOT NULL DEFAULT 0,
    execute_attempts    int,
    compensations       int  NOT NULL DEFAULT 0,
    biz_type            text COLLATE "C" NOT NULL,
    biz_id              text COLLATE "C",
    priority            text COLLATE "C" NOT NULL DEFAULT 'low',
    ordering_key        text COLLATE "C",
    status              text COLLATE "C" NOT NULL DEFAULT 'pending',
    phase               text COLLATE "C" NOT NULL DEFAULT 'execute',
    compensation        text COLLATE "C" NOT NULL DEFAULT 'none',
    lease_owner         text,
    last_error          text,
    error_class         text,
    cause               text,
    dead_reason         text,
    result              json,
    headers             jsonb NOT NULL DEFAULT '{}',
    payload             json  NOT NULL DEFAULT '{}',

    CONSTRAINT biz_type_is_1_to_63_letters_digits_underscores_dashes
        CHECK (biz_type !~ '[^A-Za-z0-9_-]|^[_-]' AND octet_length(biz_type) BETWEEN 1 AND 63),
    CONSTRAINT biz_id_is_1_to_255_bytes_without_control_characters
        CHECK (octet_length(biz_id) BETWEEN 1 AND 255 AND biz_id !~ '[\x01-\x1f\x7f]'),
    CONSTRAINT priority_is_high_or_low CHECK (priority IN ('low', 'high')),
    CONSTRAINT ordering_key_is_1_to_255_bytes_without_control_characters
        CHECK (octet_length(ordering_key) BETWEEN 1 AND 255 AND ordering_key !~ '[\x01-\x1f\x7f]'),
    -- The size with its 4 bytes of header, which needs no look at the value: Postgres checks at every claim and settle
    -- too, and octet_length(payload::text) fetches the payload each time (8 KB: 4 µs, 100 KB: 34 µs an update).
    CONSTRAINT payload_is_at_most_512_kib CHECK (pg_column_size(payload) <= 524288 + 4),
    CONSTRAINT max_attempts_is_1_to_1000 CHECK (max_attempts BETWEEN 1 AND 1000),
    CONSTRAINT headers_is_an_object CHECK (jsonb_typeof(headers) = 'object'),
    CONSTRAINT status_is_known
        CHECK (status IN ('pending', 'running', 'succeeded', 'retrying', 'dead', 'cancelled', 'blocked')),
    CONSTRAINT phase_is_known CHECK (phase IN ('execute', 'compensate')),
    -- A plain UPDATE of status must not strand a row: whoever means to bring one back uses the function.
    CONSTRAINT use_taskrelay_requeue
        CHECK ((finished_at IS NOT NULL) = (status IN ('succeeded', 'dead', 'cancelled'))),
    CONSTRAINT running_needs_lease CHECK (status <> 'running' OR lease_until IS NOT NULL),
    CONSTRAINT task_biz_id_key UNIQUE (biz_type, biz_id)
) WITH (
    -- A batch claims whole pages, so a page needs room for two copies of its rows: then claim and settle are HOT.
    fillfactor = 30,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.05
);

-- Never an index on status, lease or attempt, nor a predicate over them: that would end HOT.
CREATE INDEX task_lane ON {{schema}}.task (biz_type, priority, xid, id);
CREATE INDEX task_scheduled ON {{schema}}.task (biz_type, priority, run_at, id) WHERE run_at IS NOT NULL;
CREATE INDEX task_republish ON {{schema}}.task (biz_type, priority, republish_at) WHERE republish_at IS NOT NULL;
CREATE INDEX task_ordering ON {{schema}}.task (biz_type, ordering_key, id) WHERE ordering_key IS NOT NULL;
CREATE INDEX task_dead ON {{schema}}.task (biz_type, dead_at) WHERE dead_at IS NOT NULL;
CREATE INDEX task_dead_letter ON {{schema}}.task (dead_at) WHERE dead_at IS NOT NULL AND dead_lettered_at IS NULL;

-- One row per attempt, successes too. No foreign key: the log outlives its task.
CREATE TABLE {{schema}}.task_attempt (
    task_id     bigint      NOT NULL,
    lease_token bigint      NOT NULL,
    started_at  timestamptz NOT NULL,
    finished_at timestamptz NOT NULL DEFAULT now(),
    generation  int  NOT NULL,
    attempt     int  NOT NULL,
    biz_type    text COLLATE "C" NOT NULL,
    biz_id      text COLLATE "C",
    phase       text COLLATE "C" NOT NULL,
    outcome     text COLLATE "C" NOT NULL,
    worker      text,
    error_class text,
    error       text,
    stack       text,
    CONSTRAINT outcome_is_known CHECK (outcome IN
        ('succeeded', 'failed', 'timeout', 'panic', 'lost', 'snoozed', 'released', 'cancelled', 'stale')),
    -- By task first: a unique index on the random token alone cost 1,917 B of WAL a settle against 478.
    CONSTRAINT task_attempt_key UNIQUE (task_id, lease_token)
) WITH (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);
CREATE INDEX task_attempt_finished ON {{schema}}.task_attempt USING brin (finished_at);

-- One row per (biz_type, priority): how far the relay has read, and which relay reads on.
CREATE TABLE {{schema}}.lane (
    biz_type       text COLLATE "C" NOT NULL,
    priority       text COLLATE "C" NOT NULL,
    -- The position: everything visible in snapshot with run_at up to at is published.
    snapshot       pg_snapshot NOT NULL DEFAULT '1:1:',
    at             timestamptz NOT NULL DEFAULT '-infinity',
    -- The open round, if any, and the page key up to which it is published.
    round_snapshot pg_snapshot,
    round_at       timestamptz,
    key_xid        xid8,
    key_id         bigint,
    key_run_at     timestamptz,
    key_run_id     bigint,
    -- Reconciling (3.4): rows below low are finished or have republish_at; the mark is what low becomes.
    low_snapshot   pg_snapshot NOT NULL DEFAULT '1:1:',
    low_at         timestamptz NOT NULL DEFAULT '-infinity',
    mark_snapshot  pg_snapshot,
    mark_at        timestamptz,
    mark_seq       bigint,
    max_seq        bigint NOT NULL DEFAULT 0,   -- highest sequence the stream has acknowledged
    losses         int NOT NULL DEFAULT 0,      -- installation.losses that low has been restarted for
    owner          text,
    owner_until    timestamptz,
    fence          bigint NOT NULL DEFAULT 0,   -- grows with each new owner
    saved_at       timestamptz NOT NULL DEFAULT now(),
    created_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (biz_type, priority),
    CONSTRAINT priority_is_high_or_low CHECK (priority IN ('low', 'high'))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Emptied by Postgres itself at every crash recovery and promotion: then xids are used again, and
-- every position that lived in a relay's memory is worthless.
CREATE UNLOGGED TABLE {{schema}}.incarnation (
    id         uuid NOT NULL DEFAULT gen_random_uuid(),
    only_one   boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE {{schema}}.ordering_head (
    biz_type     text COLLATE "C" NOT NULL,
    ordering_key text COLLATE "C" NOT NULL,
    done_below   bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (biz_type, ordering_key)
);

-- What operators set per biz type, and what workers make known of theirs.
CREATE TABLE {{schema}}.biz_type (
    biz_type         text COLLATE "C" PRIMARY KEY,
    paused_at        timestamptz,
    paused_reason    text,
    rate             double precision CHECK (rate > 0),            -- publishes a second
    concurrency      int  CHECK (concurrency > 0),                  -- over all workers
    default_priority text CHECK (default_priority IN ('low', 'high')),
    max_attempts     int  CHECK (max_attempts BETWEEN 1 AND 1000),
    policy           jsonb,                                          -- default retry policy, informative
    retain_succeeded interval,
    retain_cancelled interval,
    retain_dead      interval,
    on_dead          text NOT NULL DEFAULT 'block' CHECK (on_dead IN ('block', 'skip', 'park')),
    compensates      boolean NOT NULL DEFAULT false,                 -- set by workers, cleared by an operator only
    notifier         text,
    title            text,
    runbook_url      text,
    known_by         text,                                           -- the last worker that registered it
    known_at         timestamptz,
    CONSTRAINT biz_type_is_1_to_63_letters_digits_underscores_dashes
        CHECK (biz_type !~ '[^A-Za-z0-9_-]|^[_-]' AND octet_length(biz_type) BETWEEN 1 AND 63)
);

-- One row: this installation. id names the owner of a stream, a message and an idempotency key.
CREATE TABLE {{schema}}.installation (
    only_one            boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    id                  uuid NOT NULL DEFAULT gen_random_uuid(),
    system_identifier   bigint,
    stream_created      timestamptz,
    losses              int NOT NULL DEFAULT 0, -- how often the stream has lost messages: all lanes are reconciled
    dead_stream_created timestamptz,
    strict_types        boolean NOT NULL DEFAULT false,
    created_at          timestamptz NOT NULL DEFAULT now()
);
INSERT INTO {{schema}}.installation DEFAULT VALUES;

CREATE TABLE {{schema}}.worker (
    name       text PRIMARY KEY,
    host       text NOT NULL,
    pid        int  NOT NULL,
    version    text NOT NULL DEFAULT '',
    biz_types  text[] NOT NULL DEFAULT '{}',
    running    int NOT NULL DEFAULT 0,
    started_at timestamptz NOT NULL DEFAULT now(),
    seen_at    timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE {{schema}}.relay (
    name       text PRIMARY KEY,
    host       text NOT NULL,
    pid        int  NOT NULL,
    version    text NOT NULL DEFAULT '',
    biz_types  text[] NOT NULL DEFAULT '{}',      -- empty: all
    lanes      int NOT NULL DEFAULT 0,
    started_at timestamptz NOT NULL DEFAULT now(),
    seen_at    timestamptz NOT NULL DEFAULT now()
);

-- Letters of tasks that were deleted: the relay takes them out of the stream, which the table cannot reach.
CREATE TABLE {{schema}}.letter_purge (
    task_id  bigint PRIMARY KEY,
    biz_type text COLLATE "C" NOT NULL,
    added_at timestamptz NOT NULL DEFAULT now()
);

-- Who changed what and why, written in the transaction of the change.
CREATE TABLE {{schema}}.audit (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL DEFAULT now(),
    actor    text NOT NULL DEFAULT session_user,
    action   text NOT NULL,
    task_id  bigint,
    biz_type text,
    biz_id   text,
    reason   text,
    before   jsonb,
    after    jsonb
);
CREATE INDEX audit_task ON {{schema}}.audit (task_id, id);
