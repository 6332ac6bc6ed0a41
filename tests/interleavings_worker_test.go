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
