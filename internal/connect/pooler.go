package connect

import (
	"context"
	"errors"
	"strconv"

	"github.com/jackc/pgx/v5/pgxpool"
)

// ping asks Postgres for an answer, and tells whether a pooler such as PgBouncer gave it: a pooler hands out a process
// number of its own when a session begins, because the backend may be another one for each transaction.
//
// By default pgx prepares each statement once per connection. In transaction mode the next transaction's backend does
// not know it, and every statement would fail for ever, with "already exists" (42P05) and "does not exist" (26000) in
// turn. PgBouncer since 1.21 can carry statements along, and in session mode all is well; that cannot be told from
// outside for certain, and not preparing ahead is right everywhere and costs little.
func ping(ctx context.Context, pool *pgxpool.Pool) (pooled bool, err error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return false, err
	}
	defer conn.Release()
	// Below pgx: its simple protocol refuses sessions with standard_conforming_strings off.
	results, err := conn.Conn().PgConn().Exec(ctx, "SELECT pg_backend_pid()").ReadAll()
	if err != nil {
		return false, err
	}
	if len(results) != 1 || len(results[0].Rows) != 1 || len(results[0].Rows[0]) != 1 {
		return false, errors.New("no row for SELECT pg_backend_pid()")
	}
	return string(results[0].Rows[0][0]) != strconv.FormatUint(uint64(conn.Conn().PgConn().PID()), 10), nil
}
