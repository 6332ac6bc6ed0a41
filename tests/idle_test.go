package tests

import (
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// B13, C34: a relay with nothing to do asks Postgres fewer than 60 times a second, and still takes a task within 50 ms
// or so. Measured over some seconds, after the lanes have been found.
func TestIdleRelayAsksLittle(t *testing.T) {
	e := testenv.New(t)
	e.RunRelay()
	e.Insert(t, "ORDER_PAYMENT")
	e.Insert(t, "REFUND", "run_at", time.Now().Add(time.Hour))
	waitMessages(t, e, 1)

	stats := func() (transactions int64, at time.Time) {
		// As of this moment: backends hand in their counts when they are idle, at most a second late.
		e.Exec(t, `SELECT pg_stat_clear_snapshot()`)
		return e.Int(t, `SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()`), time.Now()
	}
	var rate float64
	testenv.Eventually(t, soon, func() error {
		n0, t0 := stats()
		timer := time.NewTimer(3 * time.Second)
		<-timer.C
		n1, t1 := stats()
		if rate = float64(n1-n0) / t1.Sub(t0).Seconds(); rate >= 60 || rate < 1 {
			return errorf("%.0f transactions a second on an idle database", rate)
		}
		return nil
	})
	t.Logf("%.0f transactions a second", rate)

	// The quiet must not make it miss anything: a task at once, a task that becomes due, a task handed back.
	id := e.Insert(t, "REFUND", "run_at", time.Now().Add(1500*time.Millisecond))
	e.Insert(t, "ORDER_PAYMENT")
	waitMessages(t, e, 3)
	e.Exec(t, `SELECT taskrelay.run_now($1::bigint, 'test')`, e.Insert(t, "REFUND", "run_at", time.Now().Add(time.Hour)))
	waitMessages(t, e, 4)
	if due := e.Task(t, id).RunAt; time.Now().Before(*due) {
		t.Error("a scheduled task was published before its time")
	}
}

// C15: a producer that says so after its commit need not wait for the poll.
func TestWakeUpDoesNotWaitForThePoll(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.RunRelay(func(c *outbox.RelayConfig) { c.PollMin, c.PollMax = time.Hour, time.Hour })
	e.NATS.WaitStream(t, "TASKS")
	testenv.Eventually(t, soon, func() error { // the lane is found at its own pace, the read needs the hint
		e.Insert(t, "ORDER_PAYMENT")
		if err := outbox.WakeUp(e.NATS.Conn, ""); err != nil {
			return err
		}
		if n := e.NATS.Messages(t, "TASKS"); n == 0 {
			return errorf("nothing published")
		}
		return nil
	})
	before := e.NATS.Messages(t, "TASKS")
	e.Insert(t, "ORDER_PAYMENT")
	if err := outbox.WakeUp(e.NATS.Conn, ""); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n <= before {
			return errorf("stream has %d messages, had %d", n, before)
		}
		return nil
	})
}

// C7, C39, C-042: deleting takes the row and its dead letter, frees the biz id, and leaves the log and an audit row.
func TestDeletedTaskIsGoneAndItsBizIDFree(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Statuses(422)...)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "O-1")
	e.WaitStatus(t, soon, id, "dead")
	subject := outbox.Names{}.DeadSubject("ORDER_PAYMENT", id)
	testenv.Eventually(t, soon, func() error {
		_, err := e.NATS.Last(t.Context(), "TASKS_DEAD", subject)
		return err
	})
	if out, code := e.CLI("delete", "ORDER_PAYMENT/O-1", "--reason", "entered twice"); code == 0 {
		t.Errorf("deleted without being asked: %s", out)
	}
	if out, code := e.CLI("delete", "ORDER_PAYMENT/O-1", "--reason", "entered twice", "--yes"); code != 0 {
		t.Fatalf("exit %d: %s", code, out)
	}
	testenv.Eventually(t, soon, func() error {
		if m, err := e.NATS.Last(t.Context(), "TASKS_DEAD", subject); err == nil {
			return errorf("letter %d is still there", m.Sequence)
		}
		return nil
	})
	equal(t, "attempts left in the log", len(e.Attempts(t, id)), 1)
	equal(t, "audit rows", e.Int(t, `SELECT count(*) FROM taskrelay.audit WHERE task_id = $1 AND action = 'delete' AND reason = 'entered twice'`, id), 1)
	e.WaitStatus(t, soon, e.Insert(t, "ORDER_PAYMENT", "biz_id", "O-1"), "dead")
}
