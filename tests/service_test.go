package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

// opsAnswer is what an action over NATS returns; code is empty when it was done.
type opsAnswer struct {
	Changed, Skipped int
	Results          []struct {
		ID      string
		Changed bool
		WhyNot  string `json:"why_not"`
	}
	code, failure string
}

// ask sends a request and waits until a relay answers.
func ask(t *testing.T, nc *nats.Conn, subject, body string) (a opsAnswer) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		m, err := nc.Request(subject, []byte(body), 10*time.Second)
		if errors.Is(err, nats.ErrNoResponders) {
			return err
		}
		if err != nil {
			t.Fatalf("%s %s: %v", subject, body, err)
		}
		if a.code, a.failure = m.Header.Get("Nats-Service-Error-Code"), m.Header.Get("Nats-Service-Error"); a.code != "" {
			return nil
		}
		return json.Unmarshal(m.Data, &a)
	})
	return a
}

// done asks for an action that must change n tasks.
func done(t *testing.T, nc *nats.Conn, subject, body string, n int) {
	t.Helper()
	if a := ask(t, nc, subject, body); a.code != "" || a.Changed != n {
		t.Fatalf("%s %s: got %+v, want %d changed", subject, body, a, n)
	}
}

// Issue 5, item 2: every action over NATS does what the function of that name does: to the row, the stream and the audit.
func TestActionsOverNATS(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 422})
	sink.Script("back", testenv.Statuses(422, 200)...)
	sink.Script("again", testenv.Statuses(422, 200)...)
	e.StartRelay("TASKRELAY_RELAY_OPS=true")
	e.StartRelay("TASKRELAY_RELAY_OPS=true") // one of them answers
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	nc := e.NATS.Conn

	back, again := e.Insert(t, "ORDER_PAYMENT", "biz_id", "back"), e.Insert(t, "ORDER_PAYMENT", "biz_id", "again")
	gone, given := e.Insert(t, "ORDER_PAYMENT", "biz_id", "gone"), e.Insert(t, "ORDER_PAYMENT", "biz_id", "given")
	for _, id := range []int64{back, again, gone, given} {
		waitLetter(t, e, "ORDER_PAYMENT", id)
		e.WaitCount(t, soon, 1, "SELECT count(*) FROM taskrelay.task WHERE id = $1 AND dead_lettered_at IS NOT NULL", id)
	}
	done(t, nc, "taskrelay.ops.requeue", fmt.Sprintf(`{"ids": ["%d"], "reason": "bank is back", "user": "alice"}`, back), 1)
	e.WaitStatus(t, soon, back, "succeeded")
	waitNoLetter(t, e, "ORDER_PAYMENT", back)
	done(t, nc, "taskrelay.ops.reset", `{"biz_type": "ORDER_PAYMENT", "biz_id": "again", "reason": "once more"}`, 1)
	e.WaitStatus(t, soon, again, "succeeded")
	waitNoLetter(t, e, "ORDER_PAYMENT", again)
	done(t, nc, "taskrelay.ops.rerun", fmt.Sprintf(`{"ids": [%d], "reason": "and again", "allow_succeeded": true}`, again), 1)
	sink.WaitCallsOf(t, soon, again, 3)
	done(t, nc, "taskrelay.ops.discard", fmt.Sprintf(`{"ids": [%d], "reason": "refunded by hand"}`, given), 1)
	equal(t, "status of the discarded", e.Task(t, given).Status, "cancelled")
	waitNoLetter(t, e, "ORDER_PAYMENT", given)
	done(t, nc, "taskrelay.ops.delete_task", fmt.Sprintf(`{"ids": [%d], "reason": "a test order"}`, gone), 1)
	waitNoLetter(t, e, "ORDER_PAYMENT", gone)
	equal(t, "rows of the deleted", e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE id = $1`, gone), 0)

	later := e.Insert(t, "ORDER_PAYMENT", "run_at", time.Now().Add(time.Hour))
	done(t, nc, "taskrelay.ops.delay", fmt.Sprintf(`{"ids": [%d], "by": "48h", "reason": "holiday"}`, later), 1)
	if at := e.Task(t, later).NextAttemptAt; at == nil || time.Until(*at) < 47*time.Hour {
		t.Errorf("due at %v after a delay of 48h", at)
	}
	done(t, nc, "taskrelay.ops.set_priority", fmt.Sprintf(`{"ids": [%d], "priority": "high", "reason": "vip"}`, later), 1)
	equal(t, "priority", e.Task(t, later).Priority, "high")
	done(t, nc, "taskrelay.ops.run_now", fmt.Sprintf(`{"ids": [%d], "reason": "no holiday"}`, later), 1)
	e.WaitStatus(t, soon, later, "dead")
	stopped := e.Insert(t, "ORDER_PAYMENT", "run_at", time.Now().Add(time.Hour))
	done(t, nc, "taskrelay.ops.cancel", fmt.Sprintf(`{"ids": [%d], "reason": "customer has left"}`, stopped), 1)
	equal(t, "status of the cancelled", e.Task(t, stopped).Status, "cancelled")

	done(t, nc, "taskrelay.ops.pause", `{"biz_type": "ORDER_PAYMENT", "reason": "bank is down until 6"}`, 1)
	equal(t, "paused", e.Text(t, `SELECT paused_reason FROM taskrelay.biz_type WHERE biz_type = 'ORDER_PAYMENT'`), "bank is down until 6")
	done(t, nc, "taskrelay.ops.resume", `{"biz_type": "ORDER_PAYMENT", "reason": "bank is up"}`, 1)
	last := e.Insert(t, "ORDER_PAYMENT", "biz_id", "last")
	e.WaitStatus(t, soon, last, "dead")

	// A second press is harmless, and says why it does nothing.
	a := ask(t, nc, "taskrelay.ops.requeue", fmt.Sprintf(`{"ids": [%d, 999999], "reason": "twice"}`, back))
	if a.code != "" || a.Changed != 0 || a.Skipped != 2 || !strings.Contains(a.Results[0].WhyNot, "succeeded") || a.Results[1].WhyNot != "no such task" {
		t.Errorf("a second requeue: %+v", a)
	}
	equal(t, "who, in the audit", e.Int(t, `SELECT count(*) FROM taskrelay.audit WHERE action = 'requeue' AND task_id = $1 AND reason = 'bank is back'
		AND actor LIKE 'nats:alice (as %'`, back), 1)
	equal(t, "actions in the audit", e.Int(t, `SELECT count(DISTINCT action) FROM taskrelay.audit WHERE actor LIKE 'nats%'`), 11)
	e.WaitCount(t, soon, 0, `SELECT count(*) FROM taskrelay.task WHERE finished_at IS NULL`)
	testenv.Eventually(t, soon, func() error {
		if n := e.NATS.Messages(t, "TASKS"); n != 0 {
			return errorf("%d messages are left in the work queue", n)
		}
		if dead, letters := e.Int(t, `SELECT count(*) FROM taskrelay.task WHERE status = 'dead'`), e.NATS.Messages(t, "TASKS_DEAD"); dead != int64(letters) {
			return errorf("%d dead tasks, %d letters", dead, letters)
		}
		return nil
	})
	noDoubleSuccess := e.Int(t, `SELECT count(*) FROM taskrelay.task_attempt WHERE task_id = $1 AND outcome = 'succeeded'`, back)
	equal(t, "successes of the requeued", noDoubleSuccess, 1)

	for _, c := range []struct{ action, body, code, want string }{
		{"requeue", `{"ids": [1]}`, "400", "reason"},
		{"requeue", `not json`, "400", "expected"},
		{"requeue", `{"ids": [1], "reason": "x", "schema": "other"}`, "400", "not known"},
		{"reset", `{"biz_type": "ORDER_PAYMENT", "biz_id": "nobody", "reason": "x"}`, "404", "no task"},
		{"set_priority", fmt.Sprintf(`{"ids": [%d], "priority": "urgent", "reason": "x"}`, last), "400", "priority"},
		{"delay", fmt.Sprintf(`{"ids": [%d], "by": "9000h", "reason": "x"}`, last), "400", "366 days"},
	} {
		if a := ask(t, nc, "taskrelay.ops."+c.action, c.body); a.code != c.code || !strings.Contains(a.failure, c.want) {
			t.Errorf("%s %s: got %s %s, want %s %s", c.action, c.body, a.code, a.failure, c.code, c.want)
		}
	}
}

// Whoever may publish could delete tasks, so it is off unless asked for; a namespace has a service of its own; and a
// relay whose Postgres user is no operator refuses, saying what is missing.
func TestActionsOverNATSAreOffByDefault(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	e.Exec(t, `CREATE ROLE `+e.Name+`_relay LOGIN PASSWORD 'pw' IN ROLE taskrelay_relay`)
	t.Cleanup(func() {
		if _, err := e.Pool.Exec(context.Background(), `DROP ROLE `+e.Name+`_relay`); err != nil {
			t.Error(err)
		}
	})
	e.StartRelay()
	strict, err := url.Parse(e.URL)
	if err != nil {
		t.Fatal(err)
	}
	strict.User = url.UserPassword(e.Name+"_relay", "pw")
	relay := e.StartRelay("TASKRELAY_RELAY_OPS=true", "TASKRELAY_NAMESPACE=eu", "TASKRELAY_DATABASE_URL="+strict.String())
	id := e.Insert(t, "ORDER_PAYMENT", "run_at", time.Now().Add(time.Hour))
	a := ask(t, e.NATS.Conn, "eu.taskrelay.ops.cancel", fmt.Sprintf(`{"ids": [%d], "reason": "x"}`, id))
	if a.code != "403" || !strings.Contains(a.failure, "GRANT taskrelay_operator TO "+e.Name+"_relay") {
		t.Errorf("a relay that is no operator: got %+v", a)
	}
	equal(t, "status", e.Task(t, id).Status, "pending")
	if _, err := e.NATS.Conn.Request("taskrelay.ops.cancel", []byte(`{}`), 2*time.Second); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("without RELAY_OPS: got %v, want no responders", err)
	}
	e.Exec(t, `GRANT taskrelay_operator TO `+e.Name+`_relay`)
	done(t, e.NATS.Conn, "eu.taskrelay.ops.cancel", fmt.Sprintf(`{"ids": [%d], "reason": "x"}`, id), 1)
	relay.Stop(t, soon)
}

// A relay whose NATS user may not listen there says so, and does all the rest.
func TestActionsOverNATSNeedPermission(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	n := testenv.NATS(t, func(o *server.Options) {
		o.Users = []*server.User{
			{Username: "relay", Password: "pw", Permissions: &server.Permissions{
				Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX_relay.>", "taskrelay.wake", "taskrelay.ops.pause"}},
			}},
			{Username: "admin", Password: "pw"},
		}
		o.NoAuthUser = "admin"
	})
	e := testenv.NewEnv(t, db, n)
	relay := e.StartRelay("TASKRELAY_RELAY_OPS=true", "TASKRELAY_NATS_URL="+strings.Replace(n.URL, "nats://", "nats://relay:pw@", 1))
	relay.WaitLog(t, soon, "operator action over NATS is off: the relay's NATS user may not subscribe to it")
	relay.WaitLog(t, soon, "nats micro ls cannot show the service")
	done(t, n.Conn, "taskrelay.ops.pause", `{"biz_type": "ORDER_PAYMENT", "reason": "x"}`, 0)
	if _, err := n.Conn.Request("taskrelay.ops.delete_task", []byte(`{}`), 2*time.Second); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("a subject that is refused: got %v, want no responders", err)
	}
	e.Insert(t, "ORDER_PAYMENT")
	testenv.Eventually(t, soon, func() error {
		if e.NATS.Messages(t, "TASKS") != 1 {
			return errorf("the relay publishes nothing")
		}
		return nil
	})
}
