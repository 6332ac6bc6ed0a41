package tests

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// A decision (here of an operator) makes every message from before it stale: such a message is acknowledged and causes no
// call, however long it was on its way. A guess does not: it repeats the generation.
func TestMessageFromBeforeADecisionCausesNoCall(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	var calls atomic.Int64
	register(t, &reg, "PAY", fast(func(context.Context, *command.Task[raw]) (any, error) {
		calls.Add(1)
		return nil, nil
	}))
	id := l.Insert(t, "PAY")
	old := l.message(id)
	l.Exec(t, "SELECT taskrelay.run_now($1::bigint, 'test')", id)
	row := l.Task(t, id)
	equal(t, "generation", row.Generation, 1)
	l.worker(&reg)
	l.publishMsg(old)
	l.publish(id, func(h nats.Header) { h.Set(outbox.HeaderGeneration, "2") }) // of a future that the database has lost
	l.waitEmpty()
	equal(t, "calls", calls.Load(), 0)
	equal(t, "status", l.Task(t, id).Status, "pending")
	l.publish(id)
	l.WaitStatus(t, soon, id, "succeeded")
	l.waitEmpty()
	equal(t, "calls", calls.Load(), 1)
}

// A message leaves the stream only after its row was written: whatever keeps the row from being written (here the lock
// of a person in psql), the message is still there, and would bring the task back if the worker died now.
func TestMessageStaysUntilItsRowIsWritten(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	goOn, ended := make(chan struct{}), make(chan struct{})
	register(t, &reg, "PAY", fast(func(context.Context, *command.Task[raw]) (any, error) {
		<-goOn
		close(ended)
		return nil, nil
	}))
	l.worker(&reg)
	id := l.task("PAY")
	l.WaitStatus(t, soon, id, "running")
	unlock := lockRow(t, l.Env, id)
	close(goOn)
	<-ended
	testenv.Never(t, time.Second, func() error {
		if n := l.NATS.Messages(t, "TASKS"); n != 1 {
			return errorf("%d messages while the row is not written, want 1", n)
		}
		return nil
	})
	equal(t, "status while it is locked", l.Task(t, id).Status, "running")
	unlock()
	l.WaitStatus(t, soon, id, "succeeded")
	l.waitEmpty()
}

// Interleaving 11: after a failover an id is given out again while a worker still holds the task that had it. The new task
// waits for a moment, not for a lease.
func TestTaskDoesNotWaitForTheOneThatHadItsID(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	goOn, begun := make(chan struct{}), make(chan string, 10)
	register(t, &reg, "PAY", fast(func(_ context.Context, p *command.Task[string]) (any, error) {
		begun <- p.Payload
		if p.Payload == "old" {
			<-goOn
		}
		return nil, nil
	}))
	w := l.worker(&reg, func(c *command.WorkerConfig) { c.Lease = time.Minute })
	id := l.task("PAY", "payload", `"old"`)
	equal(t, "first call", <-begun, "old")
	l.Exec(t, `DELETE FROM taskrelay.task WHERE id = $1`, id) // as a failover to a standby that lags does
	l.Exec(t, `INSERT INTO taskrelay.task (id, biz_type, payload) OVERRIDING SYSTEM VALUE VALUES ($1, 'PAY', '"new"')`, id)
	l.publish(id)
	testenv.Eventually(t, soon, func() error { // its message has come, and was given back
		c, err := l.NATS.JS.Consumer(t.Context(), "TASKS", "PAY-low")
		if err == nil && c.CachedInfo().Delivered.Consumer < 2 {
			return errorf("%d messages were delivered", c.CachedInfo().Delivered.Consumer)
		}
		return err
	})
	close(goOn)
	l.WaitStatus(t, soon, id, "succeeded")
	equal(t, "second call", <-begun, "new")
	equal(t, "stale", w.Stats().Stale.Load(), 1)
}
