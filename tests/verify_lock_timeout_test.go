package tests

import (
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// B84, B45: a person sets an unfinished row to running, with an ended lease and an owner that never was. It is
// recovered, the attempt of the unknown owner is counted as lost, and it runs.
func TestVerifyLockTimeout(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	e.NATS.WaitStream(t, "TASKS")
	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "L-1")
	testenv.Eventually(t, soon, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 1 {
			return errorf("%d messages, want 1", n)
		}
		return nil
	})
	e.Exec(t, `UPDATE taskrelay.task SET status = 'running', attempt = 1, lease_owner = 'manual', lease_token = 4711,
		lease_until = now() - interval '10 min', started_at = now() - interval '11 min' WHERE id = $1`, id)
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	row := e.WaitStatus(t, soon, id, "succeeded")
	equal(t, "attempt", row.Attempt, 2)
	equal(t, "outcomes", outcomes(t, e, id), "[lost succeeded]")
	equal(t, "owner of the lost attempt", text(e.Attempts(t, id)[0].Worker), "manual")
	equal(t, "calls", len(sink.CallsOf(id)), 1)

	// The same by hand without a token, and a running row without a lease is refused with a name a person understands.
	waiting := e.Insert(t, "ORDER_PAYMENT", "run_at", time.Now().Add(time.Hour))
	_, err := e.Pool.Exec(t.Context(), "UPDATE taskrelay.task SET status = 'running' WHERE id = $1", waiting)
	wantConstraint(t, err, "running_needs_lease")
	_, err = e.Pool.Exec(t.Context(), "UPDATE taskrelay.task SET status = 'x' WHERE id = $1", waiting)
	wantConstraint(t, err, "status_is_known")
	// B77: an UPDATE that would bring a finished row back is refused by the function's name.
	_, err = e.Pool.Exec(t.Context(), "UPDATE taskrelay.task SET status = 'pending' WHERE id = $1", id)
	wantConstraint(t, err, "use_taskrelay_requeue")
}

// B59, B62, B98, C-099: a worker that sleeps past its lease loses the task to another one; when it wakes up its
// result is stale, is logged as such, and changes nothing.
func TestSleepingWorkerChangesNothing(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 500, Delay: time.Second}, testenv.Reply{Status: 200, Body: `"second"`})
	e.StartRelay()
	vars := testenv.HTTPType("ORDER_PAYMENT", sink.URL)
	sleeper := e.StartWorker(vars...)
	id := e.Insert(t, "ORDER_PAYMENT")
	sink.WaitCallsOf(t, soon, id, 1)
	sleeper.Pause(t)
	e.StartWorker(vars...)
	row := e.WaitStatus(t, soon, id, "succeeded")
	equal(t, "attempt", row.Attempt, 2)
	equal(t, "result", text(row.Result), `"second"`)
	sleeper.Continue(t)
	e.WaitCount(t, soon, 1, "SELECT count(*) FROM taskrelay.task_attempt WHERE task_id = $1 AND outcome = 'stale'", id)
	after := e.Task(t, id)
	equal(t, "state after the late result", after.Status, "succeeded")
	equal(t, "result after the late result", text(after.Result), `"second"`)
	equal(t, "last_error after the late result", text(after.LastError), "")
	equal(t, "outcomes", outcomes(t, e, id), "[stale succeeded]")
	equal(t, "calls", len(sink.CallsOf(id)), 2)
	testenv.Eventually(t, soon, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 0 {
			return errorf("%d messages are left", n)
		}
		return nil
	})
}

// A1, B28: a call of several leases is one call, because the lease moves on with it.
func TestLongCallKeepsItsLease(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 200, Delay: 7 * time.Second})
	e.StartRelay()
	for range 2 {
		e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_LEASE=2s")...)
	}
	id := e.Insert(t, "ORDER_PAYMENT")
	sink.WaitCallsOf(t, soon, id, 1)
	first := e.Task(t, id).LeaseUntil
	testenv.Eventually(t, 5*time.Second, func() error {
		if now := e.Task(t, id).LeaseUntil; first == nil || now == nil || !now.After(*first) {
			return errorf("lease_until has not moved from %v: %v", first, now)
		}
		return nil
	})
	// B6, B97: no transaction is open while handlers run.
	testenv.Never(t, 2*time.Second, func() error {
		n := e.Int(t, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND xact_start < now() - interval '1 s' AND backend_type = 'client backend'")
		if n != 0 {
			return errorf("%d transactions are open for more than a second", n)
		}
		return nil
	})
	e.WaitStatus(t, soon, id, "succeeded")
	equal(t, "calls", len(sink.CallsOf(id)), 1)
	equal(t, "outcomes", outcomes(t, e, id), "[succeeded]")
}
