package tests

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
)

// C-111: what runs at the stop may finish, is written down and acknowledged; what has not begun is given back.
func TestStopLetsRunningHandlersFinish(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	var calls atomic.Int64
	c := fast(func(context.Context, *command.Task[raw]) (any, error) {
		calls.Add(1)
		time.Sleep(1500 * time.Millisecond)
		return nil, nil
	})
	c.Concurrency = 30
	register(t, &reg, "PAY", c)
	var ids []int64
	for range 40 {
		ids = append(ids, l.task("PAY"))
	}
	w := l.worker(&reg, func(c *command.WorkerConfig) { c.Grace = 20 * time.Second })
	testenv.Eventually(t, soon, func() error {
		if n := calls.Load(); n < 30 {
			return errorf("%d handlers run, want 30", n)
		}
		return nil
	})
	began := time.Now()
	if err := w.wait(soon); err != nil {
		t.Errorf("Run returned %v", err)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("stop took %v, want no longer than the handlers", took)
	}
	equal(t, "calls", calls.Load(), 30)
	equal(t, "succeeded", l.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded'"), 30)
	equal(t, "running", l.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status = 'running'"), 0)
	equal(t, "attempts not counted", l.Int(t, "SELECT count(*) FROM taskrelay.task WHERE status <> 'succeeded' AND attempt > 0"), 0)
	equal(t, "workers", l.Int(t, "SELECT count(*) FROM taskrelay.worker"), 0)
	testenv.Eventually(t, soon, func() error {
		if n := l.NATS.Messages(t, "TASKS"); n != 10 {
			return errorf("%d messages are left, want the 10 that did not run", n)
		}
		return nil
	})
	// Nothing waits for AckWait: another worker gets the rest at once.
	l.worker(&reg)
	for _, id := range ids {
		l.WaitStatus(t, soon, id, "succeeded")
	}
	equal(t, "calls", calls.Load(), 40)
	l.waitEmpty()
}

// C-110: handlers that heed their context are released uncounted, and so are those that do not; Run ends in time.
func TestStopEndsEvenIfHandlersIgnoreTheirContext(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	end := make(chan struct{})
	t.Cleanup(func() { close(end) })
	cause := make(chan error, 1)
	register(t, &reg, "HEEDS", fast(func(ctx context.Context, _ *command.Task[raw]) (any, error) {
		<-ctx.Done()
		cause <- context.Cause(ctx)
		return nil, ctx.Err()
	}))
	register(t, &reg, "IGNORES", fast(func(context.Context, *command.Task[raw]) (any, error) {
		<-end
		return nil, nil
	}))
	w := l.worker(&reg)
	heeds, ignores := l.task("HEEDS"), l.task("IGNORES")
	l.WaitStatus(t, soon, heeds, "running")
	l.WaitStatus(t, soon, ignores, "running")
	began := time.Now()
	if err := w.wait(soon); err != nil {
		t.Errorf("Run returned %v", err)
	}
	if took := time.Since(began); took < time.Second || took > 15*time.Second {
		t.Errorf("stop took %v, want the grace of 1s and a little more", took)
	}
	if err := <-cause; !errors.Is(err, command.ErrStopping) {
		t.Errorf("cause is %v, want ErrStopping", err)
	}
	for _, id := range []int64{heeds, ignores} {
		r := l.Task(t, id)
		equal(t, "status", r.Status, "retrying")
		equal(t, "attempt", r.Attempt, 0)
		equal(t, "outcomes", outcomes(t, l.Env, id), "[released]")
	}
	if w.Live() == nil {
		t.Error("a worker that has ended is live")
	}
}

// C-097, C-110: a handler that ignores its timeout keeps lease and slot for one more lease; then its task goes on.
func TestHandlerThatIgnoresItsTimeoutIsGivenUp(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	end := make(chan struct{})
	var calls, overlaps atomic.Int64
	c := fast(func(_ context.Context, p *command.Task[payment]) (any, error) {
		if p.Payload.How == "hangs" && p.Attempt == 1 {
			calls.Add(1)
			<-end
			return "too late", nil
		}
		if p.Payload.How == "hangs" && calls.Load() == 0 {
			overlaps.Add(1)
		}
		return "second", nil
	})
	c.Timeout, c.Concurrency = 500*time.Millisecond, 1
	register(t, &reg, "PAY", c)
	w := l.worker(&reg, func(c *command.WorkerConfig) { c.Lease = time.Second })
	hangs := l.task("PAY", "payload", `{"how": "hangs"}`)
	l.WaitStatus(t, soon, hangs, "running")
	canary := l.task("PAY")
	r := l.waitStatus(hangs, "succeeded")
	equal(t, "result", text(r.Result), `"second"`)
	equal(t, "outcomes", outcomes(t, l.Env, hangs), "[timeout succeeded]")
	first := l.Attempts(t, hangs)[0]
	if took := first.FinishedAt.Sub(first.StartedAt); took < 1500*time.Millisecond {
		t.Errorf("given up after %v, want timeout and one lease: 1.5s", took)
	}
	if !strings.Contains(text(first.Error), "still be running") {
		t.Errorf("error is %q", text(first.Error))
	}
	l.waitStatus(canary, "succeeded")
	equal(t, "leaked", w.Stats().Leaked.Load(), 1)
	close(end)
	testenv.Eventually(t, soon, func() error {
		if w.Stats().Late.Load() != 1 {
			return errorf("the late return is not noticed")
		}
		return nil
	})
	equal(t, "result", text(l.Task(t, hangs).Result), `"second"`)
	l.waitEmpty()
}

func TestHighGoesFirstAndLowKeepsAFifth(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	order := make(chan string, 300)
	c := fast(func(_ context.Context, p *command.Task[raw]) (any, error) {
		order <- p.Priority
		time.Sleep(20 * time.Millisecond)
		return nil, nil
	})
	c.Concurrency = 2
	register(t, &reg, "PAY", c)
	for range 100 {
		l.task("PAY", "priority", "high")
	}
	for range 100 {
		l.task("PAY")
	}
	l.worker(&reg)
	l.WaitCount(t, soon, 200, "SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded'")
	low := 0
	for range 100 {
		if <-order == "low" {
			low++
		}
	}
	if low < 10 || low > 50 {
		t.Errorf("%d of the first 100 were low, want about a fifth", low)
	}
}

func TestRateLimitsStarts(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	var calls atomic.Int64
	c := fast(func(context.Context, *command.Task[raw]) (any, error) {
		calls.Add(1)
		return nil, nil
	})
	c.Rate = 10
	register(t, &reg, "PAY", c)
	for range 30 {
		l.task("PAY")
	}
	began := time.Now()
	l.worker(&reg)
	l.WaitCount(t, soon, 30, "SELECT count(*) FROM taskrelay.task WHERE status = 'succeeded'")
	if took := time.Since(began); took < 2800*time.Millisecond {
		t.Errorf("30 tasks at 10/s took %v, want about 3s", took)
	}
	equal(t, "calls", calls.Load(), 30)
}
