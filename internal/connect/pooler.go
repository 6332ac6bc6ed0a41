package connect

import (
	"context"
	"crypto/rand"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// probeTime is how long the probe may take. A pooler with a single backend lets its last step wait.
const probeTime = 2 * time.Second

// forgetsStatements reports whether a pooler lends each transaction another backend, without carrying prepared
// statements along: PgBouncer in transaction mode before 1.21, or without max_prepared_statements. By default pgx
// prepares each statement once per connection; there it would fail for ever, with "already exists" (42P05) and "does
// not exist" (26000) in turn.
//
// It asks for exactly that: one session prepares a statement, another one takes the backend that was used last, and
// the first uses its statement. A pooler busy with others may pass, so it is tried several times.
func forgetsStatements(ctx context.Context, cfg *pgx.ConnConfig) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	first, err := pgconn.ConnectConfig(ctx, &cfg.Config)
	if err != nil {
		return false, err
	}
	defer hangUp(first)
	second, err := pgconn.ConnectConfig(ctx, &cfg.Config)
	if err != nil {
		return false, err
	}
	defer hangUp(second)

	for range 3 {
		name := "taskrelay_probe_" + rand.Text()
		if _, err := first.Prepare(ctx, name, "SELECT 1", nil); err != nil {
			return false, err
		}
		if err := simple(ctx, second, "BEGIN; SELECT 1"); err != nil {
			return false, err
		}
		err := first.ExecPrepared(ctx, name, nil, nil, nil).Read().Err
		var server *pgconn.PgError
		switch {
		case errors.As(err, &server):
			return server.Code == "26000", nil
		case err != nil && ctx.Err() != nil:
			return true, nil // it waits for the other session's backend
		case err != nil:
			return false, err
		}
		if err := simple(ctx, second, "ROLLBACK"); err != nil {
			return false, err
		}
		if err := first.Deallocate(ctx, name); err != nil {
			return false, err
		}
	}
	return false, nil
}

func simple(ctx context.Context, c *pgconn.PgConn, sql string) error {
	return c.Exec(ctx, sql).Close()
}

func hangUp(c *pgconn.PgConn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = c.Close(ctx)
}
