package tests

import (
	"testing"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Interleaving 16d: a worker sleeps through its last attempt; the task is compensated meanwhile. When it wakes up, its
// success comes too late: the task stays dead and undone.
func TestSleeperWakesUpAfterCompensation(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Script("order-1", testenv.Reply{Status: 200, Body: `"paid"`, Delay: 300e6})
	sink.Script("order-1/compensate", testenv.Reply{Status: 200})
	e.StartRelay()
	vars := append(testenv.HTTPType("ORDER_PAYMENT", sink.URL+"/pay", "COMPENSATE", sink.URL+"/undo", "MAX_ATTEMPTS", "1"),
		"TASKRELAY_WORKER_LEASE=2s")
	sleeper := e.StartWorker(vars...)
	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "order-1")
	sink.WaitCallsOf(t, soon, id, 1)
	sleeper.Pause(t)
	e.StartWorker(vars...)
	e.WaitStatus(t, soon, id, "dead")
	sleeper.Continue(t)
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task_attempt WHERE task_id = $1 AND outcome = 'stale'`, id)
	row := e.Task(t, id)
	equal(t, "status", row.Status, "dead")
	equal(t, "compensation", row.Compensation, "done")
	equal(t, "reason", text(row.DeadReason), "lost")
	equal(t, "result", text(row.Result), "")
	equal(t, "outcomes", outcomes(t, e, id), "[stale succeeded]")
	var paths []string
	for _, c := range sink.CallsOf(id) {
		paths = append(paths, c.Path)
	}
	if len(paths) != 2 || paths[0] != "/pay" || paths[1] != "/undo" {
		t.Errorf("calls: %v, want /pay, then /undo", paths)
	}
}

// Interleaving 16f: the worker that ended execute is dead, and so is the relay it might have told. The event "failed" goes
// out all the same, for it is made from the row; the row stays on the work list until both messages are stored.
func TestFailedEventComesFromTheRow(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	var id int64
	e.Scan(t, `INSERT INTO taskrelay.task (biz_type, status, phase, generation, attempt, compensation, cause, next_attempt_at, republish_at)
		VALUES ('ORDER_PAYMENT', 'pending', 'compensate', 1, 0, 'pending', 'bank is down', now(), now()) RETURNING id`, nil, &id)
	e.RunRelay()
	e.WaitCount(t, soon, 1, `SELECT count(*) FROM taskrelay.task WHERE id = $1 AND looks = 1`, id)
	event, err := e.NATS.Last(t.Context(), "TASKS_EVENTS", "events.ORDER_PAYMENT.failed")
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "Task-Id", event.Header.Get("Task-Id"), itoa(id))
	message, err := e.NATS.Last(t.Context(), "TASKS", "tasks.ORDER_PAYMENT.low")
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "Task-Phase", message.Header.Get("Task-Phase"), "compensate")
}
