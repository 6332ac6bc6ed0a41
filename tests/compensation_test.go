package tests

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// A2, A8, A33, A40, C-119: Execute fails for good; Compensate has its own attempts, delays and key, and gets the cause.
func TestCompensationRunsAsItsOwnPhase(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	type call struct {
		phase, key string
		attempt    int
		cause      string
	}
	var mu sync.Mutex
	calls := map[int64][]call{}
	var reg command.Registry
	mustRegister(t, &reg, "ACCOUNT", command.Command[string]{
		Retry:       quickRetry,
		MaxAttempts: 3,
		Timeout:     time.Second,
		Execute: func(_ context.Context, task *command.Task[string]) (any, error) {
			mu.Lock()
			defer mu.Unlock()
			calls[task.ID] = append(calls[task.ID], call{task.Phase, task.Key(), task.Attempt, ""})
			if task.Payload == "permanent" {
				return nil, retry.Permanent(errors.New("the bank said no"))
			}
			return nil, errors.New("the bank is closed")
		},
		Compensate: func(ctx context.Context, task *command.Task[string], cause error) error {
			mu.Lock()
			calls[task.ID] = append(calls[task.ID], call{task.Phase, task.Key(), task.Attempt, cause.Error()})
			mu.Unlock()
			switch {
			case task.Payload == "works" || task.Payload == "permanent":
				return nil
			case task.Payload == "third" && task.Attempt == 3:
				return nil
			case task.Payload == "panics":
				panic("while undoing")
			case task.Payload == "gives up":
				return retry.Permanent(errors.New("cannot be undone"))
			}
			return errors.New("undoing failed")
		},
	})
	e.RunRelay()
	e.RunWorker(&reg)
	for _, c := range []struct {
		payload, reason, compensation, outcomes string
		undone                                  bool
	}{
		{"works", "max_attempts", "done", "[failed failed failed succeeded]", true},
		{"permanent", "permanent", "done", "[failed succeeded]", true},
		{"third", "max_attempts", "done", "[failed failed failed failed failed succeeded]", true},
		{"never", "compensation_failed", "failed", "[failed failed failed failed failed failed]", false},
		{"panics", "compensation_failed", "failed", "[failed failed failed panic panic panic]", false},
		{"gives up", "compensation_failed", "failed", "[failed failed failed failed]", false},
	} {
		t.Run(c.payload, func(t *testing.T) {
			id := e.Insert(t, "ACCOUNT", "payload", `"`+c.payload+`"`)
			row := e.WaitStatus(t, soon, id, "dead", "succeeded", "cancelled")
			equal(t, "status", row.Status, "dead")
			equal(t, "phase", row.Phase, "compensate")
			equal(t, "reason", text(row.DeadReason), c.reason)
			equal(t, "compensation", row.Compensation, c.compensation)
			equal(t, "outcomes", outcomes(t, e, id), c.outcomes)
			cause := "the bank is closed"
			if c.payload == "permanent" {
				cause = "the bank said no"
			}
			if c.undone && !strings.Contains(text(row.LastError), cause) {
				t.Errorf("last_error after a compensation that worked: got %q, want the cause %q", text(row.LastError), cause)
			}
			letter := waitLetter(t, e, "ACCOUNT", id)
			equal(t, "Task-Reason", letter.Header.Get("Task-Reason"), c.reason)
			equal(t, "Task-Compensation", letter.Header.Get("Task-Compensation"), c.compensation)

			mu.Lock()
			defer mu.Unlock()
			n := map[string]int{}
			key := installation(t, e) + "-" + itoa(id)
			for _, got := range calls[id] {
				n[got.phase]++
				equal(t, "attempt of "+got.phase, got.attempt, n[got.phase])
				if got.phase == "compensate" {
					equal(t, "key of compensate", got.key, key+"-compensate")
					if !strings.Contains(got.cause, cause) {
						t.Errorf("cause: got %q, want %q", got.cause, cause)
					}
				} else {
					equal(t, "key of execute", got.key, key)
				}
			}
			equal(t, "attempts in the log = calls", len(e.Attempts(t, id)), len(calls[id]))
		})
	}
	equal(t, "biz_type.compensates", e.Text(t, "SELECT compensates::text FROM taskrelay.biz_type WHERE biz_type = 'ACCOUNT'"), "true")
}

// Over HTTP the compensation target gets the phase, the last error and its own key.
func TestCompensationOverHTTP(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 500, Body: "bank is closed"})
	sink.Script("A-1/compensate", testenv.Statuses(500, 200)...)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ACCOUNT", sink.URL+"/open", "COMPENSATE", sink.URL+"/cancel", "MAX_ATTEMPTS", "2")...)
	id := e.Insert(t, "ACCOUNT", "biz_id", "A-1", "payload", `{"no": "A-1"}`)
	row := e.WaitStatus(t, soon, id, "dead")
	equal(t, "compensation", row.Compensation, "done")
	calls := sink.CallsOf(id)
	if len(calls) != 4 {
		t.Fatalf("calls: got %d, want 4", len(calls))
	}
	for i, c := range calls {
		path, phase, key := "/open", "execute", installation(t, e)+"-"+itoa(id)
		if i >= 2 {
			path, phase, key = "/cancel", "compensate", key+"-compensate"
			if !strings.Contains(c.Header.Get("Task-Error"), "bank is closed") {
				t.Errorf("Task-Error of a compensation: got %q", c.Header.Get("Task-Error"))
			}
		}
		equal(t, "path", c.Path, path)
		equal(t, "Task-Phase", c.Phase, phase)
		equal(t, "Idempotency-Key", c.Key, key)
		equal(t, "Task-Attempt", c.Attempt, i%2+1)
		equal(t, "body", c.Body, `{"no": "A-1"}`)
	}
}

// C-120: a worker is killed in mid-compensation: compensation is resumed by another one; a task whose execute counts
// as done is never compensated.
func TestCompensationSurvivesKill(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 422})
	sink.Script("A-1/compensate", testenv.Reply{Hang: true}, testenv.Reply{Status: 200})
	sink.Script("done", testenv.Reply{Status: 200})
	e.StartRelay()
	vars := testenv.HTTPType("ACCOUNT", sink.URL+"/open", "COMPENSATE", sink.URL+"/cancel")
	first := e.StartWorker(vars...)
	done := e.Insert(t, "ACCOUNT", "biz_id", "done")
	e.WaitStatus(t, soon, done, "succeeded")
	id := e.Insert(t, "ACCOUNT", "biz_id", "A-1")
	sink.WaitCallsOf(t, soon, id, 2)
	first.Kill9(t)
	e.StartWorker(vars...)
	row := e.WaitStatus(t, soon, id, "dead")
	equal(t, "compensation", row.Compensation, "done")
	equal(t, "outcomes", outcomes(t, e, id), "[failed lost succeeded]")
	calls := sink.CallsOf(id)
	equal(t, "calls", len(calls), 3)
	if len(calls) == 3 {
		equal(t, "key of the repeated compensation", calls[2].Key, calls[1].Key)
	}
	equal(t, "state of the task that was done", e.Task(t, done).Status, "succeeded")
	equal(t, "its calls", len(sink.CallsOf(done)), 1)
}
