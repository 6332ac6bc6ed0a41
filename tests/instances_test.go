package tests

import (
	"strconv"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// C-072, K1: five relays without faults publish each row once.
func TestManyRelaysPublishOnce(t *testing.T) {
	const rows = 10_000
	e := testenv.New(t)
	published := countPublishes(t, e, "tasks.>")
	for range 5 {
		e.RunRelay()
	}
	for i := range 10 {
		insertMany(t, e, "TYPE"+strconv.Itoa(i), rows/10)
	}
	testenv.Eventually(t, 2*soon, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n < rows {
			return errorf("%d messages in the stream, want %d", n, rows)
		}
		return nil
	})
	e.NATS.Conn.Flush()
	equal(t, "messages in the stream", e.NATS.Messages(t, "TASKS"), rows)
	equal(t, "messages published", published.total(), rows)
}

// C-073: a relay is killed again and again in mid-work: everything is called, nothing twice.
func TestKilledRelaysLoseNothing(t *testing.T) {
	const rows = 4_000
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	for batch := range 4 {
		relay := e.StartRelay()
		insertMany(t, e, "ORDER_PAYMENT", rows/4)
		// The kill falls into the work: some are called, more are not.
		sink.WaitCalls(t, soon, batch*rows/4+50)
		relay.Kill9(t)
	}
	e.StartRelay()
	e.WaitNoneOpen(t, 3*soon)
	equal(t, "calls", len(sink.Calls()), rows)
	noOverlaps(t, sink)
	noDoubleSuccess(t, e)
	equal(t, "attempts", e.Int(t, "SELECT count(*) FROM taskrelay.task_attempt"), rows)
}

// C1: the retry runs on another worker when the one that failed it first is gone.
func TestRetryRunsOnAnotherWorker(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Statuses(500, 200)...)
	e.StartRelay()
	vars := testenv.HTTPType("ORDER_PAYMENT", sink.URL, "BASE_DELAY", "1s")
	first := e.StartWorker(vars...)
	id := e.Insert(t, "ORDER_PAYMENT")
	e.WaitStatus(t, soon, id, "retrying")
	first.Kill9(t)
	e.StartWorker(vars...)
	e.WaitStatus(t, soon, id, "succeeded")
	a := e.Attempts(t, id)
	if len(a) != 2 || text(a[0].Worker) == text(a[1].Worker) {
		t.Errorf("attempts: %+v, want two by different workers", a)
	}
	if calls := sink.CallsOf(id); len(calls) == 2 && calls[1].At.Sub(calls[0].Ended) < time.Second-20*time.Millisecond {
		t.Errorf("the retry came after %v, want 1s", calls[1].At.Sub(calls[0].Ended))
	}
}

// C27: two installations in one database and on one NATS, told apart by schema and namespace, see nothing of each other.
func TestNamespacesSeparate(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sinks := []*testenv.Sink{testenv.NewSink(t), testenv.NewSink(t)}
	// The second installation has a schema of its own.
	if out, code := testenv.Run(t, "taskrelay", []string{"migrate", "up"}, e.Vars("TASKRELAY_SCHEMA=second")...); code != 0 {
		t.Fatalf("migrate: %d\n%s", code, out)
	}
	own := [][]string{{}, {"TASKRELAY_SCHEMA=second", "TASKRELAY_NAMESPACE=eu"}}
	for i, vars := range own {
		e.StartRelay(vars...)
		e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sinks[i].URL), vars...)...)
	}
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type, payload) VALUES ('ORDER_PAYMENT', '1')`)
	e.Exec(t, `INSERT INTO second.task (biz_type, payload) VALUES ('ORDER_PAYMENT', '2')`)
	e.WaitCount(t, soon, 1, "SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded'")
	e.WaitCount(t, soon, 1, "SELECT count(*) FROM second.task WHERE status = 'succeeded'")
	for i, want := range []string{"1", "2"} {
		calls := sinks[i].Calls()
		if len(calls) != 1 || calls[0].Body != want {
			t.Errorf("installation %d: calls %+v, want one with body %s", i+1, calls, want)
		}
	}
	e.NATS.WaitStream(t, "EU_TASKS")
}

// Interleaving 5: a relay and a worker of another installation refuse the stream, and say whose it is.
func TestForeignStreamIsRefused(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.RunRelay()
	e.NATS.WaitStream(t, "TASKS")
	other := testenv.NewEnv(t, testenv.DB(t), e.NATS)
	other.Exec(t, "UPDATE taskrelay.installation SET id = gen_random_uuid()") // databases of tests are copies of one
	sink := testenv.NewSink(t)
	relay := other.StartRelay()
	worker := other.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	for _, p := range []*testenv.Process{relay, worker} {
		if code := p.Wait(t, soon); code == 0 {
			t.Errorf("%s ended with code 0 on another installation's stream", p.Name)
		}
		p.WaitLog(t, soon, installation(t, e))
	}
}
