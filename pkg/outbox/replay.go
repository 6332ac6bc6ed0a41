package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Dead letters are rebuilt from the table when their stream has been created anew (deleted by hand, or lost), or has
// been put back to an older copy. They carry Task-Replayed, and no events are sent again.

const replaySQL = `-- taskrelay: replay dead letters
SELECT ` + deadColumns + `
FROM {{schema}}.task AS t
WHERE t.dead_at IS NOT NULL AND t.dead_lettered_at IS NOT NULL AND (t.biz_type, t.dead_at, t.id) > ($1::text, $2::timestamptz, $3::bigint)
ORDER BY t.biz_type, t.dead_at, t.id LIMIT $4::int`

// lettersStillSQL tells which rows are still dead, so that their replayed letters may stay.
const lettersStillSQL = `-- taskrelay: letters still wanted
SELECT t.id FROM unnest($1::bigint[], $2::int[]) AS c(id, generation)
JOIN {{schema}}.task AS t ON t.id = c.id WHERE t.generation = c.generation AND t.status = 'dead'`

const deadStreamSQL = `-- taskrelay: dead stream created
SELECT dead_stream_created FROM {{schema}}.installation`

const saveDeadStreamSQL = `-- taskrelay: save dead stream
UPDATE {{schema}}.installation SET dead_stream_created = $1::timestamptz`

const forgetDeadStreamSQL = `-- taskrelay: forget dead stream
UPDATE {{schema}}.installation SET dead_stream_created = 'epoch'`

// forgetLetters makes replayLetters send all letters again: the stream has lost some although it is still the same one.
func (r *Relay) forgetLetters(ctx context.Context) error {
	if err := r.exec(ctx, forgetDeadStreamSQL); err != nil {
		return fmt.Errorf("forget dead stream: %w", err)
	}
	r.letters.replayed = time.Time{}
	r.mu.Lock()
	r.deadHighest = 0
	r.mu.Unlock()
	return nil
}

// replayLetters fills a dead stream that is not the one the letters were sent to. created is the stream's own time.
// Should two relays do it at once, the ids are the same.
func (r *Relay) replayLetters(ctx context.Context, created time.Time) error {
	created = created.Truncate(time.Microsecond)
	var saved *time.Time
	err := r.query(ctx, deadStreamSQL, nil, func(rows pgx.Rows) error { return rows.Scan(&saved) })
	if err != nil {
		return fmt.Errorf("replay dead letters: %w", err)
	}
	r.letters.replayed = created
	if saved != nil && saved.Equal(created) { // else it is another stream, or somebody has asked for it: replay_letters()
		return nil
	}
	var n int
	var lastType string
	lastDead, lastID := time.Time{}, int64(0)
	for saved != nil { // a first stream ever has nothing to replay
		var dead []deadTask
		if err := r.query(ctx, replaySQL, []any{lastType, lastDead, lastID, letterBatch}, scanDead(&dead)); err != nil {
			r.letters.replayed = time.Time{}
			return fmt.Errorf("replay dead letters: %w", err)
		}
		if len(dead) == 0 {
			break
		}
		if err := r.publishLetters(ctx, dead, true); err != nil {
			r.letters.replayed = time.Time{}
			return fmt.Errorf("replay: %w", err)
		}
		n += len(dead)
		d := dead[len(dead)-1]
		lastType, lastDead, lastID = d.bizType, *d.deadAt, d.id
		r.turned(loopStreams)
	}
	if err := r.exec(ctx, saveDeadStreamSQL, created); err != nil {
		r.letters.replayed = time.Time{}
		return fmt.Errorf("replay dead letters: %w", err)
	}
	if n > 0 {
		r.log.Warn().Int("count", n).Str("stream", r.names.DeadStream()).Msg("dead letters replayed into a new stream")
	}
	return nil
}
