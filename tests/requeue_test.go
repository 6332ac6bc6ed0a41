package tests

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

func wantConstraint(t *testing.T, err error, name string) {
	t.Helper()
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.ConstraintName != name {
		t.Errorf("got %v, want an error that names %s", err, name)
	}
}

// change runs one of the operators' functions on one task.
func change(t *testing.T, e *testenv.Env, call string, args ...any) (changed bool, whyNot string) {
	t.Helper()
	var why *string
	e.Scan(t, "SELECT changed, why_not FROM taskrelay."+call, args, &changed, &why)
	return changed, text(why)
}

// C-123, B46, B31, B2: a dead task runs again with a fresh budget, and its history stays.
func TestRequeueStartsOver(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Statuses(500, 500, 500, 500, 200)...)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "MAX_ATTEMPTS", "3")...)
	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "R-1")
	dead := e.WaitStatus(t, soon, id, "dead")

	if changed, why := change(t, e, "requeue($1::bigint, 'bank is back')", id); !changed {
		t.Fatalf("requeue of a dead task is refused: %s", why)
	}
	row := e.WaitStatus(t, soon, id, "succeeded")
	equal(t, "attempt", row.Attempt, 2)
	equal(t, "generation", row.Generation, dead.Generation+1)
	equal(t, "outcomes", outcomes(t, e, id), "[failed failed failed failed succeeded]")
	if row.DeadAt != nil || row.DeadReason != nil || row.DeadLetteredAt != nil {
		t.Errorf("a requeued task that succeeded still says it is dead: %+v", row)
	}
	equal(t, "audit rows", e.Int(t, "SELECT count(*) FROM taskrelay.audit WHERE task_id = $1 AND action = 'requeue' AND reason = 'bank is back'", id), 1)

	// A second press is harmless, and says why.
	changed, why := change(t, e, "requeue($1::bigint, 'again')", id)
	equal(t, "requeue of a succeeded task changed it", changed, false)
	if why == "" {
		t.Error("requeue of a succeeded task does not say why it was refused")
	}
	equal(t, "calls", len(sink.CallsOf(id)), 5)
}

// B66, B79: run now and delay are hand-backs: the old message, if any, is stale from that moment.
func TestRunNowAndDelay(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	id := e.Insert(t, "ORDER_PAYMENT", "run_at", time.Now().Add(time.Hour))
	if changed, why := change(t, e, "run_now($1::bigint, 'test')", id); !changed {
		t.Fatalf("run_now: %s", why)
	}
	e.WaitStatus(t, soon, id, "succeeded")

	later := e.Insert(t, "ORDER_PAYMENT", "run_at", time.Now().Add(500*time.Millisecond))
	if changed, why := change(t, e, "delay($1::bigint, interval '3 seconds', 'bank down')", later); !changed {
		t.Fatalf("delay: %s", why)
	}
	from := time.Now()
	e.WaitStatus(t, soon, later, "succeeded")
	if d := sink.CallsOf(later)[0].At.Sub(from); d < 2500*time.Millisecond {
		t.Errorf("a task delayed by 3s was called after %v", d)
	}
	equal(t, "calls", len(sink.CallsOf(later)), 1)
}

// Cancel: a waiting task never runs; a running one that fails is not tried again; success stays success.
func TestCancel(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Script("hangs", testenv.Reply{Hang: true})
	sink.Script("works", testenv.Reply{Status: 200})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	waiting := e.Insert(t, "ORDER_PAYMENT", "run_at", time.Now().Add(time.Second))
	if changed, why := change(t, e, "cancel($1::bigint, 'test')", waiting); !changed {
		t.Fatalf("cancel: %s", why)
	}
	hangs := e.Insert(t, "ORDER_PAYMENT", "biz_id", "hangs")
	sink.WaitCallsOf(t, soon, hangs, 1)
	if changed, why := change(t, e, "cancel($1::bigint, 'test')", hangs); !changed {
		t.Fatalf("cancel of a running task: %s", why)
	}
	// The handler's context ends with the next heartbeat: long before its timeout of 20 s.
	e.WaitStatus(t, 15*time.Second, hangs, "cancelled")
	works := e.Insert(t, "ORDER_PAYMENT", "biz_id", "works")
	e.WaitStatus(t, soon, works, "succeeded")
	if changed, _ := change(t, e, "cancel($1::bigint, 'test')", works); changed {
		t.Error("a succeeded task was cancelled")
	}
	testenv.Never(t, 1500*time.Millisecond, func() error {
		if n := len(sink.CallsOf(waiting)); n != 0 {
			return errorf("a cancelled task was called %d times", n)
		}
		return nil
	})
	equal(t, "state", e.Task(t, waiting).Status, "cancelled")

	// Interleaving 15: a requeue clears the request, so the task is not cancelled again at once.
	sink.Script("hangs", testenv.Reply{Status: 200})
	if changed, why := change(t, e, "requeue($1::bigint, 'after all')", hangs); !changed {
		t.Fatalf("requeue of a cancelled task: %s", why)
	}
	e.WaitStatus(t, soon, hangs, "succeeded")
}
