package tests

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// C-119, C-120, interleaving 16: compensation is a phase of its own, with its own attempts, key and end.
func TestCompensation(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	keys := make(chan string, 100)
	c := fast(func(_ context.Context, p *command.Task[payment]) (any, error) {
		keys <- p.Key()
		return nil, errors.New("bank is down")
	})
	c.MaxAttempts = 2
	c.Compensate = func(_ context.Context, p *command.Task[payment], cause error) error {
		keys <- p.Key()
		if cause.Error() != "bank is down" || p.Phase != command.PhaseCompensate {
			t.Errorf("cause %v, phase %s", cause, p.Phase)
		}
		switch {
		case p.Payload.How == "flaky" && p.Attempt == 1, p.Payload.How == "never":
			return errFlaky
		case p.Payload.How == "panic":
			panic("undo")
		case p.Payload.How == "permanent":
			return retry.Permanent(errors.New("cannot be undone"))
		case p.Payload.How == "cancel":
			return command.Cancel(errors.New("not a way out"))
		}
		return nil
	}
	register(t, &reg, "PAY", c)
	l.worker(&reg)
	equal(t, "biz_type knows", l.Text(t, "SELECT compensates::text FROM taskrelay.biz_type WHERE biz_type = 'PAY'"), "true")
	cases := []struct{ how, compensation, reason, outcomes, err string }{
		{"works", "done", "max_attempts", "[failed failed succeeded]", "bank is down"},
		{"flaky", "done", "max_attempts", "[failed failed failed succeeded]", "bank is down"},
		{"never", "failed", "compensation_failed", "[failed failed failed failed]", "flaky"},
		{"panic", "failed", "compensation_failed", "[failed failed panic panic]", "panic: undo"},
		{"permanent", "failed", "compensation_failed", "[failed failed failed]", "cannot be undone"},
		{"cancel", "failed", "compensation_failed", "[failed failed failed]", "not a way out"},
	}
	for _, c := range cases {
		id := l.task("PAY", "payload", `{"how": "`+c.how+`"}`)
		r := l.waitStatus(id, "dead")
		equal(t, c.how+": compensation", r.Compensation, c.compensation)
		equal(t, c.how+": reason", text(r.DeadReason), c.reason)
		equal(t, c.how+": outcomes", outcomes(t, l.Env, id), c.outcomes)
		equal(t, c.how+": error", text(r.LastError), c.err)
		equal(t, c.how+": cause", text(r.Cause), "bank is down")
		equal(t, c.how+": generation", r.Generation, 1)
		equal(t, c.how+": execute attempts", l.Int(t, "SELECT execute_attempts FROM taskrelay.task WHERE id = $1", id), 2)
		if c.how == "works" {
			base := l.installation + "-" + itoa(id)
			for _, want := range []string{base, base, base + "-compensate"} {
				equal(t, "key", <-keys, want)
			}
			equal(t, "compensations", r.Compensations, 1)
		}
	}
	l.waitEmpty()
}

func TestKeyTellsARunAfterADoneCompensationApart(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	keys := make(chan string, 10)
	c := fast(func(_ context.Context, p *command.Task[raw]) (any, error) {
		keys <- p.Key()
		return nil, retry.Permanent(errFlaky)
	})
	c.Compensate = func(_ context.Context, p *command.Task[raw], _ error) error {
		keys <- p.Key()
		return nil
	}
	register(t, &reg, "PAY", c)
	l.worker(&reg)
	id := l.task("PAY")
	l.waitStatus(id, "dead")
	l.Exec(t, "SELECT taskrelay.requeue($1::bigint, 'test', true)", id)
	l.waitStatus(id, "dead")
	base := l.installation + "-" + itoa(id)
	for _, want := range []string{base, base + "-compensate", base + "-r1", base + "-compensate-r1"} {
		equal(t, "key", <-keys, want)
	}
}

// A rolling deploy: a worker without Compensate neither makes a task dead that others would compensate, nor uses
// up the attempts of its compensation.
func TestWorkerWithoutCompensateLeavesItToOthers(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var old, young command.Registry
	c := fast(func(context.Context, *command.Task[raw]) (any, error) { return nil, retry.Permanent(errFlaky) })
	register(t, &old, "PAY", c)
	c.Compensate = func(context.Context, *command.Task[raw], error) error { return nil }
	register(t, &young, "PAY", c)
	l.Exec(t, "INSERT INTO taskrelay.biz_type (biz_type, compensates) VALUES ('PAY', true)")
	w := l.worker(&old)
	id := l.task("PAY")
	r := l.WaitStatus(t, soon, id, "pending")
	for r.Phase == "execute" {
		r = l.WaitStatus(t, soon, id, "pending")
	}
	equal(t, "compensation", r.Compensation, "pending")
	equal(t, "published", l.relayDue(), 1)
	// The old worker leaves the message alone; attempts are not used up.
	time.Sleep(500 * time.Millisecond) // time to do the wrong thing
	equal(t, "attempt", l.Task(t, id).Attempt, 0)
	w.wait(soon)
	l.worker(&young)
	l.publish(id) // the first copy is parked for 30 s
	r = l.waitStatus(id, "dead")
	equal(t, "compensation", r.Compensation, "done")
	equal(t, "outcomes", outcomes(t, l.Env, id), "[failed succeeded]")
}

func TestCompensationResumesAfterItsWorkerDied(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	c := fast(func(context.Context, *command.Task[raw]) (any, error) {
		t.Error("executed")
		return nil, nil
	})
	c.Compensate = func(_ context.Context, p *command.Task[raw], cause error) error {
		if p.Attempt != 2 || cause.Error() != "declined" {
			t.Errorf("attempt %d, cause %v; want 2, declined", p.Attempt, cause)
		}
		return nil
	}
	register(t, &reg, "PAY", c)
	id := l.Insert(t, "PAY")
	l.Exec(t, `UPDATE taskrelay.task SET status = 'running', phase = 'compensate', compensation = 'pending', cause = 'declined',
		last_error = 'declined', dead_reason = 'permanent', execute_attempts = 1, generation = 1, attempt = 1, lease_token = 42,
		lease_owner = 'gone', lease_until = now() - interval '1 s', started_at = now() WHERE id = $1`, id)
	l.worker(&reg)
	l.publish(id)
	r := l.waitStatus(id, "dead")
	equal(t, "compensation", r.Compensation, "done")
	equal(t, "reason", text(r.DeadReason), "permanent")
	equal(t, "outcomes", outcomes(t, l.Env, id), "[lost succeeded]")
}

// A request to cancel that meets the end of execute does not leave half of the work undone.
func TestCancelRequestDoesNotCallOffCompensation(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	c := fast(func(_ context.Context, p *command.Task[raw]) (any, error) {
		l.Exec(t, "UPDATE taskrelay.task SET cancel_requested_at = now() WHERE id = $1", p.ID)
		return nil, retry.Permanent(errFlaky)
	})
	c.Compensate = func(context.Context, *command.Task[raw], error) error { return nil }
	register(t, &reg, "PAY", c)
	l.worker(&reg)
	r := l.waitStatus(l.task("PAY"), "dead")
	equal(t, "compensation", r.Compensation, "done")
}
