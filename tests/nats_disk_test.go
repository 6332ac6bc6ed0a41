package tests

import (
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// C-086: the disk under JetStream is full while tasks are published. The server writes nothing to that stream any more, answers
// no publish, and may have lost what it had answered last. Tasks wait in the table, none dies of it; once there is room and
// the server has been started anew, each is called once.
func TestFullDiskOfNATSLosesNothing(t *testing.T) {
	t.Parallel()
	disk := testenv.SmallDisk(t, 32<<20)
	n := testenv.StartNATSProcess(t, disk.Dir)
	e := testenv.NewEnv(t, testenv.DB(t), &n.NATSServer)
	sink := testenv.NewSink(t)
	relay := e.StartRelay()
	e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sink.URL), "TASKRELAY_WORKER_LEASE=30s")...)
	e.WaitStatus(t, soon, e.Insert(t, "ORDER_PAYMENT"), "succeeded")

	disk.Fill(t, n.Pid(), 512<<10)
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, payload) SELECT 'ORDER_PAYMENT', to_json(repeat('x', 8000)) FROM generate_series(1, 400)`)
	testenv.Eventually(t, soon, func() error {
		if logs := n.Logs(); !strings.Contains(logs, "no space left on device") && !strings.Contains(logs, "file too large") {
			return errorf("the server has not met the end of its disk")
		}
		return nil
	})
	relay.WaitLog(t, soon, "lane waits, its tasks stay in the table")
	waitHealth(t, adminURL(t, relay)+"/readyz", 503)
	equal(t, "unharmed", e.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'dead' OR attempt > 1"), 0)

	disk.Free(t) // which alone changes nothing: the server keeps its error until it ends
	n.Stop(t)
	n.Start(t)
	room := time.Now()
	e.WaitNoneOpen(t, soon)
	t.Logf("all had run %v after the server was there again", time.Since(room).Round(time.Millisecond))
	equal(t, "succeeded at once", e.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded' AND attempt = 1"), 401)
	equal(t, "calls", len(sink.Calls()), 401)
	waitHealth(t, adminURL(t, relay)+"/readyz", 200)
}
