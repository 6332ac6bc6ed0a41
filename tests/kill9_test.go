package tests

import (
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// A3, B12, B60, C-093, C-103: a worker is killed with 200 running tasks: all run again within lease and margin, the
// log says the first attempt was lost, nothing stays running.
func TestKilledWorkerLosesItsTasksToAnother(t *testing.T) {
	const tasks = 200
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Hang: true}, testenv.Reply{Status: 200})
	e.StartRelay()
	vars := testenv.HTTPType("ORDER_PAYMENT", sink.URL, "CONCURRENCY", "200")
	first := e.StartWorker(vars...)
	insertMany(t, e, "ORDER_PAYMENT", tasks)
	sink.WaitCalls(t, soon, tasks)
	first.Kill9(t)
	killed := time.Now()
	e.StartWorker(vars...)
	e.WaitNoneOpen(t, soon)
	if d := time.Since(killed); d > 20*time.Second {
		t.Errorf("all tasks were taken over after %v, with a lease of 3s", d)
	}
	equal(t, "lost attempts", e.Int(t, "SELECT count(*) FROM taskrelay.task_attempt WHERE outcome = 'lost' AND attempt = 1"), tasks)
	equal(t, "second attempts that worked", e.Int(t, "SELECT count(*) FROM taskrelay.task_attempt WHERE outcome = 'succeeded' AND attempt = 2"), tasks)
	equal(t, "calls", len(sink.Calls()), 2*tasks)
}

// C-103, interleaving 17: an attempt that crashes counts; when it was the last one the task is dead with reason lost,
// and its handler is not called once more.
func TestLostLastAttemptIsDead(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Hang: true})
	e.StartRelay()
	vars := testenv.HTTPType("ORDER_PAYMENT", sink.URL)
	first := e.StartWorker(vars...)
	id := e.Insert(t, "ORDER_PAYMENT", "max_attempts", 1)
	sink.WaitCallsOf(t, soon, id, 1)
	first.Kill9(t)
	e.StartWorker(vars...)
	row := e.WaitStatus(t, soon, id, "dead", "succeeded")
	equal(t, "status", row.Status, "dead")
	equal(t, "reason", text(row.DeadReason), "lost")
	equal(t, "attempt", row.Attempt, 1)
	equal(t, "outcomes", outcomes(t, e, id), "[lost]")
	equal(t, "calls", len(sink.CallsOf(id)), 1)
	equal(t, "Task-Reason", waitLetter(t, e, "ORDER_PAYMENT", id).Header.Get("Task-Reason"), "lost")
}

// C-111, 4.7: SIGTERM lets running handlers finish; all are recorded and none runs again.
func TestStoppedWorkerFinishesWhatRuns(t *testing.T) {
	t.Parallel()
	const tasks = 50
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 200, Delay: 3 * time.Second})
	e.StartRelay()
	first := e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_GRACE=20s")...)
	insertMany(t, e, "ORDER_PAYMENT", tasks)
	sink.WaitCalls(t, soon, tasks)
	if code := first.Stop(t, soon); code != 0 {
		t.Errorf("exit code after SIGTERM: got %d, want 0", code)
	}
	equal(t, "succeeded when the worker has ended", e.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded'"), tasks)
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	testenv.Eventually(t, soon, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 0 {
			return errorf("%d messages are left", n)
		}
		return nil
	})
	equal(t, "calls", len(sink.Calls()), tasks)
}

// 4.7: what does not finish within the grace is handed back, and its attempt is not counted.
func TestStopHandsBackWhatDoesNotFinish(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Hang: true}, testenv.Reply{Status: 200})
	e.StartRelay()
	first := e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_GRACE=1s", "TASKRELAY_WORKER_LEASE=60s")...)
	id := e.Insert(t, "ORDER_PAYMENT", "max_attempts", 1)
	sink.WaitCallsOf(t, soon, id, 1)
	if code := first.Stop(t, soon); code != 0 {
		t.Errorf("exit code after SIGTERM: got %d, want 0", code)
	}
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	row := e.WaitStatus(t, soon, id, "succeeded", "dead")
	equal(t, "status", row.Status, "succeeded")
	equal(t, "attempt", row.Attempt, 1)
	equal(t, "outcomes", outcomes(t, e, id), "[released succeeded]")
}

// 7: kill -9 of nats-server and a full restart of it lose nothing.
func TestKilledNATSLosesNothing(t *testing.T) {
	const tasks = 1000
	db := testenv.DB(t)
	nats := testenv.StartNATSProcess(t)
	e := testenv.NewEnv(t, db, &nats.NATSServer)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 200, Delay: 50 * time.Millisecond})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	insertMany(t, e, "ORDER_PAYMENT", tasks)
	sink.WaitCalls(t, soon, 100)
	nats.Kill9(t)
	insertMany(t, e, "ORDER_PAYMENT", 100)
	nats.Start(t)
	e.WaitNoneOpen(t, 2*soon)
	equal(t, "attempts", e.Int(t, "SELECT count(*) FROM taskrelay.task_attempt WHERE outcome = 'succeeded'"), tasks+100)
	noDoubleSuccess(t, e)
	noOverlaps(t, sink)
	equal(t, "calls", len(sink.Calls()), tasks+100)
}
