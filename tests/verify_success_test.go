package tests

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// The success path (B82, B42, A41, A7): status success, one attempt, no reason, lease gone, result kept.
func TestVerifySuccess(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 200, Body: `{"no":"7"}`, Delay: 200 * time.Millisecond})
	e.StartRelay()
	worker := e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)

	const payload = `{"orderId": 10001, "operator": "system-4711"}`
	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "O-10001", "payload", payload)
	row := e.WaitStatus(t, soon, id, "succeeded")

	equal(t, "attempt", row.Attempt, 1)
	equal(t, "last_error", text(row.LastError), "")
	equal(t, "priority", row.Priority, "low")
	if row.FinishedAt == nil || row.StartedAt == nil || row.LeaseUntil != nil || row.NextAttemptAt != nil || row.RepublishAt != nil {
		t.Errorf("times of a finished row: %+v", row)
	} else if row.CreatedAt.After(*row.StartedAt) || row.StartedAt.After(*row.FinishedAt) {
		t.Errorf("created_at %v, started_at %v, finished_at %v are not in order", row.CreatedAt, row.StartedAt, row.FinishedAt)
	}
	equal(t, "result->>'no'", e.Text(t, "SELECT result->>'no' FROM taskrelay.task WHERE id = $1", id), "7")

	attempts := e.Attempts(t, id)
	if len(attempts) != 1 {
		t.Fatalf("attempt log: got %d rows, want 1", len(attempts))
	}
	a := attempts[0]
	equal(t, "outcome", a.Outcome, "succeeded")
	equal(t, "attempt", a.Attempt, 1)
	equal(t, "biz_id in the log", text(a.BizID), "O-10001")
	if d := a.FinishedAt.Sub(a.StartedAt); d < 200*time.Millisecond || d > 5*time.Second {
		t.Errorf("duration in the log: got %v, want 200ms and a little", d)
	}

	calls := sink.CallsOf(id)
	if len(calls) != 1 {
		t.Fatalf("calls: got %d, want 1", len(calls))
	}
	c := calls[0]
	equal(t, "body", c.Body, payload)
	equal(t, "Task-Biz-Type", c.BizType, "ORDER_PAYMENT")
	equal(t, "Task-Biz-Id", c.BizID, "O-10001")
	equal(t, "Task-Attempt", c.Attempt, 1)
	equal(t, "Task-Phase", c.Phase, "execute")
	equal(t, "Idempotency-Key", c.Key, installation(t, e)+"-"+itoa(id))

	// One line for the finished task, with what an operator greps for, and no payload.
	testenv.Eventually(t, soon, func() error { return logsTask(worker, id) })
	for _, p := range []*testenv.Process{worker} {
		if strings.Contains(p.Logs(), "system-4711") {
			t.Error("the log holds a payload")
		}
	}
}

// logsTask looks for exactly one info line about a finished task.
func logsTask(p *testenv.Process, id int64) error {
	lines := 0
	for line := range strings.Lines(p.Logs()) {
		var m struct {
			Level      string   `json:"level"`
			TaskID     int64    `json:"task_id"`
			BizType    string   `json:"biz_type"`
			Attempt    int      `json:"attempt"`
			DurationMs *float64 `json:"duration_ms"`
		}
		if json.Unmarshal([]byte(line), &m) != nil || m.TaskID != id || m.Level != "info" {
			continue
		}
		if m.BizType != "" && m.Attempt > 0 && m.DurationMs != nil {
			lines++
		}
	}
	if lines != 1 {
		return errorf("%d info lines with task_id, biz_type, attempt and duration_ms, want 1", lines)
	}
	return nil
}
