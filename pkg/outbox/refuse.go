package outbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/pg"
	"github.com/taskrelay/taskrelay/internal/text"
)

// buryRefusedSQL ends a task whose message no server takes, so that it stops its lane no longer.
const buryRefusedSQL = `-- taskrelay: bury refused
UPDATE {{schema}}.task AS t
SET status = 'dead', finished_at = now(), dead_at = now(), dead_reason = $3::text, dead_lettered_at = NULL,
  last_error = $4::text, error_class = 'publish', next_attempt_at = NULL, republish_at = NULL,
  compensation = CASE WHEN t.phase = 'compensate' THEN 'failed' ELSE t.compensation END
WHERE t.id = $1::bigint AND t.generation = $2::int
  AND (t.status IN ('pending', 'retrying') OR t.status = 'running' AND t.lease_until < now())
RETURNING t.id`

// buryRefused makes each refused task dead, then lets its page go on. A row whose lock somebody holds is left to the
// next turn: waiting for it would cost the relay the leases of all its lanes.
func (r *Relay) buryRefused(ctx context.Context) error {
	for {
		r.mu.Lock()
		if len(r.refusals) == 0 {
			r.mu.Unlock()
			return nil
		}
		p := r.refusals[0]
		r.mu.Unlock()

		reason := "refused"
		if tooLarge(p.refusal) {
			reason = "oversize"
		}
		var buried int64
		args := []any{p.rec.id, p.rec.generation, reason, text.Storable(p.refusal.Error(), 8<<10)}
		err := r.withPatience(ctx, buryRefusedSQL, queryTimeout, func(ctx context.Context) error {
			return pg.QueryLocked(ctx, r.pool, r.cfg.Schema.Render(buryRefusedSQL), args, func(rows pgx.Rows) error { return rows.Scan(&buried) })
		})
		if pg.Code(err) == "55P03" { // lock not available
			r.mu.Lock()
			r.refusals = append(r.refusals[1:], p)
			r.mu.Unlock()
			return nil
		}
		if err != nil {
			return fmt.Errorf("bury refused task %d: %w", p.rec.id, err)
		}
		if buried != 0 { // else it has moved on
			r.log.Error().Err(p.refusal).Int64("task_id", p.rec.id).Str("biz_type", p.lane.bizType).Str("reason", reason).
				Msg("task is dead: its message cannot be published")
		}
		r.mu.Lock()
		r.refusals = r.refusals[1:]
		if buried != 0 {
			r.counts.Refused++
			p.lane.tally.buried(reason)
		}
		if p.page != nil {
			p.page.left--
			r.advance(p.lane, true)
		}
		r.mu.Unlock()
	}
}

// tooLarge reports whether a message is beyond a limit on size: of the connection, the stream (10054) or the
// header block (10097).
func tooLarge(err error) bool {
	var e *jetstream.APIError
	if errors.As(err, &e) {
		return e.ErrorCode == 10054 || e.ErrorCode == 10097
	}
	return errors.Is(err, errOversize)
}

// sized adds to an answer that a message is too large how large it is and what the stream takes: the server's text has
// neither. r.mu is held.
func (r *Relay) sized(err error, rec *record) error {
	var e *jetstream.APIError
	if !errors.As(err, &e) || e.ErrorCode != 10054 {
		return err
	}
	return fmt.Errorf("%w: %d bytes with headers, max_msg_size of stream %[3]s is %[4]d: raise it with \"%[5]s stream edit %[3]s --max-msg-size=-1\", then requeue the task",
		err, r.size(rec), r.names.Stream(), r.sizeLimit, r.names.natsCLI())
}

// size is how many bytes the message of a task has, with its headers.
func (r *Relay) size(rec *record) int {
	e := envelopes.Get().(*envelope)
	defer envelopes.Put(e)
	m, _ := r.message(e, rec)
	return m.Size()
}
