package tests

import (
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// C-082: somebody edits the stream so that a full lane would lose its oldest messages. The relay publishes nothing, names
// the setting and the option that mends it, and goes on by itself after that; nothing is missing. One that is started
// meanwhile refuses to.
func TestStreamThatWouldLoseTasksIsRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, edit, option, mend string
		mentions                 string
	}{
		{"discard old", "--discard=old --no-discard-per-subject", "--discard new", "--discard=new --discard-per-subject", "discard policy is old"},
		{"not per subject", "--discard=new --no-discard-per-subject", "--discard-per-subject", "--discard=new --discard-per-subject", "discard per subject is off"},
		{"max age", "--max-age=1h", "--max-age 0", "--max-age=0", "max age is 1h"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := testenv.New(t)
			nats := testenv.NATSCLI(t, e.NATS.URL)
			few := "TASKRELAY_STREAM_MAX_PER_SUBJECT=10"
			relay := e.StartRelay(few)
			e.NATS.WaitStream(t, "TASKS")
			relay.WaitLog(t, soon, "relay started")
			nats(append([]string{"stream", "edit", "TASKS", "-f"}, strings.Fields(c.edit)...)...)
			relay.WaitLog(t, soon, c.mentions)
			for _, want := range []string{c.mentions, c.option, "nats stream edit TASKS"} {
				if !strings.Contains(relay.Logs(), want) {
					t.Errorf("the relay does not say %q:\n%s", want, relay.Logs())
				}
			}
			if code := e.StartRelay(few).Wait(t, soon); code != 1 {
				t.Errorf("exit code of one that is started %d, want 1", code)
			}
			e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 50)`)
			nats(append([]string{"stream", "edit", "TASKS", "-f"}, strings.Fields(c.mend)...)...)
			sink := testenv.NewSink(t)
			e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
			e.WaitNoneOpen(t, soon)
			equal(t, "calls", len(sink.Calls()), 50)
			relay.WaitLog(t, soon, "loop works again")
		})
	}
}

// A limit that refuses instead of dropping is the operator's business: the lane waits, and all goes through in the end.
func TestSmallerStreamOnlyMakesTasksWait(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	e.NATS.WaitStream(t, "TASKS")
	testenv.NATSCLI(t, e.NATS.URL)("stream", "edit", "TASKS", "-f", "--max-msgs=20")
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 300)`)
	waitMessages(t, e, 20)
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	e.WaitNoneOpen(t, soon)
	equal(t, "calls", len(sink.Calls()), 300)
}

// Somebody sets a limit on deliveries: at the second one a message would stay in the stream and never come again. The
// relay finds such messages, and each task gets all its attempts.
func TestConsumerWithALimitOnDeliveriesLosesNothing(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 500})
	e.StartRelay("TASKRELAY_RELAY_RECONCILE=1s")
	e.StartWorker(append(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "MAX_ATTEMPTS", "4", "BASE_DELAY", "50ms"), "TASKRELAY_WORKER_LEASE=1s")...)
	first := e.Insert(t, "ORDER_PAYMENT")
	e.WaitStatus(t, soon, first, "dead")
	testenv.NATSCLI(t, e.NATS.URL)("consumer", "edit", "TASKS", "ORDER_PAYMENT-low", "-f", "--max-deliver=2")
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 10)`)
	e.WaitNoneOpen(t, 2*soon)
	equal(t, "dead after four attempts", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'dead' AND attempt = 4`), 11)
	equal(t, "calls", len(sink.Calls()), 44)
	noOverlaps(t, sink)
}

// A stream that takes nothing any more is an outage, not a fault of the rows: none of them dies, other lanes' letters
// still go out, and a new stream gets them all.
func TestSealedStreamKillsNoTask(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	relay := e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	e.WaitStatus(t, soon, e.Insert(t, "ORDER_PAYMENT"), "succeeded")
	testenv.NATSCLI(t, e.NATS.URL)("stream", "seal", "TASKS", "-f")
	e.Exec(t, `INSERT INTO taskrelay.task (biz_type) SELECT 'ORDER_PAYMENT' FROM generate_series(1, 20)`)
	relay.WaitLog(t, soon, "sealed stream")
	testenv.Never(t, time.Second, func() error {
		if n := e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'pending'`); n != 20 {
			return errorf("%d tasks wait, want all 20", n)
		}
		return nil
	})
	if err := e.NATS.JS.DeleteStream(t.Context(), "TASKS"); err != nil {
		t.Fatal(err)
	}
	e.WaitNoneOpen(t, soon)
	equal(t, "calls", len(sink.Calls()), 21)
}
