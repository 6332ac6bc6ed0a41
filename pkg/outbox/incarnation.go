package outbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/pg"
)

// The table incarnation is UNLOGGED: Postgres itself empties it at every crash recovery and every promotion. After
// either, transaction ids that were rolled back or lost are handed out again, so a position kept in memory would skip
// rows for ever. Positions in the table lane are safe: the commit that stored one flushed all WAL before it.

const enterIncarnationSQL = `-- taskrelay: enter incarnation
WITH made AS (INSERT INTO {{schema}}.incarnation DEFAULT VALUES ON CONFLICT DO NOTHING RETURNING id)
SELECT id::text FROM made UNION ALL SELECT id::text FROM {{schema}}.incarnation LIMIT 1`

var errOtherIncarnation = errors.New("Postgres crashed or failed over since the positions were read: reading them again")

// enterIncarnation forgets every lane held in memory and names the incarnation the next ones are read in.
func (r *Relay) enterIncarnation(ctx context.Context) error {
	r.mu.Lock()
	r.dropAllLanes()
	r.incarnation = ""
	r.mu.Unlock()

	var id string
	err := r.query(ctx, enterIncarnationSQL, nil, func(rows pgx.Rows) error { return rows.Scan(&id) })
	if err != nil {
		return fmt.Errorf("enter incarnation: %w", inRecovery(err))
	}
	if id == "" { // another relay's insert was not visible yet
		return errors.New("enter incarnation: none visible yet")
	}
	r.mu.Lock()
	r.incarnation = id
	r.mu.Unlock()
	return nil
}

// inRecovery words the answers of a standby: 0A000 for an unlogged table, 25006 for a write.
func inRecovery(err error) error {
	if code := pg.Code(err); code == "0A000" || code == "25006" {
		return fmt.Errorf("this Postgres is a standby or read-only: waiting for the primary: %w", err)
	}
	return err
}
