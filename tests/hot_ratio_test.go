package tests

import (
	"context"
	"testing"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
)

// A claim and a settle change no indexed column, and a page has room for their versions: then nearly every update of
// a drain is HOT, and the table prunes itself.
func TestDrainUpdatesAreHOT(t *testing.T) {
	const tasks = 20_000
	e := testenv.New(t)
	insertMany(t, e, "NOOP", tasks)

	var reg command.Registry
	noop := command.Command[struct{}]{Execute: func(context.Context, *command.Task[struct{}]) (any, error) { return nil, nil }}
	if err := command.Register(&reg, "NOOP", noop); err != nil {
		t.Fatal(err)
	}
	e.RunRelay()
	worker := e.RunWorker(&reg)
	e.WaitNoneOpen(t, 2*soon)
	worker.Stop()

	// Backends report what they counted some time after their transaction.
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
	ratio := float64(hot) / float64(updates)
	t.Logf("%d of %d updates are HOT: %.3f", hot, updates, ratio)
	if ratio < 0.95 {
		t.Errorf("HOT ratio: got %.3f, want at least 0.95", ratio)
	}
}
