package tests

import (
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/pkg/retry"
	"github.com/taskrelay/taskrelay/schema"
)

// C-060: as many handlers as slots want a transaction on the worker's own pool, which has one connection or two. Claims,
// heartbeats and settles do not wait for handlers that wait for a connection.
func TestHandlersMayUseTheWorkersPool(t *testing.T) {
	t.Parallel()
	for _, size := range []int32{1, 2} {
		t.Run(itoa(int64(size)), func(t *testing.T) {
			t.Parallel()
			l := newWorkerLab(t)
			l.Exec(t, "CREATE TABLE paid (task_id bigint PRIMARY KEY)")
			pool := openPool(t, l.URL, func(c *pgxpool.Config) { c.MaxConns = size })
			var reg command.Registry
			c := fast(func(ctx context.Context, task *command.Task[raw]) (any, error) {
				return nil, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					_, err := tx.Exec(ctx, "INSERT INTO paid SELECT $1 FROM pg_sleep(0.02)", task.ID)
					return err
				})
			})
			c.Concurrency = 50
			register(t, &reg, "PAY", c)
			for range 60 {
				l.task("PAY")
			}
			worker, err := command.NewWorker(pool, l.Connect("worker"), &reg, command.WorkerConfig{Lease: 2 * time.Second, Grace: time.Second,
				Logger: zerolog.New(zerolog.NewTestWriter(t))})
			if err != nil {
				t.Fatal(err)
			}
			w := &runningWorker{Worker: worker, t: t, done: make(chan struct{})}
			w.start()
			l.WaitNoneOpen(t, soon)
			equal(t, "paid", l.Int(t, "SELECT count(*) FROM paid"), 60)
			equal(t, "succeeded at once", l.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded' AND attempt = 1"), 60)
			equal(t, "stale", w.Stats().Stale.Load(), 0)
		})
	}
}

// C-044, C-045, C-061: nothing in the schema or the code listens or notifies, so no business commit takes the lock of
// the notification queue, and a full queue stops nobody.
func TestNothingListensOrNotifies(t *testing.T) {
	t.Parallel()
	sql, err := schema.SQL(schema.Options{})
	if err != nil {
		t.Fatal(err)
	}
	word := regexp.MustCompile(`\bpg_notify\s*\(|\bNOTIFY\s+[a-z_"]|\b(UN)?LISTEN\s+[a-z_"*]|\bWaitForNotification\b`)
	comment := regexp.MustCompile(`(?m)(--|//).*$`)
	check := func(name, text string) {
		if found := word.FindString(comment.ReplaceAllString(text, "")); found != "" {
			t.Errorf("%s has %q", name, found)
		}
	}
	if !word.MatchString("SELECT pg_notify('a', 'b')") || !word.MatchString("NOTIFY a") || !word.MatchString("LISTEN a") {
		t.Error("the pattern finds nothing")
	}
	check("the schema", sql)
	files := productFiles(t)
	for name, text := range files {
		check(name, text)
	}
	if len(files) < 50 {
		t.Errorf("%d files were read, want all of the product", len(files))
	}
}

// productFiles reads the code that is shipped, by path below the root.
func productFiles(t *testing.T) map[string]string {
	t.Helper()
	files := map[string]string{}
	for _, dir := range []string{"pkg", "internal", "cmd", "schema"} {
		err := filepath.WalkDir(filepath.Join(testenv.Root(), dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") || strings.Contains(path, "testenv") {
				return err
			}
			text, err := os.ReadFile(path)
			files[path] = string(text)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// C-020: backoff/v4 gives up after a quarter of an hour unless it is told not to. Each use of it in the product tells it.
func TestNoBackoffGivesUp(t *testing.T) {
	t.Parallel()
	found := 0
	for name, text := range productFiles(t) {
		file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || !strings.HasSuffix(source(text, call.Fun), "NewExponentialBackOff") {
				return true
			}
			found++
			if !slices.ContainsFunc(call.Args, func(a ast.Expr) bool { return strings.HasSuffix(source(text, a), "WithMaxElapsedTime(0)") }) {
				t.Errorf("%s: %s gives up after 15 minutes: add backoff.WithMaxElapsedTime(0)", name, source(text, call))
			}
			return true
		})
	}
	if found == 0 {
		t.Error("found no use of backoff, want that of internal/pause")
	}
}

func source(text string, n ast.Node) string { return text[n.Pos()-1 : n.End()-1] }

// C-020: a target asks for a pause of half an hour, once. The task waits for as long, in the table, and then runs.
func TestLongPauseThatWasAskedForEnds(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 503, Header: map[string]string{"Retry-After": "1800"}}, testenv.Reply{})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "MAX_DELAY", "1h", "MAX_ATTEMPTS", "2")...)
	id := e.Insert(t, "ORDER_PAYMENT")
	e.WaitStatus(t, soon, id, "retrying")
	equal(t, "waits for half an hour", e.Text(t, `SELECT (next_attempt_at - now() BETWEEN interval '29 min' AND interval '31 min')::text
		FROM taskrelay.task WHERE id = $1`, id), "true")
	equal(t, "the relay looks at its time", e.Text(t, `SELECT (republish_at = next_attempt_at)::text FROM taskrelay.task WHERE id = $1`, id), "true")
	// Half an hour passes.
	e.Exec(t, `UPDATE taskrelay.task SET next_attempt_at = next_attempt_at - interval '31 min', republish_at = republish_at - interval '31 min' WHERE id = $1`, id)
	row := e.WaitStatus(t, soon, id, "succeeded", "dead")
	equal(t, "status", row.Status, "succeeded")
	equal(t, "calls", len(sink.Calls()), 2)
}

// C-065: people act on the same tasks in every order while workers claim and settle them and a relay hands them back.
// Postgres breaks no deadlock, and each task has as many calls as its log has attempts.
func TestPeopleAndWorkersDoNotDeadlock(t *testing.T) {
	t.Parallel()
	const tasks = 120
	e := testenv.New(t)
	var calls atomic.Int64
	registry := func() *command.Registry {
		var reg command.Registry
		mustRegister(t, &reg, "PAY", command.Command[raw]{Retry: quickRetry, MaxAttempts: 3, Execute: func(_ context.Context, task *command.Task[raw]) (any, error) {
			if calls.Add(1)%2 == 0 {
				return nil, retry.After(time.Duration(task.ID%40)*time.Millisecond, errFlaky)
			}
			return nil, nil
		}})
		return &reg
	}
	e.RunRelay(quick)
	e.RunRelay(quick)
	e.RunWorker(registry())
	e.RunWorker(registry())
	insertMany(t, e, "PAY", tasks)
	ids := make([]int64, tasks)
	for i := range ids {
		ids[i] = int64(i + 1)
	}
	reversed := slices.Clone(ids)
	slices.Reverse(reversed)
	var people sync.WaitGroup
	for i, sql := range []string{
		`SELECT taskrelay.requeue($1::bigint[], 'why')`, `SELECT taskrelay.cancel($1::bigint[], 'why')`, `SELECT taskrelay.run_now($1::bigint[], 'why')`,
		`SELECT taskrelay.delay($1::bigint[], '20 ms', 'why')`, `SELECT taskrelay.set_priority($1::bigint[], 'high', 'why')`,
		`SELECT taskrelay.rerun($1::bigint[], 'why', allow_succeeded => true)`,
	} {
		order := [][]int64{ids, reversed}[i%2]
		people.Go(func() {
			for range 8 {
				if _, err := e.Pool.Exec(t.Context(), sql, order); err != nil {
					t.Errorf("%s: %v", sql, err)
				}
			}
		})
	}
	people.Wait()
	e.WaitNoneOpen(t, soon)
	equal(t, "deadlocks", e.Int(t, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"), 0)
	ended := e.Int(t, "SELECT count(*) FROM taskrelay.task_attempt WHERE outcome IN ('succeeded', 'failed')")
	all := e.Int(t, "SELECT count(*) FROM taskrelay.task_attempt")
	if n := calls.Load(); n < ended || n > all { // a call that a person cancelled is neither
		t.Errorf("%d calls, and the log has %d attempts, %d of them ended by themselves", n, all, ended)
	}
	equal(t, "lost or stale attempts", e.Int(t, "SELECT count(*) FROM taskrelay.task_attempt WHERE outcome IN ('lost', 'stale')"), 0)
}

// C-055: a task that is put off a hundred times leaves a hundred rows in the log, and its own row as small as before.
func TestLongHistoryKeepsTheRowSmall(t *testing.T) {
	t.Parallel()
	const times = 100
	e := testenv.New(t)
	var reg command.Registry
	calls := 0
	sizes := map[int]int64{}
	mustRegister(t, &reg, "WAITS", command.Command[raw]{MaxAttempts: 1, Execute: func(_ context.Context, task *command.Task[raw]) (any, error) {
		calls++
		if calls == 5 || calls == times {
			sizes[calls] = e.Int(t, "SELECT pg_column_size(t.*) FROM taskrelay.task AS t WHERE id = $1", task.ID)
		}
		if calls <= times {
			return nil, command.Snooze(time.Millisecond)
		}
		return nil, nil
	}})
	e.RunRelay()
	e.RunWorker(&reg)
	id := e.Insert(t, "WAITS")
	row := e.WaitStatus(t, soon, id, "succeeded", "dead")
	equal(t, "status", row.Status, "succeeded")
	equal(t, "attempt", row.Attempt, 1)
	equal(t, "rows in the log", len(e.Attempts(t, id)), times+1)
	if sizes[times] == 0 || sizes[times] > sizes[5]+64 {
		t.Errorf("the row has %d bytes after %d times, %d after 5", sizes[times], times, sizes[5])
	}
}

// C-053: a task that waits for its time or its retry longer than finished ones are kept is not deleted: age counts from
// the end.
func TestTasksWaitLongerThanFinishedOnesAreKept(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Script("retried", testenv.Statuses(500, 200)...)
	e.RunRelay(func(c *outbox.RelayConfig) {
		c.Retain = outbox.Retention{Succeeded: 200 * time.Millisecond, Cancelled: 200 * time.Millisecond, Every: 50 * time.Millisecond}
	})
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "STRATEGY", "fixed", "BASE_DELAY", "1500ms")...)
	e.Insert(t, "ORDER_PAYMENT", "biz_id", "at once")
	e.Insert(t, "ORDER_PAYMENT", "biz_id", "retried")
	e.Insert(t, "ORDER_PAYMENT", "biz_id", "later", "run_at", time.Now().Add(1500*time.Millisecond))
	e.WaitCount(t, soon, 3, "SELECT count(*) FROM taskrelay.task_attempt WHERE outcome = 'succeeded'")
	e.WaitCount(t, soon, 0, "SELECT count(*) FROM taskrelay.task")
	equal(t, "calls", len(sink.Calls()), 4)
}
