package tests

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// B26, C17, B69: without a time at once, with one not before it, in the order of the times; far ones wait.
func TestTasksRunWhenDue(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "CONCURRENCY", "1")...)

	// Times are ahead of everybody: what is overdue when it is first read is taken in the order of insertion.
	e.WaitStatus(t, soon, e.Insert(t, "ORDER_PAYMENT"), "succeeded")
	now := time.Now()
	late := e.Insert(t, "ORDER_PAYMENT", "run_at", now.Add(3000*time.Millisecond))
	middle := e.Insert(t, "ORDER_PAYMENT", "run_at", now.Add(2700*time.Millisecond))
	early := e.Insert(t, "ORDER_PAYMENT", "run_at", now.Add(2400*time.Millisecond))
	far := e.Insert(t, "ORDER_PAYMENT", "run_at", now.Add(time.Hour))
	past := e.Insert(t, "ORDER_PAYMENT", "run_at", now.Add(-24*time.Hour))
	atOnce := e.Insert(t, "ORDER_PAYMENT")

	for _, id := range []int64{late, middle, early, past, atOnce} {
		e.WaitStatus(t, soon, id, "succeeded")
	}
	var order []int64
	for _, c := range sink.Calls() {
		if c.ID == early || c.ID == middle || c.ID == late {
			order = append(order, c.ID)
		}
		if row := e.Task(t, c.ID); row.RunAt != nil && c.At.Before(*row.RunAt) {
			t.Errorf("task %d was called at %v, due at %v", c.ID, c.At, row.RunAt)
		}
	}
	equal(t, "calls of scheduled tasks", len(order), 3)
	if len(order) == 3 && (order[0] != early || order[1] != middle || order[2] != late) {
		t.Errorf("order of calls: got %v, want %v", order, []int64{early, middle, late})
	}
	equal(t, "state of a task due in an hour", e.Task(t, far).Status, "pending")
	equal(t, "calls of a task due in an hour", len(sink.CallsOf(far)), 0)
	equal(t, "messages left in the stream", e.NATS.Messages(t, "TASKS"), 0)
}

// C-013, C-014: a time is an instant, whatever zone the session that wrote it and the processes have.
func TestTimeZonesOfSessionsDoNotShiftTasks(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay("TZ=Pacific/Auckland")
	e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TZ=Europe/Berlin")...)
	var ids []int64
	for _, zone := range []string{"Asia/Kolkata", "America/St_Johns", "UTC", "Europe/Berlin"} {
		for _, due := range []string{
			"now() + interval '1 second'",
			// A literal without a zone means the session's zone.
			"to_char(now() + interval '1 second', 'YYYY-MM-DD HH24:MI:SS.US')::timestamptz",
			"NULL",
		} {
			err := pgx.BeginFunc(t.Context(), e.Pool, func(tx pgx.Tx) error {
				if _, err := tx.Exec(t.Context(), "SET LOCAL TIME ZONE '"+zone+"'"); err != nil {
					return err
				}
				var id int64
				err := tx.QueryRow(t.Context(), "INSERT INTO taskrelay.task (biz_type, run_at) VALUES ('ORDER_PAYMENT', "+due+") RETURNING id").Scan(&id)
				ids = append(ids, id)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, id := range ids {
		row := e.WaitStatus(t, soon, id, "succeeded")
		call := sink.CallsOf(id)[0]
		due := row.CreatedAt
		if row.RunAt != nil {
			due = *row.RunAt
		}
		if wait := call.At.Sub(due); wait < 0 || wait > 10*time.Second {
			t.Errorf("task %d ran %v after its time", id, wait)
		}
		if row.StartedAt.Before(due) {
			t.Errorf("task %d started at %v, due at %v", id, row.StartedAt, due)
		}
	}
}

// C-015: times that few programs can show neither run nor stop anybody else, and -infinity means at once.
func TestFarAwayTimes(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	var far []int64
	for _, due := range []string{"10000-01-01", "294276-12-31 23:59:59", "infinity"} {
		id, err := insertAt(t, e, due)
		if err != nil {
			t.Logf("run_at %s is refused: %v", due, err)
			continue
		}
		far = append(far, id)
	}
	var now []int64
	for _, due := range []string{"4713-01-01 BC", "-infinity", "1969-12-31"} {
		id, err := insertAt(t, e, due)
		if err != nil {
			t.Logf("run_at %s is refused: %v", due, err)
			continue
		}
		now = append(now, id)
	}
	for _, id := range append(now, e.Insert(t, "ORDER_PAYMENT")) {
		e.WaitCount(t, soon, 1, "SELECT count(*) FROM taskrelay.task WHERE id = $1 AND status = 'succeeded'", id)
	}
	for _, id := range far {
		equal(t, "state of a far task", e.Text(t, "SELECT status FROM taskrelay.task WHERE id = $1", id), "pending")
	}
	for _, args := range [][]string{{"list"}, {"list", "--output", "json"}} {
		out, code := e.CLI(args...)
		if code != 0 {
			t.Errorf("taskrelay %v: exit %d\n%s", args, code, out)
		}
		for _, id := range far {
			if !containsNumber(out, id) {
				t.Errorf("taskrelay %v does not show task %d:\n%s", args, id, out)
			}
		}
	}
}

func insertAt(t *testing.T, e *testenv.Env, due string) (id int64, err error) {
	err = e.Pool.QueryRow(context.WithoutCancel(t.Context()),
		"INSERT INTO taskrelay.task (biz_type, run_at) VALUES ('ORDER_PAYMENT', '"+due+"') RETURNING id").Scan(&id)
	return id, err
}
