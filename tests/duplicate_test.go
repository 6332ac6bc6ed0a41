package tests

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// C9, C-078, interleaving 8: copies of a message, whoever sends them, cause no second call.
func TestCopiesOfAMessageCauseNoSecondCall(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 200, Delay: 1500 * 1e6})
	relay := e.StartRelay()
	e.NATS.WaitStream(t, "TASKS")
	id := e.Insert(t, "ORDER_PAYMENT")
	testenv.Eventually(t, soon, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 1 {
			return errorf("%d messages, want 1", n)
		}
		return nil
	})
	relay.Stop(t, soon)
	msg, err := e.NATS.Last(t.Context(), "TASKS", "tasks.ORDER_PAYMENT.low")
	if err != nil {
		t.Fatal(err)
	}
	again := func() {
		h := nats.Header{}
		for k, v := range msg.Header {
			if !strings.HasPrefix(k, "Nats-") {
				h[k] = v
			}
		}
		if _, err := e.NATS.JS.PublishMsg(t.Context(), &nats.Msg{Subject: msg.Subject, Header: h, Data: msg.Data}); err != nil {
			t.Fatal(err)
		}
	}
	// Before the first one is fetched: two copies in one batch; then while it runs; then after its end.
	again()
	again()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	sink.WaitCalls(t, soon, 1)
	again()
	e.WaitStatus(t, soon, id, "succeeded")
	again()
	testenv.Eventually(t, soon, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 0 {
			return errorf("%d messages are left, want 0", n)
		}
		return nil
	})
	equal(t, "calls", len(sink.CallsOf(id)), 1)
	equal(t, "outcomes", outcomes(t, e, id), "[succeeded]")
}

// B58: a second copy of a retrying row's message is not run before the row is due.
func TestCopyOfARetryingTaskWaitsForItsTime(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Statuses(500, 200)...)
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "BASE_DELAY", "3s")...)
	copies := make(chan *nats.Msg, 1)
	sub, err := e.NATS.Conn.ChanSubscribe("tasks.ORDER_PAYMENT.low", copies)
	if err != nil {
		t.Fatal(err)
	}
	id := e.Insert(t, "ORDER_PAYMENT")
	first := <-copies
	_ = sub.Unsubscribe()
	e.WaitStatus(t, soon, id, "retrying")
	for range 3 {
		m := &nats.Msg{Subject: first.Subject, Header: nats.Header{}, Data: first.Data}
		for k, v := range first.Header {
			if !strings.HasPrefix(k, "Nats-") {
				m.Header[k] = v
			}
		}
		if _, err := e.NATS.JS.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	due := e.Task(t, id).NextAttemptAt
	e.WaitStatus(t, soon, id, "succeeded")
	calls := sink.CallsOf(id)
	equal(t, "calls", len(calls), 2)
	if due == nil || calls[1].At.Before(*due) {
		t.Errorf("second call at %v, due at %v", calls[1].At, due)
	}
	testenv.Eventually(t, soon, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 0 {
			return errorf("%d messages are left, want 0", n)
		}
		return nil
	})
	equal(t, "calls in the end", len(sink.CallsOf(id)), 2)
}

// A14, C6, C47: one row for a biz id, in every state, from SQL; the caller learns which one it is.
func TestDuplicateBizIDIsOneTask(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Script("dies", testenv.Reply{Status: 422})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	enqueue := func(bizID string) (id int64, isNew bool) {
		e.Scan(t, "SELECT id, is_new FROM taskrelay.enqueue('ORDER_PAYMENT', '{}', $1)", []any{bizID}, &id, &isNew)
		return id, isNew
	}
	for bizID, end := range map[string]string{"works": "succeeded", "dies": "dead"} {
		id, isNew := enqueue(bizID)
		equal(t, "is_new", isNew, true)
		again, isNew := enqueue(bizID)
		equal(t, "id of a duplicate", again, id)
		equal(t, "is_new of a duplicate", isNew, false)
		e.WaitStatus(t, soon, id, end)
		again, isNew = enqueue(bizID)
		equal(t, "id of a duplicate of a finished task", again, id)
		equal(t, "is_new of a duplicate of a finished task", isNew, false)
		equal(t, "state after the duplicate", e.Task(t, id).Status, end)
		equal(t, "calls", len(sink.CallsOf(id)), 1)
	}
	tag, err := e.Pool.Exec(t.Context(), "INSERT INTO taskrelay.task (biz_type, biz_id) VALUES ('ORDER_PAYMENT', 'works') ON CONFLICT (biz_type, biz_id) DO NOTHING")
	if err != nil || tag.RowsAffected() != 0 {
		t.Errorf("ON CONFLICT DO NOTHING: %v rows, %v", tag.RowsAffected(), err)
	}
	// B19: tasks without a biz id are never duplicates.
	a, b := e.Insert(t, "ORDER_PAYMENT"), e.Insert(t, "ORDER_PAYMENT")
	e.WaitStatus(t, soon, a, "succeeded")
	e.WaitStatus(t, soon, b, "succeeded")
}
