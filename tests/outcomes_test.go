package tests

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
	"github.com/taskrelay/taskrelay/pkg/command"
	"github.com/taskrelay/taskrelay/pkg/retry"
)

// quickRetry is a policy for tests that are not about delays.
var quickRetry = retry.Fixed{Base: 50 * time.Millisecond}

// behave is a command whose payload says how to behave, attempt by attempt; the last one stays.
type behave struct {
	Do []string `json:"do"`
}

func behaving() command.Command[behave] {
	return command.Command[behave]{
		Retry:       quickRetry,
		MaxAttempts: 3,
		Timeout:     time.Second,
		Execute: func(ctx context.Context, task *command.Task[behave]) (any, error) {
			do := "ok"
			if n := len(task.Payload.Do); n > 0 {
				do = task.Payload.Do[min(task.Attempt, n)-1]
			}
			switch do {
			case "ok":
				return map[string]int{"attempt": task.Attempt}, nil
			case "fail":
				return nil, errors.New("it failed")
			case "permanent":
				return nil, retry.Permanent(errors.New("never again"))
			case "after":
				return nil, retry.After(time.Second, errors.New("not now"))
			case "cancel":
				return nil, command.Cancel(errors.New("not wanted any more"))
			case "timeout":
				<-ctx.Done()
				return nil, fmt.Errorf("call bank: %w", ctx.Err())
			case "panic error":
				panic(errors.New("the handler broke"))
			case "panic nil":
				panic(nil)
			case "nil map":
				var m map[string]int
				//lint:ignore SA5000 the handler is to panic
				m["x"] = 1
			case "goexit":
				runtime.Goexit()
			case "deferred panic":
				defer func() { panic("while cleaning up") }()
			case "bad text":
				return nil, errors.New("bytes \xff\xfe and \x00 zero " + strings.Repeat("é", 20_000))
			case "bad result":
				return func() {}, nil
			}
			return nil, nil
		},
	}
}

func TestOutcomesOfHandlers(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	var reg command.Registry
	mustRegister(t, &reg, "BEHAVE", behaving())
	e.RunRelay()
	worker := e.RunWorker(&reg)

	for _, c := range []struct {
		do, status, outcomes, reason, errorHas string
	}{
		{`"ok"`, "succeeded", "[succeeded]", "", ""},
		{`"fail", "ok"`, "succeeded", "[failed succeeded]", "", ""},
		{`"fail"`, "dead", "[failed failed failed]", "max_attempts", "it failed"},
		{`"permanent"`, "dead", "[failed]", "permanent", "never again"},
		{`"fail", "permanent"`, "dead", "[failed failed]", "permanent", "never again"},
		{`"cancel"`, "cancelled", "[cancelled]", "", ""},
		{`"timeout"`, "dead", "[timeout timeout timeout]", "max_attempts", "call bank"},
		{`"timeout", "ok"`, "succeeded", "[timeout succeeded]", "", ""},
		{`"panic error", "ok"`, "succeeded", "[panic succeeded]", "", ""},
		{`"panic error"`, "dead", "[panic panic panic]", "max_attempts", "the handler broke"},
		{`"panic nil"`, "dead", "[panic panic panic]", "max_attempts", ""},
		{`"nil map"`, "dead", "[panic panic panic]", "max_attempts", "nil map"},
		{`"goexit"`, "dead", "[panic panic panic]", "max_attempts", ""},
		{`"deferred panic"`, "dead", "[panic panic panic]", "max_attempts", "while cleaning up"},
		{`"bad text"`, "dead", "[failed failed failed]", "max_attempts", "bytes"},
		{`"bad result"`, "dead", "[failed failed failed]", "max_attempts", ""},
		{`"after", "ok"`, "succeeded", "[failed succeeded]", "", ""},
	} {
		t.Run(c.do, func(t *testing.T) {
			id := e.Insert(t, "BEHAVE", "payload", `{"do": [`+c.do+`]}`)
			row := e.WaitStatus(t, soon, id, "succeeded", "dead", "cancelled")
			equal(t, "status", row.Status, c.status)
			equal(t, "outcomes", outcomes(t, e, id), c.outcomes)
			equal(t, "reason", text(row.DeadReason), c.reason)
			if !strings.Contains(text(row.LastError), c.errorHas) {
				t.Errorf("last_error: got %q, want %q in it", text(row.LastError), c.errorHas)
			}
			if n := len(text(row.LastError)); n > 8<<10 {
				t.Errorf("last_error has %d bytes, want at most 8192", n)
			}
			for _, a := range e.Attempts(t, id) {
				if a.Outcome == "panic" && !strings.Contains(c.do, "goexit") && !strings.Contains(text(a.Stack), "outcomes_test.go:") {
					t.Errorf("the stack of a panic does not name file and line:\n%s", text(a.Stack))
				}
				if len(text(a.Stack)) > 32<<10 {
					t.Errorf("stack has %d bytes", len(text(a.Stack)))
				}
			}
			if c.status == "succeeded" && strings.HasSuffix(c.do, `"ok"`) {
				equal(t, "result", text(row.Result), fmt.Sprintf(`{"attempt":%d}`, row.Attempt))
			}
		})
	}
	select {
	case <-worker.Done():
		t.Error("the worker has ended")
	default:
	}
}

// A9, B57, C-009: a payload that does not decode is dead after one attempt, and the error names the field.
func TestUndecodablePayloadIsDeadAtOnce(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	type order struct {
		OrderID int64   `json:"orderId"`
		Amount  float64 `json:"amount"`
	}
	compensated := make(chan int64, 10)
	var reg command.Registry
	mustRegister(t, &reg, "ORDER", command.Command[order]{
		Execute: func(_ context.Context, task *command.Task[order]) (any, error) { return task.Payload.OrderID, nil },
		Compensate: func(_ context.Context, task *command.Task[order], _ error) error {
			compensated <- task.ID
			return nil
		},
	})
	e.RunRelay()
	e.RunWorker(&reg)
	for payload, names := range map[string]string{
		`[1]`:               "array",
		`"text"`:            "string",
		`{"orderId": "x"}`:  "orderId",
		`{"orderId": 1.5}`:  "orderId",
		`{"amount": [1]}`:   "amount",
		`{"orderId": 1e99}`: "orderId",
	} {
		id := e.Insert(t, "ORDER", "payload", payload)
		row := e.WaitStatus(t, soon, id, "dead", "succeeded")
		equal(t, payload+": status", row.Status, "dead")
		equal(t, payload+": attempt", row.Attempt, 1)
		equal(t, payload+": class", text(row.ErrorClass), "decode")
		equal(t, payload+": reason", text(row.DeadReason), "decode")
		if !strings.Contains(text(row.LastError), names) {
			t.Errorf("%s: last_error %q does not name %s", payload, text(row.LastError), names)
		}
		equal(t, payload+": Task-Reason", waitLetter(t, e, "ORDER", id).Header.Get("Task-Reason"), "decode")
	}
	ok := e.Insert(t, "ORDER", "payload", `{"orderId": 10001, "operator": "unknown fields are fine"}`)
	row := e.WaitStatus(t, soon, ok, "succeeded")
	equal(t, "result", text(row.Result), "10001")
	equal(t, "compensations of undecodable payloads", len(compensated), 0)
}

// Snooze uses up no attempt; After is a failure with its own delay.
func TestSnoozeUsesUpNoAttempt(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	calls := 0
	var reg command.Registry
	mustRegister(t, &reg, "SLEEPY", command.Command[struct{}]{
		MaxAttempts: 1,
		Execute: func(_ context.Context, task *command.Task[struct{}]) (any, error) {
			if calls++; calls <= 4 {
				return nil, command.Snooze(100 * time.Millisecond)
			}
			return nil, nil
		},
	})
	e.RunRelay()
	e.RunWorker(&reg)
	id := e.Insert(t, "SLEEPY")
	row := e.WaitStatus(t, soon, id, "succeeded", "dead")
	equal(t, "status", row.Status, "succeeded")
	equal(t, "attempt", row.Attempt, 1)
	equal(t, "outcomes", outcomes(t, e, id), "[snoozed snoozed snoozed snoozed succeeded]")
}
