package tests

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// Field case C-015: one time that Go cannot encode must not make a list fail.
func TestListsSurviveAnyTime(t *testing.T) {
	db := testenv.DB(t)
	for _, c := range []struct{ runAt, want string }{
		{"10000-01-01", "9999-12-31T23:59:59.999999Z"},
		{"294276-12-31", "9999-12-31T23:59:59.999999Z"},
		{"infinity", "9999-12-31T23:59:59.999999Z"},
		{"-infinity", "0001-01-01T00:00:00Z"},
		{"0044-03-15 BC", "0001-01-01T00:00:00Z"},
		{"9999-12-31 23:59:59.999999+00", "9999-12-31T23:59:59.999999Z"},
		{"2031-03-02 01:00:00.000001+05:30", "2031-03-01T19:30:00.000001Z"},
	} {
		db.Insert(t, "FAR", "run_at", c.runAt, "biz_id", c.want+" "+c.runAt)
	}
	db.Exec(t, "UPDATE taskrelay.task SET next_attempt_at = 'infinity', republish_at = 'infinity', lease_until = '-infinity', created_at = '-infinity'")
	for mode, pool := range modes(t, db) {
		tasks, err := outbox.List(t.Context(), pool, outbox.Filter{BizType: "FAR"})
		noError(t, mode, err)
		equal(t, mode+": tasks", len(tasks), 7)
		_, err = json.Marshal(tasks)
		noError(t, mode, err)
		for _, task := range tasks {
			if got := task.RunAt.Format(time.RFC3339Nano); !strings.HasPrefix(task.BizID, got+" ") {
				t.Errorf("%s: %s: got %s", mode, task.BizID, got)
			}
			one, err := outbox.Get(t.Context(), pool, task.ID)
			noError(t, mode, err)
			if !one.RunAt.Equal(*task.RunAt) || !one.CreatedAt.Equal(outbox.MinTime) || !one.Due().Equal(outbox.MaxTime) || !one.LeaseUntil.Equal(outbox.MinTime) {
				t.Errorf("%s: got %+v", mode, one)
			}
		}
	}
}

func TestGetShowsEveryColumn(t *testing.T) {
	db := testenv.DB(t)
	id := db.Insert(t, "T", "biz_id", "b", "priority", "high", "max_attempts", 7, "payload", `{ "a":1.10 }`, "headers", `{"h":"v"}`)
	db.Exec(t, `UPDATE taskrelay.task SET status = 'dead', phase = 'compensate', generation = 2, attempt = 3, looks = 4, execute_attempts = 5,
		compensations = 6, compensation = 'failed', lease_owner = 'w', lease_token = -9007199254740993, last_error = 'e', error_class = 'c', cause = 'why',
		dead_reason = 'compensation_failed', result = '{"no":"7"}', parent_id = 8, lease_until = '2030-01-01Z', next_attempt_at = '2030-01-02Z',
		republish_at = '2030-01-03Z', started_at = '2030-01-04Z', first_started_at = '2030-01-05Z', finished_at = '2030-01-06Z', dead_at = '2030-01-07Z',
		dead_lettered_at = '2030-01-08Z', cancel_requested_at = '2030-01-09Z', cancel_compensates = true, expires_at = '2030-01-10Z', run_at = '2030-01-11Z', created_at = '2030-01-12Z'`)
	for mode, pool := range modes(t, db) {
		task, err := outbox.Get(t.Context(), pool, id)
		noError(t, mode, err)
		task.XID = "x"
		got, err := json.Marshal(task)
		noError(t, mode, err)
		equal(t, mode, string(got), fmt.Sprintf(`{"id":"%d","biz_type":"T","biz_id":"b","priority":"high","status":"dead","phase":"compensate",`+
			`"generation":2,"attempt":3,"max_attempts":7,"payload":{"a":1.10},"headers":{"h":"v"},"result":{"no":"7"},`+
			`"created_at":"2030-01-12T00:00:00Z","run_at":"2030-01-11T00:00:00Z","next_attempt_at":"2030-01-02T00:00:00Z",`+
			`"republish_at":"2030-01-03T00:00:00Z","looks":4,"first_started_at":"2030-01-05T00:00:00Z","started_at":"2030-01-04T00:00:00Z",`+
			`"finished_at":"2030-01-06T00:00:00Z","expires_at":"2030-01-10T00:00:00Z","cancel_requested_at":"2030-01-09T00:00:00Z","cancel_compensates":true,`+
			`"lease_owner":"w","lease_token":"-9007199254740993","lease_until":"2030-01-01T00:00:00Z","last_error":"e","error_class":"c",`+
			`"compensation":"failed","compensations":6,"cause":"why","execute_attempts":5,"dead_at":"2030-01-07T00:00:00Z",`+
			`"dead_reason":"compensation_failed","dead_lettered_at":"2030-01-08T00:00:00Z","parent_id":"8","xid":"x"}`, id))
		equal(t, mode+": payload byte for byte", string(task.Payload), `{ "a":1.10 }`)
	}
	// A column that was added to the table but not to Task would be missing above.
	equal(t, "columns", db.Int(t, "SELECT count(*) FROM information_schema.columns WHERE table_schema = 'taskrelay' AND table_name = 'task'"), 38)

	_, err := outbox.Get(t.Context(), db.Pool, id+1)
	if !errors.Is(err, outbox.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
}

func TestListFilters(t *testing.T) {
	db := testenv.DB(t)
	db.Exec(t, `INSERT INTO taskrelay.task (biz_type, biz_id) SELECT 'T' || i % 2, 'b' || i FROM generate_series(1, 60) AS i`)
	db.Exec(t, `UPDATE taskrelay.task SET status = 'dead', finished_at = now(), dead_at = now(), last_error = 'bank said 100% no' WHERE biz_id IN ('b1', 'b2', 'b3')`)
	db.Exec(t, `UPDATE taskrelay.task SET status = 'retrying', last_error = 'bank said 1000 times' WHERE biz_id = 'b5'`)
	list := func(f outbox.Filter) string {
		t.Helper()
		tasks, err := outbox.List(t.Context(), db.Pool, f)
		noError(t, "list", err)
		var ids []string
		for _, task := range tasks {
			ids = append(ids, task.BizID)
			if task.Payload != nil || task.Headers != nil || task.Result != nil {
				t.Errorf("a payload in a list: %+v", task)
			}
		}
		return strings.Join(ids, " ")
	}
	all, err := outbox.List(t.Context(), db.Pool, outbox.Filter{})
	noError(t, "list", err)
	equal(t, "default limit", len(all), 50)
	equal(t, "dead", list(outbox.Filter{Status: "dead"}), "b3 b2 b1")
	equal(t, "dead of a type", list(outbox.Filter{Status: "dead", BizType: "T1"}), "b3 b1")
	equal(t, "retrying", list(outbox.Filter{Status: "retrying"}), "b5")
	equal(t, "error text", list(outbox.Filter{ErrorContains: "100%"}), "b3 b2 b1")
	equal(t, "biz id", list(outbox.Filter{BizID: "b7"}), "b7")
	equal(t, "limit", list(outbox.Filter{Limit: 2}), "b60 b59")
	equal(t, "next page", list(outbox.Filter{Limit: 2, Before: all[1].ID}), "b58 b57")
	equal(t, "no such type", list(outbox.Filter{BizType: "it's '$1"}), "")
}

func TestAttemptsInTheirOrder(t *testing.T) {
	db := testenv.DB(t)
	id := db.Insert(t, "T", "biz_id", "b")
	db.Exec(t, `INSERT INTO taskrelay.task_attempt (task_id, lease_token, started_at, finished_at, generation, attempt, biz_type, biz_id, phase, outcome, worker, error_class, error, stack)
		VALUES ($1, 1, '2030-01-01 00:00:02Z', '2030-01-01 00:00:03.5Z', 0, 2, 'T', 'b', 'execute', 'succeeded', 'w', NULL, NULL, NULL),
		       ($1, 2, '2030-01-01 00:00:00Z', '2030-01-01 00:00:01Z', 0, 1, 'T', 'b', 'execute', 'panic', 'w', 'panic', 'boom', 'main.go:1')`, id)
	attempts, err := outbox.Attempts(t.Context(), db.Pool, id)
	noError(t, "attempts", err)
	if len(attempts) != 2 || attempts[0].Outcome != "panic" || attempts[0].Stack != "main.go:1" || attempts[1].Duration() != 1500*time.Millisecond {
		t.Errorf("got %+v", attempts)
	}
	none, err := outbox.Attempts(t.Context(), db.Pool, id+1)
	if err != nil || len(none) != 0 {
		t.Errorf("of no task: got %v, %v", none, err)
	}
}

func TestOperationsFromGo(t *testing.T) {
	db := testenv.DB(t)
	ctx := t.Context()
	dead := db.Insert(t, "T", "biz_id", "dead")
	db.Exec(t, "UPDATE taskrelay.task SET status = 'dead', compensation = 'done', compensations = 1, finished_at = now(), dead_at = now() WHERE id = $1", dead)
	done := db.Insert(t, "T", "biz_id", "done")
	db.Exec(t, "UPDATE taskrelay.task SET status = 'succeeded', finished_at = now() WHERE id = $1", done)
	waiting := db.Insert(t, "T", "biz_id", "waiting")
	status := func(id int64) string {
		t.Helper()
		return db.Text(t, "SELECT status FROM taskrelay.task WHERE id = $1", id)
	}

	for mode, pool := range modes(t, db) {
		changes, err := outbox.Requeue(ctx, pool, []int64{dead, waiting, 999}, "bank is back")
		noError(t, mode, err)
		if len(changes) != 3 || changes[0].Changed || !strings.Contains(changes[0].WhyNot, "allow_compensated") || changes[2].ID != 999 || changes[2].WhyNot == "" {
			t.Errorf("%s: requeue without its flag: %+v", mode, changes)
		}
		changes, err = outbox.RunNow(ctx, pool, []int64{waiting, done}, "now")
		noError(t, mode, err)
		if len(changes) != 2 {
			t.Fatalf("%s: run now: %+v", mode, changes)
		}
		byID := map[int64]outbox.Change{changes[0].ID: changes[0], changes[1].ID: changes[1]}
		if !byID[waiting].Changed || byID[waiting].WhyNot != "" || byID[done].Changed {
			t.Errorf("%s: run now: %+v", mode, changes)
		}
		changes, err = outbox.Delay(ctx, pool, []int64{waiting}, 90*time.Second, "bank down")
		if err != nil || len(changes) != 1 || !changes[0].Changed {
			t.Errorf("%s: delay: %+v, %v", mode, changes, err)
		}
		equal(t, "delayed by", db.Text(t, "SELECT round(extract(epoch FROM next_attempt_at - now()) / 10)::text FROM taskrelay.task WHERE id = $1", waiting), "9")
		none, err := outbox.Cancel(ctx, pool, nil, "none")
		if err != nil || len(none) != 0 {
			t.Errorf("%s: cancel of nothing: %+v, %v", mode, none, err)
		}
	}

	change, err := outbox.Reset(ctx, db.Pool, "T", "done", "twice")
	if err != nil || change.Changed || !strings.Contains(change.WhyNot, "allow_succeeded") {
		t.Errorf("reset without its flag: %+v, %v", change, err)
	}
	change, err = outbox.Reset(ctx, db.Pool, "T", "done", "twice", outbox.AllowSucceeded)
	equal(t, "reset", fmt.Sprint(change, err), fmt.Sprintf("{%d true } <nil>", done))
	equal(t, "reset", status(done), "pending")
	_, err = outbox.Reset(ctx, db.Pool, "T", "nobody", "twice")
	if !errors.Is(err, outbox.ErrNotFound) {
		t.Errorf("reset of nothing: got %v", err)
	}
	changes, err := outbox.Requeue(ctx, db.Pool, []int64{dead}, "idempotent", outbox.AllowCompensated)
	equal(t, "requeue", fmt.Sprint(changes, err), fmt.Sprintf("[{%d true }] <nil>", dead))
	equal(t, "requeue", status(dead), "pending")
	changes, err = outbox.Cancel(ctx, db.Pool, []int64{waiting}, "not wanted")
	equal(t, "cancel", fmt.Sprint(changes, err), fmt.Sprintf("[{%d true }] <nil>", waiting))
	equal(t, "cancel", status(waiting), "cancelled")

	// What the functions would raise is refused here, so that a caller's transaction stays usable.
	tx, err := db.Pool.Begin(ctx)
	noError(t, "begin", err)
	defer tx.Rollback(ctx)
	for what, err := range map[string]error{
		"no reason":       second(outbox.Requeue(ctx, tx, []int64{dead}, " ")),
		"NUL":             second(outbox.Cancel(ctx, tx, []int64{dead}, "a\x00")),
		"not UTF-8":       second(outbox.RunNow(ctx, tx, []int64{dead}, "a\xff")),
		"no delay":        second(outbox.Delay(ctx, tx, []int64{dead}, 0, "x")),
		"negative delay":  second(outbox.Delay(ctx, tx, []int64{dead}, -time.Hour, "x")),
		"a long delay":    second(outbox.Delay(ctx, tx, []int64{dead}, 367*24*time.Hour, "x")),
		"unknown flag":    second(outbox.Requeue(ctx, tx, []int64{dead}, "x", 9)),
		"the wrong flag":  second(outbox.Requeue(ctx, tx, []int64{dead}, "x", outbox.AllowSucceeded)),
		"reset of a name": second(outbox.Reset(ctx, tx, "a b", "c", "x")),
	} {
		if err == nil {
			t.Errorf("%s: no error", what)
		}
	}
	_, err = outbox.Get(ctx, tx, dead)
	noError(t, "the transaction", err)
}

func second[T any](_ T, err error) error { return err }
