package tests

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/outbox"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

type payment struct {
	Amount int    `json:"amount"`
	How    string `json:"how"`
}

func TestWorkerSettlesSuccessWithItsResult(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	got := make(chan *command.Task[payment], 1)
	register(t, &reg, "PAY", command.Command[payment]{Execute: func(_ context.Context, p *command.Task[payment]) (any, error) {
		got <- p
		return map[string]int{"charged": p.Payload.Amount}, nil
	}})
	id := l.Insert(t, "PAY", "biz_id", "O-1", "priority", "high", "payload", `{"amount": 7}`)
	// Nobody works yet: who waits for the result gives up, and the task lives on.
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := outbox.Await(short, l.Pool, id); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("await without a worker: %v", err)
	}
	if _, err := outbox.Await(t.Context(), l.Pool, id+1000); !errors.Is(err, outbox.ErrNotFound) {
		t.Errorf("await of a task that is not there: %v", err)
	}
	awaited := make(chan outbox.Task, 1)
	go func() {
		task, err := outbox.Await(t.Context(), l.Pool, id)
		if err != nil {
			t.Errorf("await: %v", err)
		}
		awaited <- task
	}()
	w := l.worker(&reg)
	l.publish(id, func(h nats.Header) { h["traceparent"] = []string{"00-abc"} })
	r := l.waitStatus(id, "succeeded")
	p := <-got
	equal(t, "payload", p.Payload.Amount, 7)
	equal(t, "raw", string(p.Raw), `{"amount": 7}`)
	equal(t, "key", p.Key(), l.installation+"-"+itoa(id))
	equal(t, "biz id", p.BizID, "O-1")
	equal(t, "priority", p.Priority, "high")
	equal(t, "header", p.Header["traceparent"], "00-abc")
	equal(t, "headers", len(p.Header), 1)
	equal(t, "attempt", p.Attempt, 1)
	equal(t, "max attempts", p.MaxAttempts, 10)
	equal(t, "created", p.CreatedAt.UnixMicro(), r.CreatedAt.UnixMicro())
	equal(t, "result", text(r.Result), `{"charged":7}`)
	task := <-awaited
	equal(t, "awaited", task.Status+" "+string(task.Result), `succeeded {"charged":7}`)
	equal(t, "outcomes", outcomes(t, l.Env, id), "[succeeded]")
	if r.FirstStartedAt == nil || r.FinishedAt == nil || r.LeaseUntil != nil || r.RepublishAt != nil {
		t.Errorf("times are wrong: %+v", r)
	}
	l.waitEmpty()
	equal(t, "succeeded", w.Stats().Succeeded.Load(), 1)
}

func TestWorkerRetriesByNakThenByTableThenDead(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	delays := []time.Duration{100 * time.Millisecond, 300 * time.Millisecond, 50 * time.Millisecond}
	c := command.Command[raw]{MaxAttempts: 4,
		Retry:   retry.PolicyFunc(func(n int) time.Duration { return delays[n-1] }),
		Execute: func(context.Context, *command.Task[raw]) (any, error) { return nil, errFlaky },
	}
	register(t, &reg, "PAY", c)
	l.worker(&reg, func(c *command.WorkerConfig) { c.NakMax = 200 * time.Millisecond })
	id := l.task("PAY")
	r := l.waitStatus(id, "dead")
	equal(t, "outcomes", outcomes(t, l.Env, id), "[failed failed failed failed]")
	equal(t, "generation", r.Generation, 1) // one hand-back: the delay beyond NakMax
	equal(t, "reason", text(r.DeadReason), "max_attempts")
	equal(t, "error", text(r.LastError), "flaky")
	equal(t, "class", text(r.ErrorClass), "error")
	equal(t, "attempt", r.Attempt, 4)
	if r.RepublishAt != nil || r.NextAttemptAt != nil || r.DeadAt == nil || r.DeadLetteredAt != nil {
		t.Errorf("final columns are wrong: %+v", r)
	}
	at := l.Attempts(t, id)
	for i, d := range delays {
		if gap := at[i+1].StartedAt.Sub(at[i].FinishedAt); gap < d {
			t.Errorf("attempt %d started %v after the one before, want at least %v", i+2, gap, d)
		}
	}
	l.waitEmpty()
}

func TestRowKeepsRepublishAtOnceItHadOne(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	running := make(chan struct{})
	goOn := make(chan struct{})
	register(t, &reg, "PAY", command.Command[raw]{
		Retry: retry.Fixed{Base: 3 * time.Second}, MaxAttempts: 3,
		Execute: func(context.Context, *command.Task[raw]) (any, error) {
			running <- struct{}{}
			<-goOn
			return nil, errFlaky
		}})
	l.worker(&reg)
	id := l.Insert(t, "PAY")
	l.Exec(t, "UPDATE taskrelay.task SET republish_at = now() + interval '10 min' WHERE id = $1", id)
	l.publish(id)
	<-running
	equal(t, "claim moves it behind the lease", l.Text(t,
		"SELECT (republish_at - lease_until BETWEEN interval '9 min 59 s' AND interval '10 min 1 s')::text FROM taskrelay.task WHERE id = $1", id), "true")
	close(goOn)
	l.WaitStatus(t, soon, id, "retrying")
	equal(t, "nak keeps it behind the retry", l.Text(t,
		"SELECT (republish_at - next_attempt_at BETWEEN interval '9 min' AND interval '10 min')::text FROM taskrelay.task WHERE id = $1", id), "true")
}

func TestWorkerOutcomes(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	c := fast(func(ctx context.Context, p *command.Task[payment]) (any, error) {
		switch p.Payload.How {
		case "permanent":
			return nil, retry.Permanent(errors.New("no such account"))
		case "after":
			if p.Attempt == 1 {
				return nil, retry.After(400*time.Millisecond, errors.New("busy"))
			}
			return nil, nil
		case "snooze":
			if l.Int(t, "SELECT count(*) FROM taskrelay.task_attempt WHERE task_id = $1", p.ID) < 4 {
				return nil, command.Snooze(20 * time.Millisecond)
			}
			return p.Attempt, nil
		case "cancel":
			return nil, command.Cancel(errors.New("order was withdrawn"))
		case "panic error":
			panic(errors.New("boom"))
		case "panic nil":
			panic(nil) //nolint:govet // the point of the test
		case "map write":
			var m map[string]int
			//lint:ignore SA5000 the handler is to panic
			m["x"] = 1
		case "goexit":
			runtime.Goexit()
		case "deferred":
			defer func() { panic("from a deferred function") }()
			return nil, errors.New("hidden")
		case "nil error":
			return nil, (*nilError)(nil)
		case "bad text":
			return nil, fmt.Errorf("a\x00b\xff%s", strings.Repeat("ü", 8000))
		case "bad result":
			return raw(`{"a":`), nil
		case "unmarshalable":
			return map[string]any{"f": func() {}}, nil
		case "class":
			return nil, classy{}
		case "timeout":
			<-ctx.Done()
			return nil, fmt.Errorf("call bank: %w", ctx.Err())
		}
		return nil, nil
	})
	c.MaxAttempts, c.Timeout = 2, 300*time.Millisecond
	register(t, &reg, "PAY", c)
	w := l.worker(&reg)
	cases := []struct {
		how, status, outcomes, class, errorHas, reason string
	}{
		{"ok", "succeeded", "[succeeded]", "", "", ""},
		{"permanent", "dead", "[failed]", "permanent", "no such account", "permanent"},
		{"after", "succeeded", "[failed succeeded]", "", "", ""},
		{"snooze", "succeeded", "[snoozed snoozed snoozed snoozed succeeded]", "", "", ""},
		{"cancel", "cancelled", "[cancelled]", "", "order was withdrawn", ""},
		{"panic error", "dead", "[panic panic]", "panic", "panic: boom", "max_attempts"},
		{"panic nil", "dead", "[panic panic]", "panic", "panic called with nil argument", "max_attempts"},
		{"map write", "dead", "[panic panic]", "panic", "assignment to entry in nil map", "max_attempts"},
		{"goexit", "dead", "[panic panic]", "panic", "runtime.Goexit", "max_attempts"},
		{"deferred", "dead", "[panic panic]", "panic", "from a deferred function", "max_attempts"},
		{"nil error", "dead", "[failed failed]", "error", "panics when it is read", "max_attempts"},
		{"bad text", "dead", "[failed failed]", "error", "ab?üüü", "max_attempts"},
		{"bad result", "dead", "[failed failed]", "result", "invalid input syntax for type json", "max_attempts"},
		{"unmarshalable", "dead", "[failed failed]", "result", "encode result", "max_attempts"},
		{"class", "dead", "[failed failed]", "http_503", "no service", "max_attempts"},
		{"timeout", "dead", "[timeout timeout]", "timeout", "call bank: context deadline exceeded", "max_attempts"},
	}
	ids := make(map[string]int64)
	for _, c := range cases {
		ids[c.how] = l.task("PAY", "payload", fmt.Sprintf(`{"how": %q}`, c.how))
	}
	for _, c := range cases {
		id := ids[c.how]
		r := l.waitStatus(id, c.status)
		equal(t, c.how+": outcomes", outcomes(t, l.Env, id), c.outcomes)
		if c.status != "cancelled" {
			equal(t, c.how+": class", text(r.ErrorClass), c.class)
		}
		equal(t, c.how+": reason", text(r.DeadReason), c.reason)
		if !strings.Contains(text(r.LastError), c.errorHas) {
			t.Errorf("%s: error is %q, want it to contain %q", c.how, text(r.LastError), c.errorHas)
		}
		if n := len(text(r.LastError)); n > 8192 {
			t.Errorf("%s: error text has %d bytes, want at most 8192", c.how, n)
		}
		for _, a := range l.Attempts(t, id) {
			if (a.Outcome == "panic") != (a.Stack != nil) || len(text(a.Stack)) > 32<<10 {
				t.Errorf("%s: outcome %s with a stack of %d bytes", c.how, a.Outcome, len(text(a.Stack)))
			}
		}
	}
	equal(t, "snooze does not count", l.Task(t, ids["snooze"]).Attempt, 1)
	if !strings.HasSuffix(text(l.Task(t, ids["bad text"]).LastError), "[cut]") {
		t.Error("a cut error text is not marked")
	}
	if err := w.Ready(); err != nil {
		t.Errorf("the worker is not ready any more: %v", err)
	}
	l.waitEmpty()
}

type nilError struct{ text string }

func (e *nilError) Error() string { return e.text }

type classy struct{}

func (classy) Error() string      { return "no service" }
func (classy) ErrorClass() string { return "http_503" }

func TestPayloadThatDoesNotDecodeIsDeadAtOnceAndNotCompensated(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	c := fast(func(context.Context, *command.Task[payment]) (any, error) {
		t.Error("called")
		return nil, nil
	})
	c.Compensate = func(context.Context, *command.Task[payment], error) error {
		t.Error("compensated")
		return nil
	}
	register(t, &reg, "PAY", c)
	l.worker(&reg)
	id := l.task("PAY", "payload", `{"amount": "twelve"}`)
	r := l.waitStatus(id, "dead")
	equal(t, "reason", text(r.DeadReason), "decode")
	equal(t, "class", text(r.ErrorClass), "decode")
	equal(t, "compensation", r.Compensation, "none")
	if !strings.Contains(text(r.LastError), "amount") {
		t.Errorf("error %q does not name the field", text(r.LastError))
	}
	equal(t, "outcomes", outcomes(t, l.Env, id), "[failed]")
}

// Interleaving 9a: one result that Postgres refuses does not take its neighbours along.
func TestRefusedResultLeavesItsNeighboursAlone(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	gate := make(chan struct{})
	c := fast(func(_ context.Context, p *command.Task[payment]) (any, error) {
		<-gate
		if p.Payload.How == "bad" {
			return raw("\xff"), nil
		}
		return 1, nil
	})
	c.Concurrency, c.MaxAttempts = 60, 1
	register(t, &reg, "PAY", c)
	w := l.worker(&reg)
	var good, bad []int64
	for i := range 50 {
		if i%10 == 3 {
			bad = append(bad, l.task("PAY", "payload", `{"how": "bad"}`))
			continue
		}
		good = append(good, l.task("PAY"))
	}
	l.WaitCount(t, soon, 50, "SELECT count(*) FROM taskrelay.task WHERE status = 'running'")
	close(gate)
	for _, id := range good {
		l.WaitStatus(t, soon, id, "succeeded")
		equal(t, "outcomes", outcomes(t, l.Env, id), "[succeeded]")
	}
	for _, id := range bad {
		r := l.WaitStatus(t, soon, id, "dead")
		equal(t, "class", text(r.ErrorClass), "result")
		equal(t, "outcomes", outcomes(t, l.Env, id), "[failed]")
	}
	equal(t, "refused", w.Stats().Refused.Load(), 5)
	l.waitEmpty()
}

func TestLimitOnAttemptsRowThenTypeThenCommand(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	for _, b := range []string{"A", "B"} {
		register(t, &reg, b, fast(func(context.Context, *command.Task[raw]) (any, error) { return nil, errFlaky }))
	}
	l.Exec(t, "INSERT INTO taskrelay.biz_type (biz_type, max_attempts) VALUES ('B', 2)")
	l.worker(&reg)
	command3, type2, row1 := l.task("A"), l.task("B"), l.task("B", "max_attempts", 1)
	equal(t, "by command", l.waitStatus(command3, "dead").Attempt, 3)
	equal(t, "by type", l.waitStatus(type2, "dead").Attempt, 2)
	equal(t, "by row", l.waitStatus(row1, "dead").Attempt, 1)
}

func TestMessageWithoutRowOrHeadersIsTerminated(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	register(t, &reg, "PAY", fast(func(context.Context, *command.Task[raw]) (any, error) {
		t.Error("called")
		return nil, nil
	}))
	w := l.worker(&reg)
	id := l.Insert(t, "PAY")
	l.publish(id, func(h nats.Header) { h.Set(outbox.HeaderCreatedAt, "1234567") })             // another row's id
	l.publish(id, func(h nats.Header) { h.Set(outbox.HeaderID, "99999999") })                   // no row
	l.publish(id, func(h nats.Header) { h.Set(outbox.HeaderID, "x") })                          // no number
	l.publish(id, func(h nats.Header) { h.Set(outbox.HeaderCreatedAt, "9223372036854775807") }) // no instant
	l.publish(id, func(h nats.Header) { h.Set(outbox.HeaderBizType, "OTHER") })                 // wrong subject
	l.publishMsg(&nats.Msg{Subject: "tasks.PAY.low", Data: []byte("hello")})                    // by hand
	l.publishMsg(&nats.Msg{Subject: "tasks.PAY.low"})                                           // empty, too
	l.waitEmpty()
	equal(t, "terminated", w.Stats().Terminated.Load(), 7)
	equal(t, "row", l.Task(t, id).Status, "pending")
}

// Interleaving 5: what belongs to another installation is neither acknowledged, terminated nor claimed.
func TestForeignMessageIsLeftAlone(t *testing.T) {
	t.Parallel()
	l := newWorkerLab(t)
	var reg command.Registry
	register(t, &reg, "PAY", fast(func(context.Context, *command.Task[raw]) (any, error) { return nil, nil }))
	w := l.worker(&reg)
	id := l.Insert(t, "PAY")
	l.publish(id, func(h nats.Header) { h.Set(outbox.HeaderInstallation, "8e0a5f0a-0000-0000-0000-000000000000") })
	testenv.Eventually(t, soon, func() error {
		if w.Ready() == nil {
			return errorf("the worker is ready, want the foreign message to show")
		}
		return nil
	})
	ours := l.task("PAY")
	l.waitStatus(ours, "succeeded")
	equal(t, "row", l.Task(t, id).Status, "pending")
	equal(t, "messages", l.NATS.Messages(t, "TASKS"), 1)
	equal(t, "foreign", w.Stats().Foreign.Load(), 1)
}

func TestWorkerRefusesTheStreamOfAnotherInstallation(t *testing.T) {
	t.Parallel()
	l := &workerLab{Env: testenv.New(t), t: t}
	l.makeStream("8e0a5f0a-0000-0000-0000-000000000000")
	var reg command.Registry
	register(t, &reg, "PAY", fast(func(context.Context, *command.Task[raw]) (any, error) { return nil, nil }))
	w := l.unstarted(&reg)
	w.start()
	<-w.done
	if err := w.wait(soon); err == nil || !strings.Contains(err.Error(), "belongs to installation 8e0a5f0a") {
		t.Errorf("Run returned %v, want it to name the other installation", err)
	}
}
