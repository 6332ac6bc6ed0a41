//go:build soak

package tests

import (
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// Issue 3, part 5: the clocks of the machines on which relays and workers run are wrong, by an hour in either direction,
// or are set to and fro all the time. Nobody compares them with anything: no lease ends early, none is held too long,
// and a delay is as long as it says.
func TestProcessClocksAreWrong(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 200, Delay: 20 * time.Millisecond})
	vars := testenv.Types(testenv.HTTPType("ORDER_PAYMENT", sink.URL), testenv.HTTPType("RETRIED", sink.URL, "BASE_DELAY", "2s"),
		testenv.HTTPType("LONG", sink.URL))
	vars = append(vars, "TASKRELAY_WORKER_LEASE=3s", "TASKRELAY_WORKER_NAK_MAX=1s")
	all := []*testenv.Process{
		e.StartShifted("relay", "3600", vars...), e.StartShifted("relay", "jumps", vars...),
		e.StartShifted("worker", "-3600", vars...), e.StartShifted("worker", "3600", vars...), e.StartShifted("worker", "jumps", vars...),
	}
	l := startLoad(t, e, sink, "ORDER_PAYMENT", 20*time.Millisecond)
	l.warmUp(20)
	for n := range 6 { // each outlives its lease twice: heartbeats keep it
		sink.Script("long-"+itoa(int64(n)), testenv.Reply{Status: 200, Delay: 6500 * time.Millisecond})
		e.Insert(t, "LONG", "biz_id", "long-"+itoa(int64(n)))
	}
	for n := range 9 { // some for each worker; a long delay goes through the table
		sink.Script("retried-"+itoa(int64(n)), testenv.Statuses(500, 200)...)
		e.Insert(t, "RETRIED", "biz_id", "retried-"+itoa(int64(n)))
	}
	began := time.Now()
	due, never := insertDue(t, e, "2 seconds"), insertDue(t, e, "30 minutes")
	e.WaitCount(t, 2*soon, 16, `SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded' AND (biz_type <> 'ORDER_PAYMENT' OR id = $1)`, due)

	if d := sink.CallsOf(due)[0].At.Sub(began); d < 1900*time.Millisecond || d > 15*time.Second {
		t.Errorf("a task due in 2s ran after %v", d)
	}
	equal(t, "calls of a task due in 30 minutes", len(sink.CallsOf(never)), 0)
	e.Exec(t, `DELETE FROM taskrelay.task WHERE id = $1`, never)
	byID := make(map[string][]testenv.Call)
	for _, c := range sink.Calls() {
		byID[c.BizID] = append(byID[c.BizID], c)
	}
	for n := range 6 {
		equal(t, "calls of a long task", len(byID["long-"+itoa(int64(n))]), 1)
	}
	for n := range 9 {
		if c := byID["retried-"+itoa(int64(n))]; len(c) != 2 || c[1].At.Sub(c[0].Ended) < 1950*time.Millisecond || c[1].At.Sub(c[0].Ended) > 15*time.Second {
			t.Errorf("%d attempts, want two with 2s between them", len(c))
		}
	}
	equal(t, "attempts that were lost or stale", e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt WHERE outcome IN ('lost', 'stale')`), 0)
	l.verdict(1)
	stillRunning(t, all...)
	for _, p := range all { // the clock is wrong indeed
		lines := p.LogLines(map[bool]string{true: "relay started", false: "worker started"}[p == all[0] || p == all[1]])
		if len(lines) != 1 {
			t.Fatalf("%s logged its start %d times", p.Name, len(lines))
		}
		at, err := time.Parse(time.RFC3339, lines[0]["time"].(string))
		if err != nil || time.Since(at).Abs() < 50*time.Minute {
			t.Errorf("%s says %v: its clock is not wrong", p.Name, lines[0]["time"])
		}
	}
}
