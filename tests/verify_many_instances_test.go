package tests

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Several instances on one database (B7, B85, A29, K1, K22): each task is called once.
func TestVerifyManyInstances(t *testing.T) {
	n := 10_000
	if testing.Short() || testenv.Race {
		n = 2_000
	}
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	for range 2 {
		e.StartRelay()
	}
	for range 4 {
		e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	}
	published := countPublishes(t, e, "tasks.>")

	insertMany(t, e, "ORDER_PAYMENT", n)
	e.WaitNoneOpen(t, 4*soon)

	equal(t, "calls", len(sink.Calls()), n)
	seen := map[int64]int{}
	for _, c := range sink.Calls() {
		seen[c.ID]++
	}
	equal(t, "tasks called", len(seen), n)
	noOverlaps(t, sink)
	noDoubleSuccess(t, e)
	equal(t, "rows in the attempt log", e.Int(t, "SELECT count(*) FROM taskrelay.task_attempt"), int64(n))
	equal(t, "succeeded", e.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded'"), int64(n))
	equal(t, "messages published", published.total(), n)
	if w := e.Int(t, "SELECT count(DISTINCT worker) FROM taskrelay.task_attempt"); w < 2 {
		t.Errorf("workers that took part: got %d, want at least 2", w)
	}
}

// insertMany writes n rows of one type in one transaction.
func insertMany(t *testing.T, e *testenv.Env, bizType string, n int) {
	t.Helper()
	_, err := e.Pool.CopyFrom(t.Context(), pgx.Identifier{"taskrelay", "task"}, []string{"biz_type"},
		pgx.CopyFromSlice(n, func(int) ([]any, error) { return []any{bizType}, nil }))
	if err != nil {
		t.Fatal(err)
	}
}
