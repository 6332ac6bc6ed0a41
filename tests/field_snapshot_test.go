package tests

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
)

// C-048, C-037: an analytics session holds a snapshot, so Postgres may clean up nothing. Tasks run all the same, and their
// updates still find room in their pages: no index grows.
func TestHeldSnapshotDoesNotGrowTheIndexes(t *testing.T) {
	t.Parallel()
	const tasks = 3000
	e := testenv.New(t)
	insertMany(t, e, "NOOP", tasks)
	old, err := e.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		t.Fatal(err)
	}
	defer old.Rollback(context.Background())
	count := func() (n int64) {
		if err := old.QueryRow(t.Context(), "SELECT count(*) FROM taskrelay.task WHERE status = 'pending'").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	equal(t, "pending in the snapshot", count(), tasks)
	var reg command.Registry
	mustRegister(t, &reg, "NOOP", command.Command[raw]{Execute: func(context.Context, *command.Task[raw]) (any, error) { return nil, nil }})
	e.RunRelay()
	worker := e.RunWorker(&reg)
	e.WaitNoneOpen(t, soon)
	worker.Stop()
	var updates, hot int64
	testenv.Eventually(t, soon, func() error {
		if _, err := e.Pool.Exec(t.Context(), "SELECT pg_stat_force_next_flush()"); err != nil {
			return err
		}
		err := e.Pool.QueryRow(t.Context(), `SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables
			WHERE schemaname = 'taskrelay' AND relname = 'task'`).Scan(&updates, &hot)
		if err == nil && updates < 2*tasks {
			return errorf("%d updates are reported, want a claim and a settle for each of %d tasks", updates, tasks)
		}
		return err
	})
	if ratio := float64(hot) / float64(updates); ratio < 0.95 {
		t.Errorf("HOT ratio beside a held snapshot: got %.3f, want at least 0.95", ratio)
	}
	equal(t, "pending in the snapshot, which was held all the time", count(), tasks)
}
