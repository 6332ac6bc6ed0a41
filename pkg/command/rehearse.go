package command

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/pg"
)

// rehearse runs the statements of an attempt's life for no task. A right that is missing is found before a task is
// claimed and called, whose outcome could then not be written.
func (w *Worker) rehearse(ctx context.Context) error {
	nobody := func(pgx.Rows) error { return nil }
	claim := []any{[]int64{}, []int32{}, []int64{}, []int64{}, []bool{}, w.cfg.Name, w.cfg.Lease.Microseconds()}
	settle := []any{[]int64{}, []int64{}, []string{}, []string{}, []int64{}, []*string{}, []*string{}, []*string{}, []*string{},
		[]*string{}, []bool{}, []bool{}}
	for _, s := range []struct {
		sql  string
		args []any
	}{
		{w.sql.claim, claim},
		{w.sql.takeOver, claim},
		{w.sql.heartbeat, []any{[]int64{}, []int64{}, w.cfg.Lease.Microseconds()}},
		{w.sql.settleSucceeded, []any{[]int64{}, []int64{}, []*string{}, w.cfg.Name}},
		{w.sql.settle, settle},
	} {
		if err := pg.QueryCached(ctx, w.pool, s.sql, s.args, nobody); err != nil {
			name, _, _ := strings.Cut(strings.TrimPrefix(s.sql, "-- taskrelay: "), "\n")
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}
