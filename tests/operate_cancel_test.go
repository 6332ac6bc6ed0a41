package tests

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// cancel with compensate: what was begun is undone, and ends as dead with reason cancelled; what was not begun just ends.
func TestCancelCompensatesWhatWasBegun(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	var mu sync.Mutex
	undone := map[int64]string{}
	running := make(chan int64, 1)
	var reg command.Registry
	err := command.Register(&reg, "ORDER_PAYMENT", command.Command[json.RawMessage]{
		Execute: func(ctx context.Context, task *command.Task[json.RawMessage]) (any, error) {
			if task.BizID != "running" {
				return nil, errors.New("bank is down")
			}
			running <- task.ID
			<-ctx.Done()
			return nil, context.Cause(ctx)
		},
		Compensate: func(ctx context.Context, task *command.Task[json.RawMessage], cause error) error {
			if task.BizID == "by hand" {
				running <- task.ID
				<-ctx.Done()
				return context.Cause(ctx)
			}
			mu.Lock()
			defer mu.Unlock()
			undone[task.ID] = cause.Error()
			return nil
		},
		Retry: retry.Fixed{Base: time.Hour}, Timeout: time.Minute,
	})
	noError(t, "register", err)
	e.RunRelay()
	e.RunWorker(&reg, func(c *command.WorkerConfig) { c.Lease = time.Second })

	waiting := e.Insert(t, "ORDER_PAYMENT", "biz_id", "waiting")
	e.WaitStatus(t, soon, waiting, "retrying")
	began := e.Insert(t, "ORDER_PAYMENT", "biz_id", "running")
	equal(t, "running", <-running, began)
	fresh := e.Insert(t, "ORDER_PAYMENT", "run_at", time.Now().Add(time.Hour))
	for id, note := range map[int64]string{
		waiting: "it is compensated first, and ends as dead with reason cancelled",
		began:   "it is running: its worker is asked to stop, then it is compensated", fresh: "",
	} {
		changed, why := change(t, e, "cancel($1::bigint, 'shop is closed', true)", id)
		if !changed || why != note {
			t.Errorf("task %d: got %v %q, want %q", id, changed, why, note)
		}
	}
	changed, why := change(t, e, "cancel($1::bigint, 'again', true)", began)
	if changed || !strings.Contains(why, "already") && !strings.Contains(why, "on its way") {
		t.Errorf("a second press: got %v %q", changed, why)
	}
	equal(t, "a task that was never started", e.Task(t, fresh).Status, "cancelled")
	for _, id := range []int64{waiting, began} {
		row := e.WaitStatus(t, soon, id, "dead")
		equal(t, "compensation", row.Compensation, "done")
		equal(t, "reason of death", text(row.DeadReason), "cancelled")
		if row.CancelRequestedAt != nil {
			t.Error("the request to cancel is still there: it would call off a compensation that is retried")
		}
	}

	// A compensation that runs is not called off by the way, and where it is meant nobody takes it for done.
	byHand := e.Insert(t, "ORDER_PAYMENT", "biz_id", "by hand")
	e.WaitStatus(t, soon, byHand, "retrying")
	change(t, e, "cancel($1::bigint, 'shop is closed', true)", byHand)
	equal(t, "compensating", <-running, byHand)
	if changed, why := change(t, e, "cancel($1::bigint, 'enough')", byHand); changed || !strings.Contains(why, "allow_uncompensated") {
		t.Errorf("a cancel of a compensation that runs: got %v %q", changed, why)
	}
	if changed, why := change(t, e, "cancel($1::bigint, 'refunded by hand', false, true)", byHand); !changed || !strings.Contains(why, "is not undone") {
		t.Errorf("a compensation called off: got %v %q", changed, why)
	}
	equal(t, "compensation that was called off", e.WaitStatus(t, soon, byHand, "cancelled").Compensation, "failed")
	mu.Lock()
	defer mu.Unlock()
	equal(t, "compensated", len(undone), 2)
	equal(t, "cause", undone[waiting], "cancelled: shop is closed")
}

// A plain cancel, by id or in bulk, leaves alone what is being compensated: it would end as if it had been undone. Called off
// on purpose it ends with a compensation that has failed, and the audit has both states.
func TestCancelDoesNotCallOffACompensation(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	id := db.Insert(t, "A")
	db.Exec(t, `UPDATE taskrelay.task SET `+states["compensating"]+` WHERE id = $1`, id)
	other := db.Insert(t, "A")
	db.Exec(t, `UPDATE taskrelay.task SET `+states["compensating"]+` WHERE id = $1`, other)
	plain := db.Insert(t, "A")
	cancel := func(flags string) (changed bool, why string) {
		t.Helper()
		var not *string
		db.Scan(t, `SELECT changed, why_not FROM taskrelay.cancel($1::bigint, 'x'`+flags+`)`, []any{id}, &changed, &not)
		return changed, text(not)
	}
	for flags, want := range map[string]string{"": "allow_uncompensated", ", true": "on its way already", ", true, true": "on its way already"} {
		if changed, why := cancel(flags); changed || !strings.Contains(why, want) {
			t.Errorf("cancel%s: got %v %q, want %q", flags, changed, why, want)
		}
	}
	named := db.Text(t, `SELECT why_not FROM taskrelay.cancel(ids => ARRAY[$1::bigint], reason => 'x', allow_uncompensated => false, compensate => false)`, id)
	if !strings.Contains(named, "allow_uncompensated") { // as the relay calls it over NATS
		t.Errorf("by names: got %q", named)
	}
	db.Exec(t, `SELECT taskrelay.start_bulk('cancel', '{"type": "A"}', 'not needed')`)
	step(t, db)
	equal(t, "bulk", db.Text(t, `SELECT concat_ws(' ', state, done, changed, skipped, skipped_why::text LIKE '%allow_uncompensated%: 2}') FROM taskrelay.bulk`), "done 3 1 2 t")
	equal(t, "the others", db.Task(t, plain).Status+" "+db.Task(t, id).Status+" "+db.Task(t, id).Compensation, "cancelled retrying pending")

	if changed, why := cancel(", false, true"); !changed || why != "its compensation is called off: what it began is not undone" {
		t.Errorf("called off: got %v %q", changed, why)
	}
	row := db.Task(t, id)
	equal(t, "called off", row.Status+" "+row.Compensation+" "+text(row.DeadReason), "cancelled failed max_attempts")
	equal(t, "audit", db.Text(t, `SELECT concat_ws(' ', before->>'compensation', after->>'compensation') FROM taskrelay.audit WHERE task_id = $1`, id), "pending failed")
	db.Exec(t, `SELECT taskrelay.start_bulk('cancel', '{"type": "A"}', 'refunded by hand', '{"allow_uncompensated": true}')`)
	step(t, db)
	equal(t, "called off in bulk", db.Task(t, other).Status+" "+db.Task(t, other).Compensation, "cancelled failed")
}

// A type without compensation has nothing that could undo it: the operator must choose.
func TestCancelWithCompensationNeedsATypeThatCompensates(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	begun, fresh := inState(t, db, "retrying"), inState(t, db, "pending")
	var changed bool
	var why string
	db.Scan(t, `SELECT changed, why_not FROM taskrelay.cancel($1::bigint, 'x', true)`, []any{begun}, &changed, &why)
	if changed || why != "its type has no compensation: cancel it without" {
		t.Errorf("got %v %q", changed, why)
	}
	db.Exec(t, `SELECT taskrelay.cancel($1::bigint, 'x', true)`, fresh)
	equal(t, "never started", db.Task(t, fresh).Status, "cancelled")
}

// The worker that was asked is gone: whoever takes the task over compensates it and does not call the command again.
func TestCancelWithCompensationSurvivesTheWorker(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var executed, undone atomic.Int64
	var reg command.Registry
	noError(t, "register", command.Register(&reg, "ORDER_PAYMENT", command.Command[json.RawMessage]{
		Execute: func(context.Context, *command.Task[json.RawMessage]) (any, error) {
			executed.Add(1)
			return nil, nil
		},
		Compensate: func(context.Context, *command.Task[json.RawMessage], error) error {
			undone.Add(1)
			return nil
		},
	}))
	id := l.Insert(t, "ORDER_PAYMENT")
	l.Exec(t, `UPDATE taskrelay.task SET status = 'running', attempt = 1, lease_token = 7, lease_until = now() - interval '1 s',
		lease_owner = 'gone', started_at = now() - interval '1 min', first_started_at = now() - interval '1 min' WHERE id = $1`, id)
	l.Exec(t, `INSERT INTO taskrelay.biz_type (biz_type, compensates) VALUES ('ORDER_PAYMENT', true)`)
	if changed, why := change(t, l.Env, "cancel($1::bigint, 'shop is closed', true)", id); !changed {
		t.Fatal(why)
	}
	l.publish(id)
	l.RunWorker(&reg, func(c *command.WorkerConfig) { c.Lease = time.Second })
	row := l.waitStatus(id, "dead")
	equal(t, "compensation", row.Compensation, "done")
	equal(t, "reason of death", text(row.DeadReason), "cancelled")
	equal(t, "calls of the command", executed.Load(), 0)
	equal(t, "calls of its compensation", undone.Load(), 1)
	equal(t, "outcomes", outcomes(t, l.Env, id), "[lost succeeded]")
}
