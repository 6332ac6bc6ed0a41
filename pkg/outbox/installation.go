package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// An Installation is one set of tables. Its id names the owner of a stream, a message and an idempotency key.
type Installation struct {
	ID          string // a uuid made by the migration
	StrictTypes bool   // only types that a worker has registered may be enqueued and published
}

const installationSQL = `-- taskrelay: read installation
SELECT i.id::text, i.strict_types FROM {{schema}}.installation AS i`

// Installation reads the installation's row. The error says what to do when the schema is missing.
func (s Schema) Installation(ctx context.Context, db querier) (Installation, error) {
	if err := s.Validate(); err != nil {
		return Installation{}, err
	}
	rows, err := db.Query(ctx, s.Render(installationSQL))
	if err != nil {
		return Installation{}, fmt.Errorf("read installation: %w", err)
	}
	i, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (i Installation, err error) {
		err = row.Scan(&i.ID, &i.StrictTypes)
		return i, err
	})
	if err != nil {
		return Installation{}, fmt.Errorf("read installation from schema %q (is it missing? run \"taskrelay migrate up\"): %w", s, err)
	}
	return i, nil
}
