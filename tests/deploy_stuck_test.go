//go:build soak

package tests

import (
	"syscall"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// A claim that is not answered does not keep the worker: it ends with its grace, and what the claim took is lost and
// counted when the lease ends, without a call.
func TestSIGTERMWhileClaimingForEver(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	const tasks = 30
	vars := append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_GRACE=1s")
	worker := e.StartWorker(vars...)
	worker.WaitLog(t, soon, "worker started")
	worker.Signal(t, syscall.SIGSTOP) // until its tasks are there and the table is not
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, $1)`, tasks)
	waitMessages(t, e, tasks)
	thaw := freeze(t, e)
	worker.Signal(t, syscall.SIGCONT)
	waitStuck(t, e, "take over")
	began := time.Now()
	if code := worker.Stop(t, 20*time.Second); code != 0 {
		t.Errorf("exit code after SIGTERM: got %d, want 0", code)
	}
	t.Logf("ended after %v, with a grace of 1s", time.Since(began).Round(100*time.Millisecond))
	thaw()
	e.StartWorker(vars...)
	e.WaitNoneOpen(t, soon)
	equal(t, "calls", len(sink.Calls()), tasks)
	equal(t, "successes", e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt WHERE outcome = 'succeeded'`), tasks)
}
