package tests

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// mixed makes n tasks: with and without biz ids, some of them twice, some that exist in the table.
// want is, by index, whether the task is new.
func mixed(n int) (tasks []outbox.NewTask, isNew []bool) {
	for i := range n {
		task := outbox.NewTask{BizType: "A", Payload: map[string]int{"n": i}}
		fresh := true
		switch i % 10 {
		case 1, 2, 3:
			task.Options = []outbox.Option{outbox.BizID(fmt.Sprint("new ", i))}
		case 4:
			task.Options, fresh = []outbox.Option{outbox.BizID(fmt.Sprint("new ", i-1))}, false
		case 5:
			task.Options, fresh = []outbox.Option{outbox.BizID(fmt.Sprint("old ", i))}, false
		case 6:
			task.BizType, task.Options = "B", []outbox.Option{outbox.BizID(fmt.Sprint("old ", i-1)), outbox.High()} // free: another type
		case 7:
			task.Options = []outbox.Option{outbox.High(), outbox.In(time.Hour), outbox.MaxAttempts(1 + i%1000), outbox.Header("n", fmt.Sprint(i))}
		case 8:
			task.Options = []outbox.Option{outbox.At(time.Date(2099, 1, 1, 0, 0, i%60, 0, time.UTC))}
		}
		tasks, isNew = append(tasks, task), append(isNew, fresh)
	}
	return tasks, isNew
}

func TestManyTellsOfEachTaskWhetherItIsNew(t *testing.T) {
	db := testenv.DB(t)
	for mode, pool := range modes(t, db) {
		n := 200
		if mode == "cache_statement" {
			n = 12_000 // three statements
		}
		t.Run(mode, func(t *testing.T) {
			db.Exec(t, "DELETE FROM taskrelay.task")
			db.Exec(t, "INSERT INTO taskrelay.task (biz_type, biz_id, payload) SELECT 'A', 'old ' || i, '{\"old\":true}' FROM generate_series(5, $1::int, 10) AS i", n)
			tasks, isNew := mixed(n)
			var refs []outbox.Ref
			start := time.Now()
			err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
				refs, err = outbox.EnqueueMany(t.Context(), tx, tasks)
				return err
			})
			noError(t, "many", err)
			t.Logf("%d tasks in %v", n, time.Since(start))
			if len(refs) != n {
				t.Fatalf("got %d refs", len(refs))
			}

			ids := make([]int64, n)
			for i, ref := range refs {
				ids[i] = ref.ID
				if ref.New != isNew[i] {
					t.Fatalf("task %d: got %+v, want new: %v", i, ref, isNew[i])
				}
			}
			// Each ref names the row with its own payload; a repeated one names the first's.
			wrong := db.Text(t, `SELECT string_agg(format('%s: %s', u.ord - 1, t.payload), ', ')
				FROM unnest($1::bigint[]) WITH ORDINALITY AS u (id, ord) LEFT JOIN taskrelay.task AS t USING (id)
				WHERE CASE (u.ord - 1) % 10 WHEN 5 THEN t.payload->>'old' WHEN 4 THEN ((t.payload->>'n')::int + 1)::text ELSE t.payload->>'n' END
					IS DISTINCT FROM CASE (u.ord - 1) % 10 WHEN 5 THEN 'true' ELSE (u.ord - 1)::text END`, ids)
			equal(t, "refs to other rows", wrong, "")
			fresh := slices.DeleteFunc(slices.Clone(refs), func(r outbox.Ref) bool { return !r.New })
			if !slices.IsSortedFunc(fresh, func(a, b outbox.Ref) int { return int(a.ID - b.ID) }) {
				t.Error("ids do not follow the order of the tasks")
			}
			equal(t, "rows of case 7", db.Int(t, `SELECT count(*) FROM taskrelay.task WHERE priority = 'high' AND run_at > created_at + '59 min'
				AND max_attempts = 1 + (payload->>'n')::int % 1000 AND headers->>'n' = payload->>'n'`), int64(n/10))
			equal(t, "rows of case 8", db.Int(t, `SELECT count(*) FROM taskrelay.task WHERE run_at = '2099-01-01Z'::timestamptz + (payload->>'n')::int % 60 * interval '1 s'`), int64(n/10))
			equal(t, "rows", db.Int(t, "SELECT count(*) FROM taskrelay.task"), int64(n/10*9))

			// The same once more: nothing that has a biz id is new.
			err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				again, err := outbox.EnqueueMany(t.Context(), tx, tasks)
				for i, ref := range again {
					if named := slices.Contains([]int{1, 2, 3, 4, 5, 6}, i%10); ref.New == named || named && ref.ID != refs[i].ID {
						return fmt.Errorf("task %d once more: %+v, first %+v", i, ref, refs[i])
					}
				}
				return err
			})
			noError(t, "once more", err)
		})
	}
}

func TestManyLargePayloadsAreSplit(t *testing.T) {
	db := testenv.DB(t)
	large := `"` + strings.Repeat("é", 256<<10-1) + `"`
	tasks := slices.Repeat([]outbox.NewTask{{BizType: "T", Payload: large}}, 20)
	err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		refs, err := outbox.EnqueueMany(t.Context(), tx, tasks)
		equal(t, "refs", len(refs), 20)
		return err
	})
	noError(t, "many", err)
	equal(t, "bytes", db.Int(t, "SELECT sum(octet_length(payload::text))::bigint FROM taskrelay.task"), 20*512<<10)
}

func TestManyIsAllOrNothingWithItsTransaction(t *testing.T) {
	db := testenv.DB(t)
	tx, err := db.Pool.Begin(t.Context())
	noError(t, "begin", err)
	_, err = outbox.EnqueueMany(t.Context(), tx, []outbox.NewTask{{BizType: "T"}, {BizType: "T"}, {BizType: "T", Payload: "["}})
	if err == nil || !strings.Contains(err.Error(), "task 2") {
		t.Errorf("got %v", err)
	}
	refs, err := outbox.EnqueueMany(t.Context(), tx, nil)
	if err != nil || len(refs) != 0 {
		t.Errorf("no tasks: got %v, %v", refs, err)
	}
	refs, err = outbox.EnqueueMany(t.Context(), tx, []outbox.NewTask{{BizType: "T"}, {BizType: "T"}})
	noError(t, "many", err)
	equal(t, "refs", len(refs), 2)
	noError(t, "rollback", tx.Rollback(t.Context()))
	equal(t, "rows", db.Int(t, "SELECT count(*) FROM taskrelay.task"), 0)
}
