package tests

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// A11, A34, B25, C29, C41, C42: two types of one worker wait as each is set, and without a setting as documented. The delay
// written down is that between the end of an attempt and the next.
func TestDelaysAreThoseOfEachType(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t) // no relay: what goes through the table stays there
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 500})
	l.StartWorker("TASKRELAY_BIZ_TYPES=DEFAULT,FIXED,BASE_2", "TASKRELAY_WORKER_NAK_MAX=1s",
		"TASKRELAY_BIZ_DEFAULT_TARGET="+sink.URL, "TASKRELAY_BIZ_DEFAULT_JITTER=0",
		"TASKRELAY_BIZ_FIXED_TARGET="+sink.URL, "TASKRELAY_BIZ_FIXED_JITTER=0", "TASKRELAY_BIZ_FIXED_STRATEGY=fixed",
		"TASKRELAY_BIZ_BASE_2_TARGET="+sink.URL, "TASKRELAY_BIZ_BASE_2_JITTER=0", "TASKRELAY_BIZ_BASE_2_BASE_DELAY=2s")
	for bizType, delays := range map[string][]int{"DEFAULT": {5, 10, 20, 40}, "FIXED": {60, 60, 60, 60}, "BASE_2": {2, 4, 8, 16}} {
		for failures, want := range delays { // before the attempt that is made now
			id := l.Insert(t, bizType)
			l.Exec(t, "UPDATE taskrelay.task SET attempt = $2 WHERE id = $1", id, failures)
			l.publish(id)
			row := l.WaitStatus(t, soon, id, "retrying")
			if d := row.NextAttemptAt.Sub(l.Attempts(t, id)[0].FinishedAt).Round(time.Second / 10); d != time.Duration(want)*time.Second {
				t.Errorf("%s waits %v after failure %d, want %d s", bizType, d, failures+1, want)
			}
		}
	}
	equal(t, "calls", len(sink.Calls()), 12)
}

// C28: a worker never has more calls open than its concurrency says.
func TestWorkerKeepsItsConcurrency(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Delay: 50 * time.Millisecond})
	e.StartRelay()
	e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_CONCURRENCY=10")...)
	insertMany(t, e, "ORDER_PAYMENT", 100)
	e.WaitNoneOpen(t, soon)
	equal(t, "calls open at once", sink.MostOpen(), 10)
	equal(t, "calls", len(sink.Calls()), 100)
}

// C23, C32: a task of a type whose worker says PRIORITY=high goes out as high when enqueue is not told otherwise.
func TestPriorityOfATypeIsItsWorkers(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "PRIORITY", "high")...)
	e.WaitCount(t, soon, 1, "SELECT count(*) FROM taskrelay.biz_type WHERE biz_type = 'ORDER_PAYMENT' AND default_priority = 'high'")
	for sql, want := range map[string]string{
		"SELECT id FROM taskrelay.enqueue('ORDER_PAYMENT')":                                  "high",
		"SELECT id FROM taskrelay.enqueue('ORDER_PAYMENT', priority => 'low')":               "low",
		"INSERT INTO taskrelay.task (biz_type) VALUES ('ORDER_PAYMENT') RETURNING id":        "low",
		"SELECT id FROM taskrelay.enqueue('NOBODY_KNOWS', run_at => now() + interval '1 h')": "low",
	} {
		id := e.Int(t, sql)
		equal(t, sql, e.Task(t, id).Priority, want)
		if strings.Contains(sql, "NOBODY") {
			continue
		}
		e.WaitStatus(t, soon, id, "succeeded")
		equal(t, "header of the call", sink.CallsOf(id)[0].Header.Get("Task-Priority"), want)
	}
}

// B64, A32, K7: each failed attempt is one warning with attempt, limit and what comes next; the end is one error.
func TestLogHasALinePerFailedAttempt(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 500, Body: "bank is closed"})
	e.StartRelay()
	worker := e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "MAX_ATTEMPTS", "3", "STRATEGY", "fixed")...)
	id := e.Insert(t, "ORDER_PAYMENT", "payload", `{"card": "4111-1111"}`)
	e.WaitStatus(t, soon, id, "dead")
	worker.WaitLog(t, soon, `"message":"task dead"`)
	equal(t, "lines of tasks", lineList(worker, id), `warn 1/3 "attempt failed, retrying" delay error; warn 2/3 "attempt failed, retrying" delay error; error 3/3 "task dead" error`)
	if strings.Contains(worker.Logs(), "4111-1111") {
		t.Error("the log shows a payload")
	}
}

// lineList sums up the log lines about a task.
func lineList(p *testenv.Process, id int64) string {
	var all []string
	for line := range strings.Lines(p.Logs()) {
		var m struct {
			Level   string `json:"level"`
			TaskID  int64  `json:"task_id"`
			Attempt int64  `json:"attempt"`
			Max     int64  `json:"max_attempts"`
			Message string `json:"message"`
			Delay   any    `json:"delay"`
			Error   string `json:"error"`
		}
		if json.Unmarshal([]byte(line), &m) != nil || m.TaskID != id {
			continue
		}
		text := m.Level + " " + itoa(m.Attempt) + "/" + itoa(m.Max) + ` "` + m.Message + `"`
		if m.Delay != nil {
			text += " delay"
		}
		if strings.Contains(m.Error, "500") {
			text += " error"
		}
		all = append(all, text)
	}
	return strings.Join(all, "; ")
}
