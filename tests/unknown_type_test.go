package tests

import (
	"testing"
	"time"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// A25, B56, C-109: a type that no worker knows waits, uses up nothing, and runs when a worker comes that knows it.
func TestUnknownTypeWaitsForALaterWorker(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("OLD", sink.URL)...)
	unknown := e.Insert(t, "NEW")
	known := e.Insert(t, "OLD")
	e.WaitStatus(t, soon, known, "succeeded")
	testenv.Never(t, 2*time.Second, func() error {
		if r := e.Task(t, unknown); r.Status != "pending" || r.Attempt != 0 {
			return errorf("a task of an unknown type is %s, attempt %d", r.Status, r.Attempt)
		}
		return nil
	})
	equal(t, "attempts in the log", len(e.Attempts(t, unknown)), 0)
	e.StartWorker(testenv.Types(testenv.HTTPType("OLD", sink.URL), testenv.HTTPType("NEW", sink.URL))...)
	r := e.WaitStatus(t, soon, unknown, "succeeded")
	equal(t, "attempt", r.Attempt, 1)
	equal(t, "generation", r.Generation, 0)
}

// A24: each type's tasks go to its own target and to no other.
func TestTypesAreNotCrossed(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	a, b := testenv.NewSink(t), testenv.NewSink(t)
	e.StartRelay()
	e.StartWorker(testenv.Types(testenv.HTTPType("A", a.URL), testenv.HTTPType("a-b_C", b.URL))...)
	ida, idb := e.Insert(t, "A"), e.Insert(t, "a-b_C")
	e.WaitStatus(t, soon, ida, "succeeded")
	e.WaitStatus(t, soon, idb, "succeeded")
	if calls := a.Calls(); len(calls) != 1 || calls[0].ID != ida {
		t.Errorf("target of A: %+v", calls)
	}
	if calls := b.Calls(); len(calls) != 1 || calls[0].ID != idb {
		t.Errorf("target of a-b_C: %+v", calls)
	}
}

// B10, C33: a relay that is switched off is alive and publishes nothing.
func TestDisabledRelayPublishesNothing(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	off := e.StartRelay("TASKRELAY_RELAY_ENABLED=false")
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	id := e.Insert(t, "ORDER_PAYMENT")
	testenv.Never(t, 1500*time.Millisecond, func() error {
		select {
		case <-off.Done():
			return errorf("the relay has ended")
		default:
		}
		if s := e.Task(t, id).Status; s != "pending" {
			return errorf("the task is %s", s)
		}
		return nil
	})
	// B67, B68, B100: driven from outside, one type at a time.
	other := e.Insert(t, "OTHER")
	if out, code := e.CLI("relay", "run-once", "--biz-type", "ORDER_PAYMENT"); code != 0 {
		t.Fatalf("run-once: exit %d\n%s", code, out)
	}
	e.WaitStatus(t, soon, id, "succeeded")
	equal(t, "state of the other type", e.Task(t, other).Status, "pending")
	equal(t, "messages of the other type", e.NATS.Messages(t, "TASKS"), 0)
	if code := off.Stop(t, soon); code != 0 {
		t.Errorf("exit code after SIGTERM: got %d, want 0", code)
	}
}
