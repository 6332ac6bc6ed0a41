//go:build soak

package tests

import (
	"syscall"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Issue 3, part 6: the tables are migrated first, then relays and workers are replaced one by one, and put back again,
// since a deploy may be rolled back. Meanwhile the version before and this one share lanes, messages and rows. Each task
// is called once, and so is each compensation, whoever executed it.
func TestPreviousVersionRunsBesideThisOne(t *testing.T) {
	t.Parallel()
	e := testenv.New(t) // the newest schema
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 200, Delay: 20 * time.Millisecond})
	vars := testenv.Types(testenv.HTTPType("ORDER_PAYMENT", sink.URL),
		testenv.HTTPType("REFUND", sink.URL, "MAX_ATTEMPTS", "2", "COMPENSATE", sink.URL+"/undo", "BASE_DELAY", "300ms"))
	vars = append(vars, "TASKRELAY_WORKER_LEASE=30s", "TASKRELAY_WORKER_NAK_MAX=1s")
	// Both ways of a retry: REFUND's are naks, and those of LATER go through the table, from one version to the other.
	vars = testenv.Types(vars, testenv.HTTPType("LATER", sink.URL, "BASE_DELAY", "1500ms", "MAX_DELAY", "1500ms"))

	relays := []*testenv.Process{e.Previous("relay", vars...), e.Previous("relay", vars...)}
	workers := []*testenv.Process{e.Previous("worker", vars...), e.Previous("worker", vars...)}
	l := startLoad(t, e, sink, "ORDER_PAYMENT", 20*time.Millisecond)
	l.warmUp(20)

	const each = 5
	var refunds, later int
	work := func(state string) {
		t.Helper()
		for range each {
			refunds++
			bizID := "refund-" + itoa(int64(refunds))
			sink.Script(bizID, testenv.Reply{Status: 500})
			sink.Script(bizID+"/compensate", testenv.Statuses(500, 200)...)
			e.Insert(t, "REFUND", "biz_id", bizID)
			later++
			bizID = "later-" + itoa(int64(later))
			sink.Script(bizID, testenv.Statuses(500, 200)...)
			e.Insert(t, "LATER", "biz_id", bizID)
		}
		l.recovery(state, time.Now(), 15*time.Second)
	}
	work("the previous version on the newest schema")
	replace := func(p **testenv.Process, start func(...string) *testenv.Process) {
		t.Helper()
		fresh := start(vars...)
		(*p).Signal(t, syscall.SIGTERM)
		if code := (*p).Wait(t, soon); code != 0 {
			t.Errorf("%s ended with exit code %d after SIGTERM:\n%s", (*p).Name, code, lastLines((*p).Logs(), 5))
		}
		*p = fresh
	}
	start := func(name string) func(...string) *testenv.Process {
		return func(kv ...string) *testenv.Process { return testenv.Start(t, name, nil, e.Vars(kv...)...) }
	}
	previous := func(name string) func(...string) *testenv.Process {
		return func(kv ...string) *testenv.Process { return e.Previous(name, kv...) }
	}
	replace(&relays[0], start("relay"))
	work("one relay is new")
	replace(&workers[0], start("worker"))
	work("one worker is new too")
	replace(&relays[1], start("relay"))
	replace(&workers[1], start("worker"))
	work("all are new")
	replace(&workers[0], previous("worker"))
	work("one worker is put back")
	replace(&relays[0], previous("relay"))
	replace(&relays[1], previous("relay"))
	work("the relays are put back")

	l.verdict(1)
	all := append(relays, workers...)
	stillRunning(t, all...)
	equal(t, "refunds", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_type = 'REFUND'`), int64(refunds))
	equal(t, "refunds undone", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_type = 'REFUND' AND status = 'dead' AND compensation = 'done'
		AND execute_attempts = 2`), int64(refunds))
	equal(t, "attempts of refunds", e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt WHERE biz_type = 'REFUND'`), int64(4*refunds))
	equal(t, "later ones done at the second attempt", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE biz_type = 'LATER' AND status = 'succeeded' AND attempt = 2`), int64(later))
	equal(t, "attempts that were lost or stale", e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt WHERE outcome IN ('lost', 'stale')`), 0)
	calls := map[string]int{}
	for _, c := range sink.Calls() {
		calls[c.BizType+c.Phase]++
	}
	equal(t, "calls of refunds, execute", calls["REFUNDexecute"], 2*refunds)
	equal(t, "calls of refunds, compensate", calls["REFUNDcompensate"], 2*refunds)
	equal(t, "calls of later ones", calls["LATERexecute"], 2*later)
	e.WaitCount(t, soon, int64(refunds), `SELECT count(*) FROM taskrelay.task WHERE dead_lettered_at IS NOT NULL`)
	equal(t, "dead letters", int(e.NATS.Messages(t, "TASKS_DEAD")), refunds)
	testenv.Eventually(t, soon, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 0 {
			return errorf("%d messages are left in the stream", n)
		}
		return nil
	})
}
