package faults

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// watchSQL keeps what happens to each row. The attempt log alone cannot show a stale write: it is what the writer says
// of itself. The row's token before each change, taken by a trigger, is what the fence must have compared.
const watchSQL = `
CREATE TABLE public.move (
  seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp(),
  id bigint NOT NULL, was text NOT NULL, became text NOT NULL, was_token bigint, token bigint, was_attempt int NOT NULL,
  phase text NOT NULL);
CREATE FUNCTION public.keep_move() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO public.move (id, was, became, was_token, token, was_attempt, phase)
  VALUES (OLD.id, OLD.status, NEW.status, OLD.lease_token, NEW.lease_token, OLD.attempt, OLD.phase);
  RETURN NULL;
END $$;
CREATE TRIGGER keep_move AFTER UPDATE ON taskrelay.task FOR EACH ROW
WHEN (OLD.status IS DISTINCT FROM NEW.status OR OLD.lease_token IS DISTINCT FROM NEW.lease_token
  OR OLD.attempt <> NEW.attempt OR OLD.phase <> NEW.phase OR OLD.finished_at IS DISTINCT FROM NEW.finished_at)
EXECUTE FUNCTION public.keep_move()`

// A move is one change of a row.
type move struct {
	at          time.Time
	id          int64
	was, became string
	wasToken    int64 // 0: none
	token       int64
	attempt     int // before
	compensate  bool
}

// A row is a task as the table has it in the end.
type row struct {
	id           int64
	n            int64
	bizType      string
	status       string
	phase        string
	compensation string
	deadReason   string
	generation   int
	attempt      int
	result       string
	finishedAt   time.Time // zero: unfinished
	leased       bool      // a lease that has not ended
	listed       bool      // on the work list
	lettered     bool
	lastError    string
}

// An attempt is a row of the attempt log.
type attempt struct {
	id         int64
	token      int64
	compensate bool
	number     int
	outcome    string
	class      string
	worker     string
	started    time.Time
}

func readMoves(ctx context.Context, pool *pgxpool.Pool) ([]move, error) {
	rows, err := pool.Query(ctx, `SELECT at, id, was, became, coalesce(was_token, 0), coalesce(token, 0), was_attempt,
		phase = 'compensate' FROM public.move ORDER BY seq`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (m move, err error) {
		err = r.Scan(&m.at, &m.id, &m.was, &m.became, &m.wasToken, &m.token, &m.attempt, &m.compensate)
		return m, err
	})
}

func readRows(ctx context.Context, pool *pgxpool.Pool) ([]row, error) {
	rows, err := pool.Query(ctx, `SELECT id, payload, biz_type, status, phase, compensation, coalesce(dead_reason, ''), generation,
		attempt, coalesce(result::text, ''), coalesce(finished_at, 'epoch'), coalesce(lease_until >= now(), false),
		republish_at IS NOT NULL, dead_lettered_at IS NOT NULL, coalesce(last_error, '')
		FROM taskrelay.task`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (t row, err error) {
		var payload []byte
		if err := r.Scan(&t.id, &payload, &t.bizType, &t.status, &t.phase, &t.compensation, &t.deadReason, &t.generation, &t.attempt,
			&t.result, &t.finishedAt, &t.leased, &t.listed, &t.lettered, &t.lastError); err != nil {
			return t, err
		}
		if t.finishedAt.Unix() == 0 {
			t.finishedAt = time.Time{}
		}
		var s script
		err = json.Unmarshal(payload, &s)
		t.n = s.N
		return t, err
	})
}

func readAttempts(ctx context.Context, pool *pgxpool.Pool) ([]attempt, error) {
	rows, err := pool.Query(ctx, `SELECT task_id, lease_token, phase = 'compensate', attempt, outcome, coalesce(error_class, ''),
		coalesce(worker, ''), started_at FROM taskrelay.task_attempt ORDER BY task_id, started_at`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (a attempt, err error) {
		err = r.Scan(&a.id, &a.token, &a.compensate, &a.number, &a.outcome, &a.class, &a.worker, &a.started)
		return a, err
	})
}
