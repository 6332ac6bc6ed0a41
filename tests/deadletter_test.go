package tests

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/taskrelay/taskrelay/internal/testenv"
)

func waitLetter(t *testing.T, e *testenv.Env, bizType string, id int64) *jetstream.RawStreamMsg {
	t.Helper()
	var letter *jetstream.RawStreamMsg
	testenv.Eventually(t, soon, func() (err error) {
		letter, err = e.NATS.Last(t.Context(), "TASKS_DEAD", "dead."+bizType+"."+itoa(id))
		return err
	})
	return letter
}

func waitNoLetter(t *testing.T, e *testenv.Env, bizType string, id int64) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		if _, err := e.NATS.Last(t.Context(), "TASKS_DEAD", "dead."+bizType+"."+itoa(id)); err == nil {
			return errorf("the dead letter of task %d is still there", id)
		}
		return nil
	})
}

// K20, A37, C-118: the dead letter holds the payload byte for byte and says why, when and what to do.
func TestDeadLetterSaysEverything(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 503, Body: "first line\nsecond \"line\" 支付"})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL, "MAX_ATTEMPTS", "2")...)

	// Spaces, order of keys, number and escapes are the producer's.
	const payload = "{ \"b\": 1.10,\t\"a\": \"\\u00e9 é 支付\",\n \"n\": 12345678901234567890 }"
	id := e.Insert(t, "ORDER_PAYMENT", "biz_id", "支付-1", "payload", payload, "headers", `{"tenant": "t1"}`)
	row := e.WaitStatus(t, soon, id, "dead")
	letter := waitLetter(t, e, "ORDER_PAYMENT", id)
	e.WaitCount(t, soon, 1, "SELECT count(*) FROM taskrelay.task WHERE id = $1 AND dead_lettered_at IS NOT NULL", id)

	equal(t, "body", string(letter.Data), payload)
	for header, want := range map[string]string{
		"Task-Installation": installation(t, e),
		"Task-Id":           itoa(id),
		"Task-Biz-Type":     "ORDER_PAYMENT",
		"Task-Biz-Id":       "支付-1",
		"Task-Attempts":     "2",
		"Task-Reason":       "max_attempts",
		"Task-Compensation": "none",
		"Task-Requeue":      "taskrelay requeue " + itoa(id),
		"tenant":            "t1",
	} {
		equal(t, header, letter.Header.Get(header), want)
	}
	for _, header := range []string{"Task-Error", "Task-Error-Class", "Task-First-Attempt-At", "Task-Dead-At"} {
		if letter.Header.Get(header) == "" {
			t.Errorf("the dead letter has no %s", header)
		}
	}
	if s := letter.Header.Get("Task-Error"); strings.ContainsAny(s, "\r\n") || len(s) > 1024 || !strings.Contains(s, "503") || !strings.Contains(s, "支付") {
		t.Errorf("Task-Error: got %q, want one line with the last error", s)
	}

	// As an operator sees it.
	nats := testenv.NATSCLI(t, e.NATS.URL)
	out := nats("stream", "get", "TASKS_DEAD", "--last-for", "dead.ORDER_PAYMENT."+itoa(id))
	for _, want := range []string{payload, "Task-Reason: max_attempts", "Task-Requeue: taskrelay requeue " + itoa(id)} {
		if !strings.Contains(out, want) {
			t.Errorf("nats stream get does not show %q:\n%s", want, out)
		}
	}
	if out := nats("sub", "dead.>", "--stream", "TASKS_DEAD", "--all", "--count", "1"); !strings.Contains(out, payload) {
		t.Errorf("nats sub does not show the letter:\n%s", out)
	}
	equal(t, "messages left in the work queue", e.NATS.Messages(t, "TASKS"), 0)
	if row.FinishedAt == nil {
		t.Error("a dead row has no finished_at")
	}
}

// K20: while NATS is down a task that dies is dead in the table; the letter follows. Then the dead letter stream is lost
// while no relay runs, and is rebuilt from the table (K23), marked as a repetition.
func TestDeadLettersAreRebuiltFromTheTable(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 422})
	relay := e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	var ids []int64
	for range 5 {
		ids = append(ids, e.Insert(t, "ORDER_PAYMENT", "payload", `{"x": [1, 2]}`))
	}
	for _, id := range ids {
		waitLetter(t, e, "ORDER_PAYMENT", id)
	}
	e.WaitCount(t, soon, 5, "SELECT count(*) FROM taskrelay.task WHERE dead_lettered_at IS NOT NULL")
	relay.Stop(t, soon)
	if err := e.NATS.JS.DeleteStream(t.Context(), "TASKS_DEAD"); err != nil {
		t.Fatal(err)
	}
	e.StartRelay()
	for _, id := range ids {
		letter := waitLetter(t, e, "ORDER_PAYMENT", id)
		equal(t, "body", string(letter.Data), `{"x": [1, 2]}`)
		equal(t, "Task-Replayed", letter.Header.Get("Task-Replayed"), "true")
	}
	// And they are not sent for ever: the stream keeps one letter for each task.
	e.WaitCount(t, soon, 5, "SELECT count(*) FROM taskrelay.task WHERE dead_lettered_at IS NOT NULL")
	equal(t, "letters", e.NATS.Messages(t, "TASKS_DEAD"), 5)
}

// A task that dies while NATS is away is dead at once in the table, and its letter comes when NATS is back.
func TestDeadLetterWaitsForNATS(t *testing.T) {
	t.Parallel()
	db := testenv.DB(t)
	nats := testenv.StartNATSProcess(t)
	e := testenv.NewEnv(t, db, &nats.NATSServer)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 422, Delay: 1500 * 1e6})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	id := e.Insert(t, "ORDER_PAYMENT")
	sink.WaitCalls(t, soon, 1)
	nats.Stop(t)
	row := e.WaitStatus(t, soon, id, "dead")
	if row.DeadLetteredAt != nil {
		t.Error("dead_lettered_at is set while NATS is down")
	}
	nats.Start(t)
	waitLetter(t, e, "ORDER_PAYMENT", id)
	e.WaitCount(t, soon, 1, "SELECT count(*) FROM taskrelay.task WHERE dead_lettered_at IS NOT NULL")
	equal(t, "calls", len(sink.CallsOf(id)), 1)
}

// A requeue takes the letter away, a second death brings a new one (4.8).
func TestRequeuePurgesTheDeadLetter(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Script("a", testenv.Statuses(422, 200)...)
	sink.Script("b", testenv.Reply{Status: 422, Body: "once"}, testenv.Reply{Status: 410, Body: "twice"})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	a := e.Insert(t, "ORDER_PAYMENT", "biz_id", "a")
	b := e.Insert(t, "ORDER_PAYMENT", "biz_id", "b")
	waitLetter(t, e, "ORDER_PAYMENT", a)
	first := waitLetter(t, e, "ORDER_PAYMENT", b)
	e.WaitCount(t, soon, 2, "SELECT count(*) FROM taskrelay.task WHERE dead_lettered_at IS NOT NULL")

	e.Exec(t, "SELECT * FROM taskrelay.requeue($1::bigint[], 'test')", []int64{a, b})
	e.WaitStatus(t, soon, a, "succeeded")
	waitNoLetter(t, e, "ORDER_PAYMENT", a)
	testenv.Eventually(t, soon, func() error {
		letter, err := e.NATS.Last(t.Context(), "TASKS_DEAD", "dead.ORDER_PAYMENT."+itoa(b))
		if err != nil {
			return err
		}
		if letter.Sequence == first.Sequence || !strings.Contains(letter.Header.Get("Task-Error"), "twice") {
			return errorf("the letter is still the first one: %v", letter.Header)
		}
		return nil
	})
	equal(t, "outcomes of b", outcomes(t, e, b), "[failed failed]")
}

// Payloads of every kind that the column takes arrive in the letter as they were written.
func TestDeadLetterBodies(t *testing.T) {
	t.Parallel()
	e := testenv.New(t)
	sink := testenv.NewSink(t)
	sink.Default(testenv.Reply{Status: 422})
	e.StartRelay()
	e.StartWorker(testenv.HTTPType("ORDER_PAYMENT", sink.URL)...)
	bodies := map[int64]string{}
	for _, p := range []string{`null`, `{}`, `""`, `[]`, `0`, ` {"a" : 1e400} `, `{"a":"\u0000"}`, `{"a":1,"a":2}`} {
		bodies[e.Insert(t, "ORDER_PAYMENT", "payload", p)] = p
	}
	for id, want := range bodies {
		equal(t, "body", string(waitLetter(t, e, "ORDER_PAYMENT", id).Data), want)
		if !json.Valid([]byte(want)) {
			t.Errorf("%s is no JSON", want)
		}
		equal(t, "body that was sent", sink.CallsOf(id)[0].Body, want)
	}
}
