package tests

import (
	"context"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Issue 3, part 6: SIGTERM while a worker fetches, claims and settles; each time it is driven there by a condition, not by
// the clock. While handlers run, and one that ignores its context: kill9_test.go and worker_stop_test.go.

// freeze keeps everybody from writing tasks until thaw is called; reading goes on.
func freeze(t *testing.T, e *testenv.Env) (thaw func()) {
	t.Helper()
	tx, err := e.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	if _, err := tx.Exec(t.Context(), `LOCK TABLE taskrelay.task IN SHARE MODE`); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// waitStuck waits until a statement of a worker waits for the lock.
func waitStuck(t *testing.T, e *testenv.Env, statement string) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		if e.Int(t, `SELECT count(*) FROM pg_stat_activity WHERE datname = $1 AND wait_event_type = 'Lock'
			AND query LIKE '-- taskrelay: ' || $2 || '%'`, e.Name, statement) == 0 {
			return errorf("no %s waits for the table", statement)
		}
		return nil
	})
}

func waitNoMessages(t *testing.T, e *testenv.Env, within time.Duration) {
	t.Helper()
	testenv.Eventually(t, within, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 0 {
			return errorf("%d messages are left in the stream", n)
		}
		return nil
	})
}

// What is on its way from the server at that moment is given back: another worker has it at once, not after the lease.
func TestSIGTERMWhileFetching(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	vars := append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_LEASE=60s")
	const each = 40
	rounds := 2
	if *soak {
		rounds = 10
	}
	worker := testenv.Start(t, "worker", nil, e.Vars(vars...)...)
	for i := range rounds {
		testenv.Eventually(t, soon, func() error {
			c, err := e.NATS.JS.Consumer(t.Context(), "TASKS", "ORDER_PAYMENT-low")
			if err == nil && c.CachedInfo().NumWaiting == 0 {
				err = errorf("no pull waits")
			}
			return err
		})
		// Messages are on their way when the signal comes, and go on coming.
		e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, $1)`, each/2)
		if i%2 == 0 {
			sink.WaitCalls(t, soon, each*i+1)
		}
		worker.Signal(t, syscall.SIGTERM)
		e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, $1)`, each/2)
		if code := worker.Wait(t, 15*time.Second); code != 0 {
			t.Errorf("exit code after SIGTERM: got %d, want 0", code)
		}
		stopped := time.Now()
		worker = testenv.Start(t, "worker", nil, e.Vars(vars...)...)
		e.WaitNoneOpen(t, 45*time.Second)
		if took := time.Since(stopped); took > 20*time.Second {
			t.Errorf("the rest was done %v after the stop: it waited for something", took)
		}
	}
	equal(t, "calls", len(sink.Calls()), rounds*each)
	equal(t, "attempts in the log", e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt WHERE outcome = 'succeeded' AND attempt = 1`), int64(rounds*each))
	waitNoMessages(t, e, soon)
}

// A claim that is under way is waited for, and its tasks are given back, their attempts not counted.
func TestSIGTERMWhileClaiming(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	const tasks = 30
	vars := append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_LEASE=60s", "TASKRELAY_WORKER_GRACE=20s")
	worker := testenv.Start(t, "worker", nil, e.Vars(vars...)...)
	worker.WaitLog(t, soon, "worker started")
	worker.Signal(t, syscall.SIGSTOP) // until its tasks are there and the table is not
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, $1)`, tasks)
	waitMessages(t, e, tasks)
	thaw := freeze(t, e)
	worker.Signal(t, syscall.SIGCONT)
	waitStuck(t, e, "take over") // the claim itself waits for no lock
	worker.Signal(t, syscall.SIGTERM)
	worker.WaitLog(t, soon, "worker stopping")
	thaw()
	if code := worker.Wait(t, 15*time.Second); code != 0 {
		t.Errorf("exit code after SIGTERM: got %d, want 0", code)
	}
	equal(t, "calls by the worker that stops", len(sink.Calls()), 0)
	equal(t, "rows that are held or whose attempt is counted", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'running' OR attempt > 0`), 0)
	testenv.Start(t, "worker", nil, e.Vars(vars...)...)
	e.WaitNoneOpen(t, soon) // half of the lease: nothing waits for its end
	equal(t, "calls", len(sink.Calls()), tasks)
	equal(t, "attempts that count", e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt WHERE outcome <> 'released'`), tasks)
	waitNoMessages(t, e, soon)
}

// Results that wait to be written are written before the worker ends, and their messages acknowledged.
func TestSIGTERMWhileSettling(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 200, Delay: time.Second})
	e.StartRelay()
	const tasks = 30
	vars := append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_LEASE=60s", "TASKRELAY_WORKER_GRACE=20s")
	worker := testenv.Start(t, "worker", nil, e.Vars(vars...)...)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, $1)`, tasks)
	sink.WaitCalls(t, soon, tasks)
	thaw := freeze(t, e)
	waitStuck(t, e, "settle")
	worker.Signal(t, syscall.SIGTERM)
	worker.WaitLog(t, soon, "worker stopping")
	equal(t, "written while the table is locked", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE finished_at IS NOT NULL`) < tasks, true)
	thaw()
	if code := worker.Wait(t, 15*time.Second); code != 0 {
		t.Errorf("exit code after SIGTERM: got %d, want 0", code)
	}
	equal(t, "succeeded when the worker has ended", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded' AND attempt = 1`), tasks)
	waitNoMessages(t, e, soon)
	equal(t, "calls", len(sink.Calls()), tasks)
}

// A second signal means now: what ran is lost with its lease, counted, and run again elsewhere with the same key.
func TestSecondSIGTERMEndsAtOnce(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Hang: true}, testenv.Reply{Status: 200})
	e.StartRelay()
	vars := append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_GRACE=60s")
	worker := e.StartWorker(vars...)
	id := e.Insert(t, "ORDER_PAYMENT")
	sink.WaitCallsOf(t, soon, id, 1)
	worker.Signal(t, syscall.SIGTERM)
	worker.WaitLog(t, soon, "worker stopping")
	if code := worker.Stop(t, 10*time.Second); code != 130 {
		t.Errorf("exit code after the second SIGTERM: got %d, want 130", code)
	}
	e.StartWorker(vars...)
	e.WaitStatus(t, soon, id, "succeeded")
	equal(t, "outcomes", outcomes(t, e, id), "[lost succeeded]")
	calls := sink.CallsOf(id)
	if len(calls) != 2 || calls[0].Key != calls[1].Key || calls[0].Key == "" {
		t.Errorf("calls %+v, want two with one key", calls)
	}
}

// A relay that is asked to stop in the middle of a backlog saves how far it has come and gives its lanes back: the next
// one goes on at once, and publishes nothing a second time.
func TestSIGTERMWhilePublishing(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	published := countPublishes(t, e, "tasks.>")
	const tasks = 5_000
	for _, lane := range []string{"A", "B"} {
		e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT $1 FROM generate_series(1, $2)`, lane, tasks/2)
	}
	var stops []time.Duration
	for done := false; !done; {
		before := published.total()
		relay := e.StartRelay("TASKRELAY_RELAY_BATCH=100")
		testenv.Eventually(t, soon, func() error {
			if n := published.total(); n < min(before+tasks/5, tasks) {
				return errorf("%d of %d messages are published", n, tasks)
			}
			return nil
		})
		began := time.Now()
		if code := relay.Stop(t, 20*time.Second); code != 0 {
			t.Errorf("exit code after SIGTERM: got %d, want 0", code)
		}
		stops = append(stops, time.Since(began))
		if n := e.Int(t, `SELECT count(*) FROM taskrelay.lane WHERE owner IS NOT NULL`); n != 0 {
			t.Errorf("%d lanes were not given back", n)
		}
		done = published.total() >= tasks
	}
	t.Logf("stopped %d times, after %v", len(stops), slices.Max(stops))
	if len(stops) < 2 {
		t.Error("the relay was never stopped in the middle")
	}
	e.StartRelay().WaitLog(t, soon, "relay started")
	equal(t, "messages in the stream", e.NATS.Messages(t, "TASKS"), tasks)
	equal(t, "messages published", published.total(), tasks)
}
