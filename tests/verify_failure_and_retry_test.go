package tests

import (
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// The failure path (B83, B24, B43, B44, B63, A30, C19): the first failure counts one, waits and keeps a time;
// after the last allowed one the task is dead, and nothing calls it again.
func TestVerifyFailureAndRetry(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 500, Body: "bank is closed"})
	e.StartRelay()
	worker := e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "BASE_DELAY", "700ms")...)

	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "F-1", "max_attempts", 3)

	for n := 1; n <= 2; n++ {
		testenv.Eventually(t, soon, func() error {
			var ok bool
			err := e.Pool.QueryRow(t.Context(), `SELECT status = 'retrying' AND attempt = $2 AND next_attempt_at > now()
				AND lease_owner IS NULL AND lease_token IS NULL AND lease_until IS NULL AND last_error IS NOT NULL
				FROM taskrelay.task WHERE id = $1`, id, n).Scan(&ok)
			if err == nil && !ok {
				r := e.Task(t, id)
				return errorf("after failure %d: %s, attempt %d, next %v, owner %v", n, r.Status, r.Attempt, r.NextAttemptAt, text(r.LeaseOwner))
			}
			return err
		})
	}
	row := e.WaitStatus(t, soon, id, "dead")
	equal(t, "attempt", row.Attempt, 3)
	equal(t, "dead_reason", text(row.DeadReason), "max_attempts")
	equal(t, "outcomes", outcomes(t, e, id), "[failed failed failed]")
	if row.NextAttemptAt != nil || row.RepublishAt != nil || row.LeaseUntil != nil || row.FinishedAt == nil || row.DeadAt == nil {
		t.Errorf("times of a dead row: %+v", row)
	}
	if !strings.Contains(text(row.LastError), "500") || !strings.Contains(text(row.LastError), "bank is closed") {
		t.Errorf("last_error: got %q, want status and body", text(row.LastError))
	}

	calls := sink.CallsOf(id)
	for i := 1; i < len(calls); i++ {
		equal(t, "Idempotency-Key of a repeated call", calls[i].Key, calls[0].Key)
		equal(t, "Task-Attempt", calls[i].Attempt, i+1)
		// The delay runs from the end of the attempt: 700 ms, then 1.4 s.
		if gap, want := calls[i].At.Sub(calls[i-1].Ended), 700*time.Millisecond<<(i-1); gap < want-10*time.Millisecond || gap > want+3*time.Second {
			t.Errorf("gap before attempt %d: got %v, want %v", i+1, gap, want)
		}
	}
	// Longer than the next delay would be.
	testenv.Never(t, 3*time.Second, func() error {
		if n := len(sink.CallsOf(id)); n != 3 {
			return errorf("%d calls, want 3", n)
		}
		return nil
	})
	warnings := 0
	for line := range strings.Lines(worker.Logs()) {
		if strings.Contains(line, `"level":"warn"`) && strings.Contains(line, `"task_id":`+itoa(id)) {
			warnings++
		}
	}
	if warnings < 2 {
		t.Errorf("warn lines for failed attempts: got %d, want one for each retry", warnings)
	}
}

// B36, B23, B34: a task that fails twice and then works has three rows in the log, in order, and no error left.
func TestFailedAttemptsStayInTheLogAfterSuccess(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Statuses(500, 503, 200)...)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	id := e.Insert(t, "ORDER_PAYMENT")
	row := e.WaitStatus(t, soon, id, "succeeded")
	equal(t, "attempt", row.Attempt, 3)
	equal(t, "last_error", text(row.LastError), "")
	equal(t, "outcomes", outcomes(t, e, id), "[failed failed succeeded]")
	var workers []string
	for i, a := range e.Attempts(t, id) {
		equal(t, "attempt number in the log", a.Attempt, i+1)
		workers = append(workers, text(a.Worker))
	}
	if workers[0] == "" {
		t.Error("the log does not name the worker")
	}
	equal(t, "different lease tokens", e.Int(t, "SELECT count(DISTINCT lease_token) FROM taskrelay.task_attempt WHERE task_id = $1", id), 3)
}
